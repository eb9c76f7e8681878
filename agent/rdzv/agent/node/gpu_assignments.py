"""The assignment of this node's GPUs to jobs: each GPU belongs to at most one job.

A job holds a place and GPUs until its last process is gone. Others wait for them in order, but a
waiting job does not delay jobs for which there are enough free GPUs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable
from dataclasses import dataclass, field

from rdzv.core.fleet.node_resources import Resources
from rdzv.errors import InvalidRequestError

log = logging.getLogger("rdzv.agent")

Key = Hashable


@dataclass(slots=True)
class Ledger:
    """One node's GPUs, and the jobs that hold them."""

    capacity: int
    uuids: tuple[str, ...]
    """All of the node's GPUs."""
    _held: dict[Key, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, resources: Resources) -> Ledger:
        """Return the ledger for a node on which nothing is running."""
        return cls(resources.capacity, tuple(gpu.uuid for gpu in resources.gpus))

    def check(self, count: int) -> None:
        """Refuse a number of GPUs that this node can never provide.

        Raises:
            InvalidRequestError: this node does not have that many.
        """
        if count > len(self.uuids):
            raise InvalidRequestError(
                f"{count} GPUs are requested, but this node has {len(self.uuids)}; ask "
                "for fewer (--gpus-per-node, --nproc-per-node), or for nodes that have "
                "them"
            )

    def take(self, key: Key, count: int) -> tuple[str, ...] | None:
        """Give a job `count` GPUs, lowest first; return None if it has to wait."""
        free = self.free
        if len(self._held) >= self.capacity or count > len(free):
            return None
        self._held[key] = free[:count]
        return self._held[key]

    def take_over(self, key: Key, gpus: tuple[str, ...]) -> None:
        """Record, without a check, a job that already has a place and these GPUs."""
        self._held[key] = gpus

    def release(self, key: Key) -> None:
        """Free a job's place and GPUs, if it has any."""
        self._held.pop(key, None)

    def held_by(self, key: Key) -> tuple[str, ...]:
        return self._held.get(key, ())

    @property
    def free(self) -> tuple[str, ...]:
        held = {uuid for uuids in self._held.values() for uuid in uuids}
        return tuple(uuid for uuid in self.uuids if uuid not in held)

    def why_not(self, count: int) -> str:
        """Explain why a job that asks for `count` GPUs has to wait."""
        if len(self._held) >= self.capacity:
            return f"a job to end: {len(self._held)} of {self.capacity} places taken"
        return f"GPUs: {count} requested, {len(self.free)} of {len(self.uuids)} free"


class GpuQueue:
    """The queue of jobs that are waiting for a place or for GPUs from a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: dict[Key, tuple[int, asyncio.Future[tuple[str, ...]]]] = {}
        """The number of GPUs each job is waiting for, and the future that receives them."""

    @property
    def waiting(self) -> tuple[Key, ...]:
        """The jobs that are waiting."""
        return tuple(self._waiting)

    async def take(self, key: Key, count: int, name: str) -> tuple[str, ...]:
        """Wait for a place and `count` free GPUs; log a message if job `name` has to wait.

        Raises:
            InvalidRequestError: this node does not have that many.
        """
        self._ledger.check(count)
        granted: asyncio.Future[tuple[str, ...]] = asyncio.get_running_loop().create_future()
        self._waiting[key] = count, granted
        try:
            self.grant()
            if not granted.done():
                log.info("%s: waiting for %s", name, self._ledger.why_not(count))
            return await granted
        finally:
            del self._waiting[key]

    def grant(self) -> None:
        """Give free places and GPUs to waiting jobs."""
        for key, (count, granted) in self._waiting.items():
            if not granted.done() and (gpus := self._ledger.take(key, count)) is not None:
                granted.set_result(gpus)
