"""Assembles the parts of scheduling: nodes' reports and resources, restrictions, and placement."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from rdzv.core.fleet import nodes
from rdzv.core.fleet.node_resources import FailingCheck
from rdzv.messages import Announcement, Draining, Hello, Holding
from rdzv.runtime.clock import Clock
from rdzv.runtime.tasks import Tasks
from rdzv.server.engine.decide_persist_publish import Engine
from rdzv.server.engine.store_access import StoreAccess
from rdzv.server.scheduling.cordons import Cordon, Cordons
from rdzv.server.scheduling.drains import Drains
from rdzv.server.scheduling.hosts import Hosts
from rdzv.server.scheduling.known_nodes import KnownNodes
from rdzv.server.scheduling.placing import Placer
from rdzv.server.scheduling.quarantined_nodes import Quarantine
from rdzv.server.settings.server_settings import RdzvdSettings


class Scheduling:
    """Placement and everything that it depends on."""

    def __init__(
        self,
        engine: Engine,
        store: StoreAccess,
        clock: Clock,
        tasks: Tasks,
        config: RdzvdSettings,
        records: Callable[[], Mapping[str, nodes.NodeRecord]],
        send: Callable[[str, Announcement], object],
        on_quarantine: Callable[[], None],
    ) -> None:
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
            settle_ms=config.lease.takeover_grace_ms,
        )

    async def start(self) -> None:
        """Load the cordons and start placing jobs; the quarantine must have been loaded before.

        Raises:
            RendezvousConnectionError: the store is unavailable.
            RendezvousStateError: the stored cordons cannot be read.

        """
        await self.cordons.load()
        self.placer.start()

    def stop(self) -> None:
        """Stop placing jobs, and stop the timer that ends quarantines."""
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

    # ---------------------------------------------------------------- reports of nodes

    def note_hello(self, hello: Hello) -> None:
        """Record a node's resources and holdings, and whether it is about to leave."""
        self.drains.note_hello(hello)
        self.known_nodes.note_hello(hello)

    def note_health(self, node_id: str, failing: tuple[FailingCheck, ...]) -> None:
        """Record which of a node's health checks are failing; the node is healthy if none is."""
        self.known_nodes.note_health(node_id, failing)

    def note_holdings(self, node_id: str, holdings: tuple[Holding, ...]) -> None:
        """Record the submitted jobs that a node currently holds."""
        self.known_nodes.note_holdings(node_id, holdings)

    def note_draining(self, node_id: str, draining: Draining) -> None:
        """Record that a known node is leaving all its jobs by itself; ignore other drains."""
        if self.known_nodes.of(node_id) is not None and draining.own:
            self.drains.note_draining(node_id, draining)
            self.placer.wake()

    def note_lost(self, node_id: str) -> None:
        self.drains.note_lost(node_id)
        self.known_nodes.note_lost(node_id)
