"""Messages waiting to be written to one node, several at a time.

gRPC's work for a message does not depend on its length, and is most of what a node costs a server.
So messages that are not urgent wait a moment for others.
"""

from __future__ import annotations

import asyncio

from rdzv.server.messages import Announcement, Joined, Lease, Servers, Waiting, Welcome

LINGER_S = 0.05
"""The longest that a message waits for others."""

AT_ONCE = 64
"""The most messages written at once."""

_PATIENT = (Welcome, Servers, Joined, Lease, Waiting)
"""Messages that may wait: a node does not act on them until others tell it to."""


class Outbox:
    """A bounded queue with one reader. Messages keep their order."""

    def __init__(self, limit: int, *, lingers: bool) -> None:
        """With `lingers`, messages may wait for others; without it, each is due at once."""
        self.limit = limit
        self._lingers = lingers
        self._waiting: list[Announcement] = []
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def put(self, told: Announcement) -> bool:
        """Add a message; return False if the queue is full."""
        if len(self._waiting) >= self.limit:
            return False
        self._waiting.append(told)
        if not self._lingers or not isinstance(told, _PATIENT):
            self._due.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._due.set)
        return True

    def close(self) -> None:
        """Write no more: the reader gets no more messages and does not wait for any."""
        self._closed = True
        self._due.set()

    async def take(self) -> list[Announcement]:
        """Wait until a message is due, and take all that wait; return none once closed."""
        await self._due.wait()
        return [] if self._closed else self.take_now()

    def take_now(self) -> list[Announcement]:
        """Take all waiting messages, due or not."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        told, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
        if not self._waiting:
            self._due.clear()
        return told
