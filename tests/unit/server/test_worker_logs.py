"""Logs that pass through the server: which node is asked, what is bounded, how a request ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rdzv import errors
from rdzv.bounds import LOG_PIECE_BYTES
from rdzv.core.commands import Fail, Join, Leave, Succeed
from rdzv.core.model import Assignment, Ended, EndedRun, LeaveCause, Offer, Result, Settings
from rdzv.messages import LogPiece, LogPosition, LogsWanted, ReadLog, StopLog
from rdzv.server.diagnosis.worker_logs import WAIT_MS, by_node
from rdzv.server.sessions.streams import Stream
from rdzv.stores.memory import MemoryStore
from rdzv.structs import replace
from rdzv.view.answers import LogLines
from tests.support.builders import report
from tests.support.driven import FakeClock, Server, read, server, settle

pytestmark = pytest.mark.slow

ANSWER_MS = 10_000


class Reading:
    """A caller that accepts pieces, unless it is told to wait."""

    def __init__(self, s: Server, wanted: LogsWanted) -> None:
        self._lines = s.driver.operations.read_logs("job-7", wanted)
        self.found: list[LogLines] = []
        self.error: errors.RendezvousError | None = None
        self.ended = False
        self.may_take = asyncio.Event()
        self.may_take.set()
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            async for lines in self._lines:
                self.found.append(lines)
                await self.may_take.wait()
            self.ended = True
        except errors.RendezvousError as error:
            self.error = error
        finally:
            await self._lines.aclose()

    @property
    def text(self) -> bytes:
        return b"".join(lines.data for lines in self.found)

    @property
    def notes(self) -> list[tuple[str, str]]:
        return [(lines.node_id, lines.note) for lines in self.found if lines.note]

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


async def begin(s: Server, **wanted: object) -> Reading:
    reading = Reading(s, LogsWanted(**wanted))  # type: ignore[arg-type]
    await settle()
    return reading


def asked(stream: Stream) -> ReadLog:
    """Return the requests that a node receives, and nothing else."""
    (request,) = [told for told in read(stream) if isinstance(told, ReadLog)]
    return request


def stopped(stream: Stream) -> list[StopLog]:
    return [told for told in read(stream) if isinstance(told, StopLog)]


def readers(s: Server) -> tuple[int, int]:
    return s.driver.logs.statistics


async def answer(s: Server, stream: Stream, request: ReadLog, **piece: Any) -> None:
    """Answer once as a node; data is of LOCAL_RANK 1, and goes on where it ends."""
    made = LogPiece(request.request, **{"round": request.round or 0, **piece})
    if made.data:
        offset = sum(at.offset for at in request.positions)
        made = replace(
            made,
            **{"local_rank": 1, "rank": 9, "offset": offset, **piece},
            positions=(LogPosition("", made.round, 1, False, offset + len(made.data)),),
        )
    s.report(stream, made)
    await settle()


async def say(
    s: Server, stream: Stream, request: ReadLog, *data: bytes, last: bool = False
) -> ReadLog:
    """Answer as a node does: first with the round, then with pieces; return the next request."""
    at_start = (LogPosition("", request.round or 0, 1, False, 0),)
    if not request.positions:
        await answer(s, stream, request, positions=at_start)
        request = asked(stream)
    for text in data:
        await answer(s, stream, request, data=text)
        request = asked(stream)
    if last:
        await answer(s, stream, request, last=True)
    return request


async def end_round(s: Server, *streams: Stream) -> None:
    """A worker fails, and all nodes of the round join again."""
    failed = report(message="boom", pid=5)
    for stream in streams[:1]:
        fail = Fail(stream.node_id, stream.incarnation, "run-1", 0, (failed,))
        await s.hear(stream, fail)
    for stream in streams:
        offer = Offer("10.0.0.1", 2, machine="m1", store_port=4711)
        again = Join(
            stream.node_id, stream.incarnation, "run-1", Settings(2, 2, 3), offer, left_round=0
        )
        await s.hear(stream, again)
    await settle()


async def pair(s: Server) -> tuple[Stream, Stream]:
    """Two nodes of two workers each, in round 0, that may restart."""
    streams = await s.connect("n1"), await s.connect("n2")
    for stream in streams:
        offer = Offer("10.0.0.1", 2, machine="m1", store_port=4711)
        join = Join(stream.node_id, stream.incarnation, "", Settings(2, 2, 3), offer)
        await s.hear(stream, join)
    await settle()
    assert [type(read(stream)[-1]) for stream in streams] == [Assignment, Assignment]
    return streams


# ------------------------------------------------------------------ who is asked


@pytest.mark.quick
async def test_the_node_that_has_a_rank_is_asked_and_no_other() -> None:
    async with server() as s:
        n1, n2 = await pair(s)
        reading = await begin(s, rank=3, stdout=False, tail_lines=5)
        request = asked(n2)
        assert not read(n1)
        assert (request.round, request.rank, request.tail_lines) == (0, 3, 5)
        assert (request.stdout, request.stderr, request.follow) == (False, True, False)
        await say(s, n2, request, b"one\n", b"two\n", last=True)
        assert reading.ended
        assert reading.text == b"one\ntwo\n"
        assert [(x.node_id, x.rank, x.run) for x in reading.found if x.data] == [
            ("n2", 9, "run-1"),
            ("n2", 9, "run-1"),
        ]
        assert readers(s) == (0, 0)


async def test_all_nodes_are_asked_for_a_round_of_which_only_they_know() -> None:
    async with server() as s:
        n1, n2 = await pair(s)
        await end_round(s, n1, n2)
        assert isinstance(read(n1)[-1], Assignment)
        read(n2)
        reading = await begin(s, rank=3, round=0)
        requests = asked(n1), asked(n2)
        assert [request.rank for request in requests] == [3, 3]
        await answer(s, n1, requests[0], last=True)
        await say(s, n2, requests[1], b"x", last=True)
        assert (reading.ended, reading.text) == (True, b"x")


async def test_what_nobody_has_is_an_error_that_says_where_else_to_look() -> None:
    async with server() as s:
        n1, n2 = await pair(s)
        await end_round(s, n1, n2)
        for stream in (n1, n2):
            read(stream)
        reading = await begin(s, round=0)
        for stream in (n1, n2):
            await answer(s, stream, asked(stream), last=True)
        assert isinstance(reading.error, errors.InvalidRequestError)
        assert "job-7-run-1/NODE_ID/round_0 in its --log-dir" in str(reading.error)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("wanted", "error", "text"),
    [
        (LogsWanted(rank=4), errors.InvalidRequestError, "its RANKs are 0 to 3"),
        (LogsWanted(round=1), errors.InvalidRequestError, "has had no round 1; its last is 0"),
        (LogsWanted(run="run-0"), errors.RendezvousClosedError, "run run-0 of job-7 has ended"),
    ],
)
async def test_what_can_not_be_is_refused(
    wanted: LogsWanted, error: type[errors.RendezvousError], text: str
) -> None:
    async with server() as s:
        await pair(s)
        reading = Reading(s, wanted)
        await settle()
        assert isinstance(reading.error, error)
        assert text in str(reading.error)
        assert readers(s) == (0, 0)


async def test_a_job_without_a_round_has_nothing_but_can_be_followed() -> None:
    async with server() as s:
        n1, n2 = await s.connect("n1"), await s.connect("n2")
        assert isinstance((await begin(s)).error, errors.UnknownJobError)
        await s.join(n1)
        assert "has had no round yet" in str((await begin(s)).error)
        reading = await begin(s, follow=True, rank=2)
        assert [text.partition(";")[0] for _, text in reading.notes] == [
            "job-7 has had no round yet"
        ]
        await s.join(n2)
        line, request = [x for x in read(n2) if isinstance(x, Assignment | ReadLog)]
        # In this order, so that the node knows the round that is requested.
        assert isinstance(line, Assignment)
        assert isinstance(request, ReadLog)
        assert (request.round, request.rank, request.follow) == (0, 2, True)
        await say(s, n2, request, b"x")
        assert reading.text == b"x"
        await reading.stop()


async def test_a_node_is_told_which_runs_are_this_jobs() -> None:
    """So that a job of the same name, of another owner, can not read the output of this one."""
    async with server() as s:
        n1, n2 = await pair(s)
        state = s.driver.jobs.peek("job-7")
        assert state is not None
        ended = Ended(Result.STOPPED, "", 0)
        earlier = tuple(EndedRun(f"run-{letter}", ended) for letter in "ab")
        state = replace(state, membership=replace(state.membership, earlier=earlier))
        reader = s.driver.logs.open(state, LogsWanted())
        await settle()
        assert [asked(stream).runs for stream in (n1, n2)] == [("run-1", "run-b", "run-a")] * 2
        reader.close()


# ------------------------------------------------------------------ following


async def test_following_asks_whoever_gets_the_rank_and_ends_with_the_run() -> None:
    async with server() as s:
        n1, n2 = await pair(s)
        reading = await begin(s, follow=True)
        first = await say(s, n1, asked(n1), b"a")
        second = await say(s, n2, asked(n2), b"b")
        await end_round(s, n1, n2)
        # They read the next round without being asked again.
        assert not [x for stream in (n1, n2) for x in read(stream) if isinstance(x, ReadLog)]
        for stream in (n1, n2):
            succeed = Succeed(stream.node_id, stream.incarnation, "run-1", 1)
            await s.hear(stream, succeed)
        await settle()
        assert not reading.ended
        for stream, request in ((n1, first), (n2, second)):
            await answer(s, stream, request, last=True)
        assert (reading.ended, reading.text, reading.notes) == (True, b"ab", [])


async def test_who_follows_a_rank_that_is_not_there_hears_so_once_a_round() -> None:
    """It was silent forever."""
    async with server() as s:
        n1, n2 = await pair(s)
        reading = await begin(s, follow=True, rank=4)
        when = "; its output is shown once it exists"
        absent = "job-7 has no RANK 4 in round {}; its RANKs are 0 to 3" + when
        assert reading.notes == [("", absent.format(0))]
        await end_round(s, n1, n2)
        assert reading.notes == [("", absent.format(number)) for number in (0, 1)]
        later = await begin(s, follow=True, round=7)
        assert [text for _, text in later.notes] == [
            f"job-7 has had no round 7 yet; its last is 1{when}"
        ]
        assert (await begin(s, follow=True, rank=3)).notes == []
        await reading.stop()
        await later.stop()


async def test_a_node_that_is_back_goes_on_where_it_was() -> None:
    async with server() as s:
        n1, _ = await pair(s)
        reading = await begin(s, follow=True, rank=0, tail_lines=3)
        first = asked(n1)
        assert (first.tail_lines, first.wait_ms) == (3, 0)
        request = await say(s, n1, first, b"12345")
        s.driver.connections.detach(n1)
        again = await s.connect("n1", instance="one")
        second = asked(again)
        assert (second.tail_lines, second.wait_ms) == (0, WAIT_MS)
        assert second.positions == (LogPosition("", 0, 1, False, 5),)
        # Messages on the old stream are ignored.
        await answer(s, n1, request, data=b"late")
        await say(s, again, second, b"6")
        assert (reading.text, reading.notes) == (b"123456", [])
        await reading.stop()


async def test_a_node_that_is_back_goes_on_in_the_round_that_was_being_read() -> None:
    """Positions in files of the round before would skip what is at them."""
    async with server() as s:
        n1, _ = await pair(s)
        reading = await begin(s, follow=True, rank=0)
        request = await say(s, n1, asked(n1), b"12345")
        at_start = LogPosition("", 1, 1, False, 0)
        await answer(s, n1, request, round=1, positions=(at_start,))
        await say(s, n1, asked(n1), b"67")
        s.driver.connections.detach(n1)
        second = asked(await s.connect("n1", instance="one"))
        assert (second.round, second.positions) == (1, (replace(at_start, offset=2),))
        await reading.stop()


async def test_that_a_round_is_not_there_yet_is_not_said_once_it_is() -> None:
    async with server() as s:
        n1, n2 = await pair(s)
        state = await s.driver.operations.state("job-7")
        reader = s.driver.logs.open(state, LogsWanted(follow=True, round=1))
        await end_round(s, n1, n2)
        taking = asyncio.create_task(reader.next())
        await settle()
        assert not taking.done()
        taking.cancel()
        reader.close()


async def test_a_stream_that_replaces_another_is_asked_anew() -> None:
    async with server() as s:
        n1, _ = await pair(s)
        reading = await begin(s, follow=True, rank=0)
        await say(s, n1, asked(n1), b"1")
        newer = await s.connect("n1", instance="one")
        s.driver.connections.detach(n1)
        await say(s, newer, asked(newer), b"2")
        assert reading.text == b"12"
        await reading.stop()


async def test_a_reader_whose_stream_was_cut_goes_on_where_it_was() -> None:
    async with server() as s:
        n1, n2 = await pair(s)
        positions = (LogPosition("n1", 0, 0, True, 77), LogPosition("n1", 0, 1, False, 88))
        reading = await begin(s, follow=True, run="run-1", tail_bytes=9, positions=positions)
        first = asked(n1)
        assert {replace(at, node_id="n1") for at in first.positions} == set(positions)
        assert first.tail_bytes == 0
        # Nothing of the other node was read.
        second = asked(n2)
        assert (second.tail_bytes, second.positions) == (9, ())
        await reading.stop()


async def test_a_node_that_has_left_and_come_back_is_asked_for_its_new_round() -> None:
    async with server() as s:
        n1, n2 = await pair(s)
        reading = await begin(s, follow=True)
        await say(s, n1, asked(n1), b"a")
        await say(s, n2, asked(n2), b"b", last=True)
        leave = Leave("n2", n2.incarnation, "run-1", LeaveCause.SIGNAL, "SIGTERM", left_round=0)
        await s.hear(n2, leave)
        s.driver.connections.detach(n2)
        await end_round(s, n1)
        again = await s.connect("n2", instance="two")
        await s.hear(
            again,
            Join(
                "n2",
                again.incarnation,
                "",
                Settings(2, 2, 3),
                Offer("10.0.0.1", 2, machine="m1", store_port=4711),
            ),
        )
        await settle()
        request = asked(again)
        assert request.round == 1
        await say(s, again, request, b"c")
        assert reading.text == b"abc"
        await reading.stop()


# ------------------------------------------------------------------ nodes that do not answer


async def test_a_server_that_has_just_started_waits_for_the_nodes_of_an_ended_job() -> None:
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock) as s:
        for stream in await pair(s):
            succeed = Succeed(stream.node_id, stream.incarnation, "run-1", 0)
            await s.hear(stream, succeed)
    async with server(store, clock) as s:
        reading = await begin(s, follow=True, rank=0)
        n1 = await s.connect("n1")
        await say(s, n1, asked(n1), b"1", last=True)
        assert (reading.ended, reading.text, reading.notes) == (True, b"1", [])
        reading = await begin(s, follow=True, rank=3)
        await s.clock.advance(ANSWER_MS)
        assert reading.ended
        ((node_id, note),) = reading.notes
        assert (node_id, "not connected" in note) == ("n2", True)


async def test_of_an_ended_job_whose_nodes_have_gone_it_says_where_the_files_are() -> None:
    async with server() as s:
        s.driver.logs.expects_until_ms = 0
        n1, n2 = await pair(s)
        for stream in (n1, n2):
            succeed = Succeed(stream.node_id, stream.incarnation, "run-1", 0)
            await s.hear(stream, succeed)
        s.driver.connections.detach(n1)
        for follow in (False, True):
            reading = await begin(s, follow=follow)
            # The other's agent is still there.
            await say(s, n2, asked(n2), b"b", last=True)
            assert (reading.ended, reading.text) == (True, b"b")
            ((node_id, note),) = reading.notes
            assert node_id == "n1"
            assert "not connected" in note
            assert "job-7-run-1/n1/round_0 in its --log-dir" in note


async def test_a_node_that_says_nothing_is_named_and_not_waited_for() -> None:
    async with server() as s:
        n1, n2 = await pair(s)
        reading = await begin(s)
        request = asked(n1)
        await say(s, n2, asked(n2), b"b", last=True)
        await s.clock.advance(ANSWER_MS)
        assert (reading.ended, reading.text) == (True, b"b")
        ((node_id, note),) = reading.notes
        assert (node_id, "has sent nothing for 10 s" in note) == ("n1", True)
        assert stopped(n1) == [StopLog(request.request)]


async def test_who_follows_hears_of_a_node_that_stays_away_and_of_it_when_it_is_back() -> None:
    async with server() as s:
        n1, _ = await pair(s)
        reading = await begin(s, follow=True, rank=0)
        await say(s, n1, asked(n1), b"1")
        s.driver.connections.detach(n1)
        await s.clock.advance(ANSWER_MS - 1)
        assert not reading.notes
        await s.clock.advance(1)
        assert [node_id for node_id, _ in reading.notes] == ["n1"]
        again = await s.connect("n1", instance="one")
        await say(s, again, asked(again), b"2")
        assert reading.text == b"12"
        await reading.stop()


async def test_who_follows_a_quiet_node_waits() -> None:
    async with server() as s:
        n1, _ = await pair(s)
        reading = await begin(s, follow=True, rank=0)
        request = await say(s, n1, asked(n1))
        await s.clock.advance(WAIT_MS + ANSWER_MS - 1)
        assert not reading.notes
        # It says that there is nothing new, and is asked the same again.
        await answer(s, n1, request, positions=request.positions)
        assert asked(n1) == request
        await s.clock.advance(WAIT_MS + ANSWER_MS)
        assert "has sent nothing for 25 s" in reading.notes[0][1]
        # No output was passed on, but that the round is read.
        assert [lines.round for lines in reading.found if not lines.note] == [0]


async def test_why_a_node_sends_nothing_is_passed_on_and_ends_what_can_not_go_on() -> None:
    async with server() as s:
        n1, n2 = await pair(s)
        reading = await begin(s, follow=True)
        for stream in (n1, n2):
            await answer(s, stream, asked(stream), last=True, error="it goes to the console")
        assert reading.ended
        assert reading.notes == [(x, "it goes to the console") for x in ("n1", "n2")]


# ------------------------------------------------------------------ bounds


async def test_a_slow_reader_is_sent_no_more_than_one_piece_of_each_node() -> None:
    async with server() as s:
        n1, n2 = await pair(s)
        state = await s.driver.operations.state("job-7")
        reader = s.driver.logs.open(state, LogsWanted(follow=True))
        await settle()
        for stream in (n1, n2):
            await answer(s, stream, asked(stream), data=b"x")
            assert not read(stream)
        for n in range(2):
            assert await reader.next() is not None
            await settle()
            assert sum(bool(read(stream)) for stream in (n1, n2)) == 1, n
        reader.close()


@pytest.mark.quick
async def test_a_node_that_sends_more_than_it_may_is_not_listened_to() -> None:
    async with server() as s:
        n1, _ = await pair(s)
        reading = await begin(s, follow=True, rank=0)
        request = await say(s, n1, asked(n1), b"fair")
        assert request.max_bytes == LOG_PIECE_BYTES
        await answer(s, n1, request, data=b"x" * (LOG_PIECE_BYTES + 1))
        assert stopped(n1) == [StopLog(request.request)]
        assert reading.text == b"fair"
        assert "more than was requested" in reading.notes[0][1]
        assert reading.ended


@pytest.mark.quick
@pytest.mark.parametrize(("buffer", "piece"), [(20_000, 10_000), (100, 4_096)])
async def test_many_nodes_share_what_one_reader_may_have_on_its_way(
    monkeypatch: pytest.MonkeyPatch, buffer: int, piece: int
) -> None:
    monkeypatch.setattr("rdzv.server.diagnosis.worker_logs.BUFFER_BYTES", buffer)
    async with server() as s:
        n1, n2 = await pair(s)
        reading = await begin(s)
        assert [asked(stream).max_bytes for stream in (n1, n2)] == [piece, piece]
        await reading.stop()


@pytest.mark.quick
async def test_readers_are_bounded_and_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rdzv.server.diagnosis.worker_logs.READERS", 1)
    async with server() as s:
        n1, n2 = await pair(s)
        reading = await begin(s, follow=True)
        requests = asked(n1).request, asked(n2).request
        assert readers(s) == (1, 2)
        second = await begin(s)
        assert isinstance(second.error, errors.LimitExceededError)
        assert "which is the limit" in str(second.error)
        await reading.stop()
        assert readers(s) == (0, 0)
        assert [stopped(stream) for stream in (n1, n2)] == [[StopLog(x)] for x in requests]


@pytest.mark.quick
async def test_readers_end_when_the_server_does() -> None:
    async with server() as s:
        await pair(s)
        reading = await begin(s, follow=True)
        s.driver.close_streams(errors.RendezvousConnectionError("another leads"))
        await settle()
        assert isinstance(reading.error, errors.RendezvousConnectionError)
        assert readers(s)[0] == 0
        assert isinstance((await begin(s)).error, errors.RendezvousConnectionError)


@pytest.mark.quick
async def test_a_piece_that_nobody_asked_for_is_dropped() -> None:
    async with server() as s:
        n1, n2 = await pair(s)
        reading = await begin(s, rank=0)
        request = asked(n1)
        await answer(s, n2, request, data=b"forged")
        await answer(s, n1, replace(request, request=4_711), data=b"nobody's")
        await say(s, n1, request, b"x", last=True)
        assert reading.text == b"x"


@pytest.mark.quick
def test_of_what_was_read_of_several_rounds_the_latest_counts() -> None:
    def at(round_: int, local_rank: int, offset: int) -> LogPosition:
        return LogPosition("n1", round_, local_rank, False, offset)

    read = [at(2, 0, 20), at(3, 0, 30), at(2, 1, 21), at(3, 1, 31)]
    assert by_node(read) == {
        "n1": (3, (replace(read[1], node_id=""), replace(read[3], node_id="")))
    }
    assert by_node(read[:3]) == {"n1": (3, (replace(read[1], node_id=""),))}
