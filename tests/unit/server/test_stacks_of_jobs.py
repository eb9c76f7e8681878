"""The server asks all nodes of a round at once, waits for a limited time, and keeps little."""

from __future__ import annotations

import asyncio

import pytest

from rdzv import errors
from rdzv.core.commands import Succeed
from rdzv.core.evidence.collectives import FINISHED, CollectiveRecord, GroupRecord
from rdzv.core.evidence.stacks import (
    CollectedStacks,
    Group,
    SilentNode,
    StackFrame,
    ThreadStack,
    WorkerStack,
)
from rdzv.messages import Stacks, TakeStacks
from rdzv.server.diagnosis import stack_archive
from rdzv.server.sessions.streams import Stream
from rdzv.stores.memory import MemoryStore
from rdzv.structs import replace
from tests.support.driven import FakeClock, FlakyStore, Server, read, server, settle

pytestmark = pytest.mark.slow

ANSWER_MS = 10_000


def stack(rank: int, line: int = 41, size: int = 1) -> WorkerStack:
    frame = StackFrame("step", "/home/ada/train.py", line)
    return WorkerStack(
        rank, rank % 2, 100 + rank, "S", (ThreadStack("MainThread", True, (frame,) * size),)
    )


class Asking:
    """An operator requesting the stacks of job-7."""

    def __init__(self, s: Server, number: int | None = None, run: str = "") -> None:
        self._task = asyncio.ensure_future(
            s.driver.operations.stacks("job-7", run, number, why="asked")
        )

    @property
    def done(self) -> bool:
        return self._task.done()

    async def report(self) -> CollectedStacks:
        async with asyncio.timeout(100):
            return await self._task


async def ask(s: Server, number: int | None = None, run: str = "") -> Asking:
    asking = Asking(s, number, run)
    await settle()
    return asking


def asked(stream: Stream) -> TakeStacks:
    (request,) = [told for told in read(stream) if isinstance(told, TakeStacks)]
    return request


async def say(s: Server, stream: Stream, *stacks: WorkerStack, error: str = "") -> None:
    """Answer as a node does: one worker at a time, then the final message."""
    request = asked(stream).request
    for one in stacks:
        s.report(stream, Stacks(request, (one,)))
    s.report(stream, Stacks(request, last=True, error=error))
    await settle()


# ------------------------------------------------------------------ taking


async def test_all_nodes_are_asked_at_once_and_their_workers_put_together() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        asking = await ask(s)
        await say(s, n2, stack(2), stack(3, line=7))
        assert not asking.done
        await say(s, n1, stack(0), stack(1))
        report = await asking.report()
        assert (report.rdzv_id, report.run, report.round, report.reason) == (
            *("job-7", "run-1", 0),
            "asked",
        )
        assert report.groups == (
            Group((0, 1, 2), "in step at train.py:41"),
            Group((3,), "in step at train.py:7"),
        )
        assert [(one.rank, one.node_id) for one in report.stacks] == [
            *((0, "n1"), (1, "n1")),
            *((2, "n2"), (3, "n2")),
        ]
        assert s.driver.stacks.takings == 0


async def test_a_node_that_does_not_answer_is_named_and_waited_for_no_longer() -> None:
    clock = FakeClock()
    async with server(clock=clock) as s:
        n1, _ = await s.pair()
        asking = await ask(s)
        await say(s, n1, stack(0), stack(1))
        await clock.advance(ANSWER_MS - 1)
        assert not asking.done
        await clock.advance(1)
        (silent,) = (await asking.report()).silent
        assert (silent.node_id, silent.rank_first, silent.local_world_size) == ("n2", 2, 2)
        assert silent.reason.startswith("no answer within 10 s: ")
        assert (await asking.report()).summary == (
            "RANK 0-1 in step at train.py:41; no information about n2"
        )


async def test_a_node_that_goes_or_is_not_there_or_has_none_says_why() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        asking = await ask(s)
        s.driver.connections.detach(n1)
        await say(s, n2, error="its workers have all exited")
        assert {node.node_id: node.reason for node in (await asking.report()).silent} == {
            "n1": "its stream ended before it had answered",
            "n2": "its workers have all exited",
        }
        asking = await ask(s)
        await say(s, n2)
        assert (await asking.report()).silent == (
            SilentNode("n1", 0, 2, "its agent is not connected"),
        )


async def test_the_workers_of_a_node_that_has_succeeded_are_known_to_have_exited() -> None:
    """Also if that node says nothing, or goes."""
    async with server() as s:
        n1, n2 = await s.pair()
        succeed = Succeed("n2", n2.incarnation, "run-1", 0)
        await s.driver.engine.submit("job-7", succeed)
        asking = await ask(s)
        record = GroupRecord("0", "default_pg", 9, (CollectiveRecord(9, "barrier", age_ms=30_000),))
        await say(s, n1, *(replace(stack(rank), collectives=(record,)) for rank in (0, 1)))
        s.driver.connections.detach(n2)
        report = await asking.report()
        assert report.silent == ()
        assert [(one.rank, one.node_id) for one in report.stacks if one.state == FINISHED] == [
            (2, "n2"),
            (3, "n2"),
        ]
        assert report.cause is not None
        assert (report.cause.kind, report.cause.ranks) == ("exited", (2, 3))


async def test_what_is_not_asked_for_is_dropped() -> None:
    """Of another node's workers, twice, of an earlier request, on a replaced stream."""
    async with server() as s:
        n1, n2 = await s.pair()
        asking = await ask(s)
        number = asked(n1).request
        old, n1 = n1, s.attach("n1")
        s.report(old, Stacks(number, (stack(0),), last=True))
        s.report(n1, Stacks(number, (stack(0),), last=True))
        s.report(n2, Stacks(number + 7, (stack(2),), last=True))
        s.report(n2, Stacks(number, (stack(0), stack(2, line=7), stack(2))))
        s.report(n2, Stacks(number, last=True))
        report = await asking.report()
        assert report.groups == (Group((2,), "in step at train.py:7"),)
        assert [node.node_id for node in report.silent] == ["n1"]


@pytest.mark.quick
async def test_what_is_kept_is_bounded_and_one_of_each_group_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rdzv.server.diagnosis.stack_collection.STACK_BYTES", 2_000)
    monkeypatch.setattr("rdzv.server.diagnosis.stack_collection.STACK_GROUPS", 2)
    async with server() as s:
        n1, n2 = await s.pair()
        asking = await ask(s)
        await say(s, n1, stack(0, size=30), stack(1, size=30))
        await say(s, n2, stack(2, line=7, size=30), stack(3, line=8))
        report = await asking.report()
        assert [one.rank for one in report.stacks] == [0, 2, 3]
        assert report.left_out == 1
        assert [group.ranks for group in report.groups] == [(0, 1), (2,), (3,)]
        assert report.groups[2].where == "in one of very many places at elsewhere"


async def test_so_many_may_ask_at_once_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdzv.server.diagnosis.stack_collection.TAKINGS", 1)
    async with server() as s:
        n1, n2 = await s.pair()
        first, second = await ask(s), await ask(s)
        with pytest.raises(errors.LimitExceededError, match="try again"):
            await second.report()
        await say(s, n1)
        await say(s, n2)
        await first.report()


@pytest.mark.quick
async def test_a_server_that_stops_says_so() -> None:
    async with server() as s:
        await s.pair()
        asking = await ask(s)
        s.driver.close_streams(errors.RendezvousConnectionError("stopping"))
        with pytest.raises(errors.RendezvousConnectionError, match="no longer serves"):
            await asking.report()


async def test_what_can_not_be_had_is_refused_with_the_reason() -> None:
    async with server() as s:
        with pytest.raises(errors.UnknownJobError):
            await (await ask(s)).report()
        n1, n2 = await s.pair()
        for run, number, error, words in (
            ("run-9", None, errors.RendezvousClosedError, "run run-9 of job-7 has ended"),
            ("", 5, errors.InvalidRequestError, "no stacks of round 5 .* in round 0 now"),
        ):
            with pytest.raises(error, match=words):
                await (await ask(s, number, run)).report()
        for stream in (n1, n2):
            succeed = Succeed(stream.node_id, stream.incarnation, "run-1", 0)
            await s.hear(stream, succeed)
        with pytest.raises(errors.InvalidRequestError, match="has no workers now"):
            await (await ask(s)).report()


# ------------------------------------------------------------------ keeping


def report(round_: int, rdzv_id: str = "job-7", at_ms: int = 0) -> CollectedStacks:
    groups = (Group((0,), "in step at train.py:41"),)
    return CollectedStacks(rdzv_id, "run-1", round_, at_ms or round_, "hung", groups, (stack(0),))


@pytest.mark.quick
async def test_what_is_kept_survives_the_server_until_the_job_is_forgotten() -> None:
    store = MemoryStore()
    async with server(store) as s:
        before = await s.connect("n1")
        await s.join(before, (1, 1))
        for number in (3, 5):
            await s.driver.stack_archive.keep(report(number))
        await s.driver.stack_archive.keep(report(5, at_ms=99))
    async with server(store) as s:
        n1 = await s.come_back("n1", incarnation=before.incarnation)
        assert await (await ask(s, 3)).report() == report(3)
        assert await (await ask(s, 5)).report() == report(5, at_ms=99)
        await s.hear(n1, Succeed("n1", n1.incarnation, "run-1", 0))
        assert await (await ask(s)).report() == report(5, at_ms=99)
        with pytest.raises(errors.InvalidRequestError, match="those of round 3, 5 are"):
            await (await ask(s, 4)).report()
        await s.driver.operations.forget("job-7")
        await s.join(await s.connect("n2"), (1, 1))
        with pytest.raises(errors.InvalidRequestError, match="no round of this run has hung"):
            await (await ask(s, 3)).report()


async def test_the_oldest_makes_room_that_of_the_same_job_first() -> None:
    store = MemoryStore()
    async with server(store) as s:
        keep, rounds = (
            s.driver.stack_archive.keep,
            s.driver.stack_archive.rounds,
        )
        for number in range(1, 7):
            await keep(report(number, "flaky", at_ms=1_000 + number))
        assert await rounds("flaky", "run-1") == (3, 4, 5, 6)
        for number in range(len(stack_archive.PLACES) - 4):
            await keep(report(0, f"other-{number}", at_ms=1 + number))
        assert await rounds("flaky", "run-1") == (3, 4, 5, 6)
        await keep(report(0, "new", at_ms=9_999))
        assert await rounds("other-0", "run-1") == ()
        assert await rounds("other-1", "run-1") == (0,)
        assert await rounds("new", "run-1") == (0,)
        assert len(await store.list_documents()) == len(stack_archive.PLACES)


async def test_a_document_that_can_not_be_read_is_written_over() -> None:
    store = MemoryStore()
    await store.swap_document(stack_archive.PLACES[0], b"{", 0)
    async with server(store) as s:
        await s.driver.stack_archive.keep(report(3))
        assert await s.driver.stack_archive.find("job-7", "run-1", 3) == report(3)
        assert await store.list_documents() == (stack_archive.PLACES[0],)


async def test_after_a_write_that_failed_the_store_is_read_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = FlakyStore()
    async with server(store) as s:
        whole = store.swap_document

        async def lost(name: str, data: bytes, revision: int) -> int:
            await whole(name, data, revision)
            raise errors.RendezvousConnectionError("no answer")

        monkeypatch.setattr(store, "swap_document", lost)
        with pytest.raises(errors.RendezvousError):
            await s.driver.stack_archive.keep(report(3))
        monkeypatch.setattr(store, "swap_document", whole)
        assert await s.driver.stack_archive.find("job-7", "run-1", 3) == report(3)
        await s.driver.stack_archive.keep(replace(report(3), reason="again"))


async def test_what_is_too_much_for_a_document_is_kept_without_some_of_its_stacks() -> None:
    async with server() as s:
        frame = StackFrame("\x01" * 255, "/home/ada/train.py", 1)
        wide = [
            replace(stack(rank), threads=(ThreadStack("t", True, (frame,) * 100),))
            for rank in range(9)
        ]
        whole = replace(report(3), stacks=tuple(wide), left_out=1)
        await s.driver.stack_archive.keep(whole)
        kept = await s.driver.stack_archive.find("job-7", "run-1", 3)
        assert kept is not None
        assert kept.stacks == whole.stacks[: len(kept.stacks)]
        assert 0 < len(kept.stacks) < 9
        assert len(kept.stacks) + kept.left_out == 10
        assert kept.groups == whole.groups
