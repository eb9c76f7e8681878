"""Queues messages to one node, so that several can be written at once.

gRPC's work per message does not depend on its length, and makes up most of a node's cost to a
server. Messages that are not urgent therefore wait briefly, to be written together with others.
"""

from __future__ import annotations

import asyncio

from rdzv.messages import Announcement, Joined, Lease, Servers, Waiting, Welcome

LINGER_S = 0.05
"""The maximum time for which a message waits for others."""

AT_ONCE = 64
"""The maximum number of messages written at once."""

_PATIENT = (Welcome, Servers, Joined, Lease, Waiting)
"""Messages that may wait, because a node does not act on them urgently."""


class Outbox:
    """A bounded queue with a single reader. Messages keep their order."""

    def __init__(self, limit: int, *, lingers: bool) -> None:
        """Hold at most `limit` messages. Without `lingers`, every message is due at once."""
        self.limit = limit
        self._lingers = lingers
        self._waiting: list[Announcement] = []
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def put(self, told: Announcement) -> bool:
        """Add a message, or return False if the queue is full."""
        if len(self._waiting) >= self.limit:
            return False
        self._waiting.append(told)
        if not self._lingers or not isinstance(told, _PATIENT):
            self._due.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._due.set)
        return True

    def close(self) -> None:
        """Close the outbox: `take` no longer waits, and returns no more messages."""
        self._closed = True
        self._due.set()

    async def take(self) -> list[Announcement]:
        """Wait until a message is due, and return the waiting messages as `take_now` does.

        Returns an empty list once the outbox is closed.
        """
        await self._due.wait()
        return [] if self._closed else self.take_now()

    def take_now(self) -> list[Announcement]:
        """Remove and return up to `AT_ONCE` waiting messages, due or not, oldest first."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        told, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
        if not self._waiting:
            self._due.clear()
        return told
