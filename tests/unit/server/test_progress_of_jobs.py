"""A server shows workers' progress, only of the present round, and never decides by it."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC

import pytest
from control_samples import running as running_sample
from fake_control import FakeControl, serving

from rdzv import bounds
from rdzv.client import ControlClient, parse_endpoint
from rdzv.core.commands import Leave
from rdzv.core.evidence.progress_lag import RankProgress, lags
from rdzv.core.model import Assignment, LeaveCause
from rdzv.ctl import as_text, live
from rdzv.ctl.layout import Page
from rdzv.errors import InvalidRequestError
from rdzv.messages import Progress
from rdzv.server import wire
from rdzv.server.rpc.node_messages import NodeMessages
from rdzv.stores.memory import MemoryStore
from rdzv.structs import replace
from rdzv.transport.wire import read as read_message
from rdzv.transport.wire import write
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view import as_json
from rdzv.view.answers import JobStatus
from tests.support.driven import FakeClock, Server, last, running, server, settle

pytestmark = pytest.mark.slow

PAGE = Page(width=None, colour=False, now_s=1_700_049_600.0, zone=UTC)


# ---------------------------------------------------------------------- at the door


def message(*ranks: pb.RankProgress, **changes: object) -> pb.Progress:
    good: dict[str, object] = {"rdzv_id": "job-7", "run": "feed", "round": 2}
    return pb.Progress(ranks=ranks, **(good | changes))  # type: ignore[arg-type]


def checked(message: pb.Progress) -> Progress:
    report = wire.report_of(pb.NodeMessage(progress=message))
    assert isinstance(report, Progress)
    return report


@pytest.mark.quick
def test_progress_is_read() -> None:
    said = message(pb.RankProgress(rank=3, step=7, age_ms=9, rate=1.5))
    assert checked(said) == Progress("job-7", "feed", 2, (RankProgress(3, 7, 9, 1.5),))
    late = message(pb.RankProgress(age_ms=2**63))
    assert checked(late).ranks[0].age_ms == bounds.TIMEOUT_MS


@pytest.mark.quick
@pytest.mark.parametrize(
    ("said", "why"),
    [
        (message(*[pb.RankProgress()] * 4_097), "ranks 4097 are too many; give at most 4096"),
        (message(pb.RankProgress(rank=1), pb.RankProgress(rank=1)), "name each once"),
        (message(pb.RankProgress(rate=math.nan)), "rate nan is no rate"),
        (message(pb.RankProgress(rate=math.inf)), "rate inf is no rate"),
        (message(pb.RankProgress(rate=-1.0)), "rate -1.0 is no rate"),
        (message(rdzv_id="../x"), "rdzv_id '../x' has characters"),
        (message(run=""), "run '' is empty"),
    ],
)
def test_what_can_not_be_is_refused(said: pb.Progress, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        checked(said)


# ---------------------------------------------------------------------- what is kept


def said(*steps: int, rank: int = 0, run: str = "run-1", round_: int = 0) -> Progress:
    ranks = tuple(RankProgress(rank + n, step, 100, 2.0) for n, step in enumerate(steps))
    return Progress("job-7", run, round_, ranks)


def steps(s: Server) -> dict[int, int]:
    return {one.rank: one.step for one in s.progress("job-7")}


@pytest.mark.quick
async def test_the_last_word_of_each_worker_is_shown_with_its_age() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        s.report(n2, said(7, rank=2))
        s.report(n1, said(5, 6))
        await s.clock.advance(1_000)
        s.report(n1, said(8, 9))
        assert s.progress("job-7") == (
            RankProgress(0, 8, 100, 2.0),
            RankProgress(1, 9, 100, 2.0),
            RankProgress(2, 7, 1_100, 2.0),
        )
        assert s.progress("job-8") == ()


async def test_what_is_told_again_is_as_old_as_it_was() -> None:
    """The node sends its age with it: no reconnect and no new server makes it younger."""
    store, clock = MemoryStore(), FakeClock()
    line = Assignment("job-7", "run-1", 0, 0, 2, 0, 4, 0, 4, "h", 1, False, 0, 0)
    async with server(store, clock) as s:
        n1, _ = await s.pair()
        s.report(n1, said(6))
        await clock.advance(2_000)
        assert s.progress("job-7") == (RankProgress(0, 6, 2_100, 2.0),)
    async with server(store, clock) as s:
        n1 = await s.connect("n1", running(n1, line), incarnation=n1.incarnation)
        again = replace(said(6), ranks=(RankProgress(0, 6, 4_321, 2.0),))
        s.report(n1, again)
        assert s.progress("job-7") == (RankProgress(0, 6, 4_321, 2.0),)
        await clock.advance(679)
        assert s.progress("job-7") == (RankProgress(0, 6, 5_000, 2.0),)
        # If it is repeated, it is neither added up nor counted from the start.
        s.report(n1, replace(again, ranks=(RankProgress(0, 6, 5_010, 2.0),)))
        assert s.progress("job-7") == (RankProgress(0, 6, 5_010, 2.0),)


async def test_a_worker_of_another_node_is_refused() -> None:
    async with server() as s:
        n1, _ = await s.pair()
        with pytest.raises(InvalidRequestError, match=r"RANK 2: n1 has RANK 0..1 in round 0"):
            s.report(n1, said(5, 6, 7))
        assert steps(s) == {}


@pytest.mark.parametrize("wrong", [{"run": "run-0"}, {"round_": 1}])
async def test_what_is_of_another_round_is_passed_over(wrong: dict[str, object]) -> None:
    async with server() as s:
        n1, _ = await s.pair()
        s.report(n1, said(5, **wrong))  # type: ignore[arg-type]
        assert steps(s) == {}


async def test_who_has_no_seat_has_no_say() -> None:
    async with server() as s:
        await s.pair()
        spare = await s.connect("n3")
        await s.join(spare)
        s.report(spare, said(5))
        assert steps(s) == {}


async def test_a_round_that_ends_takes_its_progress_along() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        s.report(n1, said(5))
        leaving = Leave("n2", n2.incarnation, "run-1", LeaveCause.SIGNAL, "bye", None)
        await s.hear(n2, leaving)
        assert steps(s) == {}
        assert s.driver.rounds.find(s.state("job-7")) is None
        s.report(n1, said(6))
        assert steps(s) == {}


async def test_a_new_round_begins_with_nothing_and_goes_on_with_its_own() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        s.report(n1, said(500))
        for stream in (n1, n2):
            away = Leave(stream.node_id, stream.incarnation, "run-1", LeaveCause.SIGNAL, "x", 0)
            await s.hear(stream, away)
        for stream in (n1, n2):
            await s.join(stream)
        line = last(n1, Assignment)
        assert (line.run, line.round) != ("run-1", 0)
        s.report(n1, said(501))
        assert steps(s) == {}
        s.report(n1, said(1, run=line.run, round_=line.round))
        assert steps(s) == {0: 1}


async def test_a_server_that_starts_anew_knows_nothing_and_stores_nothing() -> None:
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock) as s:
        n1, _ = await s.pair()
        stored = await store.load("job-7")
        s.report(n1, said(5))
        assert await store.load("job-7") == stored
        line = Assignment("job-7", "run-1", 0, 0, 2, 0, 4, 0, 4, "h", 1, False, 0, 0)
    async with server(store, clock) as s:
        assert steps(s) == {}
        n1 = await s.connect("n1", running(n1, line), incarnation=n1.incarnation)
        s.report(n1, said(6))
        assert steps(s) == {0: 6}


async def test_what_is_said_before_the_beliefs_are_decided_waits_for_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A node sends it as soon as its stream is open; its seat may be known only later."""
    async with server() as s:
        n1, _ = await s.pair()
        s.driver.connections.detach(n1)
        stream = s.attach("n1", incarnation=n1.incarnation)
        messages = NodeMessages(s.driver, stream, s.clock)
        for step in (5, 6):
            ranks = [pb.RankProgress(rank=0, step=step)]
            early = pb.Progress(rdzv_id="job-7", run="run-1", round=0, ranks=ranks)
            messages.take(pb.NodeMessage(progress=early))
        other = pb.Progress(rdzv_id="job-7", run="run-1", ranks=[pb.RankProgress(rank=3)])
        assert steps(s) == {}
        messages.finish()
        belief = pb.Belief(join=pb.Join(rdzv_id="job-7"))
        await messages.obey([belief])
        assert steps(s) == {0: 6}
        for _ in range(3):
            messages.take(pb.NodeMessage(progress=other))
        assert caplog.text.count("n1: ignoring an invalid report: progress of RANK 3") == 1
        assert steps(s) == {0: 6}


# ---------------------------------------------------------------------- who watches


async def test_watchers_are_woken_by_progress_once_a_second_at_most() -> None:
    async with server() as s:
        n1, _ = await s.pair()
        seen: list[JobStatus] = []

        async def look() -> None:
            async for view in s.driver.operations.watch("job-7"):
                seen.append(view)

        watching = asyncio.ensure_future(look())
        await settle()
        assert len(seen) == 1
        for step in range(100):
            s.report(n1, said(step))
            await s.clock.advance(50)
        assert 4 <= len(seen) - 1 <= 5
        await s.clock.advance(10_000)
        calm = len(seen)
        await s.clock.advance(10_000)
        assert len(seen) == calm
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_nobody_is_woken_where_nobody_watches() -> None:
    async with server() as s:
        n1, _ = await s.pair()
        s.report(n1, said(1))
        assert s.driver.watchers.progress_due_ms is None


# ---------------------------------------------------------------------- what is shown


def status(*progress: pb.RankProgress) -> JobStatus:
    job = running_sample()
    said = [read_message(RankProgress, one) for one in progress]
    for one, behind in zip(said, lags(said), strict=True):
        write(job.progress.add(), replace(one, behind=behind))
    control = FakeControl()
    control.jobs[job.rdzv_id] = job
    with serving(control) as endpoint, ControlClient(parse_endpoint(endpoint)) as client:
        return client.status(job.rdzv_id)


def all_of(step: int, rate: float = 14.25, age_ms: int = 300) -> list[pb.RankProgress]:
    return [pb.RankProgress(rank=n, step=step, age_ms=age_ms, rate=rate) for n in range(24)]


def shown(*progress: pb.RankProgress) -> str:
    lines = as_text.status(status(*progress), PAGE).splitlines()
    return "".join(line.removeprefix("  progress     ") for line in lines if "progress" in line)


def test_one_line_says_how_far_a_job_is() -> None:
    assert shown() == ""
    assert shown(*all_of(1204)) == "step 1204, 14.2 steps/s, last 0.3 s ago"
    behind = all_of(1204)
    behind[5] = pb.RankProgress(rank=5, step=1200, age_ms=300, rate=13)
    assert shown(*behind) == "step 1200..1204, 13 steps/s, last 0.3 s ago (slowest: RANK 5)"
    # A tenth of a second earlier the others were at 1202 or 1203.
    behind[5].age_ms = 400
    assert shown(*behind) == "step 1201..1204, 13 steps/s, last 0.3 s ago (slowest: RANK 5)"
    behind[5].age_ms = 40_000
    assert shown(*behind).endswith("last 0.3 s ago (slowest: RANK 5, 40 s ago)")
    equal = all_of(7)
    equal[2].age_ms = 11_000
    assert shown(*equal).endswith("last 0.3 s ago (slowest: RANK 2, 11 s ago)")


def test_nodes_in_lock_step_are_so_whenever_each_has_said_its_last_word() -> None:
    nodes = all_of(1204)[:8] + all_of(1191, age_ms=1_200)[8:16]
    assert shown(*nodes).startswith("step 1204, 14.2 steps/s, last 0.3 s ago; reported by 16 of 24")
    lines = as_text.status(status(*nodes), PAGE).splitlines()
    (head,) = [n for n, line in enumerate(lines) if line.startswith("GROUP_RANK")]
    column = lines[head].index("STEP")
    assert [line[column:].split()[0] for line in lines[head + 1 : head + 3]] == ["1204", "1204"]


@pytest.mark.quick
def test_a_rate_that_is_not_known_is_left_out() -> None:
    assert shown(*all_of(1, rate=0)) == "step 1, last 0.3 s ago"
    assert shown(*all_of(9, age_ms=61_000)) == "step 9, last 1 min 1 s ago"
    # One step takes so long that nothing is missing yet.
    assert shown(*all_of(9, 0.01, 61_000)) == "step 9, 0.01 steps/s, last 1 min 1 s ago"


def test_it_is_told_how_many_workers_say_anything() -> None:
    assert (
        shown(*all_of(5)[:1]) == "step 5, 14.2 steps/s, last 0.3 s ago; reported by 1 of 24 workers"
    )


@pytest.mark.parametrize(("width", "there"), [(None, True), (200, True), (60, False)])
def test_nodes_have_their_steps_where_they_fit(width: int | None, there: bool) -> None:
    some = all_of(5)[:16]
    some[9].step = 8
    page = Page(width=width, colour=False, now_s=PAGE.now_s, zone=UTC)
    lines = as_text.status(status(*some), page).splitlines()
    (head,) = [n for n, line in enumerate(lines) if line.startswith("GROUP_RANK")]
    assert ("STEP" in lines[head]) == there
    if there:
        column = lines[head].index("STEP")
        assert [line[column:].split()[0] for line in lines[head + 1 :]] == ["5", "5..8", "-"]


def test_programs_read_all_of_it() -> None:
    job = status(pb.RankProgress(rank=3, step=7, age_ms=5, rate=0.5), pb.RankProgress(rank=4))
    assert job.progress == (RankProgress(3, 7, 5, 0.5), RankProgress(4, 0, 0, None, 7))
    assert (
        '"progress": [{"rank": 3, "step": 7, "age_ms": 5, "rate": 0.5, "behind": 0}'
        in as_json.document(job, indent=None)
    )


def test_ages_are_counted_on_while_nothing_is_heard() -> None:
    job = status(pb.RankProgress(rank=3, step=7, age_ms=5))
    assert live.later(job, 10**9).progress[0].age_ms == 10**9 + 5
