"""An operator sees the progress that workers write, and nothing is decided by it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import IO

import grpc
import pytest
from cluster import BIN, JOB, Cluster
from test_rdzvd import hello

from rdzv.client import ControlClient, parse_endpoints
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc as pb_grpc


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


def test_a_restart_begins_anew(c: Cluster) -> None:
    start_two(c, "upto=50", "later=20")
    wait_for_steps(c, dict.fromkeys(range(4), 50))
    with ControlClient(parse_endpoints(c.endpoint)) as client:
        status = client.status(JOB)
        assert status.run is not None
        assert client.restart(JOB, status.run, 0, "night rate").progress == ()
    c.wait_for_round(1, workers=4)
    wait_for_steps(c, dict.fromkeys(range(4), 20))
    assert c.status().round == 1
    files = {
        number: sorted(
            r["RDZV_PROGRESS_FILE"] for r in c.all_reports() if r["RDZV_ROUND"] == number
        )
        for number in ("0", "1")
    }
    assert len(set(files["0"])) == 4
    assert files["0"] == files["1"]


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


def test_watchers_see_progress(c: Cluster) -> None:
    start_two(c)
    watching = subprocess.Popen(
        [BIN / "rdzvctl", "--server", c.endpoint, "status", JOB, "--watch", "-o", "json"],
        stdout=subprocess.PIPE,
        text=True,
        env=c.environ(),
    )
    assert watching.stdout is not None
    try:
        first = step_of_rank_0(watching.stdout)
        assert step_of_rank_0(watching.stdout, above=first) > first
    finally:
        watching.kill()
        watching.wait()
        watching.stdout.close()


def step_of_rank_0(documents: IO[str], above: int = -1) -> int:
    """Read on to a document with a step above another, and return that step."""
    for line in documents:
        for one in json.loads(line)["progress"]:
            if one["rank"] == 0 and one["step"] > above:
                return int(one["step"])
    raise AssertionError("the watch has ended")


def test_garbage_is_a_warning_and_nothing_else(c: Cluster) -> None:
    node = c.start_node("n1", worker="steps.py", args=("garbage",), nnodes="1")
    c.wait_for_round(0, workers=1)
    c.wait_until("it is told of", lambda: "b'five' is not a step; write a decimal" in node.text)
    assert steps(c) == {}
    c.finish()
    assert node.wait() == 0


def test_without_a_log_folder_there_is_progress_all_the_same(c: Cluster) -> None:
    c.start_node(
        "n1", "--log-dir=/dev/null", worker="steps.py", args=("upto=9",), nnodes="1", nproc=2
    )
    wait_for_state = c.wait_for_state("running")
    assert wait_for_state.world_size == 2
    wait_for_steps(c, {0: 9, 1: 9})


def test_progress_that_can_not_be_true_costs_a_node_nothing(c: Cluster) -> None:
    """It is for people: whatever is wrong with it, the stream stays, and nothing is refused."""
    said = pb.Progress(rdzv_id=JOB, run="feed", ranks=[pb.RankProgress(rate=-1.0)])
    beat = pb.NodeMessage(heartbeat=pb.Heartbeat(number=7))
    with grpc.insecure_channel(c.endpoint) as channel:
        call = pb_grpc.RendezvousStub(channel).Attach(
            iter([pb.NodeMessage(hello=hello("n9")), pb.NodeMessage(progress=said), beat])
        )
        bodies = [message.WhichOneof("body") for message in call]
    assert bodies == ["welcome", "heard"]
    c.wait_for_log("n9: ignoring an invalid report: ranks.rate -1.0 is no rate")
