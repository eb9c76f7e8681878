"""Which job has which GPUs of this node: no GPU is given twice.

A job is entered from when the server has placed it here until its last process is gone. One that
finds its GPUs still held waits; whoever waits first is served first, but does not hold up those
whose GPUs are free.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from rdzv.core.placement import Resources
from rdzv.errors import InvalidRequestError

Key = Hashable


@dataclass(slots=True)
class Ledger:
    """The GPUs of one node, and the jobs that have them."""

    capacity: int
    uuids: tuple[str, ...]
    """All GPUs that there are."""
    _held: dict[Key, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, resources: Resources) -> Ledger:
        """Return the ledger of a node on which nothing runs."""
        return cls(resources.capacity, tuple(gpu.uuid for gpu in resources.gpus))

    def check(self, count: int) -> None:
        """Refuse a number of GPUs that can never be free.

        Raises:
            InvalidRequestError: there are not so many.

        """
        if count > len(self.uuids):
            raise InvalidRequestError(
                f"{count} GPUs are asked for, and this node has {len(self.uuids)}; ask for less "
                "(--gpus-per-node, --nproc-per-node), or for nodes that have them"
            )

    def take(self, key: Key, count: int) -> tuple[str, ...] | None:
        """Give a job `count` GPUs, lowest first; None if it has to wait."""
        free = self.free
        if len(self._held) >= self.capacity or count > len(free):
            return None
        self._held[key] = free[:count]
        return self._held[key]

    def take_over(self, key: Key, gpus: tuple[str, ...]) -> None:
        """Enter a job that has these GPUs already, and its place, whatever else is known."""
        self._held[key] = gpus

    def release(self, key: Key) -> None:
        """Take back what a job was given, if it was given anything."""
        self._held.pop(key, None)

    def held_by(self, key: Key) -> tuple[str, ...]:
        """Return the GPUs that a job has."""
        return self._held.get(key, ())

    @property
    def free(self) -> tuple[str, ...]:
        """The free GPUs."""
        held = {uuid for uuids in self._held.values() for uuid in uuids}
        return tuple(uuid for uuid in self.uuids if uuid not in held)

    def why_not(self, count: int) -> str:
        """Say what a job that is not given so many GPUs waits for."""
        if len(self._held) >= self.capacity:
            return f"a job to end: {len(self._held)} of {self.capacity} are here"
        return f"GPUs: {count} are asked for, {len(self.free)} of {len(self.uuids)} are free"
