"""Rounds as traces, made from history rows: one trace per run, however often the server changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from stories import STORIES, Told, crashing, told

from rdzv.core.events import NodeJoined, NodeLeft, RunBegan, RunEnded
from rdzv.core.model import Ended, Result
from rdzv.errors import RendezvousConnectionError
from rdzv.server.telemetry import traces as traces_module
from rdzv.server.telemetry.event_lines import records
from rdzv.server.telemetry.metrics_interface import Meter, Meters
from rdzv.server.telemetry.traces import Traces, TraceSpan, trace_spans, tracing
from rdzv.stores.base import Record
from rdzv.view.life import runs_of
from tests.unit.server.test_metrics import history, scraped

pytestmark = pytest.mark.slow


def rows_of(of: Told, rdzv_id: str = "job-7") -> list[Record]:
    return [
        Record(e.unix_ms, rdzv_id, e.run or "", e.name, json.dumps(e.fields)) for e in of.history
    ]


async def unread(rdzv_id: str, limit: int) -> Sequence[Record]:
    raise AssertionError("this run was seen from its beginning")


async def sent(rows: Sequence[Record], traces: Traces | None = None) -> list[TraceSpan]:
    """Return what is sent for a history that arrives row by row."""
    found: list[TraceSpan] = []
    traces = traces or Traces(unread, found.append)
    for row in rows:
        traces.recorded([row])
        await traces.drain()
    return found


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what these traces have logged."""
    return [r.getMessage() for r in caplog.records if r.name == "rdzv.traces"]


def named(spans: Sequence[TraceSpan]) -> dict[str, TraceSpan]:
    assert len({(s.run, s.key) for s in spans}) == len(spans), "a span is sent once"
    return {span.key: span for span in spans}


@pytest.mark.quick
async def test_a_round_is_sent_with_its_phases_when_everyone_has_stopped() -> None:
    rows = rows_of(await told(history))
    spans = named(await sent(rows))
    assert list(spans) == [
        *("round 0", "round 0/forming", "round 0/live", "round 0/stopping"),
        *("round 1", "round 1/live", "round 1/stopping"),
    ], "round 2 is live, and the run has not ended"
    first, live = spans["round 0"], spans["round 0/live"]
    assert (first.parent, live.parent, live.name) == ("", "round 0", "live")
    assert first.attributes == {
        **{"rdzv.rdzv_id": "job-7", "rdzv.run": "run-1", "rdzv.round": 0},
        **{"rdzv.cause": "worker failure", "rdzv.ended_by": "worker failure"},
        **{"rdzv.charged_to": "worker failure", "rdzv.restarts_spent": "1 of 3"},
        **{"rdzv.because": "rank 0 (local_rank 0) on n2: exit code 1: no"},
        **{"rdzv.nodes": 2, "rdzv.workers": 4, "rdzv.participants": ("n1", "n2")},
    }
    assert first.wrong.startswith("rank 0")
    assert "WorkerFailed" in {name for _, name, _ in first.happenings}
    assert spans["round 1"].attributes["rdzv.cause"] == "node lost"
    assert "NodeLost" in {name for _, name, _ in spans["round 1"].happenings}
    times = [(r.unix_ms, r.name) for r in rows if r.name in ("RoundCompleted", "RoundEnded")]
    assert [(live.since_ms, "RoundCompleted"), (live.until_ms, "RoundEnded")] == times[:2]


@pytest.mark.parametrize("name", sorted(STORIES))
async def test_each_run_is_a_trace_in_which_every_span_lies_within_its_parent(name: str) -> None:
    story, rdzv_id = STORIES[name]
    of = await told(story, rdzv_id)
    spans = await sent(rows_of(of, rdzv_id))
    runs = runs_of(of.history)
    for run in runs:
        own = named([span for span in spans if span.run == run.run])
        settled = {f"round {r.number}" for r in run.rounds if r.settled_ms or run.ended_ms}
        assert {key for key in own if key.startswith("round") and "/" not in key} == settled
        assert ("" in own) is (run.ended_ms is not None), "the run is sent at its end"
        for span in own.values():
            assert span.since_ms <= span.until_ms
            if span.parent is not None and (parent := own.get(span.parent)):
                assert parent.since_ms <= span.since_ms <= span.until_ms <= parent.until_ms
        phases = [span for span in own.values() if "/" in span.key]
        for one, other in pairwise(phases):
            assert one.until_ms <= other.since_ms, "phases follow each other"
    assert {span.run for span in spans} <= {run.run for run in runs}


async def test_what_a_server_tells_of_itself_becomes_spans() -> None:
    """The driver's own calls, not rows that are read afterwards."""
    found: list[TraceSpan] = []
    traces = Traces(unread, found.append)
    async with scraped(also=traces) as s:
        await history(s)
    await traces.drain()
    assert {span.rdzv_id for span in found} == {"job-7", "done"}
    (done,) = [span for span in found if span.rdzv_id == "done" and span.parent is None]
    assert done.attributes["rdzv.result"] == "succeeded" and not done.wrong


async def test_a_server_that_takes_over_goes_on_with_the_trace() -> None:
    """It reads the earlier history; spans that another server has sent are not sent again."""
    rows = rows_of(await told(history))
    for cut in range(1, len(rows)):
        at_once = named(await sent(rows))
        found: list[TraceSpan] = []
        asked: list[str] = []

        async def past(rdzv_id: str, limit: int, asked: list[str] = asked) -> Sequence[Record]:
            asked.append(rdzv_id)
            return rows

        before = await sent(rows[:cut])
        traces = Traces(past, found.append)
        await sent(rows[cut:], traces)
        assert len(asked) <= 1
        assert named([*before, *found]) == at_once, rows[cut]


async def test_a_past_that_can_not_be_read_costs_no_more_than_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def away(rdzv_id: str, limit: int) -> Sequence[Record]:
        raise RendezvousConnectionError("the store is away")

    rows = rows_of(await told(history))
    ended = next(i for i, row in enumerate(rows) if row.name == "RoundEnded")
    found: list[TraceSpan] = []
    await sent(rows[ended:], Traces(away, found.append))
    assert {"round 0", "round 1"} <= {span.key for span in found}
    assert said(caplog) == [
        "job job-7: cannot read its earlier events, which will be missing from its trace: "
        "the store is away"
    ]


async def test_a_server_that_leads_again_knows_that_it_has_missed_something() -> None:
    rows = rows_of(await told(history))
    completed = [i for i, row in enumerate(rows) if row.name == "RoundCompleted"]
    found: list[TraceSpan] = []

    async def past(rdzv_id: str, limit: int) -> Sequence[Record]:
        return rows

    traces = Traces(past, found.append)
    await sent(rows[: completed[0] + 1], traces)
    traces.forget_jobs()
    await sent(rows[completed[1] + 1 :], traces)
    assert named(found)["round 1/live"].since_ms == rows[completed[1]].unix_ms
    assert "round 0" not in named(found), "who led meanwhile has sent it"


async def test_what_is_heard_of_a_run_that_has_ended_opens_it_no_more() -> None:
    rows = rows_of(await told(crashing))
    spans = await sent(rows)
    (late,) = records("job-7", "run-1", [NodeLeft("n1", "done")], rows[-1].unix_ms + 5)
    assert len(await sent([*rows, late])) == len(spans)


async def test_too_many_rows_at_once_are_dropped_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = rows_of(await told(crashing))
    traces = Traces(unread, lambda span: None, most_rows=10)
    traces.recorded(rows)
    await traces.drain()
    told_of = [row for row in rows if row.name not in traces_module.SUMMED_UP]
    (line,) = said(caplog)
    assert line == f"dropped {len(told_of) - 10} history rows from the traces: too many at once"


async def test_what_is_kept_of_a_run_does_not_grow_with_it() -> None:
    rows = rows_of(await told(crashing))
    traces = Traces(unread, lambda span: None)
    for row in rows[:-1]:
        traces.recorded([row])
        await traces.drain()
        for run in traces.known.values():
            assert len(run.rounds) <= 2 and len(run.happenings) + len(run.failures) <= 20
    assert traces.known.keys() == {"job-7"}
    await sent(rows[-1:], traces)
    assert not traces.known


async def test_a_fault_in_one_row_ends_no_server(caplog: pytest.LogCaptureFixture) -> None:
    rows = rows_of(await told(history))
    found: list[TraceSpan] = []

    def send(span: TraceSpan) -> None:
        if span.key == "round 0":
            raise KeyError("a bug")
        found.append(span)

    async with tracing(unread, send) as traces:
        traces.recorded(rows)
    assert "round 1" in {span.key for span in found}
    (line,) = said(caplog)
    assert line.startswith("a bug in rdzvd, please report it: could not trace Record(")


async def test_spans_are_made_while_the_server_runs_and_what_is_left_at_its_end() -> None:
    rows = rows_of(await told(history))
    spans: asyncio.Queue[TraceSpan] = asyncio.Queue()
    half = next(i for i, row in enumerate(rows) if row.name == "RoundSettled") + 1
    async with tracing(unread, spans.put_nowait) as traces:
        traces.recorded(rows[:half])
        async with asyncio.timeout(100):
            assert (await spans.get()).key == "round 0"
        traces.recorded(rows[half:])
    assert "round 1" in {spans.get_nowait().key for _ in range(spans.qsize())}


@pytest.mark.quick
async def test_a_run_without_a_round_tells_for_how_long_it_has_formed() -> None:
    (began,) = records("j", "r", [RunBegan("r", 1, "first join")], 0)
    (joined,) = records("j", "r", [NodeJoined("n1", 1, "10.0.0.1", 1)], 5)
    ended = RunEnded("r", Ended(Result.FAILED, "too few nodes", 900))
    forming, run = await sent([began, joined, *records("j", "r", [ended], 900)])
    assert (forming.key, forming.parent, forming.until_ms) == ("forming", "", 900)
    assert (run.name, run.wrong) == ("run of j", "too few nodes")
    assert run.happenings == ((5, "NodeJoined", "n1 joined from 10.0.0.1 with 1 worker"),)


async def test_the_spans_of_a_run_are_those_of_all_its_rounds() -> None:
    of = await told(crashing)
    (run,) = runs_of(of.history)
    at_once = named(list(trace_spans("job-7", run)))
    assert at_once.keys() == named(await sent(rows_of(of))).keys()


def test_whoever_is_told_passes_it_on_to_all() -> None:
    """Every method of a meter, including those added later."""
    calls: list[str] = []

    class Told(Meter):
        def __getattribute__(self, name: str) -> object:
            calls.append(name)
            return super().__getattribute__(name)

    names = [name for name in vars(Meter) if not name.startswith("_")]
    both = Meters(Told(), Told())
    assert {name for name in vars(Meters) if not name.startswith("_")} == set(names)
    arguments: dict[str, tuple[object, ...]] = {
        **{"loaded": (None, 0), "count_step": (None, None, (), 0), "recorded": ((),)},
        **{"loop_late": (1,), "call_refused": ("PERMISSION_DENIED",)},
    }
    for name in names:
        more = {"writes": True} if name == "store_failed" else {}
        outcome = getattr(both, name)(*arguments.get(name, ()), **more)
        if name == "committing":
            with outcome:
                pass
        assert calls == [name, name]
        calls.clear()
