"""Batches the frames of many streams that share one gRPC call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

BATCH_BYTES = 256 * 1024
"""The maximum size of a batch. A larger frame is written on its own."""

FRAME_BYTES = 64
"""The maximum overhead in bytes that a frame adds to its message."""

F = TypeVar("F")


class Batches(Generic[F]):
    """Frames waiting to be written, in order.

    A stream waits for each of its frames to be written before adding the next, so no stream can
    fill up the call that it shares with others.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[F, int, asyncio.Future[None] | None]] = deque()
        self._ready = asyncio.Event()

    def put_now(self, frame: F, size: int = 0) -> None:
        """Add a frame without waiting. Only for frames that a stream sends once."""
        self._waiting.append((frame, size, None))
        self._ready.set()

    async def put(self, frame: F, size: int) -> None:
        """Add a frame of `size` bytes and wait until it is written."""
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((frame, size, written))
        self._ready.set()
        await written

    async def write_all(
        self, write: Callable[[list[F]], Awaitable[None]], beat_s: float | None = None
    ) -> None:
        """Write batches until cancelled or until `write` fails.

        With `beat_s`, write an empty batch whenever nothing has been ready for that time.
        """
        while True:
            try:
                async with asyncio.timeout(beat_s):
                    await self._ready.wait()
            except TimeoutError:
                pass
            frames, done = self._take()
            await write(frames)
            for written in done:
                if not written.done():
                    written.set_result(None)

    def _take(self) -> tuple[list[F], list[asyncio.Future[None]]]:
        frames: list[F] = []
        done: list[asyncio.Future[None]] = []
        filled = 0
        while self._waiting:
            _, size, _ = self._waiting[0]
            if frames and filled + size > BATCH_BYTES:
                break
            frame, _, written = self._waiting.popleft()
            frames.append(frame)
            filled += size + FRAME_BYTES
            if written is not None:
                done.append(written)
        if not self._waiting:
            self._ready.clear()
        return frames, done
