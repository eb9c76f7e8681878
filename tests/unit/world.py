"""A tiny world around the real cores: a server that crashes, nodes that die, a network that fails.

All of it follows from one seed. The server is the real nodes core, rendezvous core and `told`,
driven as `rdzv.server` drives them: decide, persist, publish. Agents are honest and simple. The
world checks every step of the core, and what only an onlooker sees: that no worker of a round
starts beside one of an earlier round whose node was not given up, that nobody hears two versions
of a round, and that nothing announced is forgotten by a crash.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from rdzv.core import nodes
from rdzv.core.commands import (
    Command,
    Fail,
    FailureReport,
    Join,
    Leave,
    MarkAway,
    MarkBack,
    MarkLost,
    ReportStoreHost,
    ReportStuck,
    Resume,
    Succeed,
    Tick,
)
from rdzv.core.events import Event, NodeLeft, NodeLost, NodeStuck, RoundCompleted, RunEnded
from rdzv.core.model import LeaveCause, Membership, Participant, ScaleUp, Settings, State, Tuning
from rdzv.core.rendezvous import ended_run, restore, step, vacant
from rdzv.errors import RendezvousConnectionError, RendezvousError
from rdzv.server import told
from rdzv.server.messages import Belief, Closed, Joined, Line, RoundOver, Told
from tests.unit.builders import BrokenPromiseError, check_calm, check_step, offer, report

JOB = "job-7"
Workers = tuple[str, int]
"""Whose workers a node runs: the run and the round."""


@dataclass(frozen=True)
class Swarm:
    """What one history is like. All of it follows from the seed; many rates are zero in most."""

    settings: Settings
    kinds: dict[str, nodes.AgentKind]
    rates: dict[str, float]
    """How likely each kind of trouble is beside the others."""

    @classmethod
    def of(cls, random: Random) -> Swarm:
        """Choose sizes and rates."""
        min_nodes = random.randint(1, 3)
        max_nodes = min_nodes + random.randint(0, 2)
        settings = Settings(
            min_nodes,
            max_nodes,
            max_restarts=random.choice([0, 1, 3]),
            last_call_timeout_ms=random.choice([0, 2_000]),
            scale_up=random.choice(list(ScaleUp)),
        )
        names = [f"n{i}" for i in range(1, max_nodes + random.randint(1, 3))]
        kinds = random.choice([list(nodes.AgentKind), *([kind] for kind in nodes.AgentKind)])
        rates = {trouble: random.choice([0.0, 0.0, 0.3, 1.0]) for trouble in TROUBLES}
        chosen = {name: random.choice(kinds) for name in names}
        return cls(settings, chosen, {**rates, "start": 2.0})


TROUBLES = (
    "worker_fails",
    "workers_succeed",
    "store_host_fails",
    "node_dies",
    "machine_dies",
    "agent_restarts",
    "agent_upgrades",
    "link_breaks",
    "link_cut",
    "leaves",
    "repeats",
    "server_crashes",
    "server_pauses",
)


# ------------------------------------------------------------------ the world


class World:
    """Virtual time, one seeded source of chance, and everyone in it."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.swarm = Swarm.of(self.random)
        self.now_ms = 0
        self._order = itertools.count()
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self.calm = False
        """No more trouble: whatever is not well yet gets well."""
        self.blameless = True
        """No worker has failed by itself so far."""
        self.trace: list[tuple[int, Command | str]] = []
        self.given_up: set[tuple[str, str, int]] = set()
        """Which node was given up in which run and round."""
        self.announced: dict[Workers, tuple[Participant, ...]] = {}
        self.server = Server(self)
        self.agents = {name: Agent(self, name, kind) for name, kind in self.swarm.kinds.items()}

    def at(self, in_ms: int, do: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._agenda, (self.now_ms + in_ms, next(self._order), do))

    def run(self, until_ms: int) -> None:
        """Let time pass."""
        while self._agenda and self._agenda[0][0] <= until_ms:
            self.now_ms, _, do = heapq.heappop(self._agenda)
            do()
        self.now_ms = until_ms

    def latency_ms(self) -> int:
        return self.random.choice((1, 2, 5, 20, 200) if not self.calm else (1, 2, 5))

    # -------------------------------------------------------------- trouble

    def trouble(self, times: int) -> None:
        """The safety phase: start nodes, and let things go wrong."""
        names, weights = zip(*self.swarm.rates.items(), strict=True)
        for agent in self.agents.values():
            self.at(self.random.randint(0, 500), agent.start)
        for _ in range(times):
            self.run(self.now_ms + self.random.choice((1, 10, 100, 1_000, 5_000)))
            [name] = self.random.choices(names, weights)
            self._make(name)

    def _make(self, name: str) -> None:
        if name == "server_crashes":
            self.server.crash()
        elif name == "server_pauses":
            self.server.pause()
        else:
            agent = self.random.choice(list(self.agents.values()))
            getattr(agent, name)()

    def peers_of(self, workers: Workers, but: Agent) -> list[Agent]:
        return [a for a in self.agents.values() if a.workers == workers and a is not but]

    def collectives_break(self, workers: Workers, cause: Agent) -> None:
        """When workers vanish, those of their round on other nodes fail, unless they are slow."""
        for agent in self.peers_of(workers, cause):
            if self.random.random() < 0.7:
                self.at(self.random.randint(1, 30), lambda a=agent: a.fails(workers))  # type: ignore[misc]

    # -------------------------------------------------------------- judgement

    def check_start(self, agent: Agent, workers: Workers) -> None:
        """Exclusivity, as only an onlooker sees it."""
        for other in self.agents.values():
            old = other.workers
            if old is not None and old != workers and (other.name, *old) not in self.given_up:
                raise BrokenPromiseError(
                    f"exclusivity: {agent.name} starts workers of {workers} beside those of {old} "
                    f"on {other.name}"
                )

    def check_announced(self, membership: Membership, events: tuple[Event, ...]) -> None:
        for event in events:
            if isinstance(event, RoundCompleted):
                key = (membership.run, event.round.number)
                if self.announced.setdefault(key, event.round.participants) != (
                    event.round.participants
                ):
                    raise BrokenPromiseError(f"consistency: two versions of {key}")
            if isinstance(event, RunEnded) and self.blameless and event.ended.failures:
                raise BrokenPromiseError(f"charge: {event.ended} and no worker failed by itself")
        if self.blameless and membership.restarts:
            raise BrokenPromiseError("charge: a restart was spent and no worker failed by itself")

    # -------------------------------------------------------------- liveness

    def heal(self) -> None:
        """The liveness phase begins: no more trouble, and everyone is there again."""
        self.calm = True
        self.server.start()
        for agent in self.agents.values():
            agent.cut = False
        self._start_all()

    def _start_all(self) -> None:
        """Start again whoever is not there, until all is well."""
        if not self.well:
            for agent in self.agents.values():
                agent.start()
            self.at(5_000, self._start_all)

    @property
    def well(self) -> bool:
        """Whether a round runs on all its nodes, or the run is closed."""
        state = self.server.state
        membership = state.membership
        if membership.ended is not None:
            return True
        round_ = membership.round
        if round_ is None or not round_.live:
            return False
        workers = (membership.run, round_.number)
        return all(
            self.agents[node_id].workers == workers or seat.succeeded
            for node_id, seat in state.seats.items()
        )


# ------------------------------------------------------------------ the server


class Server:
    """What `rdzv.server.driver` does, without its I/O."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.tuning = Tuning()
        self.stored = vacant(JOB, self.tuning).membership
        self.leadership = 0
        self.up = False
        self.start()

    def start(self) -> None:
        if self.up:
            return
        self.up = True
        if self.leadership:
            self.world.trace.append((self.world.now_ms, "crash"))
        self.leadership += 1
        self.nodes = nodes.Nodes(self.leadership)
        self.streams: dict[str, Stream] = {}
        self.state = restore(self.stored, self.tuning, self.world.now_ms)
        for node_id, seat in self.state.seats.items():
            self._step_nodes(nodes.Expect(node_id, seat.incarnation))
        self.submit(Tick())

    def crash(self) -> None:
        """Die at once; every stream ends."""
        if not self.up:
            return
        self.up = False
        for stream in list(self.streams.values()):
            stream.end()
        self.world.at(self.world.random.choice((10, 1_000, 8_000)), self.start)

    def pause(self) -> None:
        if self.up:
            self._step_nodes(nodes.Pause())

    # -------------------------------------------------------------- decide, persist, publish

    def submit(self, command: Command) -> State:
        world, before, now_ms = self.world, self.state, self.world.now_ms
        if isinstance(command, Join):
            command = replace(command, new_run=f"run-{before.membership.run_number + 1}")
        world.trace.append((now_ms, command))
        transition = step(before, command, now_ms)
        check_step(before, command, transition, now_ms)
        if world.random.random() < 0.05:
            check_calm(command, transition, now_ms)
        after, events = transition.state, transition.events
        self.stored = after.membership
        world.check_announced(after.membership, events)
        self._note_given_up(before, command, events)
        if not world.calm and world.random.random() < 0.01 * world.swarm.rates["server_crashes"]:
            self.crash()  # What is persisted, and was not published.
            return after
        self.state = after
        if transition.wake_at_ms is not None:
            self._wake(transition.wake_at_ms)
        if isinstance(command, Join):
            membership = after.membership
            self.tell(command.node_id, Joined(JOB, membership.run, membership.run_number))
        for node_id, message in told.news(before, after, events, now_ms):
            self.tell(node_id, message)
        return after

    def _note_given_up(self, before: State, command: Command, events: tuple[Event, ...]) -> None:
        """Note whose workers may run on, as far as the server knows."""
        round_ = before.membership.round
        names = {event.node_id for event in events if isinstance(event, NodeLost | NodeStuck)}
        if not isinstance(command, Leave):
            # Who said that it leaves, and was not heard to have done so, is called left.
            names |= {event.node_id for event in events if isinstance(event, NodeLeft)}
        for number in range(round_.number + 1 if round_ else 0):
            self.world.given_up |= {(name, before.membership.run, number) for name in names}

    def _wake(self, wake_at_ms: int) -> None:
        leadership = self.leadership

        def tick() -> None:
            if self.up and self.leadership == leadership:
                self.submit(Tick())

        self.world.at(max(wake_at_ms - self.world.now_ms, 0), tick)

    def tell(self, node_id: str, message: Told) -> None:
        if stream := self.streams.get(node_id):
            stream.down(message)

    # -------------------------------------------------------------- streams and nodes

    def attach(self, stream: Stream, hello: Hello) -> int:
        """Open a stream, hear what the node believes, and tell it what it has missed."""
        agent = stream.agent
        connect = nodes.Connect(
            node_id=agent.name,
            instance=hello.instance,
            kind=agent.kind,
            address=f"{agent.name}.net",
            pid=4711,
            stream=stream.number,
            incarnation=hello.incarnation,
        )
        self._step_nodes(connect)
        if not self.up:
            raise RendezvousConnectionError("it has just crashed")
        self.streams[agent.name] = stream
        return self.nodes.records[agent.name].incarnation

    def greet(self, stream: Stream, belief: Belief) -> None:
        node_id = stream.agent.name
        try:
            if ended_run(self.state, belief.run) is None:
                for command in belief.commands:
                    self.submit(command)
        except RendezvousError as error:
            stream.down(error)
            return
        if not self.up:
            return
        stream.greeted = True
        self._mark(node_id)
        for message in told.owed(self.state, node_id, belief, self.world.now_ms):
            stream.down(message)

    def hear(self, stream: Stream, command: Command) -> None:
        if not self.up or self.streams.get(stream.agent.name) is not stream:
            return
        try:
            self.submit(command)
        except RendezvousError as error:
            ended = ended_run(self.state, getattr(command, "run", ""))
            run = getattr(command, "run", "")
            stream.down(Closed(JOB, run, ended) if ended else error)

    def detach(self, stream: Stream) -> None:
        name = stream.agent.name
        if self.up and self.streams.get(name) is stream:
            del self.streams[name]
            self._step_nodes(nodes.Disconnect(name, stream.number))

    def plan_away(self, stream: Stream, deadline_ms: int) -> None:
        self._step_nodes(nodes.PlanAway(stream.agent.name, stream.number, deadline_ms))

    def _step_nodes(self, command: nodes.NodesCommand) -> None:
        transition = nodes.step(self.nodes, command, self.world.now_ms)
        self.nodes = transition.nodes
        for event in transition.events:
            if isinstance(event, nodes.NodeLost):
                stream = self.streams.pop(event.node_id, None)
                if stream is not None:
                    stream.end()
            self._mark(event.node_id, event.reason if isinstance(event, nodes.NodeLost) else "")
        if transition.wake_at_ms is not None:
            self._wake_nodes(transition.wake_at_ms)

    def _wake_nodes(self, wake_at_ms: int) -> None:
        leadership = self.leadership

        def tick() -> None:
            if not self.up or self.leadership != leadership:
                return
            heard = [n for n, stream in self.streams.items() if stream.carries]
            self._step_nodes(nodes.Hear(frozenset(heard)))
            self._step_nodes(nodes.Tick())

        if getattr(self, "_nodes_wake", None) != (leadership, wake_at_ms):
            self._nodes_wake = (leadership, wake_at_ms)
            self.world.at(max(wake_at_ms - self.world.now_ms, 0), tick)

    def _mark(self, node_id: str, reason: str = "") -> None:
        held = self.state.incarnation(node_id)
        record = self.nodes.records.get(node_id)
        if held is None or not self.up:
            return
        if record is None:
            self.submit(MarkLost(node_id, held, reason))
        elif record.incarnation != held:
            stream = self.streams.get(node_id)
            if stream is not None and stream.greeted:
                self.submit(MarkLost(node_id, held, "a new instance of the node took its place"))
        elif record.stream is None:
            self.submit(MarkAway(node_id, held, record.until_ms, record.firm))
        else:
            self.submit(MarkBack(node_id, held))


# ------------------------------------------------------------------ the network


@dataclass(frozen=True)
class Hello:
    instance: str
    incarnation: int


@dataclass(eq=False)
class Stream:
    """Messages in their order, each way, until it ends; what is under way then is lost."""

    world: World
    agent: Agent
    number: int
    open: bool = True
    silent: bool = False
    """Nothing comes through any more, and nobody has noticed."""
    greeted: bool = False
    _up_ms: int = 0
    _down_ms: int = 0

    @property
    def carries(self) -> bool:
        return self.open and not self.silent

    def up(self, do: Callable[[], None]) -> None:
        """Carry something to the server."""
        self._up_ms = max(self._up_ms, self.world.now_ms + self.world.latency_ms())
        self.world.at(self._up_ms - self.world.now_ms, lambda: do() if self.carries else None)

    def down(self, message: Told | RendezvousError) -> None:
        self._down_ms = max(self._down_ms, self.world.now_ms + self.world.latency_ms())
        agent = self.agent
        self.world.at(
            self._down_ms - self.world.now_ms,
            lambda: agent.hear(message) if self.carries and agent.stream is self else None,
        )

    def end(self) -> None:
        """End it for both sides, at once for the one that says so."""
        if not self.open:
            return
        self.open = False
        self.world.server.detach(self)
        if self.agent.stream is self:
            self.agent.lose_stream()


# ------------------------------------------------------------------ an honest agent


@dataclass(eq=False)
class Agent:
    """One node: its agent, which may be dead, and its workers, which may outlive the agent."""

    world: World
    name: str
    kind: nodes.AgentKind
    phase: str = "dead"
    """dead, joining, running, stopping, succeeded or leaving."""
    run: str = ""
    round: int | None = None
    left_round: int | None = None
    workers: Workers | None = None
    failures: tuple[FailureReport, ...] = ()
    store_host_failed: bool = False
    instances: int = 0
    incarnation: int = 0
    stream: Stream | None = None
    cut: bool = False
    said: list[Command] = field(default_factory=list)
    _streams: int = 0

    # -------------------------------------------------------------- start and connect

    def start(self) -> None:
        """Start an agent afresh, as after a boot: it has no workers."""
        if self.phase == "dead" and self.workers is None:
            self._begin_instance()
            self.phase, self.run, self.round, self.left_round = "joining", "", None, None
            self.failures = ()
            self.connect()

    def _begin_instance(self) -> None:
        self.instances += 1
        self.incarnation = 0
        self.said = []

    def connect(self) -> None:
        instance, world = self.instances, self.world
        if self.phase == "dead" or self.stream is not None:
            return
        if world.server.up and not self.cut:
            self._streams += 1
            stream = Stream(world, self, self._streams)
            try:
                self.incarnation = world.server.attach(
                    stream, Hello(f"{self.name}-{instance}", self.incarnation)
                )
            except RendezvousError:
                self._try_again()
            else:
                self.stream = stream
                belief = self._belief()
                stream.up(lambda: world.server.greet(stream, belief))
            return
        self._try_again()

    def _try_again(self) -> None:
        instance = self.instances

        def again() -> None:
            if self.instances == instance:
                self.connect()

        self.world.at(self.world.random.choice((50, 500, 2_000)), again)

    def lose_stream(self) -> None:
        self.stream = None
        self._try_again()

    def _belief(self) -> Belief:
        """Say in commands what this node believes."""
        if self.round is None:
            return Belief(JOB, self.run, None, has_workers=False, commands=(self._join(),))
        who = (self.name, self.incarnation, self.run)
        commands: list[Command] = []
        if self.phase != "joining" or self.store_host_failed:
            commands.append(Resume(*who, self.round))
        if self.store_host_failed:
            commands.append(ReportStoreHost(*who, self.round, "it exited 1"))
        if self.phase == "joining":
            commands.append(self._join())
            return Belief(JOB, self.run, self.round, has_workers=False, commands=tuple(commands))
        if self.phase == "succeeded":
            commands.append(Succeed(*who, self.round))
        elif self.phase == "leaving":
            commands.append(self._leave())
        elif self.failures:
            commands.append(Fail(*who, self.round, self.failures))
        return Belief(JOB, self.run, self.round, has_workers=True, commands=tuple(commands))

    # -------------------------------------------------------------- what it says

    def _join(self) -> Join:
        return Join(
            node_id=self.name,
            incarnation=self.incarnation,
            run=self.run,
            settings=self.world.swarm.settings,
            offer=offer(self.name),
            left_round=self.left_round,
            failures=self.failures,
        )

    def _leave(self, left_round: int | None = None) -> Leave:
        reason = "its agent received SIGTERM"
        who = (self.name, self.incarnation, self.run)
        return Leave(*who, LeaveCause.SIGNAL, reason, left_round)

    def _say(self, command: Command) -> None:
        """Say something, if there is a stream; now and then twice."""
        stream = self.stream
        if stream is None:
            return
        self.said.append(command)
        for _ in range(self.world.random.choice((1, 1, 1, 2))):
            stream.up(lambda: self.world.server.hear(stream, command))

    def repeats(self) -> None:
        """Say again something that this instance has said long ago."""
        stream = self.stream
        if self.said and stream is not None and self.phase != "leaving":
            command = self.world.random.choice(self.said)
            stream.up(lambda: self.world.server.hear(stream, command))

    # -------------------------------------------------------------- what it hears

    def hear(self, message: Told | RendezvousError) -> None:
        match message:
            case Joined():
                if self.phase == "joining":
                    self.run = message.run
            case Line():
                self._start_workers(message)
            case RoundOver():
                self._end_round(message)
            case Closed():
                if not self.run or self.run == message.run:
                    self._end()
            case RendezvousError():
                self._end()

    def _end_round(self, over: RoundOver) -> None:
        current = (self.run, self.round) == (over.run, over.round)
        if current and self.phase in ("running", "succeeded"):
            self._stop()
        left = -1 if self.left_round is None else self.left_round
        if self.phase == "joining" and self.run == over.run and over.round > left:
            # It never heard that the round was complete, and will not start it now.
            self.left_round = over.round
            self._say(self._join())

    def _start_workers(self, line: Line) -> None:
        stale = self.left_round is not None and line.round <= self.left_round
        if self.phase != "joining" or stale or self.run not in ("", line.run):
            return
        workers = (line.run, line.round)
        self.world.check_start(self, workers)
        self.phase, self.run, self.round = "running", *workers
        self.workers, self.failures, self.store_host_failed = workers, (), False

    def _stop(self) -> None:
        """Stop the workers; they are gone a while later."""
        self.phase, instance = "stopping", self.instances
        in_ms = self.world.random.choice((1, 50, 2_000))
        self.world.at(in_ms, lambda: self._stopped(instance))

    def _stopped(self, instance: int) -> None:
        if self.instances != instance or self.phase != "stopping":
            return
        self._workers_vanish()
        self.phase, self.left_round = "joining", self.round
        self._say(self._join())

    def _workers_vanish(self) -> None:
        workers, self.workers = self.workers, None
        if workers is not None:
            self.world.collectives_break(workers, self)

    def _end(self) -> None:
        """The agent exits, and its workers before it."""
        self._workers_vanish()
        self.phase = "dead"
        if self.stream is not None:
            stream, self.stream = self.stream, None
            stream.end()

    # -------------------------------------------------------------- its workers

    def worker_fails(self) -> None:
        """A worker fails by itself."""
        if self.phase == "running" and self.workers is not None:
            self.world.blameless = False
            self.fails(self.workers)

    def fails(self, workers: Workers) -> None:
        """A worker of this round fails; the agent stops the others."""
        if self.phase == "dead" and self.workers == workers:
            # Nobody is there to see it; the runner keeps the exit status.
            self.failures = (report(message="while its agent was away"),)
            return
        if self.phase != "running" or self.workers != workers or self.round is None:
            return
        self.failures = (report(message=f"on {self.name}"),)
        self._stop()
        who = (self.name, self.incarnation, self.run)
        self._say(Fail(*who, self.round, self.failures))
        if not self.world.calm and self.world.random.random() < 0.02:
            self.world.blameless = False
            self._say(ReportStuck(*who, self.round, (4711,)))

    def workers_succeed(self) -> None:
        if self.phase == "running" and self.round is not None:
            self.workers, self.phase = None, "succeeded"
            self._say(Succeed(self.name, self.incarnation, self.run, self.round))

    def store_host_fails(self) -> None:
        if self.phase == "running" and self.workers is not None and self.round is not None:
            workers = self.workers
            seated = self.world.announced[workers]
            if seated[0].node_id == self.name:
                self.store_host_failed = True
                who = (self.name, self.incarnation, self.run)
                self._say(ReportStoreHost(*who, self.round, "it exited 1"))
                self.world.collectives_break(workers, self)

    # -------------------------------------------------------------- what happens to it

    def node_dies(self) -> None:
        """Agent and workers die; the kernel ends the stream."""
        if self.phase != "dead":
            self._end()
            self._restart_later()

    def machine_dies(self) -> None:
        """Everything dies, and no word of it comes to the server."""
        if self.phase == "dead":
            return
        self._workers_vanish()
        self.phase = "dead"
        if self.stream is not None:
            self.stream.silent, self.stream = True, None
        self._restart_later()

    def _restart_later(self) -> None:
        self.world.at(self.world.random.choice((10, 3_000, 20_000)), self.start)

    def agent_restarts(self, planned: bool = False) -> None:
        """A daemon's workers outlive it; the next instance adopts them, if it comes in time."""
        if self.phase not in ("running", "stopping") or self.kind is not nodes.AgentKind.DAEMON:
            return
        self.phase = "dead"
        if self.stream is not None:
            stream, self.stream = self.stream, None
            stream.end()
        after_ms = self.world.random.choice((10, 200, 2_000, 8_000))
        self.instances += 1
        instance = self.instances
        if after_ms > 5_000 and not planned:
            self.world.at(5_000, lambda: self._orphans_end(instance))
        self.world.at(after_ms, lambda: self._adopt(instance))

    def agent_upgrades(self) -> None:
        if self.stream is not None and self.stream.carries and self.phase == "running":
            self.world.server.plan_away(self.stream, 10_000)
            self.agent_restarts(planned=True)

    def _orphans_end(self, instance: int) -> None:
        """The runner stops them; if the server was away too, nobody learns why they failed."""
        if self.instances == instance and self.phase == "dead":
            self.world.blameless = False
            self._workers_vanish()

    def _adopt(self, instance: int) -> None:
        if self.instances != instance or self.phase != "dead":
            return
        kept = self.incarnation
        self._begin_instance()
        self.incarnation = kept
        if self.workers is None:
            self.phase, self.left_round = "joining", self.round
        elif self.failures:
            self._stop()
        else:
            self.phase = "running"
        self.connect()

    def link_breaks(self) -> None:
        """The stream ends for both, and the node connects again."""
        if self.stream is not None:
            self.stream.end()

    def link_cut(self) -> None:
        """Nothing comes through for a while, and neither side is told."""
        if self.stream is None or self.cut:
            return
        stream, self.cut = self.stream, True
        stream.silent = True

        def notice() -> None:
            if self.stream is stream:
                self.lose_stream()

        def mend() -> None:
            self.cut = False

        self.world.at(self.world.random.choice((500, 4_000)), notice)
        self.world.at(self.world.random.choice((1_000, 3_000, 15_000)), mend)

    def leaves(self) -> None:
        """Leave in order."""
        if self.phase == "joining" or (self.phase == "running" and self.workers is not None):
            had_workers, instance = self.phase == "running", self.instances
            self.phase = "leaving"
            self._say(self._leave())
            in_ms = self.world.random.choice((1, 500)) if had_workers else 1
            self.world.at(in_ms, lambda: self._left(instance))

    def _left(self, instance: int) -> None:
        if self.instances != instance or self.phase != "leaving":
            return
        self._workers_vanish()
        if self.round is not None:
            self._say(self._leave(left_round=self.round))
        # The last word is given time to arrive.
        self.world.at(300, lambda: self._end() if self.instances == instance else None)
