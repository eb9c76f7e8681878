"""Reports to the server what this node holds of a job's state: at once, but not too often.

Each report has everything, so only the latest counts. A job of many nodes reports less often, since
all of them save at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rdzv.agent.core import commands

EVERY_LEAST_S = 0.1
EVERY_PER_NODE_S = 0.001


class SnapshotReports:
    """The reports of one job on this node."""

    def __init__(self, send: Callable[[commands.SaySnapshots], None]) -> None:
        self._send = send
        self._next: commands.SaySnapshots | None = None
        """The latest report, which waits to be sent."""
        self._timer: asyncio.TimerHandle | None = None
        """Runs while nothing more may be sent."""

    def report(self, say: commands.SaySnapshots, nodes: int) -> None:
        """Send a report of a job on this many nodes, at once or as soon as the next may follow."""
        self._next = say
        if self._timer is None:
            self._send_next(max(EVERY_LEAST_S, nodes * EVERY_PER_NODE_S))

    def _send_next(self, every_s: float) -> None:
        self._timer = None
        if self._next is not None:
            say, self._next = self._next, None
            self._send(say)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(every_s, self._send_next, every_s)

    def close(self) -> None:
        """Send nothing more."""
        self._next = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
