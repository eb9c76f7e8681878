"""An operator sees the progress that workers write, and nothing is decided by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster import JOB, Cluster


def steps(c: Cluster) -> dict[int, int]:
    return {one.rank: one.step for one in c.status().progress}


def wait_for_steps(c: Cluster, expected: dict[int, int]) -> None:
    c.wait_until(f"the steps are {expected}", lambda: steps(c) == expected)


def start_two(c: Cluster, *args: str) -> None:
    for name in ("n1", "n2"):
        c.start_node(name, "--max-restarts=3", worker="steps.py", args=args, nnodes="2", nproc=2)
    c.wait_for_round(0, workers=4)


def test_two_nodes_tell_how_far_their_workers_are(c: Cluster) -> None:
    start_two(c)
    c.wait_until("all have steps and rates", lambda: all_have_rates(c))
    text = c.run("rdzvctl", "--server", c.endpoint, "status", JOB).stdout
    (line,) = (line.split(maxsplit=1)[1] for line in text.splitlines() if "progress" in line)
    assert line.startswith("step ")
    assert " steps/s, last " in line
    said = json.loads(c.run("rdzvctl", "--server", c.endpoint, "status", JOB, "-o", "json").stdout)
    assert [one["rank"] for one in said["progress"]] == [0, 1, 2, 3]
    assert all(0 < one["rate"] <= 60 for one in said["progress"])
    c.finish()
    assert [node.wait() for node in c.nodes] == [0, 0]
    assert c.status().progress == ()
    files = {Path(report["RDZV_PROGRESS_FILE"]) for report in c.all_reports()}
    assert len(files) == 4
    assert not any(file.exists() or file.parents[1].exists() for file in files)


def all_have_rates(c: Cluster) -> bool:
    progress = c.status().progress
    return len(progress) == 4 and all(one.rate is not None for one in progress)


@pytest.mark.parametrize("store", ["sqlite", "memory"])
def test_a_server_that_starts_anew_is_told_again(c: Cluster, store: str) -> None:
    """Also of workers that have nothing new to report; also if it has to adopt the job first."""
    if store == "memory":
        c.kill_server()
        c.start_server("--store=memory")
    start_two(c, "upto=50")
    wait_for_steps(c, dict.fromkeys(range(4), 50))
    c.kill_server()
    c.start_server(f"--store={store}")

    def shown() -> bool:
        code = c.run("rdzvctl", "--server", c.endpoint, "status", JOB).returncode
        return code == 0 and steps(c) == dict.fromkeys(range(4), 50)

    c.wait_until("the progress is there again", shown)
    assert c.status().round == 0
    c.finish()
    assert [node.wait() for node in c.nodes] == [0, 0]


def test_garbage_is_a_warning_and_nothing_else(c: Cluster) -> None:
    node = c.start_node("n1", worker="steps.py", args=("garbage",), nnodes="1")
    c.wait_for_round(0, workers=1)
    c.wait_until("it is told of", lambda: "b'five' is not a step; write a decimal" in node.text)
    assert steps(c) == {}
    c.finish()
    assert node.wait() == 0
