"""`rdzvctl trace`: a job's life as a Chrome trace, checked against the format and the story."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import control_samples
import pytest
from fake_control import Ctl, FakeControl
from stories import STORIES, Told, crashing, fenced, many_nodes, told

from rdzv.ctl.__main__ import run
from rdzv.ctl.trace import trace
from tests.unit.server.test_metrics import history

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "trace"


def events(of: Told, kind: str) -> list[dict[str, Any]]:
    document = json.loads(trace(of.status, of.history, of.now_ms))
    return [event for event in document["traceEvents"] if event["ph"] == kind]


def tracks(of: Told, process: int = 1) -> dict[str, list[tuple[str, int, int]]]:
    """Return the slices of each track of a run: name, begin and end in ms."""
    names = {
        event["tid"]: event["args"]["name"]
        for event in events(of, "M")
        if event["name"] == "thread_name" and event["pid"] == process
    }
    found: dict[str, list[tuple[str, int, int]]] = {name: [] for name in names.values()}
    for one in events(of, "X"):
        if one["pid"] == process:
            since_ms, for_ms = one["ts"] // 1000, one["dur"] // 1000
            found[names[one["tid"]]].append((one["name"], since_ms, since_ms + for_ms))
    return found


@pytest.mark.quick
async def test_a_job_that_recovers(request: pytest.FixtureRequest) -> None:
    of = await told(history)
    text = trace(of.status, of.history, of.now_ms) + "\n"
    path = GOLDEN / "recovers.json"
    if request.config.getoption("--rewrite"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), "review the diff, then: pytest --rewrite"


async def test_each_node_has_its_rounds_and_the_job_what_was_between() -> None:
    of = await told(history)
    found = tracks(of)
    assert list(found) == ["job", "n1", "n2", "n3"]
    assert [name for name, _, _ in found["job"]] == [
        *("forming", "round 0", "stopping", "round 1", "stopping", "round 2"),
    ]
    assert [name for name, _, _ in found["n1"]] == [
        *("round 0", "stopping", "round 1", "stopping", "round 2"),
    ]
    assert [name for name, _, _ in found["n3"]] == ["round 2"], "it was a spare before"
    assert found["n1"][-1][2] == of.now_ms, "what goes on ends now"


@pytest.mark.parametrize("name", sorted(STORIES))
async def test_slices_of_a_track_follow_each_other(name: str) -> None:
    """Viewers nest slices that overlap, which would be misleading."""
    story, rdzv_id = STORIES[name]
    of = await told(story, rdzv_id)
    for process in {event["pid"] for event in events(of, "M")}:
        for track, slices in tracks(of, process).items():
            for (_, _, end_ms), (_, since_ms, _) in pairwise(slices):
                assert end_ms <= since_ms, (track, slices)


@pytest.mark.parametrize("name", sorted(STORIES))
async def test_every_event_is_in_the_format(name: str) -> None:
    story, rdzv_id = STORIES[name]
    of = await told(story, rdzv_id)
    document = json.loads(trace(of.status, of.history, of.now_ms))
    named = {(e["pid"], e["tid"]) for e in document["traceEvents"] if e["ph"] == "M"}
    instants = 0
    for event in document["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        assert (event["pid"], event["tid"]) in named
        match event["ph"]:
            case "X":
                assert event["ts"] >= 0 and event["dur"] >= 0
            case "i":
                instants += 1
                assert event["s"] in ("t", "p")
            case "M":
                assert event["args"]
            case other:
                raise AssertionError(other)
    assert instants == sum(event.name != "NodeStopped" for event in of.history)


async def test_causes_are_on_the_slices_and_across_the_run() -> None:
    of = await told(crashing)
    rounds = [e for e in events(of, "X") if e["name"] == "round 3"]
    assert {e["args"]["ended by"] for e in rounds} == {"worker failure"}
    assert {e["args"]["restarts spent"] for e in rounds} == {"4 of 100"}
    ended = [e for e in events(of, "i") if e["name"] == "RoundEnded"]
    assert len(ended) == 21
    assert {e["s"] for e in ended} == {"p"}


async def test_workers_that_a_fence_has_killed_are_not_live() -> None:
    found = tracks(await told(fenced))["job"]
    lasted = [(name, until_ms - since_ms) for name, since_ms, until_ms in found]
    assert [ms for name, ms in lasted if name.startswith("round")] == [30_000, 26_000]
    assert [ms for name, ms in lasted if name == "stopping"] == [22_000]


async def test_nodes_that_no_line_names_have_a_track_once_they_are_heard() -> None:
    of = await told(many_nodes)
    found = tracks(of)
    assert [name for name, _, _ in found["n08"]] == ["round 0", "stopping", "round 1"]
    (job,) = [e for e in events(of, "X") if e["name"] == "round 0" and e["tid"] == 0]
    assert job["args"]["nodes"] == "10 nodes"


async def test_each_run_is_a_process_of_its_own() -> None:
    story, rdzv_id = STORIES["again"]
    of = await told(story, rdzv_id)
    names = [e["args"]["name"] for e in events(of, "M") if e["name"] == "process_name"]
    assert [name.partition(" (")[0] for name in names] == ["job-7 run 1", "job-7 run 2"]


# ------------------------------------------------------------------ the command


def test_the_file_is_written_whole_or_the_reason_is_told(
    control: FakeControl, server: str, tmp_path: Path, ctl: Ctl
) -> None:
    control.jobs["a"] = control_samples.running()
    control.history = control_samples.history()
    path = tmp_path / "life.json"
    assert (
        f"{path} has the history of a; open it at https://ui."
        in ctl("trace", "a", "-o", str(path)).out
    )
    whole = json.loads(path.read_text())
    assert len([e for e in whole["traceEvents"] if e["ph"] == "i"]) == 3
    assert json.loads(ctl("trace", "a", "-o", "-").out)["otherData"] == whole["otherData"]
    assert (
        "cannot be written: No such file or directory; give another"
        in ctl("trace", "a", "-o", str(tmp_path / "nowhere" / "life.json"), code=1).err
    )
    assert run(["trace", "a"]) == 2
    assert control.limits == [10_000] * 3
