"""Messages waiting to be written to one node, several at a time.

gRPC's work per message does not depend on the length, and is most of a node's cost to a server. So
messages that are not urgent wait a moment, to be written together with others.
"""

from __future__ import annotations

import asyncio

from rdzv.server.messages import Announcement, Joined, Lease, Servers, Waiting, Welcome

LINGER_S = 0.05
"""The longest time that a message waits for others."""

AT_ONCE = 64
"""The maximum number of messages written at once."""

_PATIENT = (Welcome, Servers, Joined, Lease, Waiting)
"""Messages that may wait, because a node takes no urgent action on them."""


class Outbox:
    """A bounded queue with one reader. Messages keep their order."""

    def __init__(self, limit: int, *, lingers: bool) -> None:
        """Hold at most `limit` messages. Without `lingers`, each is due at once."""
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
        """Close the outbox: `take` returns no more messages and no longer waits."""
        self._closed = True
        self._due.set()

    async def take(self) -> list[Announcement]:
        """Wait until a message is due; return the waiting messages as `take_now` does.

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
