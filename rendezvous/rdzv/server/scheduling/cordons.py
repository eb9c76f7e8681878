"""Stores the cordons and drains of nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec

from rdzv.core.fleet import nodes
from rdzv.core.fleet.node_resources import Drain
from rdzv.errors import UnknownNodeError
from rdzv.runtime.clock import Clock
from rdzv.server.engine.store_access import StoreAccess
from rdzv.server.engine.stored_records import KeyValueRecord

log = logging.getLogger("rdzv.scheduling")

CORDONS = "cordons"
"""The name of the key-value record that stores cordoned and drained nodes."""


class Cordon(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node's cordon or, with a deadline, its drain; each with its reason."""

    reason: str
    at_ms: int
    due_ms: int | None = None
    """When workers still on the node are killed, or None if they may continue."""
    besides: Cordon | None = None
    """The cordon that the node has besides this drain, and keeps when the drain is lifted."""

    @property
    def alone(self) -> Cordon | None:
        """The node's cordon without its drain; None if it is only drained."""
        return self if self.due_ms is None else self.besides

    @property
    def drain(self) -> Drain | None:
        """The drain as announced to the node, or None if the node is only cordoned."""
        if self.due_ms is None:
            return None
        return Drain(self.reason, self.due_ms, self.at_ms, max(self.at_ms, 2))


def _read_cordons(data: bytes) -> dict[str, Cordon]:
    return msgspec.json.decode(data, type=dict[str, Cordon])


class Cordons:
    """The cordons and drains of one server's nodes.

    They are ordered by operators and kept in the store.
    """

    def __init__(
        self,
        store: StoreAccess,
        clock: Clock,
        lock: asyncio.Lock,
        records: Callable[[], Mapping[str, nodes.NodeRecord]],
        on_change: Callable[[Mapping[str, Cordon]], None],
    ) -> None:
        """Hold `lock` while cordons change, so that nothing is placed in the meantime.

        `on_change` receives the previous cordons after every attempt to store new ones.
        """
        self._clock = clock
        self._lock = lock
        self._records = records
        self._on_change = on_change
        self._document = KeyValueRecord(store, CORDONS, _read_cordons)

    async def load(self) -> None:
        """Read the stored cordons.

        Raises:
            RendezvousConnectionError: the store is unavailable.
            RendezvousStateError: the stored cordons cannot be read.

        """
        await self._document.load()

    @property
    def by_node(self) -> Mapping[str, Cordon]:
        return self._document.value

    def of(self, node_id: str) -> Cordon | None:
        """Return a node's cordon, or None if it has none."""
        return self._document.value.get(node_id)

    def check_known(self, node_id: str) -> None:
        """Raise an error if a node is neither known nor cordoned.

        Raises:
            UnknownNodeError: the node is neither known nor cordoned.

        """
        if node_id not in self._records() and node_id not in self.by_node:
            raise UnknownNodeError(
                f"no node {node_id} is known here; `rdzvctl nodes` shows those that are"
            )

    async def cordon(self, node_id: str, reason: str) -> None:
        """Stop placing jobs on a node.

        Raises:
            UnknownNodeError: no such node is known.
            RendezvousError: the change was not stored; retry.

        """
        self.check_known(node_id)
        now_ms = self._clock.now_ms()

        def cordoned(cordons: dict[str, Cordon]) -> dict[str, Cordon]:
            ordered, known = Cordon(reason, now_ms), cordons.get(node_id)
            if known is not None and known.due_ms is not None:
                ordered = msgspec.structs.replace(known, besides=ordered)
            return {**cordons, node_id: ordered}

        await self.store(cordoned)
        log.warning("node %s is cordoned: %s", node_id, reason or "no reason was given")

    async def lift(self, node_id: str, *, cordon: bool) -> tuple[Cordon | None, Cordon | None]:
        """Lift a node's drain and, with `cordon`, its cordon; return what it had, and still has.

        Raises:
            RendezvousError: the change was not stored; retry.

        """

        def lifted(cordons: dict[str, Cordon]) -> dict[str, Cordon]:
            left = {n: c for n, c in cordons.items() if n != node_id}
            alone = cordons[node_id].alone if node_id in cordons else None
            return left if cordon or alone is None else {**left, node_id: alone}

        if (known := self.of(node_id)) is not None:
            await self.store(lifted)
        return known, self.of(node_id)

    async def store(self, change: Callable[[dict[str, Cordon]], dict[str, Cordon]]) -> None:
        """Store a change to the cordons before putting it into effect.

        Raises:
            RendezvousError: the change was not stored; retry.

        """
        async with self._lock:
            before = self._document.value
            changed = change(before)
            try:
                await self._document.swap(changed, msgspec.json.encode(changed))
            finally:
                # After a failure, the cordons have been read again and may be different.
                self._on_change(before)
