"""The parts of scheduling, put together: what nodes have and say, who may use them, placement."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from rdzv.core import nodes
from rdzv.core.placement import FailingCheck
from rdzv.runtime.clock import Clock
from rdzv.runtime.tasks import Tasks
from rdzv.server.engine.engine import Engine
from rdzv.server.engine.store_access import StoreAccess
from rdzv.server.messages import Announcement, Draining, Hello, Holding
from rdzv.server.scheduling.cordons import Cordon, Cordons
from rdzv.server.scheduling.drains import Drains
from rdzv.server.scheduling.hosts import Hosts
from rdzv.server.scheduling.known_nodes import KnownNodes
from rdzv.server.scheduling.placer import Placer
from rdzv.server.scheduling.quarantined_nodes import Quarantine
from rdzv.server.settings.config import Config


class Scheduling:
    """Placement, and all that it depends on."""

    def __init__(
        self,
        engine: Engine,
        store: StoreAccess,
        clock: Clock,
        tasks: Tasks,
        config: Config,
        records: Callable[[], Mapping[str, nodes.NodeRecord]],
        send: Callable[[str, Announcement], object],
        on_quarantine: Callable[[], None],
    ) -> None:
        """`on_quarantine` is called when a node is quarantined, or no longer."""
        lock = asyncio.Lock()
        self._on_quarantine = on_quarantine
        self.known_nodes = KnownNodes(clock, on_change=self._wake)
        self.quarantine = Quarantine(
            store,
            clock,
            config.quarantine,
            lambda: self.known_nodes.daemons,
            on_change=self._quarantine_changed,
        )
        self.cordons = Cordons(store, clock, lock, records, on_change=self._cordons_changed)
        self.drains = Drains(engine, clock, self.cordons, send)
        self.hosts = Hosts(records, self.known_nodes, self.cordons, self.drains, self.quarantine)
        self.placer = Placer(
            engine,
            clock,
            tasks,
            records,
            lock,
            known=self.known_nodes,
            drains=self.drains,
            hosts=self.hosts,
            quarantine=self.quarantine,
            quiet_ms=config.timings.place_quiet_ms,
            retry_ms=config.timings.store_retry_ms,
            settle_ms=config.tuning.takeover_grace_ms,
        )

    async def start(self) -> None:
        """Learn which nodes are cordoned, and begin to place.

        Raises:
            RendezvousConnectionError: the store is away.
            RendezvousStateError: what is stored cannot be read.

        """
        await self.cordons.load()
        self.placer.start()

    def stop(self) -> None:
        """Place nothing any more, and let no quarantine run out."""
        self.placer.stop()
        self.quarantine.stop()

    def _wake(self) -> None:
        self.placer.wake()

    def _quarantine_changed(self) -> None:
        self._on_quarantine()
        self.placer.wake()

    def _cordons_changed(self, before: Mapping[str, Cordon]) -> None:
        self.drains.tell_changes(before)
        self.placer.wake()

    # ---------------------------------------------------------------- what nodes say

    def note_hello(self, hello: Hello) -> None:
        """Note what a node has and holds, and whether it is about to leave."""
        self.drains.note_hello(hello)
        self.known_nodes.note_hello(hello)

    def note_health(self, node_id: str, failing: tuple[FailingCheck, ...]) -> None:
        """Note which of its own checks a node fails now; none: it is healthy."""
        self.known_nodes.note_health(node_id, failing)

    def note_holdings(self, node_id: str, holdings: tuple[Holding, ...]) -> None:
        """Note what a node holds now."""
        self.known_nodes.note_holdings(node_id, holdings)

    def note_draining(self, node_id: str, draining: Draining) -> None:
        """Note that a node is about to leave all its jobs."""
        if self.known_nodes.of(node_id) is not None and draining.own:
            self.drains.note_draining(node_id, draining)
            self.placer.wake()

    def note_lost(self, node_id: str) -> None:
        """Forget a node that was given up."""
        self.drains.note_lost(node_id)
        self.known_nodes.note_lost(node_id)
