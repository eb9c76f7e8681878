"""The assignment of this node's GPUs to jobs: each GPU belongs to at most one job.

A job holds a place and GPUs until its last process is gone. Others wait for them in order, but a
waiting job does not delay jobs for which there are enough free GPUs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable

from rdzv.core.fleet.node_resources import NodeResources
from rdzv.errors import InvalidRequestError

log = logging.getLogger("rdzv.agent")


class GpuLedger:
    """One node's places and GPUs, the jobs that hold them, and those that wait for them."""

    def __init__(self, capacity: int, uuids: tuple[str, ...]) -> None:
        self.capacity = capacity
        self._uuids = uuids
        self._held: dict[Hashable, tuple[str, ...]] = {}
        self._waiting: dict[Hashable, tuple[int, asyncio.Future[tuple[str, ...]]]] = {}
        """The number of GPUs each job is waiting for, and the future that receives them."""

    @classmethod
    def of(cls, resources: NodeResources) -> GpuLedger:
        return cls(resources.capacity, tuple(gpu.uuid for gpu in resources.gpus))

    @property
    def waiting(self) -> tuple[Hashable, ...]:
        return tuple(self._waiting)

    async def wait(self, key: Hashable, count: int, name: str) -> tuple[str, ...]:
        """Wait for a place and `count` free GPUs; log a message if job `name` has to wait."""
        self.check(count)
        granted: asyncio.Future[tuple[str, ...]] = asyncio.get_running_loop().create_future()
        self._waiting[key] = count, granted
        try:
            self.grant()
            if not granted.done():
                log.info("%s: waiting for %s", name, self.why_not(count))
            return await granted
        finally:
            del self._waiting[key]

    def grant(self) -> None:
        for key, (count, granted) in self._waiting.items():
            if not granted.done() and (gpus := self.take(key, count)) is not None:
                granted.set_result(gpus)

    def check(self, count: int) -> None:
        """Refuse a number of GPUs that this node can never provide."""
        if count > len(self._uuids):
            raise InvalidRequestError(
                f"{count} GPUs are requested, but this node has {len(self._uuids)}; ask "
                "for fewer (--gpus-per-node, --nproc-per-node), or for nodes that have "
                "them"
            )

    def take(self, key: Hashable, count: int) -> tuple[str, ...] | None:
        """Give a job `count` GPUs, lowest first; return None if it has to wait."""
        free = self.free
        if len(self._held) >= self.capacity or count > len(free):
            return None
        self._held[key] = free[:count]
        return self._held[key]

    def take_over(self, key: Hashable, gpus: tuple[str, ...]) -> None:
        """Record, without a check, a job that already has a place and these GPUs."""
        self._held[key] = gpus

    def release(self, key: Hashable) -> None:
        """Free a job's place and GPUs, if it has any, for those that wait."""
        self._held.pop(key, None)
        self.grant()

    def held_by(self, key: Hashable) -> tuple[str, ...]:
        return self._held.get(key, ())

    @property
    def free(self) -> tuple[str, ...]:
        held = {uuid for uuids in self._held.values() for uuid in uuids}
        return tuple(uuid for uuid in self._uuids if uuid not in held)

    def why_not(self, count: int) -> str:
        if len(self._held) >= self.capacity:
            return f"a job to end: {len(self._held)} of {self.capacity} places taken"
        return f"GPUs: {count} requested, {len(self.free)} of {len(self._uuids)} free"
