"""Asks single nodes on the streams that they have opened, and awaits their answers.

A request has a number, and its answer the same one. `read_metrics` is one such request: so
Prometheus reads a node through the server, and no node opens a port.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from rdzv.errors import RendezvousConnectionError
from rdzv.messages import Announcement, LogPiece, NodeMetrics, ReadLog, ReadMetrics
from rdzv.runtime.clock import Clock

METRICS_MS = 5_000
"""How long a node may take to answer a `ReadMetrics`: less than Prometheus waits."""

A = TypeVar("A", LogPiece, NodeMetrics)

Send = Callable[[str, Announcement], bool]


class GoneError(Exception):
    """The node has no stream, or it has ended before the answer."""


class NodeRequests:
    """One server's requests to single nodes, and those that have no answer yet."""

    def __init__(self, clock: Clock, send: Send) -> None:
        self._clock, self._send = clock, send
        self.unanswered: dict[int, tuple[str, type[Any], asyncio.Future[Any]]] = {}
        """The node that owes each answer, and its type, by request."""
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        return next(self._numbers)

    async def ask(
        self, node_id: str, wanted: ReadLog | ReadMetrics, kind: type[A], within_ms: int
    ) -> A:
        """Return a node's answer.

        Raises:
            GoneError: the node is not connected, or no longer.
            TimeoutError: it has not answered in time.

        """
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self.unanswered[wanted.request] = node_id, kind, answer
        try:
            if not self._send(node_id, wanted):
                raise GoneError
            async with self.within(within_ms):
                return await answer
        finally:
            del self.unanswered[wanted.request]

    def take(self, node_id: str, report: LogPiece | NodeMetrics) -> None:
        asked, kind, answer = self.unanswered.get(report.request, (None, object, None))
        if answer is not None and asked == node_id and type(report) is kind and not answer.done():
            answer.set_result(report)

    def note_gone(self, node_id: str) -> None:
        for asked, _, answer in self.unanswered.values():
            if asked == node_id and not answer.done():
                answer.set_exception(GoneError())

    @asynccontextmanager
    async def within(self, timeout_ms: int) -> AsyncGenerator[None]:
        """Raise a TimeoutError from the body once the clock has advanced by `timeout_ms`."""
        async with asyncio.timeout(None) as limit:
            now_ms = self._clock.now_ms()
            call = self._clock.call_at(now_ms + timeout_ms, lambda: limit.reschedule(0))
            try:
                yield
            finally:
                call.cancel()

    async def read_metrics(self, node_id: str) -> bytes:
        """Return the metrics of a node's rdzv-agent, as Prometheus reads them.

        Raises:
            RendezvousConnectionError: it is not connected, or does not answer.

        """
        try:
            wanted = ReadMetrics(self.next_number())
            return (await self.ask(node_id, wanted, NodeMetrics, METRICS_MS)).page
        except GoneError:
            error = f"the agent of {node_id} is not connected"
        except TimeoutError:
            error = f"the agent of {node_id} has not answered within {METRICS_MS / 1000:g} s"
        raise RendezvousConnectionError(error)
