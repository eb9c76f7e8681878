"""Unhealthy nodes, with a real rdzvd and real daemons.

A node on which a worker fails repeatedly is quarantined; the job ends well on the others. A node
whose own checks fail gets no job, leaves the job whose workers have failed there, and is used again
once it has recovered.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import WORKERS, cluster
from made_up_gpus import FOLDER
from test_daemon import Daemons, worker

FAILS_ON = str(WORKERS / "fails_on.py")


@pytest.fixture(name="d")
def _daemons(tmp_path: Path) -> Iterator[Daemons]:
    with cluster(tmp_path) as made:
        yield Daemons(made)


def ctl(d: Daemons, *words: str) -> str:
    done = d.cluster.run("rdzvctl", f"--server={d.cluster.endpoint}", *words)
    assert done.returncode == 0, done
    return done.stdout


def seated(d: Daemons, rdzv_id: str) -> list[str]:
    return [node.node_id for node in d.status(rdzv_id).nodes if node.state == "seated"]


def test_a_node_that_fails_again_and_again_is_quarantined_and_the_job_ends_well(
    d: Daemons,
) -> None:
    for name in ("n1", "n2", "n3"):
        d.start(name)
    d.submit(
        "job-1",
        "--nnodes=2",
        "--max-restarts=3",
        "--restart-backoff=0",
        "--nproc-per-node=1",
        FAILS_ON,
        "n2",
    )
    d.until("n3 has the seat of n2", lambda: seated(d, "job-1") == ["n1", "n3"])
    status = d.status("job-1")
    # It was in the earlier rounds; the running one is the fourth, and there will be no fifth.
    assert (status.round, status.restarts) == (3, 3)
    d.until("n2 is free", lambda: d.node("n2")["jobs"] == {})
    shown = ctl(d, "nodes", "n2")
    assert "quarantined" in shown.splitlines()[0]
    assert "at fault 3 times within" in shown and "last in job-1: rank 1" in shown
    assert "UNUSABLE" in ctl(d, "nodes")
    events = ctl(d, "events", "job-1")
    assert "n2 is quarantined for 12 h 0 min: at fault 3 times within" in events
    agent = next(node for node in d.cluster.nodes if node.name == "n2")
    d.cluster.wait_for_text(
        agent, "job-1: the server withdrew this job from this node: quarantined: at fault 3 times"
    )

    # The server remembers it, and commands that wait for the node are answered.
    d.cluster.kill_server()
    d.cluster.start_server()
    d.until("n2 is back", lambda: d.node("n2").get("state") == "connected")
    assert d.node("n2")["node"].quarantine
    d.submit("job-2", *worker("exit=0"))
    d.until("job-2 says so", lambda: "n2 (quarantined): at fault" in str(d.status("job-2").reason))

    # An operator has repaired it.
    assert ctl(d, "uncordon", "n2") == "n2 is uncordoned: submitted jobs are placed on it again\n"
    assert d.node("n2")["node"].quarantine is None
    d.until_state("job-2", "succeeded")
    d.cluster.finish()
    d.until_state("job-1", "succeeded")


def check(d: Daemons, name: str) -> str:
    """Let a node be healthy as long as a file of its name exists."""
    (d.folder / f"{name} is well").touch()
    script = f"test -e '{d.folder}/{name} is well' || {{ echo its fan stands still; exit 1; }}"
    return f'gpus = "none"\n[[health]]\ncheck = "command"\ncommand = ["sh", "-c", "{script}"]\n'


STILL = "command sh exited 1: its fan stands still"
UNWELL = f"unhealthy: {STILL}"


def test_a_node_that_is_not_well_after_a_failure_leaves_and_a_free_one_takes_its_seat(
    d: Daemons,
) -> None:
    d.start("n1")
    agent = d.start("n2", check(d, "n2"))
    d.submit("job-1", "--nnodes=2", "--max-restarts=3", *worker())
    reports = d.reports("job-1", 2)
    d.start("n3")
    (d.folder / "n2 is well").unlink()
    (pid,) = [r["pid"] for r in reports if "n2" in Path(r["TORCHELASTIC_ERROR_FILE"]).parts]
    os.kill(pid, signal.SIGKILL)
    d.until("n3 has the seat of n2", lambda: seated(d, "job-1") == ["n1", "n3"])
    status = d.status("job-1")
    # It failed, which costs a restart; but no later round was formed with it.
    assert (status.round, status.restarts) == (1, 1)
    assert f"n2 left: {UNWELL}" in ctl(d, "events", "job-1")
    d.cluster.wait_for_text(agent, "job-1: leaving the job because this node is unhealthy")
    d.until("n2 is free", lambda: d.node("n2")["jobs"] == {})
    # An operator requests a check at once, and the node recovers.
    (d.folder / "n2 is well").touch()
    ctl(d, "uncordon", "n2")
    d.until("n2 is well", lambda: d.node("n2")["node"].unhealthy is None)
    d.cluster.finish()
    d.until_state("job-1", "succeeded")


def test_a_gpu_that_falls_off_the_bus_takes_its_node_out_of_use(d: Daemons) -> None:
    agent = d.start("n1", 'gpus = "GPU-a,GPU-b"\n[[health]]\ncheck = "gpu"\n')
    assert d.node("n1")["node"].unhealthy is None
    d.submit("job-1", "--max-restarts=3", *worker())
    (report,) = d.reports("job-1", 1)
    (d.folder / FOLDER / "GPU-b is lost").touch()
    os.kill(report["pid"], signal.SIGKILL)
    unwell = "unhealthy: gpu GPU-b does not answer: number 1: GPU is lost"
    said = unwell.replace("unhealthy:", "n1 (unhealthy):")
    d.until("job-1 says so", lambda: said in str(d.status("job-1").reason))
    assert agent.process.poll() is None
    (d.folder / FOLDER / "GPU-b is lost").unlink()
    d.reports("job-1", 2)
    d.cluster.finish()
    d.until_state("job-1", "succeeded")
