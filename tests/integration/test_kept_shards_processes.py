"""Sharded models in workers that stay, with real servers and nodes: examples/train_kept_fsdp.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cluster import FORK_ALL, JOB, Cluster, Node, cluster

from tests.support.whole_lines import lines_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_kept_fsdp.py"
EPOCH = 4
"""The steps of an epoch; a checkpoint is written at its end."""
SLOW_S = 180
"""Two zygotes and a store host import torch."""


def start(c: Cluster, name: str) -> Node:
    # rdzv.worker is found beside rdzv even if it is not installed.
    where = os.pathsep.join([str(ROOT / "worker"), os.environ["PYTHONPATH"]])
    samples = f"--samples={EPOCH * 4 * 32}"
    args = ("--replicas=2", "--epochs=1000000", samples, f"--checkpoints={c.folder / 'saved'}")
    # A node's zygote imports them once for all of its workers.
    options = ("--max-restarts=5", "--redirects=3", "--warm=torch,torch.distributed.fsdp")
    how = {"worker": str(SCRIPT), "args": args, "nnodes": "2", "nproc": 2}
    return c.start_node(name, *options, **how, environ={"PYTHONPATH": where, **FORK_ALL})  # type: ignore[arg-type]


def printed(c: Cluster, round_: int, text: str) -> str:
    """Return the first output of RANK 0 in a round, waiting for it."""

    def line() -> str:
        for log in (c.folder / "logs").glob(f"*/*/round_{round_}/*/stdout.log"):
            for one in lines_of(log):
                if text in one:
                    return one
        return ""

    return str(c.wait_until(f"round {round_} says {text!r}", line, SLOW_S))


def pids(c: Cluster) -> dict[int, int]:
    """Return the workers' pids by RANK; on a busy machine, a node may not answer in time."""

    def four() -> dict[int, int]:
        with c.client() as client:
            found = {one.rank: one.pid for one in client.stacks(JOB).stacks}
        return found if len(found) == 4 else {}

    found: dict[int, int] = c.wait_until("all four answer", four)
    return found


def step_of(line: str) -> int:
    return int(line.partition("step ")[2].split()[0])


@pytest.mark.timeout(600)
def test_parts_stay_while_each_has_a_holder_and_else_the_checkpoint_is_loaded(
    tmp_path: Path,
) -> None:
    """Four ranks are two replicas of two parts: RANK 1 and 3 have the second one."""
    with cluster(tmp_path) as c:
        nodes = [start(c, name) for name in ("n1", "n2")]
        printed(c, 0, "starting at step 0")
        trained = printed(c, 0, "epoch 2 ")
        first = pids(c)

        os.kill(first[3], signal.SIGKILL)
        going_on = printed(c, 1, "going on at step ")
        assert step_of(going_on) >= step_of(trained)
        assert printed(c, 1, "epoch ").endswith(f"pid {first[0]}")
        c.wait_until("both nodes say who was kept", lambda: c.status().cold is not None)
        assert c.status().kept == 3
        assert c.status().source is not None
        second = pids(c)
        assert [rank for rank in range(4) if second[rank] == first[rank]] == [0, 1, 2]

        for rank in (1, 3):
            os.kill(second[rank], signal.SIGKILL)
        loaded = step_of(printed(c, 2, "starting at step "))
        assert loaded >= 2 * EPOCH
        assert loaded % EPOCH == 0
        printed(c, 2, "epoch ")
        assert not set(pids(c).values()) & set(second.values())
        told = c.run("rdzvctl", f"--server={c.endpoint}", "explain", JOB).stdout
        assert "RANK 0,2 (no kept worker holds a part of the sharded state" in " ".join(
            told.split()
        )
        for node in nodes:
            node.process.terminate()
        assert [node.wait() for node in nodes] == [128 + signal.SIGTERM] * 2
