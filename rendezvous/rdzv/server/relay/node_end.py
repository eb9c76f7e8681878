"""Holds what the server has sent to a node behind a relay until the node has read it."""

from __future__ import annotations

import asyncio
from collections import deque

from rdzv.errors import LimitExceededError, RendezvousError

NODE_BYTES = 8 << 20
"""The most bytes that wait for one node."""


class NodeEnd:
    """A bounded queue with one reader: the node's stream, which ends if the node does not read."""

    def __init__(self, limit: int) -> None:
        """Let at most `limit` messages wait."""
        self._limit = limit
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self.ended = False
        """Whether nothing follows the waiting messages."""
        self.error: RendezvousError | None = None
        """Why the stream has ended; None if it ended normally."""

    def put(self, message: bytes) -> None:
        """Add a message for the node.

        Raises:
            LimitExceededError: the node reads too slowly.

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
        """End the stream once the node has read all waiting messages."""
        if not self.ended:
            self.ended, self.error = True, error
        self._changed.set()

    async def take(self) -> bytes | None:
        """Wait for the next message for the node; None at the end."""
        while not self._waiting:
            if self.ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        message = self._waiting.popleft()
        self._bytes -= len(message)
        return message
