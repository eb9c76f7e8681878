"""The nodes of a simulation: the real agent core and its messages, with fake workers.

`Agent` is one start of an agent on a node. It does what `rdzv.agent.server_link.link` does (one
stream, always reopened) and what `rdzv.agent.job.job_driver` does (events to the core, its commands
to runner and server). `Runner` simulates the workers: late, slow, failing, stuck.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

from rdzv import messages
from rdzv.agent.core import begin, commands, events, step
from rdzv.agent.core.model import JobTerms, Outcome, Phase
from rdzv.agent.core.stopping import rejoin
from rdzv.agent.job.worker_starts import LocalStarts
from rdzv.agent.runner.requests import STANDBY
from rdzv.agent.server_link import encoding
from rdzv.agent.server_link.node_drain import Event, NodeDrain
from rdzv.agent.server_link.outbox import HEARTBEATS_PER_FENCE
from rdzv.core.evidence.hang_culprit import HungWorker
from rdzv.core.evidence.stacks import StackFrame, ThreadStack, WorkerStack
from rdzv.core.fleet.node_resources import NodeResources
from rdzv.core.fleet.nodes import AgentKind, LeaseRules, absence_for
from rdzv.core.model import UNMOVED, Assignment, Moved, Offer, StandbyState
from rdzv.messages import WorkersStarted
from rdzv.structs import replace, struct
from rdzv.transport.node_stream import FINAL_REFUSALS
from rdzv.transport.wire import write
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.version import PROTOCOL_VERSION
from tests.sim.network import Connection, End
from tests.sim.parking import Parked, Parking
from tests.sim.snapshots import Slots
from tests.sim.standbys import Standbys

if TYPE_CHECKING:
    from tests.sim.world import World

KINDS = {
    AgentKind.FOREGROUND: pb.AGENT_KIND_FOREGROUND,
    AgentKind.DAEMON: pb.AGENT_KIND_DAEMON,
}
HEARTBEAT = pb.NodeMessage(heartbeat=pb.Heartbeat())
WELCOME_TIMEOUT_MS = 10_000
BACKOFF_FIRST_MS, BACKOFF_MAX_MS = 100, 5_000
STEADY_MS = 5_000
PING_MS = (5_000, 10_000)
"""How long a node takes to notice, by HTTP/2 pings, that its server is silent."""
SIGKILL_WAIT_MS = 5_000
"""Workers that survive SIGKILL for this long are stuck."""
NOTICE_HANG_MS = 2_000
"""How long a worker may report no progress."""
SAY_HUNG_AGAIN_MS = 20_000
ORPHAN_TIMEOUT_MS = absence_for(LeaseRules().duration_ms)
"""How long a daemon's runner continues without its agent, unless it got a later deadline."""


Workers = tuple[str, str, int]
"""The workers that a node runs: the job, the run and the round."""


@struct(frozen=True)
class NodeSpec:
    """The properties of one node, constant during its history."""

    name: str
    kind: AgentKind
    workers: int
    role: str
    topology: str
    can_host_store: bool
    shutdown_timeout_ms: int
    resources: NodeResources | None = None
    """Its resources for submitted jobs; None if it takes none."""


# ------------------------------------------------------------------ the workers


class Runner:
    """The workers of one job on one node, and their fate."""

    def __init__(self, world: World, part: Part) -> None:
        self.world = world
        self.part = part
        self.workers: Workers | None = None
        self.era = 0
        """The era in which they were started: a server without memory may reuse a number."""
        self.alive: set[int] = set()
        self.stuck = False
        self.succeeding = False
        self.hung: set[int] = set()
        """LOCAL_RANKs that do nothing any more, possibly forever."""
        self.parking = Parking(self)
        self.standbys = Standbys(self)
        self.started: tuple[str, int] | None = None
        """The run and the round whose workers were last ordered to start."""
        self.slots = Slots(self)
        self._keeping = False
        """Whether workers are asked to park instead of ending."""
        self._not_kept: set[int] = set()
        self._stop_due_ms: int | None = None
        self._fence_ms: int | None = None
        """When everything here is killed, unless the fence is renewed."""
        self.stood_still = False
        """Whether the machine stood still while these workers ran: no fence covers that."""
        self._told_ms = 0
        self._unheard: list[events.Event] = []
        """Events that happened while there was no agent to receive them."""

    def tell(self, event: events.Event) -> None:
        """Notify the agent, or the next one that adopts these workers."""
        agenda, part = self.world.agenda, self.part
        self._told_ms = max(self._told_ms, agenda.now_ms + self.world.random.choice((0, 1, 3)))
        agenda.after(self._told_ms - agenda.now_ms, lambda: self._arrive(part.agent, event))

    def _arrive(self, agent: Agent, event: events.Event) -> None:
        if agent.alive:
            agent.awake(lambda: self.part.hear_runner(event))
        else:
            self._unheard.append(event)

    def adopted(self) -> None:
        unheard, self._unheard = self._unheard, []
        for event in unheard:
            self.tell(event)

    def start(self, assignment: Assignment) -> None:
        workers = (self.part.rdzv_id, assignment.run, assignment.round)
        self.started = workers[1:]
        if self.is_fenced:
            self.world.count("fenced before its start")
            # As in the runner: no process of the job stays, parked or not.
            self.vanish()
            self.tell(events.Fenced(assignment.round, self.world.agenda.now_ms))
            self.tell(events.WorkersGone(assignment.round))
            return
        hot = self.part.state.standby.state is StandbyState.READY
        if hot:
            self.parking.trouble_seating()
        self.world.judge.starts(self.part, workers, assignment, hot=hot)
        self.era = self.world.judge.era
        self.workers, self.alive = workers, set(range(self.part.job.local_world_size))
        self.part.script = self.world.script_of(self.part)
        self.parking.go(assignment, hot=hot)
        self.stuck = self.succeeding = self._keeping = False
        self.hung, self._not_kept = set(), set()
        self._stop_due_ms = None
        self.stood_still = False
        self.slots.begin(workers, assignment, self.parking.base)
        if self.world.happens("start fails"):
            self.tell(events.StartFailed(assignment.round, "no such script"))
            self.vanish()
            self.tell(events.WorkersGone(assignment.round))
            return
        if assignment.hosts_store:
            if self.world.happens("store host is late"):
                return
            ready_ms = self.world.random.choice((1, 100, 3_000))
            self.world.agenda.after(ready_ms, lambda: self._store_ready(workers))

    def trains(self, workers: Workers, local_rank: int, *, healed: bool = True) -> bool:
        """Whether a worker of this round makes steps, or would if it is `healed`."""
        here = self.workers == workers and local_rank in self.alive - self.hung
        here = here and not (healed and local_rank in self.parking.unhealed)
        return here and not (self.stuck or self._stop_due_ms or self.part.agent.frozen)

    def _store_ready(self, workers: Workers) -> None:
        if self.workers == workers:
            self.tell(events.StoreHostReady(workers[2]))

    @property
    def has_workers(self) -> bool:
        """Whether any worker is left here, parked or not, with a rank or without."""
        return self.workers is not None or bool(self.parking.parked or self.standbys.starting)

    # -------------------------------------------------------------- the fence

    @property
    def is_fenced(self) -> bool:
        return self._fence_ms is not None and self.world.agenda.now_ms >= self._fence_ms

    def renew_fence(self, at_ms: int) -> None:
        """Move the fence forward: the server has received a message of this node."""
        if self._fence_ms is None or at_ms > self._fence_ms:
            self._fence_ms = at_ms
            self.world.agenda.after(max(at_ms - self.world.agenda.now_ms, 0), self._meet_fence)

    def _meet_fence(self) -> None:
        """Kill everything here, whatever the agent does, if the fence was not renewed."""
        if not self.is_fenced:
            return
        if self.part.agent.frozen:
            self.part.agent.awake(self._meet_fence)
        elif self.workers is None:
            if self.parking.parked:
                self.world.count("fenced while parked")
                self.parking.end(0)
            self.standbys.killed()
        else:
            self.world.count("fenced")
            workers, self._keeping = self.workers, False
            self._stop_due_ms = self.world.agenda.now_ms
            self.tell(events.Fenced(workers[2], self.world.agenda.now_ms))
            in_ms = self.world.random.choice((0, 50))
            self.world.agenda.after(in_ms, lambda: self._ended(workers))

    # -------------------------------------------------------------- a round ends

    def stop(self, command: commands.StopWorkers) -> None:
        """End the remaining workers, or let them park; of two graces, the shorter counts."""
        world, workers = self.world, self.workers
        if workers is None or workers[2] != command.round:
            self.tell(events.WorkersGone(command.round, kept=self.parking.waiting()))
            return
        grace_ms, first = command.grace_ms, self._stop_due_ms is None
        if command.keep_ms is not None:
            grace_ms = command.keep_ms
            self._not_kept.update(command.not_kept)
        self._keeping = command.keep_ms is not None and (first or self._keeping)
        due_ms = world.agenda.now_ms + grace_ms
        if self._stop_due_ms is not None and due_ms >= self._stop_due_ms:
            return
        self._stop_due_ms = due_ms
        slow = world.happens("slow stop")
        in_ms = grace_ms if slow else min(world.random.choice((0, 1, 50, 400)), grace_ms)
        if not self.alive:
            in_ms = 0
        elif world.happens("workers stuck"):
            self.stuck = True
        world.agenda.after(in_ms, lambda: self._ended(workers))

    def _ended(self, workers: Workers) -> None:
        world = self.world
        if self.workers != workers:
            return
        if self.part.agent.frozen:
            self.part.agent.awake(lambda: self._ended(workers))
            return
        if self.stuck:
            # It takes the processes beside it down, too.
            self._keeping = False
            world.blame()
            world.agenda.after(SIGKILL_WAIT_MS, lambda: self._say_stuck(workers))
            world.agenda.after(world.random.choice((6_000, 60_000)), lambda: self._reap(workers))
            return
        parked = {}
        if self._keeping:
            parked = self.parking.park(workers, self.alive - self._not_kept)
        for local_rank in sorted(self.alive - parked.keys()):
            self.tell(self._exit(workers, local_rank, None, int(signal.SIGTERM)))
        self.vanish(parked)
        claims = self.parking.claims()
        self.tell(events.WorkersGone(workers[2], self._moved(workers), claims))

    def _moved(self, workers: Workers) -> Moved:
        """Return how far the workers had come: most loops get nowhere."""
        chance = self.world.moves_random
        if not self.part.job.settings.no_progress_restarts:
            return UNMOVED
        step = chance.choice((None, chance.randint(0, 3), chance.randint(0, 50)))
        moved = Moved(step, snapshot_changed=chance.random() < 0.1)
        self.world.judge.moved[self.part.node_id, workers] = moved
        return moved

    def _say_stuck(self, workers: Workers) -> None:
        if self.workers == workers and self.stuck:
            self.tell(events.WorkersStuck(workers[2], (4711,)))

    def _reap(self, workers: Workers) -> None:
        if self.workers == workers:
            self.stuck = False
            self._ended(workers)

    def notify(self, round_: int, signum: int | None) -> None:
        """Notify the workers that the node leaves: some exit, some die, some continue."""
        world, workers = self.world, self.workers
        if workers is None or workers[2] != round_ or self.stuck:
            return
        exit_code = world.random.choice((0, None, 1))
        in_ms = world.random.choice((0, 50, 800, 3_000, 10_000_000))
        if signum is not None:
            world.agenda.after(in_ms, lambda: self._heed(workers, exit_code))

    def take_back_notice(self, round_: int) -> None:
        """Take the notice back: too late for workers that have exited."""
        if self.workers is not None and self.workers[2] == round_ and not self.alive:
            # A peer that fails without them may be reported before their node reports that they
            # left.
            self.world.blame()

    def _heed(self, workers: Workers, exit_code: int | None) -> None:
        """Exit because the node leaves; that breaks the others' collectives."""
        world, notice = self.world, self.part.state.notice
        gone = self.workers != workers or not self.alive or self.stuck or self.succeeding
        if gone or notice is None or self._stop_due_ms is not None or self.part.agent.frozen:
            return
        if notice.due_ms is None:
            # By now the notice may be forgotten everywhere.
            world.blame()
        world.count(f"workers heed a notice: {exit_code}")
        if exit_code == 0:
            world.judge.left_with_0.add((self.part.node_id, workers))
        for local_rank in sorted(self.alive):
            signum = int(signal.SIGTERM) if exit_code is None else None
            self.tell(self._exit(workers, local_rank, exit_code, signum))
        self.alive.clear()
        world.collectives_break(workers, self.era)
        if not self.part.agent.alive:
            self.vanish()

    def fail(self, workers: Workers) -> None:
        """One worker of this round exits 1, or crashes."""
        if self.workers != workers or not self.alive or self.stuck or self.part.agent.frozen:
            return
        local_rank = self.world.random.choice(sorted(self.alive))
        self.alive.discard(local_rank)
        self.hung.discard(local_rank)
        parks = self._keeping and local_rank in self.parking.able - self._not_kept
        by_itself = self._stop_due_ms is None or parks
        crashes = self.world.random.random() < 0.5
        how = (None, int(signal.SIGSEGV)) if crashes else (1, None)
        self.tell(replace(self._exit(workers, local_rank, *how), by_itself=by_itself))
        if self.part.agent.alive or self.alive:
            return
        if self._stop_due_ms is None:
            self.vanish()
        else:
            # Their agent has asked for their end before it died, and the next one waits for that.
            self._ended(workers)

    def feel(self, workers: Workers) -> None:
        """A collective of this round fails: a worker parks, if it can, or exits 1."""
        here = self.workers == workers and self.alive and not self.stuck
        can = here and self._stop_due_ms is None and not self.part.agent.frozen
        if not can or not self.parking.suspect(workers, self.alive - self.hung):
            self.fail(workers)

    def succeed(self) -> None:
        """The workers exit 0, one after the other."""
        if self.workers is None or not self.alive or self._stop_due_ms is not None:
            return
        self.succeeding = True
        workers, in_ms = self.workers, 0
        for local_rank in sorted(self.alive):
            in_ms += self.world.random.choice((0, 1, 300))
            self.world.agenda.after(in_ms, lambda rank=local_rank: self._exits_0(workers, rank))

    def _exits_0(self, workers: Workers, local_rank: int) -> None:
        if self.workers != workers or local_rank not in self.alive or self.part.agent.frozen:
            return
        waits = local_rank in self.hung or local_rank in self.parking.suspects
        if self._stop_due_ms is None and not waits:
            self.alive.discard(local_rank)
            self.tell(self._exit(workers, local_rank, 0, None))
            if not self.alive:
                self.world.judge.succeeded(self.part, workers)

    def hang(self, local_rank: int, for_ms: int | None) -> None:
        """A worker does nothing any more, for ever or for a while."""
        workers = self.workers
        if workers is None or local_rank not in self.alive or self._stop_due_ms is not None:
            return
        self.world.blame()
        self.hung.add(local_rank)
        self.world.agenda.after(NOTICE_HANG_MS, lambda: self.say_hung(workers, again=True))
        if for_ms is not None:
            self.world.agenda.after(for_ms, lambda: self._recover(workers, local_rank))

    def _recover(self, workers: Workers, local_rank: int) -> None:
        if self.workers != workers or local_rank not in self.hung:
            return
        self.hung.discard(local_rank)
        self.say_hung(workers)
        if self.succeeding:
            self._exits_0(workers, local_rank)

    def say_hung(self, workers: Workers | None = None, *, again: bool = False) -> None:
        """Report hung workers, and repeat that at intervals; see `HangWatch`."""
        line, state = self.part.state.assignment, self.part.state
        if self.workers is None or workers not in (None, self.workers) or line is None:
            return
        if again and self.hung:
            in_ms = SAY_HUNG_AGAIN_MS
            self.world.agenda.after(in_ms, lambda: self.say_hung(workers, again=True))
        if state.phase is Phase.RUNNING and (self.hung or workers is not None):
            hung = tuple(
                HungWorker(line.rank_first + rank, rank, 100 + rank, 60_000, "no word of it")
                for rank in sorted(self.hung)
            )
            report = messages.Hung(line.rdzv_id, line.run, line.round, hung)
            agent = self.part.agent
            agent.awake(lambda: agent.say(encoding.report(report, self.part.rdzv_id, 0)))

    def _exit(
        self, workers: Workers, local_rank: int, exit_code: int | None, signum: int | None
    ) -> events.WorkerExited:
        return events.WorkerExited(
            round=workers[2],
            local_rank=local_rank,
            pid=self.parking.pids[local_rank],
            exit_code=exit_code,
            signal=signum,
            message="" if exit_code == 0 else f"on {self.part.agent.name}",
            age_ms=0,
        )

    def vanish(self, parked: dict[int, Parked] | None = None) -> None:
        """No process is left except these; the others break their peers' collectives if alive."""
        self.parking.parked = parked or {}
        self.standbys.vanish()
        workers, alive = self.workers, self.alive
        self.workers, self.alive, self.stuck = None, set(), False
        self.hung = set()
        if workers is not None and alive:
            self.world.collectives_break(workers, self.era)
        self.world.buried(self.part.agent)


# ------------------------------------------------------------------ one job on one node


class Part:
    """One node's part in one job; see `JobDriver`."""

    def __init__(self, agent: Agent, rdzv_id: str, run: str = "") -> None:
        self.agent = agent
        self.rdzv_id = rdzv_id
        world = agent.world
        self.world = world
        self.job: JobTerms = world.swarm.job(rdzv_id, agent.spec)
        self.state = begin(self.job, world.agenda.now_ms, run)
        self.joined = False
        self.runner = Runner(world, self)
        self.script = ""
        """The digest of the script, as this node last read it."""
        self.said: WorkersStarted | None = None
        """What it would say again to another server of how its workers were started."""
        self.dead: set[int] = set()
        """The process ids of parked workers that this agent knows to have ended."""
        self.starts = self._new_starts()
        self.outcome: Outcome | None = None
        self.reason = ""
        """Why there is nothing to run, as the server last reported."""
        self._port = 20_000
        self._inbox: deque[events.Event] = deque()
        self._busy = False
        self._wake: object = None

    @property
    def node_id(self) -> str:
        return self.agent.name

    def _new_starts(self) -> LocalStarts:
        now_ms = lambda: self.world.agenda.now_ms  # noqa: E731
        size = self.job.local_world_size
        return LocalStarts(self.rdzv_id, size, now_ms, self._say_started, lambda: self.script)

    def _say_started(self, said: WorkersStarted) -> None:
        self.said = said
        if said.script:
            self.world.standbys.shows(self, said)
        self.agent.say(encoding.report(said, self.rdzv_id, 0))

    def adopted(self) -> None:
        """Go on with what the previous agent may not have done; see `JobDriver.resume`."""
        self.starts, self.said = self._new_starts(), None
        state = self.state
        if state.standby.state is StandbyState.STARTING and not state.ending_kept:
            self.runner.standbys.begin(state.standby_of[0])
        line = state.assignment
        runs = state.phase is Phase.RUNNING and not state.workers_gone
        if line is not None and runs and self.runner.started != (line.run, line.round):
            self.runner.standbys.let_start(line)

    def say_join(self) -> None:
        self._do(rejoin(self.state))

    def belief(self) -> pb.Belief | None:
        if self.state.phase is Phase.ENDED:
            return None
        return encoding.belief(self.state, self._join(None), self.world.agenda.now_ms)

    def _join(self, say: commands.SayJoin | None) -> pb.Join:
        now_ms = self.world.agenda.now_ms
        return encoding.join(say, self.state, self._offer(), now_ms, refuse_reuse=False)

    def hear_runner(self, event: events.RunnerEvent) -> None:
        """Handle an event of the runner; see `RunnerEvents`."""
        if getattr(event, "round", None) == STANDBY:
            self.runner.standbys.hear(event)
            return
        self.starts.runner_said(event)
        if isinstance(event, events.KeptExited):
            self.dead.add(event.pid)
        if not isinstance(event, events.WorkerStarted):
            self.post(event)

    def post(self, event: events.Event) -> None:
        self.joined = self.joined or isinstance(event, messages.Joined)
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox:
                self._handle(self._inbox.popleft())
        finally:
            self._busy = False

    def _handle(self, event: events.Event) -> None:
        now_ms = self.world.agenda.now_ms
        before = self.state
        transition = step(before, event, now_ms)
        self.world.judge.agent_stepped(self, before, event, transition, now_ms)
        self.state = transition.state
        for command in transition.commands:
            self._do(command)
        self._arm(transition.wake_at_ms)

    def _arm(self, wake_at_ms: int | None) -> None:
        if wake_at_ms == self._wake:
            return
        self._wake = wake_at_ms
        if wake_at_ms is None:
            return
        agent = self.agent

        def tick() -> None:
            if self._wake == wake_at_ms and self.agent is agent:
                self._wake = None
                self.post(events.Ticked())

        in_ms = max(wake_at_ms - self.world.agenda.now_ms, 0)
        self.world.agenda.after(in_ms, lambda: agent.awake(tick))

    def _offer(self) -> Offer:
        spec = self.agent.spec
        return Offer(
            address=f"{spec.name}.net",
            local_world_size=self.job.local_world_size,
            role=spec.role,
            topology=spec.topology,
            machine=f"machine-of-{spec.name}",
            store_port=self._port if self.state.phase is Phase.JOINING else 0,
            can_host_store=spec.can_host_store,
            shutdown_timeout_ms=spec.shutdown_timeout_ms,
        )

    def _do(self, command: commands.Command) -> None:
        self.starts.decided(command)
        match command:
            case commands.SayJoin():
                self._port += 1
                self.world.standbys.check_offer(self, command)
                self.agent.say(pb.NodeMessage(join=self._join(command)))
            case commands.StartWorkers():
                self.runner.standbys.let_start(command.assignment)
            case commands.StartStandby():
                self.runner.standbys.begin(command.script)
            case commands.StopWorkers():
                self.runner.standbys.cancel_start()
                self.runner.stop(command)
            case commands.EndKept():
                self.runner.standbys.cancel()
                self.runner.parking.end(command.grace_ms)
            case commands.NotifyWorkers():
                self.runner.notify(command.round, command.signum)
            case commands.TakeBackNotice():
                self.runner.take_back_notice(command.round)
            case commands.StopStoreHost():
                pass
            case messages.SnapshotsHeld():
                self.agent.say(encoding.report(command, self.rdzv_id, 0))
            case messages.SnapshotWatermark():
                self.runner.slots.watermark = command.mark
                self.runner.slots.given_up = command.given_up
                self.agent.world.counts["saves given up"] += command.given_up is not None
            case messages.KeepCopies():
                self.runner.slots.fetch(command.mark, command.sources)
            case commands.Exit():
                self.outcome = command.outcome
                if self.state.standby.state is not StandbyState.STARTING:
                    self.runner.standbys.killed()  # Those that the runner is ending.
                self.agent.ended(self)
            case _:
                self.agent.say(encoding.report(command, self.rdzv_id, self.world.agenda.now_ms))


# ------------------------------------------------------------------ one start of an agent


class Agent:
    """One agent process: its stream to a server, and its parts in jobs; see `ServerLink`."""

    def __init__(self, world: World, spec: NodeSpec, instance: str) -> None:
        self.world = world
        self.spec = spec
        self.name = spec.name
        self.instance = instance
        self.lineage = instance
        """The first of the instances that have handed these workers on."""
        self.alive = True
        self.frozen = False
        self.parts: dict[str, Part] = {}
        self.connection: Connection | None = None
        self.incarnation = 0
        self.leadership = 0
        self.deadline_ms = 0
        """Until when its runner waits for the next agent, if it announced its absence."""
        self.drain = NodeDrain(lambda: world.agenda.now_ms, self._tell_notice)
        self.said: list[pb.NodeMessage] = []
        self._welcomed_at_ms: int | None = None
        self._beat_every_ms = 0
        self._greeted = False
        self._failed_attempts = 0
        self._beats = 0
        self._hello_sent_ms = 0
        self._unanswered: dict[int, int] = {}
        """Heartbeats of the open stream: their numbers, and when they were sent."""
        self._backlog: list[Callable[[], None]] = []

    def begin(self, rdzv_ids: tuple[str, ...]) -> None:
        """Start afresh, as after a boot: there are no workers."""
        self.parts = {rdzv_id: Part(self, rdzv_id) for rdzv_id in rdzv_ids}
        for part in self.parts.values():
            part.post(events.Ticked())
        self.connect()

    def adopt(self, former: Agent) -> None:
        """Take over the workers left by the previous agent of this node."""
        self.parts, self.incarnation = former.parts, former.incarnation
        self.lineage = former.lineage
        former.parts = {}
        for part in self.parts.values():
            part.agent = self
            part.post(events.ServerLost("the agent was restarted"))
            part.runner.adopted()
            part.adopted()
        self.connect()

    @property
    def greeted(self) -> bool:
        """Whether its stream is open, and the server has welcomed it."""
        return self.connection is not None and self._greeted

    @property
    def has_workers(self) -> bool:
        """Whether any worker is left here, parked or not."""
        return any(part.runner.has_workers for part in self.parts.values())

    # -------------------------------------------------------------- life

    def awake(self, do: Callable[[], None]) -> None:
        """Do something in this process: now, when it is thawed, or never."""
        if not self.alive:
            return
        if self.frozen:
            self._backlog.append(do)
        else:
            do()

    def freeze(self, for_ms: int) -> None:
        """Stand still with the whole machine, as a virtual machine does; connections stay open."""
        if self.alive and not self.frozen:
            self.frozen = True
            for part in self.parts.values():
                part.runner.stood_still = True
            self.world.agenda.after(for_ms, self.thaw)

    def thaw(self) -> None:
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for do in backlog:
            self.awake(do)

    def ended(self, part: Part) -> None:
        """Exit once every job has ended for this node and all messages have been sent."""
        self.world.judge.exited(part)
        if all(part.outcome is not None for part in self.parts.values()):
            self.alive = False
            if self.connection is not None:
                self.connection.end_by_node()
                self.connection = None
            self.world.buried(self)

    def die(self, *, silent: bool = False, workers_live: bool = False) -> None:
        """End at once, with the workers unless `workers_live`; with the machine if `silent`."""
        if not self.alive:
            return
        self.alive = False
        connection, self.connection = self.connection, None
        if connection is not None:
            if silent:
                connection.die_with_node()
            else:
                connection.end_by_node(in_order=self.world.random.random() < 0.5)
        if workers_live:
            self.world.agenda.after(
                max(self.deadline_ms - self.world.agenda.now_ms, ORPHAN_TIMEOUT_MS),
                self.end_orphans,
            )
        else:
            self.end_workers()
        self.world.buried(self)

    def end_workers(self) -> None:
        for part in self.parts.values():
            part.runner.vanish()

    def end_orphans(self) -> None:
        """Act as the runner, which has waited long enough for an agent, and ends its workers."""
        if not self.alive and self.has_workers:
            # If the server was away, too, nothing reveals why the others' collectives broke.
            self.world.blame()
            self.end_workers()
            self.world.buried(self)

    # -------------------------------------------------------------- its messages

    def say(self, message: pb.NodeMessage) -> None:
        """Send a message if a stream is open; otherwise the next Hello includes it."""
        if self.connection is not None:
            self.said.append(message)
            self.connection.up(message)

    def repeat(self) -> None:
        """Repeat an earlier message of this instance, as if it were duplicated on its way."""
        if self.connection is not None and self.said and self._greeted:
            self.connection.up(self.world.random.choice(self.said))

    def plan_away(self, for_ms: int) -> None:
        if self.connection is not None and self._greeted:
            self.deadline_ms = self.world.agenda.now_ms + for_ms
            self.connection.up(pb.NodeMessage(away=pb.Away(deadline_ms=for_ms)))

    def preempt(self, left_ms: int) -> None:
        """Receive a notice that this node is about to be preempted."""
        if self.drain.note_wish(left_ms, "preempted") and self.connection is not None:
            said = self.drain.said()
            assert said is not None
            self.connection.up(encoding.report(said))

    def _tell_notice(self, event: Event) -> None:
        for part in list(self.parts.values()):
            if part.outcome is None:
                part.post(event)

    def signal(self) -> None:
        for part in list(self.parts.values()):
            part.post(events.Signalled(int(signal.SIGTERM), "SIGTERM"))

    # -------------------------------------------------------------- its stream

    def connect(self) -> None:
        if not self.alive or self.connection is not None:
            return
        world = self.world
        server = world.servers[self._failed_attempts % len(world.servers)]
        self._welcomed_at_ms, self._greeted = None, False
        connection = world.network.connect(self, server)
        if connection is None:
            slow = world.network.is_cut(self.name, server.number)
            in_ms = world.random.choice((3_000, 10_000)) if slow and not world.calm else 2
            world.agenda.after(in_ms, lambda: self.awake(lambda: self._failed("not reachable")))
            return
        self.connection = connection
        self._hello_sent_ms, self._unanswered = world.agenda.now_ms, {}
        connection.up(pb.NodeMessage(hello=self._hello()))
        world.agenda.after(
            WELCOME_TIMEOUT_MS, lambda: self.awake(lambda: self._give_up_unless_greeted(connection))
        )

    def _hello(self) -> pb.Hello:
        beliefs = [belief for part in self.parts.values() if (belief := part.belief()) is not None]
        said = self.drain.said()
        return pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            node_id=self.name,
            instance=self.instance,
            kind=KINDS[self.spec.kind],
            address=f"{self.name}.net",
            pid=4711,
            leadership=self.leadership,
            incarnation=self.incarnation,
            agent_version="simulated",
            fence_after_ms=self.world.swarm.fence_after_ms,
            beliefs=beliefs,
            draining=None if said is None else write(pb.Draining(), said),
        )

    def _give_up_unless_greeted(self, connection: Connection) -> None:
        if self.connection is connection and not self._greeted:
            self.hang_up("no answer in time")

    def hang_up(self, reason: str, *, in_order: bool = False) -> None:
        """Close the stream from this side."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.end_by_node(in_order=in_order)
            self._failed(reason)

    def _failed(self, reason: str) -> None:
        world = self.world
        since_ms = self._welcomed_at_ms
        if since_ms is not None and world.agenda.now_ms - since_ms >= STEADY_MS:
            self._failed_attempts = 0
        for part in list(self.parts.values()):
            part.post(events.ServerLost(reason))
        in_ms = 0
        if self._failed_attempts > 0:
            longest_ms = min(BACKOFF_FIRST_MS << min(self._failed_attempts, 10), BACKOFF_MAX_MS)
            in_ms = world.random.randint(longest_ms // 2, longest_ms)
        self._failed_attempts += 1
        world.agenda.after(in_ms, lambda: self.awake(self.connect))

    def take(self, connection: Connection, message: Any) -> None:
        self.awake(lambda: self._hear(connection, message))

    def _hear(self, connection: Connection, message: Any) -> None:
        if self.connection is not connection:
            return
        if isinstance(message, End):
            self._hear_end(message)
        elif message.leadership < self.leadership:
            self.world.count("agent: refused a deposed server")
            self.hang_up("a server was deposed")
        else:
            self.leadership = message.leadership
            if message.HasField("welcome"):
                self._welcome(connection, message.welcome)
            elif message.HasField("lease"):
                self._beat_every_ms = self._interval_ms(message.lease.heartbeat_interval_ms)
            elif message.HasField("heard"):
                self._note_heard(message.heard.number)
            elif message.HasField("drain"):
                drain = message.drain
                self.world.note(f"{self.instance} is drained: {drain.left_ms} ms")
                self.drain.take_from_server(drain.number, drain.left_ms, drain.reason)
            elif message.HasField("undrain"):
                self.drain.lift()
            elif message.HasField("refused") and message.refused.code not in FINAL_REFUSALS:
                self.world.count(f"told to say hello again: {message.refused.code}")
                self.hang_up("the server refused for now")
            elif message.HasField("take_stacks"):
                self._take_stacks(message.take_stacks)
            else:
                self._deliver(message)

    def _take_stacks(self, asked: pb.TakeStacks) -> None:
        """Report what workers do, unless this agent is too old, or delayed."""
        if self.world.happens_in("hang", 0.2):
            return
        part = self.parts.get(asked.rdzv_id)
        line = part.state.assignment if part is not None else None
        workers = (asked.rdzv_id, asked.run, asked.round)
        if part is None or line is None or part.runner.workers != workers:
            self._answer(
                encoding.report(messages.Stacks(asked.request, (), last=True, error="it has none"))
            )
            return
        for rank in sorted(part.runner.alive):
            where = StackFrame("hang" if rank in part.runner.hung else "step", "train.py", 1)
            main = ThreadStack("MainThread", True, (where,))
            stack = WorkerStack(line.rank_first + rank, rank, 100 + rank, "S", (main,))
            self._answer(
                encoding.report(messages.Stacks(asked.request, (stack,), last=False, error=""))
            )
        self._answer(encoding.report(messages.Stacks(asked.request, (), last=True, error="")))

    def _answer(self, message: pb.NodeMessage) -> None:
        """Send a message that belongs to no run, and so to no later repetition."""
        if self.connection is not None:
            self.connection.up(message)

    def _hear_end(self, end: End) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.end_by_node()
        if end.error is not None and end.error.code in FINAL_REFUSALS:
            for part in list(self.parts.values()):
                part.post(messages.Refused(part.rdzv_id, end.error.code, str(end.error)))
        if self.alive:
            self._failed("the server ended the stream")

    def _welcome(self, connection: Connection, welcome: pb.Welcome) -> None:
        self.incarnation = welcome.incarnation
        self._greeted = True
        self._welcomed_at_ms = self.world.agenda.now_ms
        self._beat_every_ms = self._interval_ms(welcome.heartbeat_interval_ms)
        self._renew_fences(self._hello_sent_ms)
        self._beat_on(connection)
        for part in list(self.parts.values()):
            part.post(events.ServerConnected())
            part.starts.say_again()
            part.runner.say_hung()

    def _beat_on(self, connection: Connection) -> None:
        def beat() -> None:
            if self.connection is connection:
                connection.up(self._heartbeat())
                if self._is_unheard:
                    self.hang_up("heartbeats are not answered")
                self.world.agenda.after(self._beat_every_ms, lambda: self.awake(beat))

        beat()

    def _heartbeat(self) -> pb.NodeMessage:
        if not self.world.swarm.fence_after_ms:
            return HEARTBEAT
        self._beats += 1
        self._unanswered[self._beats] = self.world.agenda.now_ms
        return pb.NodeMessage(heartbeat=pb.Heartbeat(number=self._beats))

    @property
    def _is_unheard(self) -> bool:
        """Whether the server was silent for so long that another stream must be tried."""
        first_ms = min(self._unanswered.values(), default=self.world.agenda.now_ms)
        most_ms = self.world.swarm.fence_after_ms / (HEARTBEATS_PER_FENCE + 1)
        return self.world.agenda.now_ms - first_ms > most_ms

    def _interval_ms(self, asked_ms: int) -> int:
        fence_ms = self.world.swarm.fence_after_ms
        most_ms = fence_ms // HEARTBEATS_PER_FENCE if fence_ms else asked_ms
        return max(min(asked_ms, most_ms), 100)

    def _note_heard(self, number: int) -> None:
        sent_ms = self._unanswered.get(number)
        self._unanswered = {n: at_ms for n, at_ms in self._unanswered.items() if n > number}
        if sent_ms is not None:
            self._renew_fences(sent_ms)

    def _renew_fences(self, heard_ms: int) -> None:
        """Renew the fences of all jobs: the server has received what was sent at that time."""
        if self.world.swarm.fence_after_ms:
            for part in self.parts.values():
                part.runner.renew_fence(heard_ms + self.world.swarm.fence_after_ms)

    def _deliver(self, message: pb.ServerMessage) -> None:
        told = encoding.announcement(message, self.world.agenda.now_ms)
        part = self.parts.get(getattr(told, "rdzv_id", ""))
        if part is None or part.outcome is not None:
            return
        self.world.judge.heard(part, message)
        if isinstance(told, messages.Waiting):
            part.reason = told.reason
        elif isinstance(told, get_args(events.FromServer)):
            part.post(told)

    def notice_silence(self, connection: Connection) -> None:
        """Detect by unanswered pings that no message gets through."""
        cuts, server = self.world.network.cuts, connection.server.number
        silent = any(name == self.name and number == server for name, number, _ in cuts)
        dead = connection.server.process is not connection.process or not connection.server.up
        if self.connection is connection and (silent or dead or not connection.server_open):
            self.awake(lambda: self.hang_up("pings are not answered"))
