"""What keeps nodes from jobs, and what nodes have for them: the record of each node but its stream.

Cordons and drains by operators, and quarantines, are stored in one key-value record. What a node
reports about itself (its resources, its health, the jobs that it holds, and its own drain because
it is being preempted or its agent is ending) is kept in memory until the node is lost, because the
node repeats it in every hello.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, TypeVar

import msgspec

from rdzv import errors
from rdzv.core.events import NodeDrained, NodeUndrained
from rdzv.core.fleet.job_queue import Host
from rdzv.core.fleet.node_resources import Drain, FailingCheck, NodeResources, gpus_needed
from rdzv.core.fleet.node_resources import told as drain_words
from rdzv.core.fleet.quarantine import Quarantined, QuarantineRecord
from rdzv.core.model import State
from rdzv.core.reason import ReasonItem
from rdzv.messages import (
    Announcement,
    Draining,
    DrainNode,
    Hello,
    Holding,
    LookAgain,
    UndrainNode,
)
from rdzv.server.engine.store_access import KeyValueRecord
from rdzv.structs import replace, struct

if TYPE_CHECKING:
    from rdzv.server.driver import Driver

log = logging.getLogger("rdzv.scheduling")

V = TypeVar("V")

NODES = "nodes"
"""The name of the key-value record that stores what keeps nodes from jobs."""


TARGET_KEPT_MS = 3_600_000
"""How long a lost node is scraped: long enough for an alert to fire and for people to react."""


@struct(frozen=True)
class Cordon:
    """A node's cordon: an operator has ordered that nothing is placed on it."""

    reason: str
    at_ms: int


@struct(frozen=True)
class Restrictions:
    """What keeps nodes from jobs, by node_id; stored unchanged."""

    cordons: Mapping[str, Cordon] = field(default_factory=dict)
    drains: Mapping[str, Drain] = field(default_factory=dict)
    """The drains by operators. A node may have a cordon besides, and keeps it afterwards."""
    quarantine: QuarantineRecord = field(default_factory=QuarantineRecord)


@struct(frozen=True)
class Reported:
    """What one node has reported about itself."""

    version: str
    resources: NodeResources | None
    """The node's resources for submitted jobs, or None if it accepts none."""
    holdings: tuple[Holding, ...] = ()
    failing: tuple[FailingCheck, ...] = ()
    failing_since_ms: int = 0

    @property
    def unhealthy(self) -> str:
        return "; ".join(map(str, self.failing))


class Fleet:
    """The nodes of one server, as placement sees them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._clock = driver.clock
        self.placing = asyncio.Lock()
        """Held while cordons and drains change, and while jobs are placed."""
        self._writing = asyncio.Lock()
        self._document = KeyValueRecord(
            driver.store, NODES, msgspec.json.Decoder(Restrictions).decode
        )
        self.reported: dict[str, Reported] = {}
        self.wishes: dict[str, Drain] = {}
        """The drains that nodes have announced themselves."""
        self._lost_agents: dict[str, int] = {}
        """When each rdzv-agent was lost, in that order."""

    async def load(self) -> None:
        await self._document.load()
        self._driver.quarantine.note_change()

    @property
    def restrictions(self) -> Restrictions:
        return self._document.value

    @property
    def ordered(self) -> set[str]:
        return {*self.restrictions.cordons, *self.restrictions.drains}

    def held(self, node_id: str) -> dict[str, set[str]]:
        held: dict[str, set[str]] = {}
        for holding in self.reported[node_id].holdings if node_id in self.reported else ():
            held.setdefault(holding.rdzv_id, set()).add(holding.run)
        return held

    def drain_of(self, node_id: str) -> Drain | None:
        """Return a node's drain, or None; if it has two, the one with the earlier deadline."""
        both = self.restrictions.drains.get(node_id), self.wishes.get(node_id)
        return min((one for one in both if one), key=lambda drain: drain.due_ms, default=None)

    def drains(self) -> dict[str, Drain]:
        found = {n: self.drain_of(n) for n in (*self.restrictions.drains, *self.wishes)}
        return {node_id: drain for node_id, drain in found.items() if drain is not None}

    # ---------------------------------------------------------------- as placement sees them

    def hosts(self, states: Iterable[State]) -> list[Host]:
        """Return all nodes that accept submitted jobs, and what the jobs in `states` use there."""
        taken = _taken(states, self.reported)
        hosts, quarantined = [], self._driver.quarantine.nodes
        ordered = self.ordered | self.wishes.keys()
        for node_id in self._driver.leases.records:
            said = self.reported.get(node_id)
            if said is None or said.resources is None:
                continue
            has = taken.get(node_id, {}) | {(h.rdzv_id, h.run): h.gpus for h in said.holdings}
            # Such a state may last for hours, so no waiting job may reserve other nodes until it
            # ends.
            barred = node_id in quarantined
            cordoned = node_id in ordered or barred or bool(said.failing)
            unusable = self._unusable(node_id, said, quarantined)
            hosts.append(Host(node_id, said.resources, has, unusable, cordoned, barred))
        return hosts

    def _unusable(
        self, node_id: str, said: Reported, quarantined: Mapping[str, Quarantined]
    ) -> ReasonItem | None:
        no_reason = "no reason was given"
        if (drain := self.drain_of(node_id)) is not None:
            return ReasonItem(drain.reason or no_reason, state=drain.what)
        if (cordon := self.restrictions.cordons.get(node_id)) is not None:
            lifted = "`rdzvctl uncordon` lifts that"
            return ReasonItem(cordon.reason or no_reason, state="cordoned", then=lifted)
        if (held := quarantined.get(node_id)) is not None:
            lifted = "`rdzvctl uncordon` lifts that, too"
            return ReasonItem(held.reason, state="quarantined", then=lifted)
        if self._driver.leases.records[node_id].stream is None:
            return ReasonItem("its agent is not connected", state="away")
        if not said.failing:
            return None
        return ReasonItem(
            said.unhealthy, state="unhealthy", then="it gets jobs once its checks pass"
        )

    # ---------------------------------------------------------------- by an operator

    def check_known(self, node_id: str) -> None:
        places = self._driver.leases.records, self.ordered, self._driver.quarantine.nodes
        if not any(node_id in place for place in places):
            raise errors.UnknownNodeError(
                f"no node {node_id} is known here; `rdzvctl nodes` shows those that are"
            )

    async def cordon(self, node_id: str, reason: str) -> None:
        self.check_known(node_id)
        cordon = Cordon(reason, self._clock.now_ms())
        async with self.placing:
            await self.change(lambda now: replace(now, cordons={**now.cordons, node_id: cordon}))

    async def uncordon(self, node_id: str) -> None:
        """Lift a node's cordon, drain and quarantine; if it is connected, it checks its health."""
        await self.undrain(node_id, cordon=True)
        await self._driver.quarantine.lift(node_id)
        self._driver.streams.send(node_id, LookAgain())

    async def drain(
        self, node_id: str, deadline_ms: int, reason: str, *, force: bool = False
    ) -> None:
        """Make a node leave all its jobs by the deadline, and place no more jobs on it."""
        self.check_known(node_id)
        now_ms = self._clock.now_ms()
        drain = Drain(reason, now_ms + deadline_ms, now_ms, number=max(now_ms, 2))
        async with self.placing:
            # No job is placed and no other node is drained in between.
            if not force and (why := self._driver.placer.short_without(node_id)):
                raise errors.TooFewNodesError(why)
            await self.change(lambda now: replace(now, drains={**now.drains, node_id: drain}))
        self._record(NodeDrained(node_id, drain_words(reason), deadline_ms))

    async def undrain(self, node_id: str, *, cordon: bool = False) -> None:
        self.check_known(node_id)
        before = self.restrictions
        if node_id not in before.drains and not (cordon and node_id in before.cordons):
            return
        async with self.placing:
            await self.change(
                lambda now: replace(
                    now,
                    cordons=_without(now.cordons, node_id) if cordon else now.cordons,
                    drains=_without(now.drains, node_id),
                )
            )
        if node_id in before.drains:
            self._record(NodeUndrained(node_id))

    async def change(
        self, change: Callable[[Restrictions], Restrictions], *, anyhow: bool = False
    ) -> None:
        """Store a change before it takes effect, and tell those whom it concerns.

        With `anyhow`, it takes effect even if the store refuses it for good.
        """
        async with self._writing:
            before = self.restrictions
            changed = change(before)
            try:
                if changed is not before:
                    await self._document.swap(changed, msgspec.json.encode(changed))
            except errors.RendezvousError as error:
                if not anyhow or isinstance(error, errors.RendezvousConnectionError):
                    raise
                log.error("cannot write the record %s: %s", NODES, error)
                self._document.value = changed
            finally:
                # After a failure, the record has been read again and may be different.
                if self.restrictions is not before:
                    was, now = before.drains, self.restrictions.drains
                    for node_id in was.keys() | now.keys():
                        if was.get(node_id) != now.get(node_id):
                            self._driver.streams.send(node_id, self._told(now.get(node_id)))
                    self._driver.quarantine.note_change()

    def _told(self, drain: Drain | None) -> Announcement:
        if drain is None:
            return UndrainNode()
        return DrainNode(drain.left_ms(self._clock.now_ms()), drain.told, drain.number)

    def _record(self, event: NodeDrained | NodeUndrained) -> None:
        for state in self._driver.jobs.states:
            if state.membership.ended is None and takes_part(state, event.node_id):
                self._driver.note(state.membership.rdzv_id, (event,))

    # ---------------------------------------------------------------- by the node

    def owed(self, hello: Hello) -> Announcement | None:
        if (drain := self.restrictions.drains.get(hello.node_id)) is not None:
            return self._told(drain)
        lifted = hello.draining is not None and hello.draining.number != 0
        return UndrainNode() if lifted else None

    def note_hello(self, hello: Hello) -> None:
        node_id, former = hello.node_id, self.reported.get(hello.node_id)
        self._lost_agents.pop(node_id, None)
        if hello.draining is not None and hello.draining.own:
            self._record_wish(node_id, hello.draining)
        else:
            self.wishes.pop(node_id, None)
        self.reported[node_id] = Reported(
            hello.agent_version,
            hello.resources,
            hello.holdings.holdings,
            former.failing if former else (),
            former.failing_since_ms if former else 0,
        )
        self.note_health(node_id, hello.health.failing)
        self._driver.placer.wake()

    def note_draining(self, node_id: str, draining: Draining) -> None:
        """Record that a known node is leaving all its jobs by itself; ignore other drains."""
        if node_id in self.reported and draining.own:
            self._record_wish(node_id, draining)
            log.warning("node %s is about to leave: %s", node_id, draining.reason)
            self._record(NodeDrained(node_id, draining.reason, draining.left_ms))
            self._driver.placer.wake()

    def _record_wish(self, node_id: str, draining: Draining) -> None:
        now_ms, known = self._clock.now_ms(), self.wishes.get(node_id)
        at_ms = known.at_ms if known is not None else now_ms
        self.wishes[node_id] = Drain(draining.reason, now_ms + draining.left_ms, at_ms)

    def note_health(self, node_id: str, failing: tuple[FailingCheck, ...]) -> None:
        known = self.reported.get(node_id)
        if known is None or known.failing == failing:
            return
        since_ms = known.failing_since_ms if known.failing else self._clock.now_ms()
        now = self.reported[node_id] = replace(known, failing=failing, failing_since_ms=since_ms)
        if failing:
            log.warning("node %s is unhealthy; placing nothing on it: %s", node_id, now.unhealthy)
        else:
            log.warning("node %s is healthy again", node_id)
        self._driver.placer.wake()

    def note_holdings(self, node_id: str, holdings: tuple[Holding, ...]) -> None:
        if (known := self.reported.get(node_id)) is not None and known.holdings != holdings:
            self.reported[node_id] = replace(known, holdings=holdings)
            self._driver.placer.wake()

    def note_lost(self, node_id: str) -> None:
        """Forget a node that was given up; if it returns, it reports everything again."""
        self.wishes.pop(node_id, None)
        known = self.reported.pop(node_id, None)
        if known is not None and known.resources is not None:
            self._lost_agents[node_id] = self._clock.now_ms()
            if len(self._lost_agents) > self._driver.config.limits.nodes:
                del self._lost_agents[next(iter(self._lost_agents))]
        self._driver.placer.wake()

    def agents(self) -> list[str]:
        """Return the nodes whose rdzv-agent has metrics.

        A lost one stays for a while: if it were removed at once, Prometheus would forget it, and
        no alert would report that it no longer responds.
        """
        since_ms = self._clock.now_ms() - TARGET_KEPT_MS
        self._lost_agents = {n: at for n, at in self._lost_agents.items() if at > since_ms}
        present = (n for n, said in self.reported.items() if said.resources is not None)
        return sorted((*present, *self._lost_agents))


def _taken(
    states: Iterable[State], reported: Mapping[str, Reported]
) -> dict[str, dict[tuple[str, str], int]]:
    taken: dict[str, dict[tuple[str, str], int]] = {}
    for state in states:
        membership = state.membership
        if membership.submission is None or membership.ended is not None:
            continue
        for node_id in membership.submission.placed:
            said = reported.get(node_id)
            if said is not None and said.resources is not None:
                gpus = gpus_needed(membership.submission.spec, said.resources)
                of_node = taken.setdefault(node_id, {})
                of_node[membership.rdzv_id, membership.run] = gpus
    return taken


def takes_part(state: State, node_id: str) -> bool:
    return state.present(node_id) or node_id in state.placed


def _without(of: Mapping[str, V], node_id: str) -> dict[str, V]:
    return {name: value for name, value in of.items() if name != node_id}
