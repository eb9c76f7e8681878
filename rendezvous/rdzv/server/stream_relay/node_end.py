"""Queues the server's messages to a node behind a relay until the node reads them."""

from __future__ import annotations

import asyncio
from collections import deque

from rdzv.errors import LimitExceededError, RendezvousError

NODE_BYTES = 8 << 20
"""The maximum number of bytes queued for one node."""


class NodeEnd:
    """A bounded queue of messages with a single reader, the node's stream."""

    def __init__(self, limit: int) -> None:
        """Create a queue that holds at most `limit` messages."""
        self._limit = limit
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self.ended = False
        """Whether no more messages will follow the queued ones."""
        self.error: RendezvousError | None = None
        """The reason why the stream ended, or None if it ended normally."""

    def put(self, message: bytes) -> None:
        """Queue a message for the node.

        Raises:
            LimitExceededError: the queue is full, because the node reads too slowly.

        """
        full = self._bytes + len(message) > NODE_BYTES and self._waiting
        if full or len(self._waiting) >= self._limit:
            raise LimitExceededError(
                f"the node reads its stream too slowly: {len(self._waiting)} messages wait at the "
                "relay; the stream is closed, and a new one begins with the present state"
            )
        self._waiting.append(message)
        self._bytes += len(message)
        self._changed.set()

    def end(self, error: RendezvousError | None) -> None:
        """End the stream once the node has read the queued messages; only the first call counts."""
        if not self.ended:
            self.ended, self.error = True, error
        self._changed.set()

    async def take(self) -> bytes | None:
        """Wait for the next message and return it, or return None at the end of the stream."""
        while not self._waiting:
            if self.ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        message = self._waiting.popleft()
        self._bytes -= len(message)
        return message
