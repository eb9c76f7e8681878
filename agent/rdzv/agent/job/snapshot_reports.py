"""Reports this node's snapshots of a job to the server promptly, but at a limited rate.

Each report is complete, so only the latest one matters. The more nodes a job has, the lower the
rate, because they all save at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rdzv.agent.core import commands

EVERY_LEAST_S = 0.1
EVERY_PER_NODE_S = 0.001


class SnapshotReports:
    """Sends snapshot reports for one job on this node."""

    def __init__(self, send: Callable[[commands.SaySnapshots], None]) -> None:
        self._send = send
        self._next: commands.SaySnapshots | None = None
        """The report that is waiting to be sent, if any."""
        self._timer: asyncio.TimerHandle | None = None
        """Runs until the next report may be sent."""

    def report(self, say: commands.SaySnapshots, nodes: int) -> None:
        """Send a report at once, or as soon as the rate for a job of `nodes` nodes allows."""
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
        self._next = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
