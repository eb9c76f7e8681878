"""What an onlooker knows of a history, and judges: the guarantees, checked at every step.

The judge sees more than anyone in the system: what is committed, what every agent is told, which
workers run where. Nothing here decides anything; every check raises `SafetyError` if it fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest.mock import patch

from rdzv.agent.core import commands as agent_commands
from rdzv.agent.core import events as agent_events
from rdzv.agent.core.machine import Transition as AgentTransition
from rdzv.agent.core.machine import step as agent_step
from rdzv.agent.core.model import AgentState, Assignment, Phase
from rdzv.core import nodes, rendezvous
from rdzv.core.commands import Command, Leave
from rdzv.core.events import (
    Event,
    NodeLeft,
    NodeLost,
    NodeStuck,
    RoundCompleted,
    RoundEnded,
    RunEnded,
)
from rdzv.core.model import Cause, Membership, Result, Round, State, stand_in
from rdzv.core.rendezvous import Transition
from rdzv.errors import RendezvousError
from rdzv.server.jobs import News
from rdzv.v1 import rdzv_pb2 as pb
from tests.scenarios.language import write_events
from tests.unit.builders import BrokenPromiseError, check_calm, check_step

if TYPE_CHECKING:
    from tests.sim.agents import Agent, Part, Workers
    from tests.sim.cluster import Server
    from tests.sim.loop import Process
    from tests.sim.world import World


class SafetyError(BrokenPromiseError):
    """A guarantee was broken."""


class LivenessError(BrokenPromiseError):
    """Nothing is wrong any more, and still nothing runs."""


CALM_SHARE = 0.03
"""How many steps are also repeated, ticked early and crashed after; it costs ten steps."""


@dataclass(frozen=True)
class Said:
    """A command that was decided, when, and by which server."""

    at_ms: int
    command: Command | str
    server: int


class Judge:
    """All that an onlooker knows, and the checks that follow from it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.era = 0
        """Grows whenever the store loses what it had committed."""
        self.blameless = True
        """No worker has failed by itself so far, and none for a reason that nobody can know."""
        self.stored: dict[str, Membership] = {}
        self.rounds: dict[Workers, Round] = {}
        """Every round that was committed; after the store's loss, as it was adopted."""
        self.first_rounds: dict[Workers, Round] = {}
        self.over: set[Workers] = set()
        """Rounds whose end was committed."""
        self.ended: dict[tuple[str, str], set[str]] = {}
        """Why a run was closed; a server that forgot it may close it once more."""
        self.given_up: set[tuple[str, Workers]] = set()
        """Which node's seat in which round was given up by a server."""
        self.succeeded_on: set[tuple[str, Workers]] = set()
        self.started: set[tuple[str, Workers]] = set()
        self.highest_round: dict[str, int] = {}
        self.replaced: set[Workers] = set()
        """Rounds that a server without memory has announced anew, with others."""
        self.known_ms: dict[Workers, int] = {}
        """Since when it is stored that there is, or was, such a round."""
        self.leadership = 0
        self.incarnations: dict[str, tuple[int, str]] = {}
        self.moves: set[str] = set()
        """Jobs in which newcomers, a late store host or everyone's success ended a round or run."""
        self.trace: dict[str, list[Said]] = {}
        self._decided: dict[tuple[int, str], tuple[State, Command, Transition, int]] = {}

    # -------------------------------------------------------------- the cores

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look over the shoulder of every step that a server makes."""
        decide, step_nodes = rendezvous.step, nodes.step

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

        with (
            patch.object(rendezvous, "step", watched_step),
            patch.object(nodes, "step", watched_nodes),
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
            self._raising(check_calm, command, transition, now_ms)
        rdzv_id = transition.state.membership.rdzv_id
        key = (id(process), rdzv_id)
        self._decided[key] = (before, command, transition, now_ms)

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
        if isinstance(command, nodes.Tick):
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
                self.fail(f"fencing: the incarnation of {event.node_id} went back")
            if isinstance(event, nodes.NodeLost):
                self._check_lost(event, before.records[event.node_id], now_ms)

    def _check_lost(self, event: nodes.NodeLost, record: nodes.NodeRecord, now_ms: int) -> None:
        """Nobody is lost before its time, and nobody whose heartbeats come through."""
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

    def fail(self, text: str) -> None:
        self.world.fail(SafetyError(text))

    # -------------------------------------------------------------- the store

    def took_over(self, server: Server, leadership: int) -> None:
        if leadership <= self.leadership:
            self.fail(f"fencing: leadership {leadership} after {self.leadership}")
        self.leadership = leadership
        # Who was welcomed and holds no place is known to nobody after a take-over.
        self.incarnations = {}
        for membership in self.stored.values():
            for seat in membership.round.participants if membership.round else ():
                highest, _ = self.incarnations.get(seat.node_id, (0, ""))
                self.incarnations[seat.node_id] = (max(highest, seat.incarnation), "")

    def rolled_back(self, stored: dict[str, Membership]) -> None:
        """The store has lost what it had; what was announced before may be announced anew."""
        self.era += 1
        self.blameless = False
        self.incarnations.clear()
        self.stored = stored
        self.known_ms = {
            (rdzv_id, membership.run, membership.round.number): self.world.agenda.now_ms
            for rdzv_id, membership in stored.items()
            if membership.round is not None
        }

    def committed(self, server: Server, after: Membership) -> None:
        """Note what is durable now; nothing that was durable may be lost by it."""
        rdzv_id = after.rdzv_id
        before = self.stored.get(rdzv_id)
        self.stored[rdzv_id] = after
        if before is not None:
            self._check_durable(before, after)
        round_ = after.round
        if round_ is not None:
            workers = (rdzv_id, after.run, round_.number)
            self.first_rounds.setdefault(workers, round_)
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
        if after.ended is not None:
            self.ended.setdefault((rdzv_id, after.run), set()).add(after.ended.reason)
        for earlier in after.earlier:
            self.ended.setdefault((rdzv_id, earlier.run), set()).add(earlier.ended.reason)
        decided = self._decided.get((id(server.process), rdzv_id))
        if decided is not None:
            self._note_given_up(*decided[:3])

    def _check_durable(self, before: Membership, after: Membership) -> None:
        if after.next_round < before.next_round:
            self.fail(f"durability: rounds went back, {before.next_round} to {after.next_round}")
        if after.run != before.run:
            if after.run_number <= before.run_number:
                self.fail("durability: the number of runs went back")
            return
        if before.ended is not None and after.ended != before.ended:
            self.fail(f"durability: closed run {after.run} changed")
        if after.restarts[: len(before.restarts)] != before.restarts:
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

    def _note_given_up(self, before: State, command: Command, transition: Transition) -> None:
        """Note whose workers may run on, as far as the server knows."""
        membership = before.membership
        for event in transition.events:
            lost = isinstance(event, NodeLost | NodeStuck)
            # Who said that it leaves, and was not heard to have done so, is called left.
            itself = isinstance(command, Leave) and command.node_id == getattr(event, "node_id", "")
            left = isinstance(event, NodeLeft) and not itself
            if (lost or left) and membership.round is not None:
                workers = (membership.rdzv_id, membership.run, membership.round.number)
                self._give_up(event.node_id, workers)  # type: ignore[union-attr]
            if isinstance(event, RunEnded) and membership.round is not None:
                # Another run took the place of this one, all of whose nodes are out of sight.
                workers = (membership.rdzv_id, membership.run, membership.round.number)
                for node_id in before.seats.keys() & before.away.keys():
                    self._give_up(node_id, workers)

    def _give_up(self, node_id: str, workers: Workers) -> None:
        """Note that a seat was given up, perhaps by the name that stands in for its holder's."""
        self.given_up.add((node_id, workers))
        round_ = self.first_rounds.get(workers)
        for group_rank, participant in enumerate(round_.participants if round_ else ()):
            if stand_in(group_rank) == node_id:
                self.given_up.add((participant.node_id, workers))

    # -------------------------------------------------------------- what is published

    def published(self, server: Server, news: News) -> None:
        rdzv_id = news.after.membership.rdzv_id
        decided = self._decided.get((id(server.process), rdzv_id))
        at_ms = decided[3] if decided else self.world.agenda.now_ms
        said = Said(at_ms - server.process.offset_ms, news.command, server.number)
        self.trace.setdefault(rdzv_id, []).append(said)
        if news.after.membership != self.stored.get(rdzv_id) and news.after.membership.run:
            current = server.store.leadership == self.world.disk.leader
            if current and self.era == server.era:
                self.fail("durability: what is published is not what is stored")
        for event in news.events:
            self._check_event(news, event)
        if self.blameless and news.after.membership.restarts:
            self.fail("charge: a restart was spent, and no worker has failed by itself")

    def _check_event(self, news: News, event: Event) -> None:
        membership = news.after.membership
        workers = (membership.rdzv_id, membership.run, 0)
        match event:
            case RoundEnded(end=end) if end.cause is Cause.STORE_HOST:
                self.moves.add(membership.rdzv_id)
            case RoundEnded(end=end) if end.cause is Cause.NODES_JOINED:
                self.moves.add(membership.rdzv_id)
                if not (news.before.waiting or news.after.waiting):
                    self.fail("calm: a round ended for newcomers, and nobody waits")
            case RoundCompleted():
                count = len(event.round.participants)
                if not membership.min_nodes <= count <= membership.max_nodes:
                    self.fail(f"barrier: round {event.round.number} has {count} nodes")
            case RunEnded():
                ended = event.ended
                if ended.result is Result.SUCCEEDED:
                    self.moves.add(membership.rdzv_id)
                if self.blameless and ended.failures:
                    self.fail(f"charge: {ended} and no worker failed by itself")
                round_ = news.before.membership.round
                if ended.result is Result.SUCCEEDED and round_ is not None and self.era == 0:
                    workers = (membership.rdzv_id, event.run, round_.number)
                    for participant in round_.participants:
                        if (participant.node_id, workers) not in self.succeeded_on:
                            self.fail(
                                f"success: {participant.node_id} has not succeeded in {workers}"
                            )

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

    def heard(self, part: Part, message: pb.ServerMessage) -> None:
        """Whatever an agent is told must be true: committed, and the same for all."""
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
        elif body == "waiting" and not message.waiting.reason:
            self.fail(f"always a reason: {part.node_id} is not told why it waits")

    def _is_over(self, workers: Workers) -> bool:
        """Whether it is committed that a round has ended."""
        rdzv_id, run, number = workers
        stored = self.stored.get(rdzv_id)
        if workers in self.over or (rdzv_id, run) in self.ended or stored is None:
            return True
        return stored.run == run and stored.next_round > number + 1

    def _check_line(self, part: Part, line: pb.RoundCompleted) -> None:
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
                self._check_reason_to_stop(part, before, event, transition.state)
        if self.world.check_random.random() < CALM_SHARE:
            self._check_agent_calm(part, event, transition, now_ms)

    def _check_reason_to_stop(
        self, part: Part, before: AgentState, event: agent_events.Event, after: AgentState
    ) -> None:
        if not _is_reason_to_stop(before, event, after):
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
        acts = [c for c in again.commands if not isinstance(c, agent_commands.SayStuck)]
        if acts:
            self.fail(f"idempotence: {part.node_id} hears {event} twice and does {acts}")

    # -------------------------------------------------------------- the workers

    def starts(self, part: Part, workers: Workers, assignment: Assignment) -> None:
        """Exclusivity, as only an onlooker sees it."""
        self.world.count("workers started")
        if part.runner.workers is not None:
            self.fail(f"exclusivity: {part.node_id} starts {workers} beside {part.runner.workers}")
        if (part.node_id, workers) in self.started and self.era == 0:
            self.fail(f"{part.node_id} starts {workers} twice")
        self.started.add((part.node_id, workers))
        if (part.node_id, workers) in self.given_up:
            # It hears late of a round in which nobody counts on it any more.
            return
        for other in self.world.agents:
            for there in other.parts.values():
                old = there.runner.workers
                if old is None or old == workers or old[0] != workers[0]:
                    continue
                if (other.name, old) in self.given_up or not self._knew(other.name, old, workers):
                    continue
                self.fail(
                    f"exclusivity: {part.node_id} starts workers of {workers} beside those of "
                    f"{old} on {other.name}"
                )

    def _knew(self, name: str, old: Workers, new: Workers) -> bool:
        """Whether the server knew of these workers when it completed a new round.

        One whose memory was lost does not, until a node has told it.
        """
        if old not in self.known_ms or new not in self.known_ms or old in self.replaced:
            return False
        seats = {participant.node_id for participant in self.rounds[old].participants}
        for group_rank, participant in enumerate(self.first_rounds[old].participants):
            if stand_in(group_rank) in seats:
                seats.add(participant.node_id)
        return name in seats and self.known_ms[old] < self.known_ms[new]

    def succeeded(self, part: Part, workers: Workers) -> None:
        self.world.count("workers succeeded")
        self.succeeded_on.add((part.node_id, workers))

    def exited(self, part: Part) -> None:
        """Who hears the result exits by it."""
        outcome = part.outcome
        assert outcome is not None
        self.world.count(f"exit {outcome.exit_code}")
        if part.runner.workers is not None:
            self.fail(f"{part.node_id} exits, and its workers run on")
        if outcome.result is Result.SUCCEEDED and outcome.exit_code != 0:
            self.fail(f"{part.node_id} exits {outcome.exit_code}, and the job has succeeded")


def _words(events: tuple[Event | nodes.NodesEvent, ...]) -> str:
    """Write events for a trace; no event that has no words yet may change the history by that."""
    try:
        return write_events(events)
    except (AttributeError, KeyError, TypeError):
        return repr(events)


def _is_reason_to_stop(before: AgentState, event: agent_events.Event, after: AgentState) -> bool:
    """Whether this ends running workers: a positive statement, their own end, or a signal."""
    line = before.assignment
    match event:
        case agent_events.RoundEnded():
            return line is not None and (event.run, event.round) == (line.run, line.round)
        case agent_events.RunClosed():
            return line is not None and event.run == line.run
        case agent_events.Refused():
            return event.code in ("RendezvousClosedError", "NodeSupersededError")
        case agent_events.WorkerExited():
            return event.exit_code != 0 or after.phase is Phase.SUCCEEDED
        case agent_events.Signalled() | agent_events.StartFailed() | agent_events.RunnerLost():
            return True
        case _:
            return False
