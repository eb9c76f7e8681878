"""Places submitted jobs: feeds `core/placement` with what is known, and does what it plans.

What is known of a node for this is what it says itself (resources, holdings), whether it is
connected, and what operators have said of it (cordons, which are stored). Each placement is a
command to the rendezvous of its job, decided, stored and announced like every other; so a server
that takes over goes on from what is stored, and nothing is kept here that would be missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from rdzv.core import nodes
from rdzv.core.commands import Command, GiveUp, Place, Withdraw
from rdzv.core.drains import Drain
from rdzv.core.drains import told as drain_words
from rdzv.core.events import NodeDrained, NodeUndrained
from rdzv.core.model import JobSpec, State
from rdzv.core.placement import (
    FailingCheck,
    Host,
    Plan,
    Resources,
    Wait,
    demand,
    gpus_needed,
    grows_at_ms,
    nearest_miss,
    plan,
)
from rdzv.core.submissions import awaited
from rdzv.core.words import counted, duration
from rdzv.errors import (
    InvalidRequestError,
    RendezvousError,
    TooFewNodesError,
    UnknownNodeError,
)
from rdzv.runtime.clock import Clock, Timer
from rdzv.runtime.tasks import Tasks
from rdzv.server.engine.jobs import Jobs
from rdzv.server.engine.key_value_records import Document
from rdzv.server.messages import (
    Draining,
    DrainNode,
    Hello,
    Holding,
    NodeJob,
    NodeSummary,
    Told,
    UndrainNode,
)
from rdzv.server.scheduling.quarantined_nodes import Quarantine
from rdzv.server.telemetry.metrics_hooks import Room
from rdzv.structs import replace, struct

log = logging.getLogger("rdzv.placer")

CORDONS = "cordons"
"""The document that remembers which nodes nothing is placed on, and which are to be empty."""


class Cordon(msgspec.Struct, frozen=True, omit_defaults=True):
    """That nothing more is placed on a node, and why; with a deadline, that it is drained."""

    reason: str
    at_ms: int
    due_ms: int | None = None
    """When the workers are ended that are still there; None: they may run on."""

    @property
    def drain(self) -> Drain | None:
        """What the node is told; None: nothing."""
        if self.due_ms is None:
            return None
        return Drain(self.reason, self.due_ms, max(self.at_ms, 2))


@struct(frozen=True)
class _Known:
    """What a node has said of itself."""

    version: str
    resources: Resources | None
    holdings: tuple[Holding, ...] = ()
    metrics: str = ""
    """Where its agent answers /metrics; empty: nowhere."""
    failing: tuple[FailingCheck, ...] = ()
    failing_since_ms: int = 0

    @property
    def unhealthy(self) -> str:
        """What is wrong with it by its own checks; empty: nothing."""
        return "; ".join(map(str, self.failing))


def _read_cordons(data: bytes) -> dict[str, Cordon]:
    return msgspec.json.decode(data, type=dict[str, Cordon])


class Placer:
    """Places the submitted jobs of one server. Made and woken by its driver."""

    def __init__(
        self,
        jobs: Jobs,
        clock: Clock,
        tasks: Tasks,
        records: Callable[[], Mapping[str, nodes.NodeRecord]],
        quarantine: Quarantine,
        tell: Callable[[str, Told], object],
        *,
        quiet_ms: int,
        retry_ms: int,
        settle_ms: int,
    ) -> None:
        """Tell nodes by `tell` that they are drained, or not any more.

        `settle_ms`: how long after a start nodes may still be on their way back.
        """
        self._jobs = jobs
        self._clock = clock
        self._tasks = tasks
        self._records = records
        self._quarantine = quarantine
        self._tell = tell
        self._quiet_ms = quiet_ms
        self._retry_ms = retry_ms
        self._settle_ms = settle_ms
        self._settled_at_ms = 0
        self._known: dict[str, _Known] = {}
        self._wishes: dict[str, Drain] = {}
        """By node_id: that a node is about to leave all its jobs, as it has said itself."""
        self._document = Document(jobs, CORDONS, _read_cordons)
        self._timer = Timer(clock, self._look)
        self._lock = asyncio.Lock()
        self._waits: Mapping[str, Wait] = {}
        self._stopping = False

    async def start(self) -> None:
        """Learn what is stored, and begin to place.

        Raises:
            RendezvousConnectionError: the store is away.
            RendezvousStateError: what is stored can not be read.

        """
        await self._document.load()
        self._settled_at_ms = self._clock.now_ms() + self._settle_ms
        self._timer.arm_by(self._clock.now_ms())

    def stop(self) -> None:
        """Place nothing any more."""
        self._stopping = True
        self._timer.cancel()

    # ---------------------------------------------------------------- what nodes say

    def note_hello(self, hello: Hello) -> None:
        """Take note of what a node has and holds."""
        former = self._known.get(hello.node_id)
        self._known[hello.node_id] = _Known(
            hello.version,
            hello.resources,
            hello.holdings,
            hello.metrics,
            former.failing if former else (),
            former.failing_since_ms if former else 0,
        )
        self.note_health(hello.node_id, hello.failing)
        self._wishes.pop(hello.node_id, None)
        if hello.draining is not None and hello.draining.own:
            self._note_wish(hello.node_id, hello.draining)
        self.wake()

    def note_health(self, node_id: str, failing: tuple[FailingCheck, ...]) -> None:
        """Take note of what is wrong with a node by its own checks, or that nothing is any more."""
        known = self._known.get(node_id)
        if known is None or known.failing == failing:
            return
        since_ms = known.failing_since_ms if known.failing else self._clock.now_ms()
        now = self._known[node_id] = replace(known, failing=failing, failing_since_ms=since_ms)
        if failing:
            log.warning("node %s is unhealthy, nothing is placed on it: %s", node_id, now.unhealthy)
        else:
            log.warning("node %s is healthy again", node_id)
        self.wake()

    def note_draining(self, node_id: str, draining: Draining) -> None:
        """Take note that a node is about to leave all its jobs."""
        if node_id in self._known and draining.own:
            self._note_wish(node_id, draining)
            log.warning("node %s is about to leave: %s", node_id, draining.reason)
            self._record(NodeDrained(node_id, draining.reason, draining.left_ms))
            self.wake()

    def _note_wish(self, node_id: str, draining: Draining) -> None:
        self._wishes[node_id] = Drain(draining.reason, self._clock.now_ms() + draining.left_ms)

    def owed(self, hello: Hello) -> Told | None:
        """Return what a node that comes back must hear of its drain; None: nothing."""
        cordon = self._cordons.get(hello.node_id)
        if cordon is not None and cordon.drain is not None:
            return self._told(cordon.drain)
        lifted = hello.draining is not None and hello.draining.number != 0
        return UndrainNode() if lifted else None

    def _told(self, drain: Drain | None) -> Told:
        if drain is None:
            return UndrainNode()
        return DrainNode(drain.left_ms(self._clock.now_ms()), drain.told, drain.number)

    def note_holdings(self, node_id: str, holdings: tuple[Holding, ...]) -> None:
        """Take note of what a node holds now."""
        if (known := self._known.get(node_id)) is not None and known.holdings != holdings:
            self._known[node_id] = replace(known, holdings=holdings)
            self.wake()

    def note_lost(self, node_id: str) -> None:
        """Forget a node that was given up; what it holds it says again when it comes back."""
        self._known.pop(node_id, None)
        self._wishes.pop(node_id, None)
        self.wake()

    @property
    def daemons(self) -> list[str]:
        """The nodes known now that take submitted jobs."""
        return [node_id for node_id, known in self._known.items() if known.resources is not None]

    def held(self, node_id: str) -> dict[str, set[str]]:
        """Return the submitted jobs that a node holds, as runs by rdzv_id."""
        held: dict[str, set[str]] = {}
        for holding in self._known[node_id].holdings if node_id in self._known else ():
            held.setdefault(holding.rdzv_id, set()).add(holding.run)
        return held

    # ---------------------------------------------------------------- placing

    def wake(self) -> None:
        """Something has changed that may let a job be placed: look soon, once for all of it."""
        if not self._stopping and (self._known or self._waits):
            self._timer.arm_by(self._clock.now_ms() + self._quiet_ms)

    def wait(self, rdzv_id: str) -> Wait | None:
        """Say what a job waits for; None if it waits for no node."""
        return self._waits.get(rdzv_id)

    def _look(self, due_ms: int) -> None:
        self._tasks.start(self.place())

    async def place(self) -> None:
        """Decide who gets which nodes now, and have it stored and announced."""
        async with self._lock:
            await self._bar()
            done: list[tuple[str, Command]] = []
            while not self._stopping and await self._resolved() and (commands := self._decide()):
                if commands == done:
                    log.error("placing changes nothing, a bug of rdzvd: %s", commands)
                    return
                for rdzv_id, command in commands:
                    try:
                        await self._jobs.submit(rdzv_id, command)
                    except RendezvousError as error:
                        log.warning("job %s is placed later: %s", rdzv_id, error)
                        self._timer.arm_by(self._clock.now_ms() + self._retry_ms)
                        return
                done = commands

    async def _bar(self) -> None:
        """Let every job know which nodes it may not keep, before any of them gets others."""
        bar = self._quarantine.bar
        barred = dict(bar.barred)
        for state in self._jobs.states:
            membership = state.membership
            if membership.submission is None or membership.ended or state.barred == barred:
                continue
            try:
                await self._jobs.submit(membership.rdzv_id, bar)
            except RendezvousError as error:
                log.warning("job %s lets go of nodes later: %s", membership.rdzv_id, error)
                self._timer.arm_by(self._clock.now_ms() + self._retry_ms)

    async def _resolved(self) -> bool:
        """Find out what became of every commit in doubt: nodes may have been given by it."""
        for rdzv_id in self._jobs.doubtful:
            try:
                async with self._jobs.claim(rdzv_id):
                    pass
            except RendezvousError as error:
                log.warning("nothing is placed until job %s is beyond doubt: %s", rdzv_id, error)
                self._timer.arm_by(self._clock.now_ms() + self._retry_ms)
                return False
        return True

    def _decide(self) -> list[tuple[str, Command]]:
        """Say what is to be done now, and arm the timer for what is to be done later."""
        now_ms = self._clock.now_ms()
        states = [state for state in self._jobs.states if state.membership.submission is not None]
        going = self.drains()
        asked = [demand(state, now_ms, going.keys()) for state in states]
        demands = {d.rdzv_id: d for d in asked if d is not None}
        settled = now_ms >= self._settled_at_ms
        decided = plan(demands.values(), self.hosts(states), settled=settled)
        self._waits = decided.waits
        if demands:
            self._arm(states, now_ms)
        lost = self._vanished(states) if settled else {}
        runs = {state.membership.rdzv_id: state.membership.run for state in states}
        return [*_withdrawn_from(going, states), *_commands(decided, runs, lost)]

    def _arm(self, states: Iterable[State], now_ms: int) -> None:
        """Come back when the server has settled, and when running jobs may grow."""
        due = [grows_at_ms(state) for state in states if state.membership.ended is None]
        later = [at_ms for at_ms in (self._settled_at_ms, *due) if at_ms is not None]
        later = [at_ms for at_ms in later if now_ms < at_ms]
        if later:
            self._timer.arm_by(min(later))

    def _vanished(self, states: Iterable[State]) -> dict[str, tuple[str, ...]]:
        """Name who was chosen, has not joined, and is not known any more."""
        records = self._records()
        vanished = {
            state.membership.rdzv_id: tuple(n for n in awaited(state) if n not in records)
            for state in states
            if state.membership.ended is None
        }
        return {rdzv_id: node_ids for rdzv_id, node_ids in vanished.items() if node_ids}

    def hosts(self, states: Iterable[State]) -> list[Host]:
        """Show all nodes that take submitted jobs, as placement sees them."""
        taken: dict[str, dict[tuple[str, str], int]] = {}
        for state in states:
            membership = state.membership
            if membership.submission is None or membership.ended is not None:
                continue
            for node_id in membership.submission.placed:
                if (resources := self._resources(node_id)) is not None:
                    gpus = gpus_needed(membership.submission.spec, resources)
                    of_node = taken.setdefault(node_id, {})
                    of_node[membership.rdzv_id, membership.run] = gpus
        hosts, quarantined = [], self._quarantine.nodes
        for node_id, record in self._records().items():
            known = self._known.get(node_id)
            if known is None or known.resources is None:
                continue
            held = {(h.rdzv_id, h.run): h.gpus for h in known.holdings}
            has = taken.get(node_id, {}) | held
            # What may last for hours keeps no other node from jobs that could use it.
            unfit = node_id in quarantined or bool(known.failing)
            cordoned = node_id in self._cordons or node_id in self._wishes or unfit
            hosts.append(Host(node_id, known.resources, has, self._unusable(record), cordoned))
        return hosts

    def _resources(self, node_id: str) -> Resources | None:
        known = self._known.get(node_id)
        return known.resources if known is not None else None

    def _unusable(self, record: nodes.NodeRecord) -> str:
        if (drain := self.drain(record.node_id)) is not None:
            what = "drained" if drain.by_operator else "about to leave"
            return what + (f" ({drain.reason})" if drain.reason else "")
        if (cordon := self._cordons.get(record.node_id)) is not None:
            return "cordoned" + (f" ({cordon.reason})" if cordon.reason else "")
        if (held := self._quarantine.nodes.get(record.node_id)) is not None:
            return f"quarantined ({held.reason})"
        if record.stream is None:
            return "away"
        known = self._known.get(record.node_id)
        return f"unhealthy: {known.unhealthy}" if known is not None and known.failing else ""

    def check_placeable(self, spec: JobSpec) -> None:
        """Refuse a job that no node which is known could ever take.

        Not while nodes may still be on their way back to a server that has just started.

        Raises:
            InvalidRequestError: it names what the nearest node lacks.

        """
        if self._clock.now_ms() < self._settled_at_ms:
            return
        hosts = self.hosts(self._jobs.states)
        if (miss := nearest_miss(spec, hosts)) is not None:
            raise InvalidRequestError(
                f"none of the nodes that are known here could ever take this job; of the nearest, "
                f"{miss}. Ask for less, or start rdzv-agent on a node that has it first"
            )

    # ---------------------------------------------------------------- drains

    def drain(self, node_id: str) -> Drain | None:
        """Return why a node leaves all its jobs, by the earlier deadline; None: it stays."""
        cordon = self._cordons.get(node_id)
        both = [cordon and cordon.drain, self._wishes.get(node_id)]
        return min((one for one in both if one), key=lambda drain: drain.due_ms, default=None)

    def drains(self) -> dict[str, Drain]:
        """Return the nodes that leave all their jobs, or have left them for that."""
        found = {node_id: self.drain(node_id) for node_id in (*self._cordons, *self._wishes)}
        return {node_id: drain for node_id, drain in found.items() if drain is not None}

    async def drain_node(
        self, node_id: str, deadline_ms: int, reason: str, *, keep_min: bool
    ) -> None:
        """Have a node leave all its jobs by the deadline, and place nothing more on it.

        Raises:
            UnknownNodeError: no such node is known.
            TooFewNodesError: with `keep_min`, a job of it would be left with too few nodes.
            RendezvousError: it was not stored; to be repeated.

        """
        self._check_known(node_id)
        now_ms = self._clock.now_ms()
        cordon = Cordon(reason, now_ms, now_ms + deadline_ms)

        def drained(cordons: dict[str, Cordon]) -> dict[str, Cordon]:
            # Under the lock, so that nothing is placed, nor another node drained, in between.
            if keep_min and (short := self.short_without(node_id)):
                raise TooFewNodesError(short)
            return {**cordons, node_id: cordon}

        await self._store_cordons(drained)
        within = duration(deadline_ms)
        log.warning("node %s is drained within %s: %s", node_id, within, reason or "no reason")
        self._record(NodeDrained(node_id, drain_words(reason), deadline_ms))

    def _record(self, event: NodeDrained | NodeUndrained) -> None:
        """Write it into the history of every job that the node takes part in."""
        for state in self._jobs.states:
            if state.membership.ended is None and _takes_part(state, event.node_id):
                self._jobs.record(state.membership.rdzv_id, event)

    async def undrain(self, node_id: str) -> None:
        """Lift a drain, and a cordon, of a node.

        Raises:
            UnknownNodeError: no such node is known.
            RendezvousError: it was not stored; to be repeated.

        """
        self._check_known(node_id)
        await self._forget_cordon(node_id)

    def short_without(self, node_id: str) -> str:
        """Say which jobs of a node would have too few nodes without it; empty: none would."""
        states = [
            state
            for state in self._jobs.states
            if state.membership.ended is None and _takes_part(state, node_id)
        ]
        going = {*self.drains(), node_id}
        return "; ".join(why for state in states if (why := self._short(state, going)))

    def _short(self, state: State, going: set[str]) -> str:
        """Say that a job would have too few nodes without these; empty: it would not."""
        membership = state.membership
        here = {*state.seats, *state.waiting} - going - state.away.keys()
        lacks = membership.min_nodes - len(here)
        if lacks <= 0:
            return ""
        have = f"{membership.rdzv_id} would have {len(here)} of the {membership.min_nodes} nodes"
        if membership.submission is None:
            return f"{have} that it needs"
        free = self._free_for(state, going)
        if free >= lacks:
            return ""
        return f"{have} that it needs, and {counted(free, 'other')} free for it"

    def _free_for(self, state: State, going: set[str]) -> int:
        """Count the nodes that are on their way to a submitted job, or would be placed for it."""
        coming = [n for n in awaited(state) if n not in going]
        states = [s for s in self._jobs.states if s.membership.submission is not None]
        hosts = [
            replace(host, unusable=host.unusable or ("drained" if host.node_id in going else ""))
            for host in self.hosts(states)
        ]
        now_ms = self._clock.now_ms()
        asked = [demand(other, now_ms, going) for other in states]
        planned = plan([d for d in asked if d is not None], hosts)
        return len(coming) + len(planned.places.get(state.membership.rdzv_id, ()))

    # ---------------------------------------------------------------- cordons

    async def cordon(self, node_id: str, reason: str) -> None:
        """Place nothing more on a node.

        Raises:
            UnknownNodeError: no such node is known.
            RendezvousError: it was not stored; to be repeated.

        """
        self._check_known(node_id)
        now_ms = self._clock.now_ms()

        def cordoned(cordons: dict[str, Cordon]) -> dict[str, Cordon]:
            if node_id in cordons and cordons[node_id].due_ms is not None:
                # It is drained, which is more.
                return cordons
            return {**cordons, node_id: Cordon(reason, now_ms)}

        await self._store_cordons(cordoned)
        log.warning("node %s is cordoned: %s", node_id, reason or "no reason was given")

    async def uncordon(self, node_id: str) -> None:
        """Let a node be placed on again, whoever has said that it is not; a drain is lifted.

        Raises:
            UnknownNodeError: no such node is known.
            RendezvousError: it was not stored; to be repeated.

        """
        lifted = await self._quarantine.lift(node_id)
        if not lifted:
            self._check_known(node_id)
        await self._forget_cordon(node_id)

    async def _forget_cordon(self, node_id: str) -> None:
        if (known := self._cordons.get(node_id)) is not None:
            await self._store_cordons(
                lambda cordons: {n: c for n, c in cordons.items() if n != node_id}
            )
            if known.drain is not None:
                self._record(NodeUndrained(node_id))
            log.warning("node %s is not cordoned any more", node_id)

    def _check_known(self, node_id: str) -> None:
        if node_id not in self._records() and node_id not in self._cordons:
            raise _unknown(node_id)

    async def _store_cordons(
        self, change: Callable[[dict[str, Cordon]], dict[str, Cordon]]
    ) -> None:
        """Store what is changed, before anything follows from it."""
        async with self._lock:
            before = self._cordons
            changed = change(before)
            try:
                await self._document.swap(changed, msgspec.json.encode(changed))
            finally:
                # If that has failed, of what was read anew.
                self._tell_drains(before)
        self.wake()

    def _tell_drains(self, before: Mapping[str, Cordon]) -> None:
        """Tell the nodes that are drained now and were not before, or the other way about."""
        for node_id in {*before, *self._cordons}:
            old, new = before.get(node_id), self._cordons.get(node_id)
            drain = new.drain if new is not None else None
            if drain != (old.drain if old is not None else None):
                self._tell(node_id, self._told(drain))

    @property
    def _cordons(self) -> dict[str, Cordon]:
        return self._document.value

    # ---------------------------------------------------------------- what operators see

    def room(self) -> Room:
        """Count what the nodes have for submitted jobs, and what is left of it."""
        gpus, places = ({"free": 0, "taken": 0, "unusable": 0} for _ in range(2))
        hosts = self.hosts(self._jobs.states)
        for host in hosts:
            left = "unusable" if host.unusable else "free"
            has, takes = len(host.resources.gpus), host.resources.capacity
            gpus[left] += host.gpus_free
            gpus["taken"] += has - host.gpus_free
            places[left] += host.places_free
            places["taken"] += takes - host.places_free
        barred = {"cordoned": len(self._cordons), "quarantined": len(self._quarantine.nodes)}
        return Room(gpus, places, barred, self._count_drains(hosts))

    def _count_drains(self, hosts: Iterable[Host]) -> dict[str, int]:
        """Count the nodes that leave all their jobs, by whether something is left on them."""
        found = {"draining": 0, "drained": 0}
        if drains := self.drains():
            busy = {host.node_id for host in hosts if host.taken}
            busy |= {n for state in self._jobs.states for n, _ in _memberships(state)}
            found["draining"] = len(drains.keys() & busy)
            found["drained"] = len(drains) - found["draining"]
        return found

    def summaries(self, node_ids: Collection[str] = ()) -> list[NodeSummary]:
        """Show every node that is connected, away, cordoned or quarantined; of these, if any."""
        known = {*self._records(), *self._cordons, *self._quarantine.nodes}
        return self._show(sorted(known.intersection(node_ids) if node_ids else known))

    def summary(self, node_id: str) -> NodeSummary:
        """Show one node, also one that is not known any more."""
        (summary,) = self._show([node_id])
        return summary

    def _show(self, node_ids: Iterable[str]) -> list[NodeSummary]:
        states, now_ms = self._jobs.states, self._clock.now_ms()
        hosts = {host.node_id: host for host in self.hosts(states)}
        records = self._records()
        jobs_of: dict[str, list[NodeJob]] = {}
        for state in states:
            for node_id, job in _memberships(state):
                jobs_of.setdefault(node_id, []).append(job)
        for node_id, host in hosts.items():
            jobs_of[node_id] = _with_gpus(jobs_of.get(node_id, []), host)
        return [
            self._summary(node_id, records.get(node_id), hosts.get(node_id), jobs_of, now_ms)
            for node_id in node_ids
        ]

    def _summary(
        self,
        node_id: str,
        record: nodes.NodeRecord | None,
        host: Host | None,
        jobs_of: Mapping[str, list[NodeJob]],
        now_ms: int,
    ) -> NodeSummary:
        cordon, known = self._cordons.get(node_id), self._known.get(node_id)
        quarantined = self._quarantine.nodes.get(node_id)
        since_ms = record.since_ms if record is not None else now_ms
        state = "gone" if record is None else "away" if record.stream is None else "connected"
        drain = self.drain(node_id)
        return NodeSummary(
            node_id=node_id,
            state=state,
            state_age_ms=max(now_ms - since_ms, 0),
            program="rdzv-agent" if host is not None else "rdzvrun" if record is not None else "",
            address=record.address if record is not None else "",
            version=known.version if known is not None else "",
            resources=host.resources if host is not None else None,
            gpus_free=host.gpus_free if host is not None else 0,
            jobs=tuple(jobs_of.get(node_id, ())),
            drain="" if drain is None else "draining" if jobs_of.get(node_id) else "drained",
            drain_reason=drain.reason if drain is not None else "",
            drain_left_ms=drain.left_ms(now_ms) if drain is not None else 0,
            drained_by_operator=drain is not None and drain.by_operator,
            cordoned=cordon is not None,
            cordon_reason=cordon.reason if cordon is not None else "",
            cordon_age_ms=max(now_ms - cordon.at_ms, 0) if cordon is not None else 0,
            quarantine=quarantined.reason if quarantined is not None else "",
            quarantine_age_ms=max(now_ms - quarantined.at_ms, 0) if quarantined else 0,
            quarantine_left_ms=max(quarantined.until_ms - now_ms, 0) if quarantined else 0,
            unhealthy=known.unhealthy if known is not None else "",
            unhealthy_age_ms=max(now_ms - known.failing_since_ms, 0)
            if known is not None and known.failing
            else 0,
            metrics=known.metrics if known is not None else "",
        )


def _withdrawn_from(
    going: Mapping[str, Drain], states: Iterable[State]
) -> list[tuple[str, Command]]:
    """Take back placements on nodes that are about to leave, where they have not joined yet."""
    commands: list[tuple[str, Command]] = []
    for state in states if going else ():
        membership = state.membership
        gone = tuple(n for n in awaited(state) if n in going) if membership.ended is None else ()
        if gone:
            why = "; ".join(dict.fromkeys(f"{n}: {going[n].reason}" for n in gone))
            commands.append((membership.rdzv_id, Withdraw(membership.run, gone, why)))
    return commands


def _takes_part(state: State, node_id: str) -> bool:
    return state.present(node_id) or node_id in state.placed


def _commands(
    decided: Plan, runs: Mapping[str, str], lost: Mapping[str, Collection[str]]
) -> list[tuple[str, Command]]:
    """Write a plan as commands; what is given up or taken back comes first, for others wait."""
    commands: list[tuple[str, Command]] = []
    for rdzv_id, reason in decided.hopeless.items():
        commands.append((rdzv_id, GiveUp(runs[rdzv_id], reason)))
    for rdzv_id, gone in lost.items():
        reason = "not heard since this server took over"
        commands.append((rdzv_id, Withdraw(runs[rdzv_id], tuple(gone), reason)))
    for rdzv_id, node_ids in decided.surplus.items():
        reason = "the job was scaled down"
        commands.append((rdzv_id, Withdraw(runs[rdzv_id], node_ids, reason)))
    for rdzv_id, node_ids in decided.places.items():
        commands.append((rdzv_id, Place(runs[rdzv_id], node_ids)))
    return commands


def _memberships(state: State) -> Iterable[tuple[str, NodeJob]]:
    """Name the nodes that are in a job, or were chosen for it."""
    rdzv_id = state.membership.rdzv_id
    ended = state.membership.round is not None and not state.membership.round.live
    for node_id in state.seats:
        yield node_id, NodeJob(rdzv_id, 0, "stopping" if ended else "seated")
    for node_id in state.waiting:
        yield node_id, NodeJob(rdzv_id, 0, "waiting")
    for node_id in state.stuck:
        yield node_id, NodeJob(rdzv_id, 0, "stopping")
    if state.membership.ended is None:
        for node_id in awaited(state):
            yield node_id, NodeJob(rdzv_id, 0, "placed")


def _with_gpus(jobs: Iterable[NodeJob], host: Host) -> list[NodeJob]:
    """Add how many GPUs each job has, and the jobs of which only something is left."""
    gpus = {rdzv_id: number for (rdzv_id, _), number in host.taken.items()}
    shown = [replace(job, gpus=gpus.get(job.rdzv_id, 0)) for job in jobs]
    names = {job.rdzv_id for job in shown}
    left = [NodeJob(name, number, "holding") for name, number in gpus.items() if name not in names]
    return [*shown, *left]


def _unknown(node_id: str) -> UnknownNodeError:
    return UnknownNodeError(
        f"no node {node_id} is known here; `rdzvctl nodes` shows those that are"
    )
