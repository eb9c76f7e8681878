"""Tracks whether this rdzvd leads, and owns the driver while it does.

A server that does not share its store always leads. Among servers that share an etcd, one leads and
the others *stand by*: they refuse calls, name the leader, and watch its process over a connection
that carries no data (`LeaderProbe`). The end of the connection proves nothing, so the probe
connects again; if a leader that was reached in this term refuses, no process is listening, and it
is deposed, which is safe even if it is not gone. If its machine falls silent, its lease decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rdzv import errors
from rdzv.runtime.clock import Clock, sleep_ms
from rdzv.runtime.tasks import beside
from rdzv.server.driver import Driver
from rdzv.server.engine.store_access import STORE_RETRY_MS
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.server.telemetry.server_metrics import Metrics
from rdzv.transport.endpoints import parse_endpoint
from rdzv.view.answers import Server

if TYPE_CHECKING:
    from rdzv.stores.election import Election
    from rdzv.stores.election_session import Leader
    from rdzv.stores.etcd_client import EtcdClient

log = logging.getLogger("rdzv.replica")

LOOK_EVERY_S = 2.0
HEAD_START_S = 0.15
"""How much longer each server waits before trying to lead than the server before it in the
order."""

LEADERLESS_HOLD_S = 4.0
"""How long a call is held while no server leads, so that the node need not repeat it. Nodes wait
10 s for an answer."""

CONNECT_S = 1.0
RETRY_S = 0.25
"""The pause before the next attempt to connect to the leader or to depose it."""
READ_BYTES = 4096


class Replica:
    """Provides the driver to the services. It stands by until `lead` or `campaign` is called."""

    def __init__(self, clock: Clock, store: str, version: str) -> None:
        self._clock = clock
        self._store = store
        self._version = version
        self._driver: Driver | None = None
        self.election: Election | None = None
        """The election that this server takes part in; None for a store without one."""
        self._probe: LeaderProbe | None = None
        self._order: tuple[str, ...] = ()
        """The addresses of all servers, in the order in which they take over."""
        self._last_leader = ""
        self._address = ""
        self._exposed = ""
        self._since_ms = clock.now_ms()
        self._changed = asyncio.Event()
        """Set and replaced whenever the leader changes or is lost."""
        self._tell: Callable[[bool], None] = lambda leads: None

    @property
    def driver(self) -> Driver:
        """The driver, which exists only while this server leads."""
        if self._driver is None or not self.proven:
            raise self._not_leader()
        return self._driver

    async def settled_driver(self) -> Driver:
        """Return the driver; while no server leads, first wait a moment for a leader.

        This brings nodes that have lost a leader to the next one immediately, without polling.
        """
        if self.proven:
            return self.driver
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEADERLESS_HOLD_S):
                while not self.proven and not self._not_leader().leader:
                    await self._changed.wait()
        return self.driver

    @property
    def proven(self) -> bool:
        leads = self._driver is not None
        return leads and (self.election is None or self.election.proven)

    async def regain_word(self) -> bool:
        """Wait until this server may send to nodes or no longer leads; return whether it may."""
        if self._driver is None or self.election is None:
            return self._driver is not None
        return await self.election.regain_word()

    @property
    def trouble(self) -> str:
        """The reason why this server can decide nothing new at the moment; empty if it can."""
        if self._driver is None or not self.proven:
            return str(self._not_leader())
        return self._driver.trouble

    def proven_driver(self) -> Driver | None:
        return self._driver if self.proven else None

    def _not_leader(self) -> errors.NotLeaderError:
        leader = self.election.leader if self.election else None
        if self._probe is not None and leader == self._probe.suspect:
            leader = None
        if leader is None or leader.address == self._address:
            return errors.NotLeaderError("this rdzvd stands by and no other leads yet; try again")
        return errors.NotLeaderError(
            f"this rdzvd stands by; the one at {leader.address} leads", leader.address
        )

    async def servers(self) -> tuple[Server, ...]:
        own: dict[str, Any] = {
            "insecure": self._exposed or None,
            "store_away": (self._driver.trouble if self._driver is not None else "") or None,
            # Not `self._clock`, which ignores steps of the system's clock.
            "unix_ms": round(time.time() * 1000),
        }
        now_ms = self._clock.now_ms()
        if self.election is None:
            return (
                Server(
                    address=self._address,
                    leads=self._driver is not None,
                    leadership=(self._driver.leadership if self._driver else 0) or None,
                    store=self._store,
                    version=self._version,
                    state_age_ms=now_ms - self._since_ms,
                    **own,
                ),
            )
        leader = self.election.leader
        views = []
        for other in await self.election.replicas():
            leads = leader is not None and leader.address == other.address
            since_ms = leader.since_unix_ms if leader and leads else other.started_unix_ms
            views.append(
                Server(
                    address=other.address,
                    leads=leads,
                    leadership=(leader.leadership if leader and leads else 0) or None,
                    store=self._store,
                    version=other.version,
                    state_age_ms=max(now_ms - since_ms, 0),
                    page=other.page or None,
                    **(own if other.address == self._address else {}),
                )
            )
        return tuple(views)

    # ---------------------------------------------------------------- leading

    def serve_as(self, address: str, tell: Callable[[bool], None], exposed: str = "") -> None:
        """Set this server's address; call `tell` with whether it leads, now and at each change.

        `exposed` says why any client may do anything here; it is empty if access is restricted.
        """
        self._address, self._tell, self._exposed = address, tell, exposed
        tell(self._driver is not None)

    def lead(self, driver: Driver) -> None:
        self._driver, self._since_ms = driver, self._clock.now_ms()
        self._tell_order()
        self._tell(True)
        self._record_change()

    def stand_by(self, error: errors.RendezvousError) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            self._since_ms = self._clock.now_ms()
            self._tell(False)
            driver.close_streams(error)

    async def wait_alone(self, timeout_s: float) -> None:
        """If this server leads, wait up to `timeout_s` until no node has a stream."""
        if self._driver is not None:
            await self._driver.streams.wait_empty(timeout_s)

    async def campaign(
        self,
        client: EtcdClient,
        election: Election,
        config: RdzvdSettings,
        metrics: Metrics | None = None,
    ) -> None:
        """Lead whenever elected, until cancelled. `metrics` counts across all terms."""
        self.election = election
        self._probe = LeaderProbe(election, self._record_change)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(election))
                tasks.create_task(self._probe.run())
                tasks.create_task(self._keep_order(election))
                while True:
                    await self._serve_a_term(client, election, config, metrics)
        finally:
            self.stand_by(
                errors.RendezvousConnectionError(
                    "this server is stopping; workers continue, connect again"
                )
            )

    async def _follow(self, election: Election) -> None:
        leader = election.leader
        while True:
            if leader is not None:
                self._last_leader = leader.address
            self._record_change()
            leader = await election.changed(leader)

    async def _keep_order(self, election: Election) -> None:
        while True:
            try:
                found = await election.replicas()
            except errors.RendezvousConnectionError as error:
                log.debug("cannot read the list of servers: %s", error)
            else:
                first = sorted(found, key=lambda one: (one.started_unix_ms, one.address))
                self._order = tuple(one.address for one in first)
                self._tell_order()
            await asyncio.sleep(LOOK_EVERY_S)

    def _tell_order(self) -> None:
        if self._driver is not None:
            others = tuple(one for one in self._order if one != self._address)
            self._driver.connections.note_standing_by(others)

    def _head_start_s(self) -> float:
        """Return how long to wait so that servers ahead of this one can take over first."""
        order = [one for one in self._order if one != self._last_leader]
        if self._address not in order:
            return 0.0
        return HEAD_START_S * order.index(self._address)

    def _record_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _serve_a_term(
        self, client: EtcdClient, election: Election, config: RdzvdSettings, metrics: Metrics | None
    ) -> None:
        from rdzv.stores.etcd import EtcdStore

        fence = await election.campaign(self._head_start_s)
        store = EtcdStore(client, fence)
        try:
            async with Driver.running(store, self._clock, config, metrics=metrics) as driver:
                log.warning("this server leads (leadership %d)", driver.leadership)
                self.lead(driver)
                reason = await election.lost()
                log.warning("this server is no longer the leader: %s", reason)
                self.stand_by(self._not_leader())
        except errors.RendezvousError as error:
            log.error("this server could not become the leader: %s", error)
            await election.resign()
            await sleep_ms(self._clock, STORE_RETRY_MS)
        finally:
            await store.close()


class LeaderProbe:
    """Watches the leader while another server leads."""

    def __init__(self, election: Election, on_change: Callable[[], None]) -> None:
        self._election = election
        self._on_change = on_change
        self.suspect: Leader | None = None
        """The leader, if its connection has ended and it has not yet accepted another; otherwise
        None."""

    async def run(self) -> None:
        first = await self._election.changed(None)
        if first is not None and first.address == self._election.address:
            # This process now has the leader's address, so the process that was leading there is
            # gone.
            await self._depose(first)
        while True:
            leader = self._election.leader
            if leader is None or leader.address == self._election.address or not leader.word_ms:
                await self._election.changed(leader)
                continue
            async with beside(self._watch(leader)):
                now: Leader | None = leader
                while now is not None and now.since_unix_ms == leader.since_unix_ms:
                    now = await self._election.changed(now)
            self._suspect(None)

    async def _watch(self, leader: Leader) -> None:
        try:
            endpoint = parse_endpoint(leader.address)
        except errors.InvalidRequestError:
            return
        reached = False
        while True:
            try:
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
            except ConnectionRefusedError:
                if reached:
                    await self._depose(leader)
                    return
            except (OSError, TimeoutError):
                self._suspect(None)
            else:
                reached = True
                self._suspect(None)
                await _until_end(reader, writer)
                self._suspect(leader)
                continue
            await asyncio.sleep(RETRY_S)

    async def _depose(self, leader: Leader) -> None:
        """Depose a leader unless its term is over; retry while etcd is unavailable."""
        while (now := self._election.leader) and now.since_unix_ms == leader.since_unix_ms:
            try:
                done = await self._election.depose(now)
            except errors.RendezvousConnectionError as error:
                log.info("cannot depose the leader at %s yet: %s", now.address, error)
                await asyncio.sleep(RETRY_S)
                continue
            if done:
                log.warning("the former leader at %s is gone", now.address)
            if done or self._election.leader == now:
                return

    def _suspect(self, leader: Leader | None) -> None:
        if self.suspect != leader:
            self.suspect = leader
            self._on_change()


async def _until_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while await reader.read(READ_BYTES):
            pass
    except OSError:
        pass
    finally:
        writer.transport.abort()
