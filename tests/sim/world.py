"""One history of the whole system in virtual time: everything in it follows from one seed.

Real parts: the server's driver, jobs, streams and timers, what it does with each message of a node,
its three pure cores, the store's codec and contract, the agent core, and the messages between
server and agents. Simulated: the network, the disk, processes, clocks, and the workers. So the
*driver* is tested as well: its process may be killed at each await. A model of it around the bare
cores would run about three times as many histories in the same time, but would miss the driver's
own bugs.
(tests/unit/core/test_small_scope.py is the other extreme: the bare core, every order of commands.)

A history has two phases. In the *safety* phase things go wrong as planned, and the judge checks
every step. In the *liveness* phase nothing new goes wrong, a random core of at least `min_nodes`
heals, and each job must run a round on the available nodes, or be closed, within a bound. Then, for
a while, nothing must happen any more.

`python -m tests.sim 4711 --trace` prints one; `make sim SEEDS=100000` runs many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from random import Random

from rdzv.agent.core import events
from rdzv.agent.core.model import Phase
from rdzv.agent.core.standbys import HOT
from rdzv.core.fleet.nodes import AgentKind, LeaseRules
from rdzv.core.life.forming import GATHER_MS, STORE_BACKOFF_MAX_MS
from rdzv.core.model import Membership
from rdzv.core.rounds.ranks import STOP_MARGIN_MS
from tests.sim.agents import PING_MS, Agent, NodeSpec, Part, Workers
from tests.sim.checkers import Judge, LivenessError
from tests.sim.cluster import Disk, Server
from tests.sim.daemons import Daemon
from tests.sim.loop import Agenda, Process
from tests.sim.network import DOWN, UP, Connection, Network
from tests.sim.operators import Operators
from tests.sim.standby_checks import StandbyJudge
from tests.sim.standbys import SLOW_MS
from tests.sim.swarm import AIMED_TROUBLES, Swarm, Trouble

TRACED = ("store", "trouble", "attach", "refused", "chance")
"""The kinds of counted events that a trace also shows."""
OF_A_PART = (
    "worker_fails",
    "collective_fails",
    "crash_loops",
    "worker_hangs",
    "workers_succeed",
    "store_host_fails",
    "runner_dies",
    "script_changes",
)
"""Troubles of a job on a node, which need a node with a job."""
CALM_MS = 15_000
"""For how long nothing must happen once all is well."""
SETTLE_MS = 10_000
"""How long after that, events under way may still complete."""
START_ANEW_MS = 5_000
"""The interval, in the liveness phase, at which missing agents are started."""


class World:
    """Virtual time, one seeded source of randomness, and all simulated processes."""

    def __init__(
        self,
        seed: int,
        *,
        only: Iterable[int] | None = None,
        without: frozenset[str] = frozenset(),
        counts: Counter[str] | None = None,
    ) -> None:
        random = Random(seed)
        self.seed = seed
        self.swarm = Swarm.of(seed, random, without)
        plan = self.swarm.plan(random)
        keep = None if only is None else set(only)
        self.plan = [trouble for trouble in plan if keep is None or trouble.number in keep]
        self.random = random
        self.check_random = Random(seed)
        """A separate source for checks, so that adding or removing one changes no history."""
        self.moves_random = Random(f"{seed}, how far workers come")
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.agenda = Agenda()
        self.calm = False
        """Whether nothing new goes wrong any more."""
        self.failure: BaseException | None = None
        self.log: list[str] | None = None
        self.judge = Judge(self)
        self.standbys = StandbyJudge(self)
        self.network = Network(self.agenda, random)
        self.network.latencies_ms = self.swarm.latencies_ms
        self.disk = Disk(random)
        self.disk.latencies_ms = self.swarm.store_latencies_ms
        self.specs = {spec.name: spec for spec in self.swarm.nodes}
        self.agents: list[Agent] = []
        """Every agent that lives, and every one whose workers do."""
        self._starts_anew = True
        """Whether missing agents are started once nothing new goes wrong."""
        self._kill_ms: tuple[int, int] | None = None
        """How long after the next round completes its server is killed, and is back."""
        if any(self.swarm.rates.get(name) for name in AIMED_TROUBLES):
            # The first round is special: its nodes have only just joined.
            self._aim(Random(f"{seed}, the first aim"))
        self.servers_from_ms = 0
        """No server can start before this time."""
        self.operators = Operators(self)
        self._scripts: Counter[str] = Counter()
        """By job: how often its script was changed."""
        self._instances = 0
        self._uids = 0
        self._pids = 0
        self.servers = [Server(self, number) for number in range(self.swarm.servers)]
        for server in self.servers:
            server.clock_offset_ms = random.choice(self.swarm.clock_offsets_ms)

    # -------------------------------------------------------------- small services

    def count(self, what: str) -> None:
        self.counts[what] += 1
        if self.log is not None and what.startswith(TRACED):
            self.note(what)

    def note(self, text: str) -> None:
        """Write a line into the trace, if there is one."""
        if self.log is not None:
            self.log.append(f"{self.agenda.now_ms:>9} ms  {text}")

    def fail(self, error: BaseException) -> None:
        """End this history: something is wrong. The first failure counts."""
        if self.failure is None:
            self.failure = error
            self.note(f"FAILED: {error!r}")

    def blame(self) -> None:
        """Note that from now on a restart may be spent for a reason that the server cannot know."""
        self.judge.blameless = False

    def happens(self, chance: str) -> bool:
        """Return whether something happens that has its own probability."""
        likely = self.swarm.chances[chance]
        if self.calm or not likely or self.random.random() >= likely:
            return False
        self.count(f"chance: {chance}")
        return True

    def happens_in(self, what: str, likely: float) -> bool:
        """Return whether something happens with this probability; never once all is healed."""
        if self.calm or self.random.random() >= likely:
            return False
        self.count(f"chance: {what}")
        return True

    def new_uid(self) -> str:
        self._uids += 1
        return f"run-{self._uids}"

    def new_pid(self, local_rank: int) -> int:
        """Return the process id of a new worker, unique if a parked one might have it."""
        self._pids += bool(self.swarm.keep_timeout_ms)
        return 100 + local_rank + 10 * self._pids

    def steps_sealed(self, workers: Workers) -> int:
        """Return how many steps a round has sealed: its workers run in lock-step."""
        return Random(f"{self.seed}, {self.judge.era}, steps of {workers}").choice((0, 0, 1, 5))

    def script_of(self, part: Part) -> str:
        """Return the digest of a job's script on a node."""
        odd = f" of {part.node_id}" if part.node_id in self.swarm.odd_scripts else ""
        return f"version {self._scripts[part.rdzv_id]}{odd}"

    @property
    def leader(self) -> Server | None:
        """The server that took over last, if it serves."""
        leaders = [s for s in self.servers if s.accepting and s.up]
        leaders = [s for s in leaders if s.store.leadership == self.disk.leader]
        return leaders[0] if leaders else None

    # -------------------------------------------------------------- life

    def live(self) -> None:
        """Run this history to its end.

        Raises:
            SafetyError: a guarantee was broken.
            LivenessError: all is healed, and nothing runs in time.
            Exception: any other error inside.
        """
        with self.judge.watching():
            self.begin()
            for trouble in self.plan:
                self.run(trouble.gap_ms)
                self.count(f"trouble: {trouble.name}")
                self._make(trouble)
            self._heal()
            self._wait_until_well()
            self._stay_calm()

    def run(self, for_ms: int) -> None:
        """Let time pass; stop at the first error."""
        self._check()
        self.agenda.run(self.agenda.now_ms + for_ms, self._check)

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def begin(self) -> None:
        self.servers[0].start()
        for name in self.specs:
            self.agenda.after(self.random.randint(0, 500), partial(self.start_node, name))
        for rdzv_id in self.swarm.specs:
            in_ms = self.random.choice((500, 3_000, 20_000))
            self.agenda.after(in_ms, partial(self.operators.submit, rdzv_id))

    def start_node(self, name: str) -> None:
        """Start an agent on a node without one; once nothing new happens, see `_start_core`."""
        if not self.calm:
            self._start(name)

    def _start(self, name: str) -> None:
        if not any(agent.name == name for agent in self.agents):
            self._start_instance(self.specs[name])

    def _start_instance(self, spec: NodeSpec) -> Agent:
        self._instances += 1
        kind = Agent if spec.resources is None else Daemon
        agent = kind(self, spec, f"{spec.name}-{self._instances}")
        self.agents.append(agent)
        agent.begin(tuple(self.swarm.jobs))
        return agent

    def buried(self, agent: Agent) -> None:
        """Forget an agent once neither it nor its workers live."""
        if not agent.alive and not agent.has_workers and agent in self.agents:
            self.agents.remove(agent)

    def collectives_break(self, workers: Workers, era: int) -> None:
        """When workers vanish, fail those of their round on other nodes, unless they hang."""
        for agent in self.agents:
            for part in agent.parts.values():
                peer = part.runner.workers == workers and part.runner.era == era
                if peer and not self.happens("peer hangs"):
                    in_ms = self.random.randint(1, 30)
                    self.agenda.after(in_ms, partial(part.runner.feel, workers))

    # -------------------------------------------------------------- trouble

    def _make(self, trouble: Trouble) -> None:
        chance = Random(trouble.salt)
        name = trouble.name
        if name == "starts":
            self.start_node(chance.choice(list(self.specs)))
        elif name.startswith(("server_", "store_is", "store_refuses", "store_loses")):
            getattr(self, f"_{name}")(chance)
        elif name.startswith("operator_"):
            getattr(self.operators, name.removeprefix("operator_"))(chance)
        else:
            alive = [agent for agent in self.agents if agent.alive]
            if alive:
                agent = alive[chance.randrange(len(alive))]
                part = agent.parts[chance.choice(list(agent.parts))] if agent.parts else None
                if part is None and name in OF_A_PART:
                    return
                rdzv_id = part.rdzv_id if part is not None else "no job"
                self.note(f"{name}: {agent.name} ({agent.instance}), {rdzv_id}")
                getattr(self, f"_{name}")(chance, agent, part)

    def _worker_fails(self, chance: Random, agent: Agent, part: Part) -> None:
        workers = part.runner.workers
        if workers is not None:
            self.blame()
            part.runner.fail(workers)

    def _collective_fails(self, chance: Random, agent: Agent, part: Part) -> None:
        """A collective fails on all nodes of a round, and nothing else does."""
        if (workers := part.runner.workers) is not None:
            self.blame()
            self.collectives_break(workers, part.runner.era)

    def _script_changes(self, chance: Random, agent: Agent, part: Part) -> None:
        """Somebody edits the script; perhaps an operator then asks for new processes."""
        self._scripts[part.rdzv_id] += 1
        if chance.random() < 0.5:
            self.operators.restarts(chance)

    def _crash_loops(self, chance: Random, agent: Agent, part: Part) -> None:
        """The script is broken: whenever a round of the job runs, it fails soon."""
        for times in range(chance.randint(2, 5)):
            at_ms = times * chance.choice((1_500, 5_000))
            self.agenda.after(at_ms, partial(self._fail_wherever, part.rdzv_id))

    def _fail_wherever(self, rdzv_id: str) -> None:
        parts = [agent.parts[rdzv_id] for agent in self.agents if rdzv_id in agent.parts]
        for part in parts:
            if not self.calm and part.runner.workers is not None:
                self.blame()
                part.runner.fail(part.runner.workers)
                return

    def _worker_hangs(self, chance: Random, agent: Agent, part: Part) -> None:
        """One or several at once; some only for a while."""
        workers = part.runner.workers
        for other in list(self.agents):
            for there in other.parts.values():
                if there.runner.workers == workers and (there is part or chance.random() < 0.3):
                    for local_rank in sorted(there.runner.alive)[: chance.choice((1, 1, 3))]:
                        there.runner.hang(local_rank, chance.choice((None, None, 3_000, 9_000)))

    def _workers_succeed(self, chance: Random, agent: Agent, part: Part) -> None:
        """All workers of the round finish, some much later than others."""
        workers = part.runner.workers
        alone = chance.random() < 0.3
        for other in list(self.agents):
            for there in other.parts.values():
                if there.runner.workers == workers and (there is part or not alone):
                    in_ms = chance.choice((0, 1, 200, 4_000))
                    self.agenda.after(in_ms, there.runner.succeed)

    def _store_host_fails(self, chance: Random, agent: Agent, part: Part) -> None:
        """The store host of the round dies, and the collectives of all its nodes with it."""
        for other in self.agents:
            for there in other.parts.values():
                line, workers = there.state.assignment, there.runner.workers
                if line is None or not line.hosts_store or workers is None or not other.alive:
                    continue
                if workers == part.runner.workers:
                    exited = events.StoreHostExited(line.round, "it exited 1")
                    other.awake(partial(there.post, exited))
                    self.collectives_break(workers, there.runner.era)
                    return

    def _node_dies(self, chance: Random, agent: Agent, part: Part) -> None:
        """Agent and workers die; the kernel ends the stream."""
        agent.die()
        self._start_later(chance, agent.name)

    def _machine_dies(self, chance: Random, agent: Agent, part: Part) -> None:
        agent.die(silent=True)
        self._start_later(chance, agent.name)

    def _node_flaps(self, chance: Random, agent: Agent, part: Part) -> None:
        """A node is lost and back, repeatedly."""
        name = agent.name
        for times in range(chance.randint(2, 3)):
            at_ms = times * chance.choice((1_500, 4_000))
            self.agenda.after(at_ms, partial(self._kill_by_name, name))
            self.agenda.after(at_ms + chance.choice((300, 1_000)), partial(self.start_node, name))

    def _kill_by_name(self, name: str) -> None:
        for agent in [a for a in self.agents if a.name == name and a.alive and not self.calm]:
            agent.die()

    def _start_later(self, chance: Random, name: str) -> None:
        in_ms = chance.choice((10, 3_000, 20_000))
        self.agenda.after(in_ms, partial(self.start_node, name))

    def _machine_freezes(self, chance: Random, agent: Agent, part: Part) -> None:
        """A machine stands still; perhaps the scheduler restarts the node elsewhere."""
        agent.freeze(chance.choice((400, 3_000, 8_000, 40_000)))
        if chance.random() < 0.3:
            in_ms = chance.choice((1_000, 6_000))
            self.agenda.after(in_ms, partial(self._start_twin, agent))

    def _comes_twice(self, chance: Random, agent: Agent, part: Part) -> None:
        self._start_twin(agent)

    def _start_twin(self, agent: Agent) -> None:
        """Start another agent under the name of a living one."""
        same = sum(1 for other in self.agents if other.name == agent.name)
        # No two daemons use one directory.
        if not self.calm and not self.swarm.specs and same < 2:
            self._start_instance(agent.spec)

    def _agent_restarts(self, chance: Random, agent: Agent, part: Part) -> None:
        """A daemon's workers outlive it; the next instance adopts them, if it comes in time."""
        if agent.spec.kind is AgentKind.DAEMON and not agent.frozen:
            agent.die(workers_live=True)
            in_ms = chance.choice((10, 200, 2_000, 8_000))
            self.agenda.after(in_ms, partial(self._adopt, agent))

    def _agent_upgrades(self, chance: Random, agent: Agent, part: Part) -> None:
        if agent.spec.kind is AgentKind.DAEMON and not agent.frozen:
            agent.plan_away(10_000)
            in_ms = chance.choice((5, 50))
            self.agenda.after(in_ms, partial(self._agent_restarts, chance, agent, part))

    def _adopt(self, former: Agent) -> None:
        """Start the next instance of a daemon; it takes over any remaining workers."""
        if former.alive or any(a.name == former.name and a.alive for a in self.agents):
            return
        if former.has_workers:
            self._instances += 1
            agent = Agent(self, former.spec, f"{former.name}-{self._instances}")
            self.agents.remove(former)
            self.agents.append(agent)
            self.count("agent: adopts")
            agent.adopt(former)
        else:
            self._start(former.name)

    def _runner_dies(self, chance: Random, agent: Agent, part: Part) -> None:
        if not agent.frozen:
            self.blame()
            part.runner.vanish()
            part.post(events.RunnerLost("its runner exited unexpectedly (1)"))

    def _leaves(self, chance: Random, agent: Agent, part: Part) -> None:
        agent.awake(agent.signal)
        self._start_later(chance, agent.name)

    def _is_hurried(self, chance: Random, agent: Agent, part: Part) -> None:
        """Two signals: the second cuts the grace short."""
        agent.awake(agent.signal)
        self.agenda.after(chance.choice((1, 300)), lambda: agent.awake(agent.signal))

    def _link_breaks(self, chance: Random, agent: Agent, part: Part) -> None:
        agent.awake(partial(agent.hang_up, "the link broke", in_order=chance.random() < 0.5))

    def _link_is_cut(self, chance: Random, agent: Agent, part: Part) -> None:
        self._cut(chance, agent, (UP, DOWN))

    def _link_is_cut_one_way(self, chance: Random, agent: Agent, part: Part) -> None:
        self._cut(chance, agent, (chance.choice((UP, DOWN)),))

    def _cut(self, chance: Random, agent: Agent, directions: tuple[str, ...]) -> None:
        """Let nothing through for a while; neither side is notified."""
        everywhere = chance.random() < 0.5
        here = agent.connection.server.number if agent.connection else 0
        for server in self.servers:
            if everywhere or server.number == here:
                for direction in directions:
                    self.network.cut(agent.name, server.number, direction)
                in_ms = chance.choice((500, 1_000, 3_000, 15_000, 60_000))
                self.agenda.after(in_ms, partial(self.network.mend, agent.name, server.number))
        if (connection := agent.connection) is not None:
            self._notice_silence_later(agent, connection)

    def _notice_silence_later(self, agent: Agent, connection: Connection) -> None:
        in_ms = self.random.randint(*PING_MS)
        self.agenda.after(in_ms, partial(agent.notice_silence, connection))

    def _repeats(self, chance: Random, agent: Agent, part: Part) -> None:
        agent.awake(agent.repeat)

    # -------------------------------------------------------------- trouble of servers

    def _some_server(self, chance: Random) -> Server | None:
        up = [server for server in self.servers if server.up]
        return chance.choice(up) if up else None

    def _server_crashes(self, chance: Random) -> None:
        if (server := self._some_server(chance)) is not None:
            server.crash(back_in_ms=chance.choice((10, 1_000, 8_000)))

    def _server_machine_dies(self, chance: Random) -> None:
        """No node is notified; each finds out by its pings."""
        if (server := self._some_server(chance)) is not None:
            talking = [agent for agent in self.agents if agent.connection is not None]
            server.crash(silent=True, back_in_ms=chance.choice((1_000, 8_000)))
            for agent in talking:
                if agent.connection is not None and agent.connection.server is server:
                    self._notice_silence_later(agent, agent.connection)

    def _server_is_killed_as_a_round_completes(self, chance: Random) -> None:
        self._aim(chance)

    def _aim(self, chance: Random) -> None:
        self._kill_ms = chance.choice((0, 0, 1, 3, 10)), chance.choice((10, 1_000, 8_000))

    def round_completed(self, server: Server) -> None:
        """Kill the server of a new round, if planned, while nodes have barely received it."""
        if self._kill_ms is not None and not self.calm:
            (in_ms, back_in_ms), self._kill_ms = self._kill_ms, None
            process = server.process
            self.count("trouble: killed as a round completes")
            self.agenda.after(in_ms, partial(self._kill, server, process, back_in_ms))

    def _kill(self, server: Server, process: Process, back_in_ms: int) -> None:
        if server.process is process:
            server.crash(reset=True, back_in_ms=back_in_ms)

    def _server_stops(self, chance: Random) -> None:
        if (server := self._some_server(chance)) is not None:
            server.stop(back_in_ms=chance.choice((10, 3_000)))

    def _server_pauses(self, chance: Random) -> None:
        if (server := self._some_server(chance)) is not None:
            server.pause(chance.choice((100, 600, 3_000, 12_000)))

    def _server_is_deposed(self, chance: Random) -> None:
        """Another server takes over; the former leader believes in itself for a while."""
        others = [server for server in self.servers if not server.up]
        if others:
            chance.choice(others).start()

    def took_over(self, server: Server) -> None:
        """Let the former leader find out that it no longer leads, if it lives long enough."""
        for other in self.servers:
            if other is not server and other.up:
                in_ms = 0 if self.calm else self.random.choice((0, 1_000, 6_000, 15_000))
                self.agenda.after(in_ms, partial(self._stand_down, other, other.process))

    def _stand_down(self, server: Server, process: Process) -> None:
        if server.process is process:
            server.crash()

    def _store_is_away(self, chance: Random) -> None:
        self.disk.away = True
        self.agenda.after(chance.choice((300, 3_000, 20_000)), self._mend_store)

    def _store_is_slow(self, chance: Random) -> None:
        self.disk.latencies_ms = (200, 3_000)
        self.agenda.after(10_000, self._mend_store)

    def _store_refuses(self, chance: Random) -> None:
        self.disk.refuses = 0.3
        self.agenda.after(10_000, self._mend_store)

    def _store_loses_answers(self, chance: Random) -> None:
        self.disk.loses_answer = 0.3
        self.agenda.after(20_000, self._mend_store)

    def _mend_store(self) -> None:
        disk = self.disk
        disk.away, disk.refuses, disk.loses_answer = False, 0.0, 0.0
        disk.latencies_ms = self.swarm.store_latencies_ms

    def _store_is_backed_up(self, chance: Random) -> None:
        self.disk.back_up()
        self._backup = dict(self.judge.stored)

    _backup: dict[str, Membership] | None = None

    def _store_is_forgotten(self, chance: Random) -> None:
        """A store in memory ends with its server."""
        self._change_store(self.disk.forget, {}, chance)

    def _store_is_restored(self, chance: Random) -> None:
        """An operator brings back an old copy of the store."""
        if self._backup is not None:
            self._change_store(self.disk.restore, dict(self._backup), chance)

    def _change_store(
        self, change: Callable[[], None], stored: dict[str, Membership], chance: Random
    ) -> None:
        for server in self.servers:
            server.crash()
        change()
        self.judge.rolled_back(stored)
        # A server's leadership is at least its clock in seconds, so that it exceeds the lost ones.
        offset_ms = max(server.clock_offset_ms for server in self.servers)
        for server in self.servers:
            server.clock_offset_ms = offset_ms
        due_ms = (self.judge.leadership + 1) * 1_000 - offset_ms - self.agenda.now_ms
        in_ms = max(due_ms, chance.choice((1_000, 8_000)))
        self.servers_from_ms = self.agenda.now_ms + in_ms
        self.servers[0].start()

    # -------------------------------------------------------------- liveness

    def _heal(self) -> None:
        """Begin the liveness phase: a random core of nodes is back; the others may stay away."""
        self.note("healing")
        self.calm = True
        self.network.latencies_ms = (1, 2, 5)
        self._mend_store()
        self._keep_one_server()
        names = sorted(self.specs)
        fewest = max(settings.min_nodes for settings in self.swarm.jobs.values())
        fewest = 1 if self.swarm.specs else fewest
        core = self.random.sample(names, self.random.randint(fewest, len(names)))
        self.core = sorted(core)
        self.note(f"the core: {', '.join(self.core)}")
        for agent in list(self.agents):
            if agent.name in core:
                if agent.frozen:
                    agent.thaw()
                for server in self.servers:
                    self.network.mend(agent.name, server.number)
            elif agent.alive:
                agent.die(silent=self.random.random() < 0.5)
        self._start_core()
        self.operators.heal()

    def _keep_one_server(self) -> None:
        leader = self.leader
        for server in self.servers:
            if server is not leader:
                server.crash()
        leader = leader or self.servers[0]
        self._keep_serving(leader)

    def _keep_serving(self, leader: Server) -> None:
        leader.start()
        self.agenda.after(START_ANEW_MS, partial(self._keep_serving, leader))

    def _start_core(self) -> None:
        """Restart missing agents until all is well."""
        if self._starts_anew and not self.well:
            for name in self.core:
                self._start(name)
            for agent in list(self.agents):
                over = any(part.outcome is not None for part in agent.parts.values())
                if over and not self.swarm.specs:
                    # It takes part in only one of two jobs; such a node is restarted.
                    agent.awake(agent.signal)
        self.agenda.after(START_ANEW_MS, self._start_core)

    @property
    def patience_ms(self) -> int:
        """Return how long after the last trouble a round may take to run: all possible waits."""
        leases = LeaseRules()
        settings = self.swarm.jobs.values()
        stop_ms = max(spec.shutdown_timeout_ms for spec in self.specs.values())
        return (
            max(s.last_call_timeout_ms for s in settings)
            + leases.duration_ms
            + leases.takeover_grace_ms
            + 2 * (stop_ms + STOP_MARGIN_MS)
            + STORE_BACKOFF_MAX_MS
            + max(s.restart_backoff_max_ms for s in settings)
            + GATHER_MS
            + 60_000  # Until stuck workers are reaped, ...
            + 60_000  # ... and for troubles planned before all of it healed.
            + (2 * SLOW_MS if self.swarm.standby == HOT else 0)
        )

    def _wait_until_well(self) -> None:
        began_ms = self.agenda.now_ms
        while not self.well:
            if self.agenda.now_ms - began_ms > self.patience_ms:
                self._note_everyone()
                raise LivenessError(f"nothing is wrong any more, and {self.ill()}")
            self.run(500)
        self.count(f"well after {(self.agenda.now_ms - began_ms) // 30_000 * 30} s or more")

    def _note_everyone(self) -> None:
        for agent in self.agents:
            there = "alive" if agent.alive else "dead"
            there += ", frozen" if agent.frozen else ""
            there += ", connected" if agent.connection else ""
            for part in agent.parts.values():
                runner = part.runner
                what = f"{part.state.phase}, workers {runner.workers} {runner.alive or ''}"
                self.note(f"{agent.instance} ({there}), {part.rdzv_id}: {what}; {part.reason}")

    @property
    def well(self) -> bool:
        return not any(True for _ in self._ills())

    def ill(self) -> str:
        """Describe what is not well."""
        return "; ".join(self._ills())

    def _ills(self) -> Iterable[str]:
        # A second agent with the same name waits for the end of the first.
        served = {agent.name for agent in self.agents if agent.alive and agent.greeted}
        for agent in self.agents:
            # A node that connects late may report a round, or be lost first.
            if agent.alive and agent.name not in served:
                yield f"{agent.name} is not connected"
        yield from self.operators.ills()
        for rdzv_id in self.swarm.jobs:
            membership = self.judge.stored.get(rdzv_id)
            if membership is None and rdzv_id in self.operators.refused:
                continue
            if membership is None:
                yield f"nobody has joined {rdzv_id}"
            elif membership.ended is None:
                yield from self._ills_of(membership)
            else:
                yield from self._unheard(membership)

    def _unheard(self, membership: Membership) -> Iterable[str]:
        """Yield the nodes that are still in a closed run."""
        for agent in self.agents:
            part = agent.parts.get(membership.rdzv_id)
            if part is None or not agent.alive or part.state.run != membership.run:
                continue
            if part.state.outcome is None and part.state.leaving is None:
                yield f"{agent.name} has not heard that {membership.run} is closed"

    def _ills_of(self, membership: Membership) -> Iterable[str]:
        round_, rdzv_id = membership.round, membership.rdzv_id
        if round_ is None or not round_.live:
            if rdzv_id in self.swarm.specs and self.operators.why_waits(membership):
                return
            parts = [agent.parts.get(rdzv_id) for agent in self.agents]
            reasons = [part.reason for part in parts if part is not None and part.reason]
            yield f"no round of {rdzv_id} runs: {reasons[:1]}"
            return
        workers = (rdzv_id, membership.run, round_.number)
        for participant in round_.participants:
            # A node missing from a live round has succeeded before.
            gone = participant.node_id in round_.gone
            if not gone and not self._has_workers(participant.node_id, workers):
                yield f"{participant.node_id} has no workers of {workers}"
        for agent in self.agents:
            part = agent.parts.get(rdzv_id)
            if part is not None and part.runner.workers == workers and part.runner.hung:
                yield f"{agent.name} hangs in {workers}"
        yield from self.standbys.missing(membership, round_)
        if not any(self._trains(agent, workers) for agent in self.agents):
            yield f"nobody trains in {workers} any more, and the run is not closed"

    def _has_workers(self, name: str, workers: Workers) -> bool:
        """Return whether a node trains, or has finished and waits for the others."""
        for agent in self.agents:
            part = agent.parts.get(workers[0])
            if agent.name != name or part is None:
                continue
            line, phase = part.state.assignment, part.state.phase
            if line is not None and (line.run, line.round) == workers[1:]:
                if agent.alive and phase is Phase.SUCCEEDED:
                    return True
                if self._trains(agent, workers):
                    return True
        return False

    def _trains(self, agent: Agent, workers: Workers) -> bool:
        part = agent.parts.get(workers[0])
        if part is None or part.runner.workers != workers or not part.runner.alive:
            return False
        # A node that stops or leaves trains for the last time.
        return part.state.phase is Phase.RUNNING

    # -------------------------------------------------------------- calm

    def _stay_calm(self) -> None:
        """Check that once all is well, and no node comes or goes, no round ends."""
        self.run(SETTLE_MS)
        self._wait_until_well()
        self._starts_anew = False
        stored = self.judge.stored
        jobs = [rdzv_id for rdzv_id in self.swarm.jobs if rdzv_id in stored]
        open_jobs = [rdzv_id for rdzv_id in jobs if stored[rdzv_id].ended is None]
        before = {rdzv_id: self._present(rdzv_id) for rdzv_id in open_jobs}
        saved = {rdzv_id: self.judge.saved_in_round(rdzv_id) for rdzv_id in open_jobs}
        self.judge.moves.clear()
        self.run(CALM_MS)
        for rdzv_id in open_jobs:
            after = self._present(rdzv_id)
            mark = saved[rdzv_id]
            if mark is not None and before[rdzv_id] == after:
                self.judge.check_announced(rdzv_id, mark)
            # Where one job ends, the nodes that it had go to others.
            moves = self.judge.moves & ({*jobs} if self.swarm.specs else {rdzv_id})
            if before[rdzv_id] != after and not moves:
                self.judge.fail(f"calm: {rdzv_id} was at {before[rdzv_id]} and is at {after}")
        self._check_standbys(open_jobs)
        if self.failure is not None:
            raise self.failure
        for agent in self.agents:
            for part in agent.parts.values():
                waits = agent.alive and part.state.phase is Phase.JOINING
                if waits and not part.reason and self.judge.stored[part.rdzv_id].ended is None:
                    self.judge.fail(f"always a reason: {agent.name} waits for {part.rdzv_id}")

    def _check_standbys(self, jobs: Iterable[str]) -> None:
        """Check that server and nodes agree on who has a standby, and that it is there."""
        for rdzv_id in jobs if self.swarm.standby == HOT else ():
            found = self.standbys.amiss(rdzv_id)
            for _ in range(4):
                # One may just have settled, or ended.
                if found:
                    self.run(500)
                    found = found & self.standbys.amiss(rdzv_id)
            if found:
                self.judge.fail(f"standby: {', '.join(sorted(found))}")

    def _present(self, rdzv_id: str) -> tuple[str, int]:
        membership = self.judge.stored[rdzv_id]
        return membership.run, membership.next_round
