"""An observer's knowledge of a history, and its judgement: the guarantees, checked at every step.

The judge sees more than any part of the system: what is committed, what every agent receives, which
workers run where. Nothing here decides anything; every check raises `SafetyError` if it fails.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

import msgspec

from rdzv.agent.core import commands as agent_commands
from rdzv.agent.core import events as agent_events
from rdzv.agent.core.machine import Decision as AgentTransition
from rdzv.agent.core.machine import step as agent_step
from rdzv.agent.core.model import AgentState, Phase
from rdzv.core import rendezvous
from rdzv.core.commands import Command, Join, Leave, ReportStuck, Tick, Withdraw
from rdzv.core.events import (
    Event,
    JobQueued,
    JobScaled,
    NodeDeclined,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeStopped,
    NodeStuck,
    NodeSucceeded,
    NodesWithdrawn,
    RoundCompleted,
    RoundEnded,
    RoundSettled,
    RunEnded,
)
from rdzv.core.fleet import job_queue, nodes
from rdzv.core.fleet.job_queue import Demand, Host, Plan
from rdzv.core.fleet.node_resources import gpus_needed
from rdzv.core.kept_ranks import kept_workers
from rdzv.core.model import (
    MAX_DECLINED,
    UNMOVED,
    Assignment,
    Cause,
    JobSpec,
    Membership,
    Moved,
    Result,
    Round,
    Snapshot,
    SnapshotMark,
    State,
    placeholder,
)
from rdzv.core.rendezvous import Transition
from rdzv.core.snapshots import MAX_LOADS
from rdzv.errors import RendezvousError
from rdzv.messages import Closed, KeepCopies, Placed, Refused, RoundOver, Withdrawn
from rdzv.server.engine.jobs import Step
from rdzv.server.scheduling.fleet import NODES, Restrictions
from rdzv.stores.base import Record
from rdzv.stores.memory import MemoryStore
from rdzv.structs import replace, struct
from rdzv.transport.wire import read
from rdzv.v1 import rdzv_pb2 as pb
from tests.scenarios.language import write_events
from tests.support.builders import BrokenPromiseError, check_calm, check_step

if TYPE_CHECKING:
    from tests.sim.agents import Agent, Part, Workers
    from tests.sim.cluster import Server
    from tests.sim.loop import Process
    from tests.sim.parking import Parked
    from tests.sim.snapshots import Saved
    from tests.sim.world import World


HAPPENS_ONCE = frozenset({"RunBegan", "RoundCompleted", "RoundEnded", "RoundSettled", "RunEnded"})
"""Events that occur at most once in a run, or in a round whose number is among their fields."""

Decided = tuple[State, Command, Transition, int]
"""A step: the state before it, its command, its result, and the time."""


class SafetyError(BrokenPromiseError):
    """A guarantee was broken."""


class LivenessError(BrokenPromiseError):
    """Nothing is wrong any more, yet nothing runs."""


A_MOMENT_MS = 20_000
"""Other jobs learn of a quarantine a moment later, and the server may pause in between."""
REPEATABLE = (ReportStuck, KeepCopies)
"""Commands of an agent that may be carried out again: a repeated fetch replaces the first one."""
UNHEARD = "while it was silent"
"""Sent to a node that returns to a job that continued without it and already knew of its seat."""
CALM_SHARE = 0.03
"""The share of steps that are also repeated, ticked early and crashed after; it costs ten steps."""


@struct(frozen=True)
class Said:
    """A command, when it was decided, and by which server."""

    at_ms: int
    command: Command | str
    server: int


class Judge:
    """Everything an observer knows, and the checks that follow from it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.era = 0
        """Grows whenever the store loses committed data."""
        self.blameless = True
        """Whether no worker has failed by itself so far, and none for an unknowable reason."""
        self.honest = True
        """No node has claimed of a parked worker what is not so."""
        self.honest_of_snapshots = True
        """Likewise of snapshots."""
        self.lineages: dict[Workers, int] = {}
        """The round in which the workers of each round, or those that they carry on, were new."""
        self.offered: dict[tuple[str, Workers], int] = {}
        """The most steps that a parked worker of a round has sealed, as its node last reported."""
        self.claimed: dict[tuple[str, SnapshotMark], set[int]] = {}
        """By job and mark: the parts that nodes have ever reported to hold."""
        self.stored: dict[str, Membership] = {}
        self.rounds: dict[Workers, Round] = {}
        """Every round that was committed; after the store's loss, as it was adopted."""
        self.first_rounds: dict[Workers, Round] = {}
        self.over: set[Workers] = set()
        """Rounds whose end was committed."""
        self.ended: dict[tuple[str, str], set[str]] = {}
        """Why a run was closed; a server that forgot it may close it once more."""
        self.given_up: set[tuple[str, Workers]] = set()
        """The seats, by node and round, that a server has given up."""
        self.succeeded_on: set[tuple[str, Workers]] = set()
        self.left_with_0: set[tuple[str, Workers]] = set()
        """Where workers have exited with 0 because their node leaves."""
        self.started: set[tuple[str, Workers]] = set()
        self.highest_round: dict[str, int] = {}
        self.replaced: set[Workers] = set()
        """Rounds that a server without memory has announced anew, with other participants."""
        self.known_ms: dict[Workers, int] = {}
        """Since when it is stored that such a round exists, or existed."""
        self.moved: dict[tuple[str, Workers], Moved] = {}
        """How far the workers of a round had come on a node when they were gone."""
        self.tallies: dict[tuple[str, str], Counter[str]] = {}
        """How often rounds of each run ended by each cause, as stored, and the present streaks."""
        self.leadership = 0
        self.incarnations: dict[str, tuple[int, str]] = {}
        self.moves: set[str] = set()
        """Jobs in which newcomers, a late store host or everyone's success ended a round or run."""
        self.placed_once: set[tuple[str, str, str]] = set()
        """Every choice of a node for a run, ever."""
        self.trace: dict[str, list[Said]] = {}
        self._decided: dict[tuple[int, str], list[Decided]] = {}
        """Each server's decisions about a job since its last commit, step by step."""
        self._decided_ms: dict[tuple[int, str], int] = {}

    # -------------------------------------------------------------- the cores

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe every step that a server makes."""
        decide, step_nodes = rendezvous.step, nodes.step
        plan = job_queue.place_queued_jobs

        def watched_step(state: State, command: Command, now_ms: int) -> Transition:
            try:
                transition = decide(state, command, now_ms)
            except RendezvousError as error:
                self.world.count(f"refused {type(command).__name__}: {error.code}")
                raise
            except Exception as error:
                self.world.fail(error)
                raise
            self._watch_step(transition, state, command, now_ms)
            return transition

        def watched_nodes(
            before: nodes.Nodes, command: nodes.NodesCommand, now_ms: int
        ) -> nodes.NodesTransition:
            transition = step_nodes(before, command, now_ms)
            self._watch_nodes(before, command, transition, now_ms)
            return transition

        def watched_plan(
            demands: Iterable[Demand], hosts: Iterable[Host], *, settled: bool = True
        ) -> Plan:
            demands, hosts = tuple(demands), tuple(hosts)
            decided = plan(demands, hosts, settled=settled)
            self._watch_plan(demands, hosts, decided, settled)
            return decided

        with (
            patch.object(rendezvous, "step", watched_step),
            patch.object(nodes, "step", watched_nodes),
            patch.object(job_queue, plan.__name__, watched_plan),
        ):
            yield

    def _watch_step(
        self, transition: Transition, before: State, command: Command, now_ms: int
    ) -> None:
        process: Process = asyncio.get_running_loop()  # type: ignore[assignment]
        world = self.world
        world.count(f"command {type(command).__name__}")
        if world.log is not None:
            at = f"server {process.name}"
            world.note(f"{at}: {command} -> {_words(transition.events)}")
        for event in transition.events:
            world.count(f"event {type(event).__name__}")
        self._raising(check_step, before, command, transition, now_ms)
        if world.check_random.random() < CALM_SHARE:
            # A join for which the end of its run was waiting would begin the next one.
            ends = isinstance(command, Join) and transition.state.membership.ended is not None
            self._raising(check_calm, Tick() if ends else command, transition, now_ms)
        rdzv_id = transition.state.membership.rdzv_id
        key = (id(process), rdzv_id)
        steps = self._decided.setdefault(key, [])
        while steps and steps[-1][2].state is not before:
            # It was dropped for an earlier event, or is stored.
            steps.pop()
        steps.append((before, command, transition, now_ms))
        self._decided_ms[key] = now_ms

    def _raising(self, check: object, *arguments: object) -> None:
        try:
            check(*arguments)  # type: ignore[operator]
        except BrokenPromiseError as error:
            self.world.fail(SafetyError(str(error)))

    def _watch_nodes(
        self,
        before: nodes.Nodes,
        command: nodes.NodesCommand,
        transition: nodes.NodesTransition,
        now_ms: int,
    ) -> None:
        world, after = self.world, transition.nodes
        world.count(f"nodes {type(command).__name__}")
        if world.log is not None and not isinstance(command, nodes.Hear):
            world.note(f"{command} -> {_words(transition.events)}")
        wake_at_ms = before.wake_at_ms
        if isinstance(command, Tick):
            early = wake_at_ms is None or now_ms < wake_at_ms
            if early and (transition.events or after is not before):
                self.fail("timer honesty: an early tick of the nodes core was no no-op")
            if transition.wake_at_ms is not None and transition.wake_at_ms <= now_ms and not early:
                self.fail("busy loop: the nodes core wakes at once")
        due = [record.expires_at_ms for record in after.records.values()]
        if due and (after.wake_at_ms is None or after.wake_at_ms > min(due)):
            self.fail(f"timer honesty: the nodes core sleeps until {after.wake_at_ms}, {min(due)=}")
        for event in transition.events:
            world.count(f"event nodes.{type(event).__name__}")
            old = before.records.get(event.node_id)
            if old is not None and event.incarnation < old.incarnation:
                self._check_went_back(before, old)
            if isinstance(event, nodes.NodeGivenUp):
                self._check_lost(event, before.records[event.node_id], now_ms)

    def _check_went_back(self, server: nodes.Nodes, old: nodes.NodeRecord) -> None:
        """A node's incarnation never goes back, except at a server that has been deposed.

        That server may have read the higher one in what its successor has stored. Unlike here, it
        can send nothing to nodes any more.
        """
        leadership = old.incarnation >> nodes.COUNTER_BITS
        if not server.leadership < leadership <= self.leadership:
            self.fail(f"fencing: the incarnation of {old.node_id} went back")

    def _check_lost(self, event: nodes.NodeGivenUp, record: nodes.NodeRecord, now_ms: int) -> None:
        """No node is lost too early, and none whose heartbeats get through."""
        process: Process = asyncio.get_running_loop()  # type: ignore[assignment]
        if not record.instance and now_ms - record.since_ms < 30_000:
            self.fail(f"silence: {event.node_id} was given up within the grace of a take-over")
        if record.stream is None or process.now_ms() - process.resumed_ms < 30_000:
            return
        for server in self.world.servers:
            connection = server.connection_of(record.stream)
            if server.process is process and connection is not None:
                silent_ms = self.world.agenda.now_ms - connection.heard_ms
                if silent_ms < record.lease_ms - 2_000:
                    self.fail(f"lease: {event.node_id} was lost, and spoke {silent_ms} ms ago")

    # -------------------------------------------------------------- placement

    def _watch_plan(
        self, demands: Sequence[Demand], hosts: Sequence[Host], plan: Plan, settled: bool
    ) -> None:
        """Check a plan by itself: which jobs may get no nodes, and which may not be skipped."""
        queue = sorted(demands, key=lambda job: (-job.spec.priority, job.at_ms, job.rdzv_id))
        waiting: list[Demand] = []
        room = {host.node_id: host for host in hosts}
        for job in queue:
            given = plan.places.get(job.rdzv_id, ())
            self.world.counts["plan: places"] += bool(given)
            missing = job.min_nodes - len(job.here - job.going)
            if missing > 0 and given and len(given) < missing:
                self.fail(f"gang: {job.rdzv_id} gets {given}, and needs {missing}")
            if given and len(given) + len(job.here - job.going) > job.max_nodes:
                self.fail(f"gang: {job.rdzv_id} gets {given} above {job.max_nodes} nodes")
            if missing > 0 and not given:
                if job.rdzv_id in plan.hopeless:
                    left = {h.node_id for h in hosts if self._could_have(job, h, now=False)}
                    tried = len(job.declined) >= MAX_DECLINED
                    enough = len(left | job.here) >= job.min_nodes and not tried
                    if not settled or job.seated or not job.declined or enough:
                        self.fail(f"hopeless: {job.rdzv_id} is given up")
                    continue
                waiting.append(job)
                if not plan.waits[job.rdzv_id].reason:
                    self.fail(f"always a reason: {job.rdzv_id} is not placed")
        for job in queue:
            for node_id in plan.places.get(job.rdzv_id, ()):
                self._check_place(job, node_id, room, waiting)
                host = room[node_id]
                gpus = gpus_needed(job.spec, host.resources)
                taken = {**host.taken, (job.rdzv_id, job.run): gpus}
                room[node_id] = replace(host, taken=taken)
        if waiting:
            free = [h for h in room.values() if self._could_have(waiting[0], h, now=True)]
            if len(free) >= waiting[0].missing:
                self.fail(f"starved: {waiting[0].rdzv_id} waits, and could have {free}")

    def _check_place(
        self, job: Demand, node_id: str, room: dict[str, Host], waiting: Sequence[Demand]
    ) -> None:
        where = f"{job.rdzv_id} is placed on {node_id}"
        if node_id not in room or not self._could_have(job, room[node_id], now=True):
            self.fail(f"capacity: {where}, which is {room.get(node_id)}")
            return
        for other in waiting:
            before = (-other.spec.priority, other.at_ms) < (-job.spec.priority, job.at_ms)
            could = {h.node_id for h in room.values() if self._could_have(other, h, now=False)}
            could -= {h.node_id for h in room.values() if h.cordoned}
            # For jobs with too few nodes in any case, none is reserved.
            before = before and len(could | (other.here - other.going)) >= other.min_nodes
            if before and self._could_have(other, room[node_id], now=False):
                self.fail(f"order: {where}, and {other.rdzv_id} waits for it")

    def _could_have(self, job: Demand, host: Host, *, now: bool) -> bool:
        if host.node_id in job.here or host.node_id in job.declined:
            return False
        if now and (host.unusable or (job.rdzv_id, job.run) in host.taken):
            return False
        return fits(job.spec, host, now=now)

    def _check_placed(self, server: Server, after: Membership, new: set[str]) -> None:
        """No node is given more than it has; nothing is placed on a cordoned node."""
        world = self.world
        if cordoned := new & world.operators.cordoned:
            self.fail(f"cordon: {after.rdzv_id} is placed on {cordoned}")
        if bad := new & self._quarantined(server):
            self.fail(f"quarantine: {after.rdzv_id} is placed on {bad}")
        for node_id in new:
            resources = world.specs[node_id].resources
            if resources is None:
                self.fail(f"{after.rdzv_id} is placed on {node_id}, which takes no such job")
                continue
            mine = [
                gpus_needed(job.submission.spec, resources)
                for job in self.stored.values()
                if job.submission is not None
                and job.ended is None
                and node_id in job.submission.placed
            ]
            # After the store's loss a node may have been given more GPUs than it has.
            needs_gpus = gpus_needed(after.submission.spec, resources) > 0
            too_many = needs_gpus and sum(mine) > len(resources.gpus)
            if len(mine) > resources.capacity or too_many:
                self.fail(f"capacity: {node_id} has {len(mine)} jobs and {sum(mine)} GPUs in use")

    def _quarantined(self, server: Server) -> set[str]:
        """Return the nodes that have been quarantined for more than a moment, as stored."""
        stored = self.world.disk.document(NODES)
        record = msgspec.json.decode(stored, type=Restrictions).quarantine
        now_ms = server.process.now_ms()
        return {
            name
            for name, held in record.quarantined(now_ms).items()
            if held.at_ms + A_MOMENT_MS < now_ms
        }

    def _check_quarantine(self, server: Server, step: Step) -> None:
        """No round of a submitted job is formed with a node that should be released."""
        membership = step.after.membership
        completed = [e.round for e in step.events if isinstance(e, RoundCompleted)]
        if not completed or membership.submission is None:
            return
        bad = self._quarantined(server) & {p.node_id for p in completed[-1].participants}
        if bad & set(membership.submission.placed):
            self.fail(f"quarantine: {membership.rdzv_id} goes on with {bad}")
        if step.before.barred and not bad:
            self.world.count("quarantine: goes on without")

    def told_placed(self, agent: Agent, placed: Placed) -> None:
        self.world.count("told placed")
        if (agent.name, placed.rdzv_id, placed.run) not in self.placed_once:
            self.fail(f"durability: {agent.name} hears of {placed}, which is not stored")

    def fail(self, text: str) -> None:
        self.world.fail(SafetyError(text))

    # -------------------------------------------------------------- the store

    def took_over(self, server: Server, leadership: int) -> None:
        if leadership <= self.leadership:
            self.fail(f"fencing: leadership {leadership} after {self.leadership}")
        self.leadership = leadership
        # After a takeover nobody knows a node that was welcomed but holds no place.
        self.incarnations = {}
        for membership in self.stored.values():
            for seat in membership.round.participants if membership.round else ():
                highest, _ = self.incarnations.get(seat.node_id, (0, ""))
                self.incarnations[seat.node_id] = (max(highest, seat.incarnation), "")

    def rolled_back(self, stored: dict[str, Membership]) -> None:
        """The store has lost data; what was announced before may be announced anew."""
        self.era += 1
        self.world.operators.cordoned.clear()
        self.blameless = False
        self.incarnations.clear()
        self.stored = stored
        self.known_ms = {
            (rdzv_id, membership.run, membership.round.number): self.world.agenda.now_ms
            for rdzv_id, membership in stored.items()
            if membership.round is not None
        }

    def committed(self, server: Server, after: Membership) -> None:
        """Note what is durable now, step by step; nothing that was durable may be lost by it."""
        steps = self._decided.get((id(server.process), after.rdzv_id), [])
        if steps and steps[-1][2].state.membership == after:
            for step in steps:
                self._note_stored(server, step[2].state.membership, step)
            steps.clear()
        else:
            self._note_stored(server, after, None)

    def recorded(self, kept: MemoryStore, records: Sequence[Record]) -> None:
        """Nothing that happens once is in a job's history twice, whatever became of its commit."""
        for record in records:
            rows = kept.records[record.rdzv_id]
            same = [
                r for r in rows if (r.run, r.name, r.data) == (record.run, record.name, record.data)
            ]
            again = sum(1 for row in rows if row is record) > 1
            if again or (record.name in HAPPENS_ONCE and len(same) > 1):
                self.fail(f"history: {record.name} of {record.rdzv_id} twice: {record.data}")

    def _note_stored(self, server: Server, after: Membership, decided: Decided | None) -> None:
        rdzv_id = after.rdzv_id
        before = self.stored.get(rdzv_id)
        self.stored[rdzv_id] = after
        if after.submission is not None:
            placed = set(after.submission.placed)
            if before is not None and before.run == after.run and before.submission is not None:
                placed -= set(before.submission.placed)
            self.placed_once |= {(node_id, rdzv_id, after.run) for node_id in placed}
            self._check_placed(server, after, placed)
        if before is not None:
            self._check_durable(before, after)
        round_ = after.round
        if round_ is not None:
            workers = (rdzv_id, after.run, round_.number)
            self.first_rounds.setdefault(workers, round_)
            if workers not in self.rounds and not round_.adopted:
                self._check_kept(workers, before, round_)
                self._check_snapshots(workers, before, round_, decided)
            first = self.rounds.setdefault(workers, round_)
            self.known_ms.setdefault(workers, self.world.agenda.now_ms)
            if first.participants != round_.participants:
                if self.era == 0:
                    self.fail(f"consistency: two versions of {workers}")
                self.rounds[workers] = round_
                if not round_.adopted:
                    self.replaced.add(workers)
            if round_.end is not None:
                self.over.add(workers)
                self.world.standbys.note_end(workers, round_.end)
        if after.ended is not None:
            self.ended.setdefault((rdzv_id, after.run), set()).add(after.ended.reason)
        for earlier in after.earlier:
            self.ended.setdefault((rdzv_id, earlier.run), set()).add(earlier.ended.reason)
        if decided is not None:
            self._note_given_up(*decided[:3])
            self._check_budgets(decided[0], decided[1], decided[2], after)

    def _round_before(self, workers: Workers) -> Workers | None:
        """Return the previous round of the same run, as stored."""
        rdzv_id, run, number = workers
        numbers = [n for job, of, n in self.rounds if (job, of) == (rdzv_id, run) and n < number]
        return (rdzv_id, run, max(numbers)) if numbers else None

    def _check_kept(self, workers: Workers, before: Membership | None, round_: Round) -> None:
        """A kept worker took part in the previous round, is not at fault, and is still there."""
        keepers = [p for p in round_.participants if p.kept]
        if not keepers:
            return
        self.world.count("rounds with kept workers")
        last = before.round if before is not None else None
        if last is None or last.end is None or last.number + 1 < round_.number:
            # The previous round was adopted, or has ended, in the same step in which this one
            # began.
            return
        if not last.end.keep:
            self.fail(f"keeping: {workers} keeps workers after {last.end}")
        known: dict[int, Parked] = {}
        for participant in keepers:
            for local_rank in participant.kept:
                own = {(f.node_id, f.local_rank) for f in last.end.failures if not f.suspect}
                if (participant.node_id, local_rank) in own:
                    self.fail(f"keeping: {participant.node_id} keeps the culprit {local_rank}")
                for parked in self._parked(participant.node_id, workers[0], local_rank):
                    rank = participant.rank_first + local_rank
                    if parked.workers == (*workers[:2], last.number) and self.honest:
                        self._check_step(round_, rank, parked)
                        known[rank] = parked
        if any(parked.shards > 1 for parked in known.values()):
            self._check_parts(workers, last, round_, known)

    def lineage(self, workers: Workers, *, carried: bool) -> int:
        """Return which lineage the workers of a round carry on, or begin."""
        before = self._round_before(workers) if carried else None
        known = self.lineages.get(before, workers[2]) if before else workers[2]
        return self.lineages.setdefault(workers, known)

    def _check_snapshots(
        self, workers: Workers, before: Membership | None, round_: Round, decided: Decided | None
    ) -> None:
        """What a round loads is claimed by its nodes part by part, and really one state."""
        mark = round_.snapshot
        held = [one for p in round_.participants for one in self._saved(p.node_id, workers[0])]
        if mark is not None and decided is not None:
            self.world.count("rounds with snapshots")
            self.world.counts["rounds that load snapshots"] += bool(round_.snapshot_loads)
            names = {p.node_id for p in round_.participants}
            said = _said_of_snapshots(decided)
            parts = {one.shard for name in names for one in said.get(name, ()) if one.mark == mark}
            if parts != set(range(mark.shards)):
                self.fail(f"snapshots: {workers} begins with {mark}, and of it are {parts}")
            sealed = {one.workers for one in held if one.mark == mark}
            if len(sealed) > 1 and not self.era and self.honest_of_snapshots:
                self.fail(f"snapshots: {mark} of {workers} is mixed from {sealed}")
        if before is not None and before.run == workers[1] and decided is not None:
            said = _said_of_snapshots(decided)
            claimed = [one for p in round_.participants for one in said.get(p.node_id, ())]
            self._check_pinned(workers, before.round, round_, claimed)

    def _check_pinned(
        self, workers: Workers, last: Round | None, round_: Round, claimed: Sequence[Snapshot]
    ) -> None:
        """The snapshots that the last round has loaded, or newer ones, are loaded again."""
        mark = last.snapshot if last is not None else None
        if last is None or mark is None or round_.source is not None or self.era:
            return
        if not last.snapshot_loads or last.snapshot_loads >= MAX_LOADS:
            return
        parts = {one.shard for one in claimed if one.mark == mark}
        if parts == set(range(mark.shards)):
            if round_.snapshot is None or round_.snapshot < mark:
                self.fail(f"snapshots: {workers} does not load {mark}, of which all is held")
            self.world.count("rounds that could load what was pinned")

    def _saved(self, node_id: str, rdzv_id: str) -> Iterator[Saved]:
        """Yield the real content of a node's slots; if its name is used twice, those of both."""
        for agent in self.world.agents:
            if agent.name == node_id and rdzv_id in agent.parts:
                yield from agent.parts[rdzv_id].runner.slots.all()

    def claims(self, rdzv_id: str, held: Iterable[Snapshot]) -> None:
        """Note what a node reports to hold, truly or not."""
        for one in held:
            self.claimed.setdefault((rdzv_id, one.mark), set()).add(one.shard)

    def saved_in_round(self, rdzv_id: str) -> SnapshotMark | None:
        """Return the newest mark that the nodes of a live round have saved, if there is one."""
        round_ = self.stored[rdzv_id].live_round
        if round_ is None or self.era or not self.honest_of_snapshots:
            return None
        names = [participant.node_id for participant in round_.participants]
        return _newest_saved(round_, {name: [*self._saved(name, rdzv_id)] for name in names})

    def check_announced(self, rdzv_id: str, mark: SnapshotMark) -> None:
        """All nodes of a live round know that this mark is whole, so they may overwrite others."""
        membership = self.stored[rdzv_id]
        round_ = membership.live_round
        for agent in self.world.agents:
            part = agent.parts.get(rdzv_id)
            if round_ is None or part is None or not agent.alive:
                continue
            if part.runner.workers == (rdzv_id, membership.run, round_.number):
                self.world.count("nodes that know what is whole")
                if part.state.watermark is None or part.state.watermark < mark:
                    self.fail(f"snapshots: {agent.name} has not heard that {mark} is whole")

    def _check_parts(
        self, workers: Workers, last: Round, round_: Round, known: Mapping[int, Parked]
    ) -> None:
        """Each part of a sharded state is held, at the newest step that all parts have sealed."""
        self.world.count("rounds with kept parts")
        if round_.world_size != last.world_size:
            self.world.count("rounds that divide kept parts anew")
        if len(known) < kept_workers(round_) or not round_.resume_step:
            # Some have died since they were offered; or nothing is lost, because nothing was
            # sealed.
            return
        (shards,) = {parked.shards for parked in known.values()}
        whole = [parked for parked in known.values() if not parked.torn]
        held = {parked.shard for parked in whole if parked.holds(round_.resume_step)}
        if held != set(range(shards)):
            self.fail(f"keeping: {workers} lacks parts of step {round_.resume_step}, has {held}")
        furthest = [max(p.sealed for p in whole if p.shard == n) for n in range(shards)]
        if round_.resume_step != min(furthest):
            self.fail(f"keeping: {workers} resumes at {round_.resume_step}, and has {furthest}")

    def _parked(self, node_id: str, rdzv_id: str, local_rank: int) -> Iterator[Parked]:
        """Yield the parked workers of a node; if its name is used twice, those of both."""
        for agent in self.world.agents:
            if agent.name == node_id and rdzv_id in agent.parts:
                parked = agent.parts[rdzv_id].runner.parking.parked.get(local_rank)
                if parked is not None:
                    yield parked

    def _check_step(self, round_: Round, rank: int, parked: Parked) -> None:
        resume_step = round_.resume_step or 0
        behind = parked.sealed > resume_step and parked.shards == 1
        if not parked.torn and behind:
            self.fail(f"keeping: {resume_step=} is behind {parked}, RANK {rank}")
        if rank == round_.source and (parked.torn or parked.sealed != resume_step):
            self.fail(f"keeping: the source at {resume_step=} is {parked}, RANK {rank}")
        if round_.source is None and (parked.torn or parked.sealed):
            self.fail(f"keeping: nobody heals {parked}, RANK {rank}")
        if abs(parked.sealed - resume_step) > 1:
            self.fail(f"keeping: {parked}, RANK {rank}, is not in lock-step at {resume_step=}")

    def _check_durable(self, before: Membership, after: Membership) -> None:
        if after.next_round < before.next_round:
            self.fail(f"durability: rounds went back, {before.next_round} to {after.next_round}")
        if after.run != before.run:
            if after.run_number <= before.run_number:
                self.fail("durability: the number of runs went back")
            return
        if before.ended is not None and after.ended != before.ended:
            self.fail(f"durability: closed run {after.run} changed")
        # A time ahead of the new server's clock counts as its present time.
        pairs = list(zip(before.restarts, after.restarts, strict=False))
        if len(pairs) < len(before.restarts) or any(new > old for old, new in pairs):
            self.fail("durability: a spent restart was forgotten")
        most = after.settings.max_restarts
        if most is not None and not after.settings.restart_window_ms and len(after.restarts) > most:
            self.fail(f"charge: {len(after.restarts)} restarts of {most} were spent")
        old, new = before.round, after.round
        if old is None:
            return
        if new is None or new.number < old.number:
            self.fail(f"durability: round {old.number} was forgotten")
        elif new.number == old.number and old.end is not None and new.end is None:
            self.fail(f"durability: round {old.number} had ended, and is live again")
        elif new.number == old.number and not set(old.succeeded) <= set(new.succeeded):
            self.fail(f"durability: a success in round {old.number} was forgotten")

    def _check_budgets(
        self, before: State, command: Command, transition: Transition, after: Membership
    ) -> None:
        """Count independently what rounds end by, and how long each is waited for."""
        if self.era:
            return
        mine = self.tallies.setdefault((after.rdzv_id, after.run), Counter())
        round_, seats = before.membership.round, {*before.seats}
        said = _said_of_snapshots((before, command, transition, 0))
        held = dict(said)
        for event in transition.events:
            match event:
                case NodeStopped():
                    # Its reports count, even if it is released in the same step.
                    seats.discard(event.node_id)
                    offers = command.kept if isinstance(command, Join) else ()
                    workers = (after.rdzv_id, after.run, event.round)
                    steps = (offer.step or 0 for offer in offers)
                    self.offered[event.node_id, workers] = max(steps, default=0)
                case RoundEnded():
                    assert round_ is not None
                    round_ = replace(round_, end=event.end)
                case NodeLost() | NodeLeft() | NodeStuck():
                    # Its snapshots are lost, even if it has stopped in the same step.
                    held.pop(event.node_id, None)
                    if round_ is not None and event.node_id in seats:
                        round_ = replace(round_, gone=(*round_.gone, event.node_id))
                case NodeJoined():
                    # Its former instance may have departed in the same step.
                    held[event.node_id] = said.get(event.node_id, ())
                case RoundSettled():
                    assert round_ is not None
                    self._count_end(mine, after, round_, event, held)
                    self._check_spent(mine, after, event)
                case RoundCompleted():
                    self._check_backoff(mine, after, event.round)
                    round_ = event.round

    def _count_end(
        self,
        mine: Counter[str],
        after: Membership,
        round_: Round,
        settled: RoundSettled,
        held: Mapping[str, Sequence[Snapshot]],
    ) -> None:
        """Count an end by its cause, and the rounds in a row that failed soon, or in vain."""
        assert round_.end is not None
        mine[settled.cause] += 1
        failed = settled.cause is Cause.WORKER_FAILURE
        saved = _newest_saved(round_, held) is not None
        moved = self._moved_on(mine, after, round_) or saved
        if moved or round_.end.at_ms - round_.at_ms >= 60_000:
            mine["row"] = 0
        elif failed:
            mine["row"] += 1
        if moved:
            mine["in vain"] = 0
        elif failed and mine["restarts"]:
            mine["in vain"] += 1
        mine["restarts"] += failed
        mine["free from"] = 0
        if failed and mine["row"] > 1:
            waits_ms = after.settings.restart_backoff_ms * 2 ** (mine["row"] - 2)
            waits_ms = min(waits_ms, after.settings.restart_backoff_max_ms)
            mine["free from"] = round_.end.at_ms + waits_ms

    def _moved_on(self, mine: Counter[str], after: Membership, round_: Round) -> bool:
        """Return whether this round has moved the job on, by the reports of stopped nodes."""
        workers = (after.rdzv_id, after.run, round_.number)
        names = [p.node_id for p in round_.participants if p.node_id not in round_.gone]
        said = [self.moved.get((name, workers), UNMOVED) for name in names]
        steps = [one.furthest_step for one in said if one.furthest_step is not None]
        # One higher, so that 0 stands for a job without reports.
        further = max(steps, default=-1) + 1 > mine["step"]
        mine["step"] = max(mine["step"], *(step + 1 for step in (*steps, -1)))
        sealed = max((self.offered.get((name, workers), 0) for name in names), default=0)
        kept_on = round_.resume_step is not None and sealed > round_.resume_step
        return further or kept_on or any(one.snapshot_changed for one in said)

    def _check_spent(self, mine: Counter[str], after: Membership, settled: RoundSettled) -> None:
        settings, ended = after.settings, after.ended
        preempted, stores = mine[Cause.NODE_LOST] + mine[Cause.NODE_LEFT], mine[Cause.STORE_HOST]
        spent, step = after.spent, mine["step"] - 1
        counted = (
            spent.preemptions,
            spent.store_failures,
            spent.without_progress,
            spent.furthest_step,
        )
        if counted != (preempted, stores, mine["in vain"], None if step < 0 else step):
            self.fail(f"charge: {counted} were counted of {mine}")
        in_vain_most = settings.no_progress_restarts - 1 if settings.no_progress_restarts else None
        for count, most, word in (
            (preempted, settings.max_preemptions, "preemptions spent"),
            (stores, settings.max_store_failures, "store failures spent"),
            (mine["in vain"], in_vain_most, "no progress: none"),
        ):
            over = most is not None and count > most
            failed = ended is not None and ended.result is Result.FAILED and word in ended.reason
            if over != failed:
                self.fail(f"budget: {word}, {count} of {most} with {settled}, and {ended}")
            if over:
                self.world.count(f"failed: {word}")

    def _check_backoff(self, mine: Counter[str], after: Membership, new: Round) -> None:
        if len(set(self.world.swarm.clock_offsets_ms)) > 1:
            return
        if new.at_ms < mine["free from"]:
            self.fail(f"backoff: round {new.number} is early, {mine['row']} failed in a row")
        self.world.counts["backed off"] += mine["free from"] > 0

    def _note_given_up(self, before: State, command: Command, transition: Transition) -> None:
        """Note which nodes' workers may still run, as far as the server knows."""
        membership = before.membership
        for event in transition.events:
            lost = isinstance(event, NodeLost | NodeStuck)
            # A node that announced its leave, without a confirmation, counts as left.
            itself = isinstance(command, Leave) and command.node_id == getattr(event, "node_id", "")
            left = isinstance(event, NodeLeft) and not itself
            if (lost or left) and membership.round is not None:
                workers = (membership.rdzv_id, membership.run, membership.round.number)
                self._give_up(event.node_id, workers)  # type: ignore[union-attr]
            if isinstance(event, RunEnded) and membership.round is not None:
                # Another run took the place of this one, whose nodes are all out of sight.
                workers = (membership.rdzv_id, membership.run, membership.round.number)
                for node_id in before.seats.keys() & before.away.keys():
                    self._give_up(node_id, workers)

    def _give_up(self, node_id: str, workers: Workers) -> None:
        """Note that a seat was given up, perhaps under its holder's placeholder."""
        self.given_up.add((node_id, workers))
        round_ = self.first_rounds.get(workers)
        for group_rank, participant in enumerate(round_.participants if round_ else ()):
            if placeholder(group_rank) == node_id:
                self.given_up.add((participant.node_id, workers))

    # -------------------------------------------------------------- what is published

    def published(self, server: Server, step: Step, *, last: bool) -> None:
        rdzv_id = step.after.membership.rdzv_id
        at_ms = self._decided_ms.get((id(server.process), rdzv_id), self.world.agenda.now_ms)
        said = Said(at_ms - server.process.offset_ms, step.command, server.number)
        self.trace.setdefault(rdzv_id, []).append(said)
        stored = step.after.membership == self.stored.get(rdzv_id)
        if last and not stored and step.after.membership.run:
            current = server.store.leadership == self.world.disk.leader
            if current and self.era == server.era:
                self.fail("durability: what is published is not what is stored")
        for event in step.events:
            self._check_event(step, event)
        self._check_quarantine(server, step)
        if self.blameless and step.after.membership.restarts:
            self.fail("charge: a restart was spent, and no worker has failed by itself")

    def _check_event(self, step: Step, event: Event) -> None:
        membership = step.after.membership
        workers = (membership.rdzv_id, membership.run, 0)
        match event:
            case RoundEnded(end=end) if end.cause is Cause.STORE_HOST:
                self.moves.add(membership.rdzv_id)
            case RoundEnded(end=end) if end.cause is Cause.NODES_JOINED:
                self.moves.add(membership.rdzv_id)
                if not (step.before.waiting or step.after.waiting):
                    self.fail("calm: a round ended for newcomers, and nobody waits")
            case NodeSucceeded():
                done = membership.round.succeeded if membership.round else ()
                if event.node_id not in done:
                    self.fail(f"durability: {event} is not stored")
            case JobScaled():
                if membership.scaled != (event.min_nodes, event.max_nodes):
                    self.fail(f"scale: {event} is not stored")
                live = membership.round is not None and membership.round.live
                if live and len(step.after.seats) > event.max_nodes:
                    self.fail(f"scale: a round of {len(step.after.seats)} nodes goes on: {event}")
            case NodeDeclined() if membership.submission is not None:
                if event.node_id not in {one.node_id for one in membership.submission.declined}:
                    self.fail(f"durability: {event} is not stored")
            case JobQueued():
                self.moves.add(membership.rdzv_id)
            case NodesWithdrawn(node_ids=node_ids):
                # If a queued job takes its nodes back, seats may have been given up in the same
                # step.
                state = step.before if isinstance(step.command, Withdraw) else step.after
                if seated := set(node_ids) & state.seats.keys():
                    self.fail(f"{seated} hear that they are withdrawn, and have seats")
            case RoundCompleted():
                count = len(event.round.participants)
                settings = membership.settings
                bounds = membership.scaled or (settings.min_nodes, settings.max_nodes)
                if not bounds[0] <= count <= bounds[1]:
                    self.fail(f"barrier: round {event.round.number} has {count} nodes")
            case RunEnded():
                ended = event.ended
                if ended.result is Result.SUCCEEDED or self.world.swarm.specs:
                    self.moves.add(membership.rdzv_id)
                if self.blameless and ended.failures:
                    self.fail(f"charge: {ended} and no worker failed by itself")
                if ended.result is Result.STOPPED and step.before.membership.stopping:
                    self._check_stopped(membership.rdzv_id, event.run)
                round_ = step.before.membership.round
                if ended.result is Result.SUCCEEDED and round_ is not None and self.era == 0:
                    workers = (membership.rdzv_id, event.run, round_.number)
                    done = self.succeeded_on | (
                        self.left_with_0
                        if any(
                            (p.node_id, workers) in self.succeeded_on for p in round_.participants
                        )
                        else set()
                    )
                    for participant in round_.participants:
                        if (participant.node_id, workers) not in done:
                            self.fail(
                                f"success: {participant.node_id} has not succeeded in {workers}"
                            )

    def _check_stopped(self, rdzv_id: str, run: str) -> None:
        """A stopped run has no workers whose agent is dead, except those that survive SIGKILL."""
        for agent in self.world.agents:
            for part in agent.parts.values():
                workers = part.runner.workers
                if agent.alive or part.runner.stuck or workers is None:
                    continue
                if workers[:2] == (rdzv_id, run):
                    self.fail(f"stopped: {workers} run on {agent.name}, whose agent is dead")

    # -------------------------------------------------------------- the nodes

    def welcomed(self, server: Server, agent: Agent, incarnation: int) -> None:
        """Incarnations of a node never go back, and two lines of instances never share one."""
        if server.store.leadership != self.leadership:
            return
        highest, lineage = self.incarnations.get(agent.name, (0, ""))
        same = lineage in ("", agent.lineage)
        if incarnation < highest or (incarnation == highest and not same):
            self.fail(f"fencing: incarnation {incarnation} of {agent.name} after {highest}")
        self.incarnations[agent.name] = (incarnation, agent.lineage)

    def turned_away(self, server: Server, agent: Agent) -> None:
        """No server locks out the instance that holds all seats of its node, as stored."""
        record = server.driver.leases.records.get(agent.name)
        if record is None or record.instance or server.store.leadership != self.leadership:
            return
        if server.driver.streams.closed:
            return  # It lets nobody in.
        rounds = [m.round for m in self.stored.values() if m.round is not None and not m.ended]
        seats = [p for round_ in rounds for p in round_.participants if p.node_id == agent.name]
        if seats and all(seat.instance.id == agent.instance for seat in seats):
            self.fail(f"locked out: {agent.instance}, which holds a seat, is not let in")

    def heard(self, part: Part, message: pb.ServerMessage) -> None:
        """Whatever an agent receives must be true: committed, and the same for all."""
        body = message.WhichOneof("body")
        self.world.count(f"told {body}")
        if self.world.log is not None:
            said = str(getattr(message, body or "")).replace("\n", " ")
            self.world.note(f"{part.agent.instance} hears {body}: {said}")
        if body == "round_completed":
            line = message.round_completed
            self._check_line(part, line)
        elif body == "round_ended":
            over = message.round_ended
            workers = (part.rdzv_id, over.run, over.round)
            given_up = (part.node_id, workers) in self.given_up
            if not (self._is_over(workers) or given_up or self.era):
                self.fail(f"{part.node_id} hears that {workers} is over, and it is not")
        elif body == "closed":
            closed = message.closed
            reasons = self.ended.get((part.rdzv_id, closed.run), set())
            unknown = closed.result == pb.RESULT_STOPPED and "not known here" in closed.reason
            if closed.reason not in reasons and not unknown:
                self.fail(f"{part.node_id} hears that run {closed.run} is closed, and it is not")
            if unknown and self.era == 0 and len(self.ended) < 10:
                self.fail(f"{part.node_id} hears that run {closed.run} is not known")
        elif body == "snapshot_watermark":
            self._check_whole(part, read(SnapshotMark, message.snapshot_watermark.mark))
        elif body == "keep_copies":
            self._check_order(part, message.keep_copies)
        elif body == "waiting" and not message.waiting.reason:
            self.fail(f"always a reason: {part.node_id} is not told why it waits")

    def _check_whole(self, part: Part, mark: SnapshotMark) -> None:
        """Nodes may overwrite older snapshots only once all parts of a newer one are there."""
        parts = self.claimed.get((part.rdzv_id, mark), set())
        if parts != set(range(mark.shards)):
            self.fail(f"snapshots: {part.node_id} hears of {mark} as whole, and of it are {parts}")

    def _check_order(self, part: Part, order: pb.KeepCopies) -> None:
        """What is copied is whole, and another node's."""
        mark = read(SnapshotMark, order.mark)
        self._check_whole(part, mark)
        for source in order.sources:
            others = {read(SnapshotMark, one.mark) for one in source.snapshots} - {mark}
            if source.node_id == part.node_id or others:
                self.fail(f"copies: {part.node_id} is asked to copy {source} of {mark}")

    def _is_over(self, workers: Workers) -> bool:
        """Return whether it is committed that a round has ended."""
        rdzv_id, run, number = workers
        stored = self.stored.get(rdzv_id)
        if workers in self.over or (rdzv_id, run) in self.ended or stored is None:
            return True
        return stored.run == run and stored.next_round > number + 1

    def _check_line(self, part: Part, line: pb.Assignment) -> None:
        workers = (part.rdzv_id, line.run, line.round)
        round_ = self.rounds.get(workers)
        if round_ is None:
            self.fail(f"durability: {part.node_id} hears of {workers}, which is not stored")
            return
        seat = round_.participants[line.group_rank]
        last = round_.participants[-1]
        expected = (
            seat.node_id,
            seat.rank_first,
            len(round_.participants),
            last.rank_first + last.offer.local_world_size,
            seat.role_rank_first,
            seat.role_world_size,
            (round_.master_addr, round_.master_port, round_.use_agent_store),
            round_.restarts,
            (seat.kept, round_.source, round_.resume_step, seat.charged_suspects),
            (round_.snapshot is not None, round_.snapshot_loads, round_.origin, round_.lineage),
        )
        heard = (
            part.node_id,
            line.rank_first,
            line.group_world_size,
            line.world_size,
            line.role_rank_first,
            line.role_world_size,
            (line.master_addr, line.master_port, line.use_agent_store),
            line.restarts,
            (
                tuple(line.kept),
                line.source if line.HasField("source") else None,
                line.resume_step if line.HasField("resume_step") else None,
                tuple(line.charged_suspects),
            ),
            (line.HasField("snapshot"), line.snapshot_loads, line.origin, line.lineage),
        )
        if heard != expected and self.era == 0:
            self.fail(f"consistency: {part.node_id} hears {heard} of {workers}, not {expected}")

    def agent_stepped(
        self,
        part: Part,
        before: AgentState,
        event: agent_events.Event,
        transition: AgentTransition,
        now_ms: int,
    ) -> None:
        self.world.count(f"agent {type(event).__name__}")
        if self.world.log is not None:
            after = transition.state.phase
            self.world.note(f"{part.agent.instance} {part.rdzv_id}: {event} -> {after}")
        for command in transition.commands:
            self.world.count(f"agent does {type(command).__name__}")
            stops = isinstance(command, agent_commands.StopWorkers)
            if stops and before.phase is Phase.RUNNING:
                self._check_reason_to_stop(part, before, event, transition.state, now_ms)
        if self.world.check_random.random() < CALM_SHARE:
            self._check_agent_calm(part, event, transition, now_ms)

    def _check_reason_to_stop(
        self,
        part: Part,
        before: AgentState,
        event: agent_events.Event,
        after: AgentState,
        now_ms: int,
    ) -> None:
        notice = before.notice
        exited = notice is not None and notice.exited_ms is not None
        if exited or (notice is not None and notice.due_ms is not None and now_ms >= notice.due_ms):
            # The node leaves: its workers have exited, or had the time to.
            return
        line = before.assignment
        workers = (part.rdzv_id, before.run, line.round if line is not None else -1)
        given_up = (part.node_id, workers) in self.given_up
        if isinstance(event, Withdrawn) and given_up and UNHEARD not in event.reason:
            # It came back before its loss was stored, and receives its placement first.
            self.world.count("withdrawn with workers, after its seat was given up")
        elif isinstance(event, Withdrawn) and self.era:
            # A server that knows a seat's holder only by its rank may take it for a spare.
            self.world.count("withdrawn with workers, after the store's loss")
        elif not _is_reason_to_stop(before, event, after):
            self.fail(f"{part.node_id} stops its workers because of {event}")

    def _check_agent_calm(
        self, part: Part, event: agent_events.Event, transition: AgentTransition, now_ms: int
    ) -> None:
        tick = agent_step(transition.state, agent_events.Ticked(), now_ms)
        if tick.commands or tick.state != transition.state:
            self.fail(f"timer honesty: {part.node_id}: a tick after {event} is no no-op")
        if isinstance(event, agent_events.Signalled | agent_events.ServerConnected):
            return
        again = agent_step(transition.state, event, now_ms)
        acts = [c for c in again.commands if not isinstance(c, REPEATABLE)]
        if acts:
            self.fail(f"idempotence: {part.node_id} hears {event} twice and does {acts}")

    # -------------------------------------------------------------- the workers

    def starts(self, part: Part, workers: Workers, assignment: Assignment, *, hot: bool) -> None:
        """Exclusivity, as only an observer sees it."""
        self.world.count("workers started")
        if part.runner.standbys.starting:
            self.fail(f"exclusivity: {part.node_id} starts {workers} beside standbys")
        if hot:
            self.world.standbys.check_seated(part, workers, assignment)
        if part.runner.workers is not None:
            self.fail(f"exclusivity: {part.node_id} starts {workers} beside {part.runner.workers}")
        for local_rank in assignment.kept:
            parked = part.runner.parking.parked.get(local_rank)
            if parked is not None and not self._was_in_last(part, workers, parked):
                self.fail(f"keeping: LOCAL_RANK {local_rank} of {part.node_id} was in {parked}")
        if (part.node_id, workers) in self.started and self.era == 0:
            self.fail(f"{part.node_id} starts {workers} twice")
        self.started.add((part.node_id, workers))
        if (part.node_id, workers) in self.given_up:
            # It learns late of a round in which no other node counts on it any more.
            return
        for other in self.world.agents:
            for there in other.parts.values():
                old = there.runner.workers
                if old is None or old == workers or old[0] != workers[0]:
                    continue
                given_up = (other.name, old) in self.given_up and not self._must_be_fenced(there)
                if given_up or not self._knew(other.name, old, workers):
                    continue
                self.fail(
                    f"exclusivity: {part.node_id} starts workers of {workers} beside those of "
                    f"{old} on {other.name}"
                )

    def _was_in_last(self, part: Part, workers: Workers, parked: Parked) -> bool:
        """Whether a parked worker was in the round before, or in the last that began here."""
        rdzv_id, run, number = workers
        for of in self.rounds:
            if of[:2] == (rdzv_id, run) and parked.workers[2] < of[2] < number:
                seats = {participant.node_id for participant in self.rounds[of].participants}
                if part.node_id not in seats or (part.node_id, of) in self.started:
                    return False
        return parked.workers[:2] == (rdzv_id, run)

    def _must_be_fenced(self, part: Part) -> bool:
        """Return whether workers must be gone before their seat is given up, while cut off."""
        runner = part.runner
        return bool(part.job.fence_after_ms) and not (runner.stood_still or runner.stuck)

    def _knew(self, name: str, old: Workers, new: Workers) -> bool:
        """Return whether the server knew of these workers when it completed a new round.

        A server whose memory was lost does not, until a node has reported them.
        """
        if old not in self.known_ms or new not in self.known_ms or old in self.replaced:
            return False
        seats = {participant.node_id for participant in self.rounds[old].participants}
        for group_rank, participant in enumerate(self.first_rounds[old].participants):
            if placeholder(group_rank) in seats:
                seats.add(participant.node_id)
        return name in seats and self.known_ms[old] < self.known_ms[new]

    def succeeded(self, part: Part, workers: Workers) -> None:
        self.world.count("workers succeeded")
        self.succeeded_on.add((part.node_id, workers))

    def exited(self, part: Part) -> None:
        """A node that receives the result exits accordingly."""
        outcome = part.outcome
        assert outcome is not None
        self.world.count(f"exit {outcome.exit_code}")
        if part.runner.has_workers:
            self.fail(f"{part.node_id} exits, and its workers continue")
        if outcome.result is Result.SUCCEEDED and outcome.exit_code != 0:
            self.fail(f"{part.node_id} exits {outcome.exit_code}, and the job has succeeded")


def fits(spec: JobSpec, host: Host, *, now: bool) -> bool:
    """Return whether a node could ever run a job, or has room for it `now`."""
    resources = host.resources
    if not set(spec.labels) <= set(resources.labels):
        return False
    gpus = spec.gpus_per_node
    if spec.needs_gpu and not resources.gpus:
        return False
    if gpus is None:
        gpus = (spec.local_world_size or len(resources.gpus)) if resources.gpus else 0
    used = sum(host.taken.values()) if now else 0
    places = resources.capacity - (len(host.taken) if now else 0)
    return gpus <= max(len(resources.gpus) - used, 0) and (places > 0 or not now)


def _words(events: tuple[Event | nodes.NodesEvent, ...]) -> str:
    """Describe events for a trace; an event without a sentence must not change the history."""
    try:
        return write_events(events)
    except (AttributeError, KeyError, TypeError):
        return repr(events)


def _is_reason_to_stop(before: AgentState, event: agent_events.Event, after: AgentState) -> bool:
    """Return whether this ends workers: a positive statement, their own end, or a signal."""
    line = before.assignment
    match event:
        case RoundOver():
            return line is not None and (event.run, event.round) == (line.run, line.round)
        case Closed():
            return line is not None and event.run == line.run
        case Refused():
            return event.code in ("RendezvousClosedError", "NodeSupersededError")
        case agent_events.WorkerSuspected():
            return True
        case agent_events.WorkerExited():
            return event.exit_code != 0 or after.phase is Phase.SUCCEEDED
        case agent_events.NoticeGiven():
            # Given with no time left.
            return event.left_ms == 0
        case agent_events.Signalled() | agent_events.StartFailed() | agent_events.RunnerLost():
            return True
        case _:
            return False


def _said_of_snapshots(decided: Decided) -> dict[str, tuple[Snapshot, ...]]:
    """Return the reported snapshots of waiting nodes, including the one that is heard now."""
    before, command, transition = decided[:3]
    said = {node_id: one.snapshots for node_id, one in before.waiting.items()}
    if not isinstance(command, Join):
        return said
    known = before.waiting.get(command.node_id)
    # A server without memory may adopt the run by this join, and complete a round in the same step.
    if command.run == transition.state.membership.run:
        said[command.node_id] = command.snapshots
    elif known is not None and known.incarnation != command.incarnation:
        # A new instance that has adopted no workers: what the former one held is gone with it.
        del said[command.node_id]
    return said


def _newest_saved(
    round_: Round, held: Mapping[str, Sequence[Snapshot | Saved]]
) -> SnapshotMark | None:
    """Return the newest mark, if newer than the round's own, of which all parts are held."""
    newest = round_.snapshot
    for mark in {one.mark for snapshots in held.values() for one in snapshots}:
        of_round = round_.lineage <= mark.lineage <= round_.number
        parts = {one.shard for all_ in held.values() for one in all_ if one.mark == mark}
        if of_round and len(parts) == mark.shards and (newest is None or mark > newest):
            newest = mark
    return None if newest == round_.snapshot else newest
