"""A hang ends its round as a failure of the worker that the stacks show; never in haste."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from rdzv.core.commands import Command, Fail, Leave
from rdzv.core.evidence.collectives import FINISHED, CollectiveRecord, GroupRecord, HangCause
from rdzv.core.evidence.hang_culprit import HungWorker, verdict
from rdzv.core.evidence.stacks import (
    EXITED,
    CollectedStacks,
    StackFrame,
    ThreadStack,
    WorkerStack,
    grouped,
)
from rdzv.core.model import Cause, Failure, LeaveCause, Membership, Result, Settings, State
from rdzv.core.root_cause import describe_failure, is_connection_error
from rdzv.errors import InvalidRequestError, RendezvousConnectionError
from rdzv.messages import Hung, RoundOver, TakeStacks
from rdzv.server.engine.decide_persist_publish import Engine
from rdzv.server.engine.store_access import STORE_RETRY_MS
from rdzv.server.sessions.streams import Stream
from rdzv.stores.memory import MemoryStore
from rdzv.structs import replace
from rdzv.view.answers import event_in
from tests.support.driven import FakeClock, FlakyStore, Server, join, read, server, settle
from tests.unit.server.test_stacks_of_jobs import say, stack

pytestmark = pytest.mark.slow

GATHER_MS, ANSWER_MS = 2_000, 10_000


def worker(rank: int, silent_ms: int = 60_000) -> HungWorker:
    return HungWorker(rank, rank % 2, 100 + rank, silent_ms, "no progress reported")


def hang(s: Server, stream: Stream, *ranks: int, run: str = "run-1", number: int = 0) -> None:
    workers = tuple(worker(rank, 60_000 + rank) for rank in ranks)
    s.report(stream, Hung("job-7", run, number, workers))


async def membership(s: Server) -> Membership:
    return (await s.driver.jobs.look("job-7")).membership


async def failure(s: Server) -> Failure:
    round_ = (await membership(s)).round
    assert round_ is not None and round_.end is not None
    assert round_.end.cause is Cause.WORKER_FAILURE
    (found,) = round_.end.failures
    return found


async def live(s: Server) -> bool:
    round_ = (await membership(s)).round
    return round_ is not None and round_.live


def was_asked(*streams: Stream) -> list[bool]:
    return [any(isinstance(told, TakeStacks) for told in read(stream)) for stream in streams]


# ------------------------------------------------------------------ whose failure it is


def a_report(*stacks: WorkerStack) -> CollectedStacks:
    return CollectedStacks("job-7", "run-1", 0, 0, "hung", tuple(grouped(stacks)), stacks)


def on(node_id: str, one: WorkerStack) -> WorkerStack:
    return WorkerStack(one.rank, one.local_rank, one.pid, one.state, one.threads, node_id=node_id)


@pytest.mark.quick
def test_it_is_the_failure_of_the_one_that_the_others_wait_for() -> None:
    stacks = [on("n1", stack(0)), on("n1", stack(1)), on("n2", stack(2, line=7))]
    found = verdict({"n1": (worker(0, 70_000), worker(1))}, a_report(*stacks), "")
    assert (found.node_id, found.rank, found.local_rank, found.pid) == ("n2", 2, 0, 102)
    assert found.message == (
        "hung: RANK 0-1 in step at train.py:41; RANK 2 in step at train.py:7 "
        "(RANK 0-1: no progress reported)"
    )
    assert found.traceback.endswith('File "/home/ada/train.py", line 7, in step')


@pytest.mark.quick
def test_where_the_stacks_do_not_tell_it_is_the_longest_silent() -> None:
    stacks = [on("n1", stack(0)), on("n1", stack(1))]
    hung = {"n1": (worker(0, 5), worker(1, 9)), "n2": (worker(2, 9),)}
    assert verdict(hung, a_report(*stacks), "").rank == 1
    alone = verdict(hung, None, "too many are being taken")
    assert (alone.node_id, alone.rank, alone.traceback) == ("n1", 1, "")
    assert alone.message.startswith(
        "hung: the rank at fault is unknown; no stacks were taken: too many are being taken "
        "(RANK 0-2"
    )


@pytest.mark.quick
@pytest.mark.parametrize(("member", "rank"), [(False, 0), (True, 2)])
def test_a_worker_that_has_exited_is_charged_only_if_it_may_be_in_the_group(
    member: bool, rank: int
) -> None:
    """The records show who is in it; without them, it may be."""
    at_barrier = [on("n1", recorded(n, 41, 9, done=False)) for n in (0, 1)]
    report = a_report(*at_barrier, on("n1", WorkerStack(2, 2, 102, FINISHED)))
    if not member:
        report = replace(
            report, cause=HangCause("unfinished", (), "1", 9, "barrier", (0, 1), 9, "so")
        )
    found = verdict({"n1": (worker(0), worker(1))}, report, "")
    assert (found.rank, found.finished) == (rank, member)
    assert ("at fault is unknown" in found.message) is not member


@pytest.mark.quick
def test_the_message_is_bounded() -> None:
    frame = StackFrame("f" * 200, "/" + "x" * 250, 1)
    many = [
        WorkerStack(n, 0, 1, "S", (ThreadStack("t", True, (StackFrame(f"{n}", "x", n), frame)),))
        for n in range(20)
    ]
    assert len(verdict({"n1": (worker(0),)}, a_report(*many), "").message) <= 1_000


@pytest.mark.quick
def test_a_failure_that_never_exited_is_told_by_its_message() -> None:
    hung = Failure(
        1, 9, 99, None, None, "hung: RANK 9 in f at t.py:1", "", 0, node_id="n1", address="10.0.0.1"
    )
    assert describe_failure(hung) == ("rank 9 (local_rank 1) on n1: hung: RANK 9 in f at t.py:1")


# ------------------------------------------------------------------ one hang


@pytest.mark.quick
async def test_the_others_are_waited_for_a_moment_then_all_stacks_are_taken_then_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock) as s:
        n1, n2 = await s.pair()
        with caplog.at_level(logging.INFO, "rdzv.events"):
            hang(s, n1, 0, 1)
            await clock.advance(GATHER_MS - 1)
            assert was_asked(n1, n2) == [False, False]
            assert s.driver.hangs.shown("job-7") == "RANK 0-1: no progress reported"
            await clock.advance(1)
            await say(s, n1, stack(0), stack(1))
            assert await live(s)
            await say(s, n2, stack(2, line=7), stack(3))
        assert s.driver.hangs.shown("job-7") == ""
        found = await failure(s)
        assert (found.node_id, found.rank, found.exit_code, found.signal) == ("n2", 2, None, None)
        assert found.at_ms == clock.now_ms()
        assert "RANK 2 in step at train.py:7" in found.message
        (over,) = [told for told in read(n2) if isinstance(told, RoundOver)]
        assert over.end.broken
        assert over.end.reason.startswith("rank 2 (local_rank 0) on n2: hung: RANK 0-1,3 in step")
        lines = [record.getMessage() for record in caplog.records]
        assert lines[0] == "job-7: n1: workers hang in round 0: RANK 0-1: no progress reported"
        assert lines[1].startswith("job-7: stacks of round 0: RANK 0-1,3 in step at train.py:41; ")
        kept = await s.driver.stack_archive.find("job-7", "run-1", 0)
        assert kept is not None
        assert kept.reason == "it hung: RANK 0-1: no progress reported"
        assert s.driver.hangs.episodes == 0
        rows = [row.name for row in await s.driver.operations.history("job-7", 100)]
        assert rows[-4:] == ["WorkersHang", "StacksTaken", "RoundEnded", "WorkerFailed"]


def recorded(rank: int, line: int, sequence: int, *, done: bool) -> WorkerStack:
    last = CollectiveRecord(sequence, "all_reduce", "[4] Float", done=done, age_ms=60_000)
    return replace(
        stack(rank, line=line), collectives=(GroupRecord("0", "default_pg", sequence, (last,)),)
    )


async def test_the_records_of_collectives_are_more_certain_than_the_stacks() -> None:
    """By its stack it would be RANK 2: the only one at another line."""
    clock = FakeClock()
    async with server(MemoryStore(), clock) as s:
        n1, n2 = await s.pair()
        hang(s, n1, 0, 1)
        hang(s, n2, 2)
        await settle()
        await say(s, n1, recorded(0, 41, 9, done=False), recorded(1, 41, 9, done=False))
        await say(s, n2, recorded(2, 7, 9, done=False), recorded(3, 41, 8, done=True))
        found = await failure(s)
        assert (found.node_id, found.rank, found.pid) == ("n2", 3, 103)
        sentence = (
            "RANK 3 has not entered all_reduce #9 of the default group; "
            "RANK 0-2 have waited in it for 60 s"
        )
        assert found.message.startswith(f"hung: {sentence}; RANK 0-1,3 in step at train.py:41; ")
        kept = await s.driver.stack_archive.find("job-7", "run-1", 0)
        assert kept is not None and kept.cause is not None
        assert (kept.cause.kind, kept.cause.sentence) == ("absent", sentence)
        assert kept.stacks[3].collectives[0].entered == 8
        rows = await s.driver.operations.history("job-7", 100)
        (row,) = [row for row in rows if row.name == "StacksTaken"]
        fields = event_in(row).fields
        assert fields is not None
        assert (fields["cause"], fields["ranks"]) == ("absent", [3])


def timed_out(s: Server, stream: Stream, *ranks: int) -> None:
    workers = tuple(replace(worker(rank, 3_000), timed_out=True) for rank in ranks)
    s.report(stream, Hung("job-7", "run-1", 0, workers))


def left(rank: int, sequence: int) -> WorkerStack:
    """Show a worker that has ended by the error of a collective."""
    return replace(recorded(rank, 41, sequence, done=False), state=EXITED, threads=())


async def test_after_a_timeout_all_are_asked_at_once_and_the_one_that_is_missing_has_failed() -> (
    None
):
    clock = FakeClock()
    async with server(MemoryStore(), clock) as s:
        n1, n2 = await s.pair()
        timed_out(s, n1, 0)
        await settle()
        await say(s, n1, left(0, 9), left(1, 9))
        await say(s, n2, recorded(2, 7, 8, done=True), left(3, 9))
        found = await failure(s)
        assert (found.node_id, found.rank) == ("n2", 2)
        assert found.message.startswith(
            "a collective timed out: RANK 2 has not entered all_reduce #9 of the default group; "
            "RANK 0-1,3 have waited in it for 60 s; "
        )
        assert not is_connection_error(found)
        assert found.at_ms < clock.now_ms() - 6_000
        kept = await s.driver.stack_archive.find("job-7", "run-1", 0)
        assert kept is not None
        assert kept.reason.startswith("a collective timed out: RANK 0: ")


@pytest.mark.parametrize(
    "stacks",
    [
        pytest.param(lambda: [stack(0), stack(1), stack(2), stack(3)], id="no record"),
        pytest.param(
            lambda: [left(0, 9), *(recorded(rank, 7, 9, done=True) for rank in (1, 2, 3))],
            id="no rank is missing",
        ),
    ],
)
async def test_a_timeout_without_a_cause_is_left_to_its_node(
    stacks: Callable[[], list[WorkerStack]],
) -> None:
    clock = FakeClock()
    async with server(clock=clock) as s:
        n1, n2 = await s.pair()
        timed_out(s, n1, 0)
        await settle()
        of = stacks()
        await say(s, n1, *of[:2])
        await say(s, n2, *of[2:])
        await clock.advance(3_000)
        assert await live(s)
        assert s.driver.hangs.episodes == 0


async def test_a_worker_that_exited_with_0_is_charged_if_the_others_wait_for_it() -> None:
    clock = FakeClock()
    async with server(clock=clock) as s:
        n1, n2 = await s.pair()
        hang(s, n1, 0, 1)
        hang(s, n2, 3)
        await settle()
        await say(s, n1, recorded(0, 41, 9, done=False), recorded(1, 41, 9, done=False))
        finished = WorkerStack(2, 0, 102, FINISHED, exited_ms=64_000)
        await say(s, n2, finished, recorded(3, 41, 9, done=False))
        found = await failure(s)
        assert (found.node_id, found.rank, found.exit_code) == ("n2", 2, 0)
        assert found.message.startswith(
            "hung: RANK 2 exited with 0, 1 min 4 s before; RANK 0-1,3 have waited in all_reduce #9 "
            "of the default group for 60 s; "
        )
        rows = await s.driver.operations.history("job-7", 100)
        assert "WorkerFailed" in [row.name for row in rows]


async def test_once_every_node_has_said_so_nobody_is_waited_for() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        hang(s, n1, 0)
        hang(s, n1, 0, 1)
        hang(s, n2, 3)
        await settle()
        assert was_asked(n1, n2) == [True, True]


async def test_a_node_that_takes_no_stacks_does_not_keep_the_round_from_ending() -> None:
    clock = FakeClock()
    async with server(clock=clock) as s:
        n1, _ = await s.pair()
        hang(s, n1, 1)
        await clock.advance(GATHER_MS)
        await say(s, n1, stack(0), stack(1, line=7))
        assert await live(s)
        await clock.advance(ANSWER_MS)
        assert "no information about n2" in (await failure(s)).message


async def test_where_nobody_hangs_any_more_the_round_goes_on() -> None:
    """Before the stacks are taken, and after."""
    clock = FakeClock()
    async with server(clock=clock) as s:
        n1, n2 = await s.pair()
        hang(s, n1, 0)
        hang(s, n1)
        await clock.advance(GATHER_MS)
        assert was_asked(n1, n2) == [False, False]
        hang(s, n1, 0)
        await clock.advance(GATHER_MS)
        hang(s, n1)
        await say(s, n1, stack(0), stack(1))
        await say(s, n2, stack(2), stack(3))
        assert await live(s)
        assert s.driver.hangs.episodes == 0
        last = (await s.driver.operations.history("job-7", 100))[-1]
        assert event_in(last).text == "round 0 continues: no worker hangs any more"


async def test_a_round_that_ends_otherwise_ends_the_hang() -> None:
    clock = FakeClock()
    async with server(clock=clock) as s:
        n1, _ = await s.pair()
        hang(s, n1, 0)
        s.driver.connections.detach(n1)
        await clock.advance(60_000)
        assert s.driver.hangs.episodes == 0
        round_ = (await membership(s)).round
        assert round_ is not None and round_.end is not None
        assert round_.end.cause is Cause.NODE_LOST


async def test_a_hang_that_is_still_looked_into_does_not_end_that_of_the_next_round() -> None:
    """The stacks of its round are waited for, though the round is over."""
    clock = FakeClock()
    async with server(clock=clock) as s:
        n1, n2 = await s.pair()
        hang(s, n1, 0)
        await clock.advance(GATHER_MS + ANSWER_MS - 1_000)
        assert was_asked(n1, n2) == [True, True]
        number = (await membership(s)).next_round
        for stream in (n1, n2):
            fail = Leave(stream.node_id, stream.incarnation, "run-1", LeaveCause.SIGNAL, "bye")
            await s.driver.engine.submit("job-7", replace(fail, left_round=number - 1))
        assert s.driver.hangs.episodes == 0
        for stream in (n1, n2):
            await s.join(stream)
        joined = await membership(s)
        assert joined.round is not None and joined.round.live
        hang(s, n1, 0, run=joined.run, number=joined.round.number)
        assert s.driver.hangs.episodes == 1
        await clock.advance(2_000)
        assert s.driver.hangs.episodes == 1
        assert s.driver.hangs.shown("job-7")


async def test_a_round_that_is_over_hangs_no_more_from_that_moment_on() -> None:
    async with server() as s:
        n1, _ = await s.pair()
        hang(s, n1, 0)
        assert s.driver.hangs.shown("job-7")
        leave = Leave("n1", n1.incarnation, "run-1", LeaveCause.SIGNAL, "bye")
        await s.driver.engine.submit("job-7", leave)
        assert s.driver.hangs.shown("job-7") == ""


async def test_what_is_said_of_another_round_or_by_another_changes_nothing() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        hang(s, n1, 0, number=1)
        hang(s, n1, 0, run="run-9")
        hang(s, n1)
        await s.join(other := await s.connect("n3"), (2, 2))
        hang(s, other, 0)
        with pytest.raises(InvalidRequestError, match=r"hang of RANK 0: n2 has RANK 2\.\.3"):
            hang(s, n2, 0)
        assert s.driver.hangs.episodes == 0


async def test_a_store_that_is_away_is_waited_for_and_who_recovers_meanwhile_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, clock, tries = FlakyStore(), FakeClock(), list[Command]()
    submit = Engine.submit

    async def counted(engine: Engine, rdzv_id: str, command: Command, *more: Any) -> State:
        if isinstance(command, Fail):
            tries.append(command)
        return await submit(engine, rdzv_id, command, *more)

    monkeypatch.setattr(Engine, "submit", counted)
    async with server(store, clock) as s:
        n1, n2 = await s.pair()
        hang(s, n1, 0)
        await clock.advance(GATHER_MS)
        store.away = RendezvousConnectionError("no disk")
        await say(s, n1, stack(0, line=7), stack(1))
        await say(s, n2, stack(2), stack(3))
        await clock.advance(5_000)
        assert await live(s)
        assert len(tries) == 1 + 5_000 // STORE_RETRY_MS
        store.away = None
        await clock.advance(2_000)
        assert (await failure(s)).rank == 0


async def test_stacks_that_can_not_be_kept_do_not_keep_the_round_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, clock = MemoryStore(), FakeClock()

    async def refuse(name: str, data: bytes, revision: int) -> int:
        raise RendezvousConnectionError("no disk")

    monkeypatch.setattr(store, "swap_document", refuse)
    async with server(store, clock) as s:
        n1, n2 = await s.pair()
        hang(s, n1, 0)
        hang(s, n2, 2)
        await settle()
        await say(s, n1, stack(0), stack(1))
        await say(s, n2, stack(2), stack(3, line=7))
        assert (await failure(s)).rank == 3


async def test_a_server_that_stops_leaves_it_to_the_next() -> None:
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock) as s:
        n1, n2 = await s.pair()
        hang(s, n1, 0)
        hang(s, n2, 2)
        await settle()
    async with server(store, clock) as s:
        back = [await s.come_back(n.node_id, incarnation=n.incarnation) for n in (n1, n2)]
        assert await live(s)
        hang(s, back[0], 0)
        hang(s, back[1], 2)
        await settle()
        await say(s, back[0], stack(0), stack(1))
        await say(s, back[1], stack(2), stack(3, line=7))
        assert (await failure(s)).rank == 3


async def test_it_spends_a_restart_and_without_one_the_run_fails_by_it() -> None:
    async with server() as s:
        n1 = await s.connect("n1")
        await s.hear(n1, join(n1, settings=Settings(1, 1, max_restarts=0)))
        read(n1)
        hang(s, n1, 0, 1)
        await settle()
        await say(s, n1, stack(0), stack(1, line=7))
        again = join(n1, settings=Settings(1, 1, max_restarts=0), run="run-1", left_round=0)
        await s.hear(n1, again)
        ended = (await membership(s)).ended
        assert ended is not None and ended.result is Result.FAILED
        assert ended.failures[0].message.startswith("hung: ")
