"""One node's open stream, as the driver sees it: a bounded outbox and an end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rdzv.core.model import UNKNOWN_INSTANCE, Instance
from rdzv.errors import LimitExceededError, RendezvousError
from rdzv.server.messages import Closed, Joined, Line, Refused, RoundOver, Told, Waiting
from rdzv.server.security.callers import ANYBODY, Caller


class Stream:
    """Takes messages without ever blocking; a reader that is too slow loses its stream.

    Nothing else suffers from a slow reader: the node reconnects, and hears what it is owed.
    """

    def __init__(
        self,
        number: int,
        node_id: str,
        incarnation: int,
        limit: int,
        on_send: Callable[[], None] = lambda: None,
        caller: Caller = ANYBODY,
        instance: Instance = UNKNOWN_INSTANCE,
    ) -> None:
        self.number = number
        self.node_id = node_id
        self.incarnation = incarnation
        self.instance = instance
        self.caller = caller
        """Who has opened it, and answers for what the node says."""
        self._on_send = on_send
        self.greeted = False
        """Whether the node has said all that it believes."""
        self._outbox: asyncio.Queue[Told] = asyncio.Queue(limit)
        self._last: dict[str, Told] = {}
        self._ended: asyncio.Future[RendezvousError | None] = (
            asyncio.get_running_loop().create_future()
        )

    @property
    def open(self) -> bool:
        """Whether anything that is sent may still arrive."""
        return not self._ended.done()

    def send(self, told: Told, *, again: bool = False) -> None:
        """Queue a message; after the stream's end, do nothing.

        What only repeats the last message about a job is left out, unless it is said `again`.
        """
        if not self.open or (self._repeats(told) and not again):
            return
        try:
            self._outbox.put_nowait(told)
            self._on_send()
        except asyncio.QueueFull:
            self.close(
                LimitExceededError(
                    f"{self.node_id} reads its stream too slowly: {self._outbox.maxsize} messages "
                    "wait; the stream is closed, and a new one begins with the present state"
                )
            )

    def _repeats(self, told: Told) -> bool:
        """Whether this says how things are with a job, just as the last such message did."""
        if isinstance(told, Joined | Closed | Refused):
            # What was said of a round before its node knew the run was not taken in.
            self.forget(told.rdzv_id)
        if not isinstance(told, Line | RoundOver | Waiting):
            return False
        repeated = self._last.get(told.rdzv_id) == told
        self._last[told.rdzv_id] = told
        return repeated

    def forget(self, rdzv_id: str) -> None:
        """Forget what was said last about a job that the node is in no more."""
        self._last.pop(rdzv_id, None)

    async def next(self) -> Told:
        """Wait for the next message to write."""
        return await self._outbox.get()

    def close(self, error: RendezvousError | None = None) -> None:
        """End the stream, with the error that the node is to hear; only the first end counts."""
        if self.open:
            self._ended.set_result(error)

    async def ended(self) -> RendezvousError | None:
        """Wait for the stream's end."""
        return await asyncio.shield(self._ended)
