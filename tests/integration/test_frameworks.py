"""Accelerate, Trainer and Lightning, the real ones, on two nodes: killed, drained, kept.

They have a separate environment beside ours: `make frameworks` makes it.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from cluster import JOB, Cluster, Node, alive, environ

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "build" / "frameworks" / "bin"
EXAMPLES = ROOT / "examples"

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (PROGRAMS / "accelerate").exists(),
        reason="the frameworks are not installed; run: make frameworks",
    ),
]

FIRST_CHECKPOINT = {
    "train_accelerate.py": "checkpoint.pt",
    "train_trainer.py": "checkpoint-5/trainer_state.json",
    "train_lightning.py": "last.ckpt",
}
FRAMEWORKS = tuple(FIRST_CHECKPOINT)
STEPS = 60
WAIT_S = 200.0
"""Importing a framework takes half a minute on a busy machine."""


def arguments(c: Cluster, script: str) -> list[str]:
    training = [str(EXAMPLES / script), f"--folder={folder(c)}", f"--steps={STEPS}"]
    return [*training, "--save-every=5", "--step-seconds=0.2"]


def folder(c: Cluster) -> Path:
    return c.folder / "checkpoints"


def by_rdzvrun(c: Cluster, name: str, script: str, *more: str) -> Node:
    command = [str(PROGRAMS / "python"), "-m", "rdzv.agent.run"]
    command += [f"--rdzv-endpoint={c.endpoint}", f"--rdzv-id={JOB}", "--nnodes=1:2"]
    command += ["--nproc-per-node=1", "--max-restarts=1", f"--node-id={name}"]
    command += ["--rdzv-conf=last_call_timeout=60", f"--log-dir={c.folder / 'logs'}"]
    return c.start(name, [*command, *arguments(c, script), *more])


def by_its_own_launcher(c: Cluster, name: str, script: str) -> Node:
    """Start a node with torchrun's plug-in; docs/frameworks.md has the same lines."""
    host, _, port = c.endpoint.rpartition(":")
    conf = f"node_id={name}"
    if script == "train_lightning.py":
        # Lightning's own launcher starts one node by itself, and more only with fixed ranks.
        command = [str(PROGRAMS / "python"), "-m", "torch.distributed.run", "--rdzv-backend=rdzv"]
        command += [f"--rdzv-endpoint={c.endpoint}", f"--rdzv-id={JOB}", "--nnodes=2"]
        command += ["--nproc-per-node=1", "--max-restarts=3", f"--rdzv-conf={conf}"]
    else:
        # On machine 0 `accelerate launch` refuses a port that is in use; rdzvd's is.
        command = [str(PROGRAMS / "accelerate"), "launch", "--multi_gpu", "--num_machines=2"]
        command += ["--num_processes=2", "--machine_rank=1", f"--main_process_ip={host}"]
        command += [f"--main_process_port={port}", "--rdzv_backend=rdzv", f"--rdzv_conf={conf}"]
        command += ["--max_restarts=3"]
    return c.start(name, [*command, *arguments(c, script)], environ={"PET_RDZV_ID": JOB})


def workers(c: Cluster) -> dict[int, int]:
    """Return the pid of each living RANK."""
    found = {}
    for pid in c.marked():
        rank = environ(pid).get("RANK")
        if rank is not None and alive(pid):
            found[int(rank)] = pid
    return found


def wait_for_checkpoint(c: Cluster, script: str) -> None:
    first = folder(c) / FIRST_CHECKPOINT[script]
    c.wait_until("there is a checkpoint", first.exists, WAIT_S)


def lowest_step(c: Cluster) -> int:
    """Return the step that all workers have reported; -1 before that."""
    steps = [one.step for one in c.status().progress]
    return min(steps) if len(steps) == 2 else -1


def text(c: Cluster) -> str:
    return "\n".join(node.text for node in c.nodes)


@pytest.mark.parametrize("script", FRAMEWORKS)
def test_a_killed_worker_and_a_drained_node_cost_a_few_steps(c: Cluster, script: str) -> None:
    """It continues from its checkpoint; then one node is drained, saves, and leaves the other."""
    nodes = [by_rdzvrun(c, name, script) for name in ("n1", "n2")]
    wait_for_checkpoint(c, script)
    os.kill(workers(c)[1], signal.SIGKILL)
    c.wait_until("round 1 trains", lambda: c.status().round == 1 and lowest_step(c) > 10, WAIT_S)
    told = c.run("rdzvctl", "--server", c.endpoint, "drain", "n2", "--deadline", "60s")
    assert told.returncode == 0, told.stderr
    assert nodes[1].wait(WAIT_S) == 75
    assert nodes[0].wait(WAIT_S) == 0
    assert f"training finished: step {STEPS}" in text(c)
    status = c.status()
    assert (status.state, status.restarts, status.world_size) == ("succeeded", 1, 1)
    assert {node.node_id: node.state for node in status.nodes}["n2"] == "left"


@pytest.mark.parametrize("script", FRAMEWORKS)
def test_under_its_own_launcher_it_goes_on_as_well(c: Cluster, script: str) -> None:
    nodes = [by_its_own_launcher(c, name, script) for name in ("n1", "n2")]
    wait_for_checkpoint(c, script)
    os.kill(workers(c)[1], signal.SIGKILL)
    assert [node.wait(WAIT_S) for node in nodes] == [0, 0]
    assert f"training finished: step {STEPS}" in text(c)
    assert c.status().state == "succeeded"


@pytest.mark.parametrize("script", FRAMEWORKS)
def test_the_worker_that_was_not_killed_keeps_its_process(c: Cluster, script: str) -> None:
    more = () if script == "train_accelerate.py" else ("--kept",)
    nodes = [by_rdzvrun(c, name, script, *more) for name in ("n1", "n2")]
    wait_for_checkpoint(c, script)
    first = workers(c)
    os.kill(first[1], signal.SIGKILL)
    c.wait_until("round 1 trains", lambda: c.status().round == 1 and lowest_step(c) > 10, WAIT_S)
    second = workers(c)
    assert second[0] == first[0] and second[1] != first[1]
    assert [node.wait(WAIT_S) for node in nodes] == [0, 0]
    assert f"training finished: step {STEPS}" in text(c)
    assert re.search("1 worker kept", text(c)), text(c)
