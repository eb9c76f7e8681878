"""Frames of many streams in one call: as many at a time as are ready, and none waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rdzv.transport.batches import BATCH_BYTES, Batches


class Writer:
    """Notes each batch, and writes it when it may."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.began = asyncio.Event()
        self.may = asyncio.Event()
        self.may.set()

    async def write(self, frames: list[str]) -> None:
        self.batches.append(frames)
        self.began.set()
        await self.may.wait()


@asynccontextmanager
async def writing(batches: Batches[str], beat_s: float | None = None) -> AsyncIterator[Writer]:
    writer = Writer()
    task = asyncio.create_task(batches.write_all(writer.write, beat_s))
    try:
        yield writer
    finally:
        task.cancel()


async def test_what_is_ready_goes_together() -> None:
    batches = Batches[str]()
    async with asyncio.timeout(60), writing(batches) as writer:
        await asyncio.gather(*(batches.put(name, 1) for name in "abc"))
        assert writer.batches == [["a", "b", "c"]]


async def test_who_adds_a_frame_waits_until_it_is_written() -> None:
    batches = Batches[str]()
    async with asyncio.timeout(60), writing(batches) as writer:
        writer.may.clear()
        first = asyncio.create_task(batches.put("a", 1))
        await writer.began.wait()
        second = asyncio.create_task(batches.put("b", 1))
        await asyncio.sleep(0)
        batches.put_now("end")
        assert (await asyncio.wait({first, second}, timeout=0.01))[0] == set()
        writer.may.set()
        await asyncio.gather(first, second)
        assert writer.batches == [["a"], ["b", "end"]]


async def test_a_stream_that_was_given_up_stops_no_other() -> None:
    batches = Batches[str]()
    given_up = asyncio.create_task(batches.put("a", 1))
    await asyncio.sleep(0)
    given_up.cancel()
    async with asyncio.timeout(60), writing(batches):
        await batches.put("b", 1)


async def test_a_batch_has_a_bound_and_a_large_frame_goes_alone() -> None:
    batches = Batches[str]()
    sizes = {"a": 10, "b": BATCH_BYTES * 2, "c": 10, "d": BATCH_BYTES - 300, "e": 10, "f": 400}
    async with asyncio.timeout(60), writing(batches) as writer:
        await asyncio.gather(*(batches.put(name, size) for name, size in sizes.items()))
        assert writer.batches == [["a"], ["b"], ["c", "d", "e"], ["f"]]


async def test_a_beat_is_written_where_nothing_else_is() -> None:
    batches = Batches[str]()
    async with asyncio.timeout(60), writing(batches, beat_s=0.01) as writer:
        await writer.began.wait()
        await batches.put("a", 1)
        assert writer.batches[0] == []
        assert writer.batches[-1] == ["a"]
