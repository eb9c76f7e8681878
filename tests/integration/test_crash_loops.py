"""Jobs that crash repeatedly, or lose their nodes: when they are given up, with real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import JOB, Cluster, cluster

LOOP = ("--max-restarts=50", "--no-progress-restarts=2", "--restart-backoff=0", "--restart-on=3,4")


@pytest.fixture
def c(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        yield made


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
    assert (status.budgets.restarts_without_progress, status.budgets.furthest_step) == (2, 20)
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
