"""Messages that wait to be written to a node: in order, several at a time, never for long."""

from __future__ import annotations

import asyncio

from rdzv.messages import Announcement, Heard, Joined, Waiting, Welcome
from rdzv.server.sessions import streams as outbox
from rdzv.server.sessions.streams import StreamOutbox
from tests.support.driven import a_stream

WELCOME = Welcome(1, 1_000, 5_000)
JOINED = Joined("job-7", "run-1", 1)
WAITING = Waiting("job-7", "waiting for 1 more node")
URGENT = Heard(1, 0)


def filled(*told: Announcement, lingers: bool = True, limit: int = 100) -> StreamOutbox:
    made = StreamOutbox(limit, lingers=lingers)
    for one in told:
        assert made.put(one)
    return made


async def taken_at_once(made: StreamOutbox) -> list[Announcement] | None:
    """Return what its reader gets without waiting; None if nothing."""
    reader = asyncio.ensure_future(made.take())
    for _ in range(3):
        await asyncio.sleep(0)
    if reader.done():
        return reader.result()
    reader.cancel()
    return None


async def test_a_message_that_no_node_hurries_for_waits_for_others() -> None:
    made = filled(WELCOME, JOINED, WAITING)
    assert await taken_at_once(made) is None
    made.put(URGENT)
    assert await taken_at_once(made) == [WELCOME, JOINED, WAITING, URGENT]


async def test_it_does_not_wait_for_long() -> None:
    made = filled(WELCOME)
    async with asyncio.timeout(20 * outbox.LINGER_S):
        assert await made.take() == [WELCOME]
        # Nor does a later one.
        made.put(JOINED)
        assert await made.take() == [JOINED]


async def test_for_a_node_that_reads_one_at_a_time_none_waits() -> None:
    assert await taken_at_once(filled(WELCOME, lingers=False)) == [WELCOME]


async def test_many_messages_are_written_in_portions() -> None:
    numbers = [Heard(number, 0) for number in range(outbox.AT_ONCE + 1)]
    made = filled(*numbers)
    assert await taken_at_once(made) == numbers[:-1]
    assert await taken_at_once(made) == numbers[-1:]
    assert await taken_at_once(made) is None


async def test_it_is_bounded() -> None:
    assert not filled(WELCOME, JOINED, limit=2).put(WAITING)


async def test_its_reader_ends_with_it() -> None:
    made = filled(WELCOME, URGENT)
    made.close()
    assert await taken_at_once(made) == []
    waits = StreamOutbox(1, lingers=True)
    reader = asyncio.ensure_future(waits.take())
    await asyncio.sleep(0)
    waits.close()
    assert await reader == []


async def test_a_stream_calls_back_at_its_end_only_within_the_block() -> None:
    """The callback sets a time limit, which must not be set once it is over."""
    called = []
    early, late = map(a_stream, range(2))
    with early.calling_on_end(lambda: called.append("early")):
        early.close()
        await asyncio.sleep(0)
    with late.calling_on_end(lambda: called.append("late")):
        late.close()
    await asyncio.sleep(0)
    assert called == ["early"]
