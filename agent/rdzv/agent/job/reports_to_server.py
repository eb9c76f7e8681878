"""This node's offer for a job's rounds, and the reports on its snapshots.

Snapshots are reported promptly, but at a limited rate. Each report is complete, so only the latest
one matters. The more nodes a job has, the lower the rate, because they all save at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rdzv.agent.launch.launch import Launch, has_torch, reachable_host_name
from rdzv.core.model import Offer
from rdzv.messages import SnapshotsHeld
from rdzv.transport.addresses import is_loopback, machine_id

EVERY_LEAST_S = 0.1
EVERY_PER_NODE_S = 0.001


class SnapshotReports:
    """Sends snapshot reports for one job on this node."""

    def __init__(self, send: Callable[[SnapshotsHeld], None]) -> None:
        self._send = send
        self._next: SnapshotsHeld | None = None
        """The report that is waiting to be sent, if any."""
        self._timer: asyncio.TimerHandle | None = None
        """Runs until the next report may be sent."""

    def report(self, say: SnapshotsHeld, nodes: int) -> None:
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


# ---------------------------------------------------------------------- the offer


async def make_offer(launch: Launch) -> Offer:
    """Return this node's offer without a port; without --local-addr, it has no address either."""
    address = launch.local_addr
    return Offer(
        address=address,
        local_world_size=launch.job.local_world_size,
        role=launch.role,
        topology=launch.topology,
        host_name=await reachable_host_name() if is_loopback(address) else "",
        machine=machine_id(),
        can_host_store=await has_torch(launch.python, launch.environ, launch.account),
        shutdown_timeout_ms=max(launch.job.shutdown_timeout_ms, launch.job.keep_timeout_ms),
    )


def on_loopback_only(offer: Offer) -> bool:
    """Return whether the offer's store can be reached from this machine only."""
    return is_loopback(offer.address) and not offer.host_name
