"""Jobs that crash repeatedly, or lose their nodes: when they are given up, with real processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import JOB, Cluster, cluster

from rdzv.errors import RendezvousError
from rdzv.view.answers import JobStatus

LOOP = ("--max-restarts=50", "--no-progress-restarts=2", "--restart-backoff=0", "--restart-on=3,4")


@pytest.fixture
def c(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        yield made


def await_status(c: Cluster, what: str, holds: Callable[[JobStatus], bool]) -> JobStatus:
    """Wait for a state of the job, which is unknown at first."""

    def reached() -> JobStatus | None:
        with contextlib.suppress(RendezvousError):
            status = c.status()
            return status if holds(status) else None
        return None

    status = c.wait_until(what, reached)
    assert isinstance(status, JobStatus)
    return status


def script(c: Cluster, text: str) -> str:
    """Write the script that each worker runs; `restart` is the number of restarts so far."""
    path = c.folder / "train.py"
    path.write_text(f"import os\nrestart = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n{text}")
    return str(path)


def test_a_job_that_gets_nowhere_fails_with_93_long_before_its_restarts_are_spent(
    c: Cluster,
) -> None:
    """It reports steps; two rounds get further than any before, then it always dies at step 20."""
    train = script(
        c,
        "from pathlib import Path\n"
        "Path(os.environ['RDZV_PROGRESS_FILE']).write_text(str(min(20, 10 * (restart + 1))))\n"
        "raise SystemExit(3)\n",
    )
    nodes = [c.start_node(f"n{i}", *LOOP, nnodes="2", worker=train) for i in (1, 2)]
    assert [node.wait() for node in nodes] == [93, 93]
    reason = "no progress: none of 2 restarts in a row got it beyond step 20; the last worker fail"
    for node in nodes:
        assert f"the job has failed: {reason}" in node.text
    status = c.status()
    assert (status.state, status.restarts, status.no_progress) == ("failed", 3, True)
    assert status.budgets is not None
    assert (status.budgets.restarts_in_vain, status.budgets.furthest_step) == (2, 20)
    waiting = c.run("rdzvctl", f"--server={c.endpoint}", "wait", JOB)
    assert waiting.returncode == 93
    assert reason in waiting.stdout


def test_a_snapshot_that_changes_is_progress_and_one_that_does_not_is_none(c: Cluster) -> None:
    train = script(
        c,
        "import time\n"
        "if os.environ['RANK'] == '0':\n"
        "    time.sleep(600)  # It is ended when the other fails.\n"
        "if restart < 3:\n"
        "    os.makedirs('saved', exist_ok=True)\n"
        "    open(f'saved/{restart}.pt', 'w').close()\n"
        "raise SystemExit(3)\n",
    )
    options = (*LOOP, "--snapshot=saved")
    node = c.start_node("n1", *options, nnodes="1", nproc=2, worker=train, cwd=c.folder)
    assert node.wait() == 93
    assert "none of 2 restarts in a row moved it on" in node.text
    assert c.status().restarts == 4


def test_a_crash_loop_backs_off_and_says_so_while_it_waits(c: Cluster) -> None:
    train = script(c, "raise SystemExit(3)")
    loop = ("--max-restarts=5", "--restart-backoff=600")
    node = c.start_node("n1", *loop, nnodes="1", worker=train)
    said = "backs off 10 min 0 s before restart 2 of 5: 2 rounds in a row failed soon"
    await_status(c, "it backs off", lambda job: said in job.reason.line)
    c.wait_until("the node says so", lambda: said in node.text)
    assert c.run("rdzvctl", f"--server={c.endpoint}", "stop", JOB).returncode == 0
    assert node.wait() == 1


def test_a_preemption_that_is_one_too_many_fails_the_job_with_its_cause(c: Cluster) -> None:
    options = ("--max-preemptions=1", "--rdzv-conf=last_call_timeout=0")
    nodes = [c.start_node(f"n{i}", *options, nnodes="1:3") for i in (1, 2, 3)]
    first, second = nodes[1], nodes[2]
    await_status(c, "three train", lambda job: (job.state, job.world_size) == ("running", 3))
    first.kill_tree()
    status = await_status(
        c, "two train on", lambda job: (job.state, job.world_size) == ("running", 2)
    )
    assert status.budgets is not None
    assert (status.budgets.preemptions, status.budgets.max_preemptions) == (1, 1)
    second.kill_tree()
    assert nodes[0].wait() == 1
    reason = c.status().reason.headline
    assert reason.startswith("node lost: n3: ")
    assert reason.endswith("; preemptions spent: 1 of 1")
    assert reason in nodes[0].text
