"""Workers that a node starts before it has a seat, in a simulation; see `StandbyWorkers`.

They run the script until all of them are parked; some end before, some never get there, and the
seat may come first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from rdzv.agent.core import events
from rdzv.agent.core.standbys import HOT
from rdzv.agent.job.standby_workers import CPUS_AFTER_S, SEATED_WITHIN_S, START_WITHIN_S
from rdzv.agent.runner.requests import STANDBY
from rdzv.core.model import Assignment, KeptWorker, Standby, StandbyState
from tests.sim.parking import Hot, Parked

if TYPE_CHECKING:
    from tests.sim.agents import Runner

SLOW_MS = 70_000
"""Longer than a round waits for standbys that are starting."""


class Standbys:
    """The standbys of one job on one node, until they are parked, and the round that waits."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.starting: dict[int, Parked] = {}
        """Those that run the script, by LOCAL_RANK."""
        self._attempts = 0
        """How often the agent has begun to start them; a later attempt takes an earlier's place."""
        self._pending = False
        """Whether the agent has not heard what has become of them."""
        self._asked = False
        """Whether the runner was asked to start them."""
        self._waits: Assignment | None = None
        self._later_round: Assignment | None = None
        """The round that the runner starts once it has ended those that are starting."""

    # -------------------------------------------------------------- the agent

    def begin(self, script: str) -> None:
        """Start them, or take over those of another agent."""
        self._attempts += 1
        self._pending, self._asked = True, False
        self._later(self._runner.world.random.choice((0, 5, 300)), partial(self._ask, script))

    def _later(self, in_ms: float, do: Callable[[], None]) -> None:
        """Let this agent do something, unless they have settled, or are started anew, by then."""
        attempt, agent = self._attempts, self._runner.part.agent

        def act() -> None:
            if self._pending and attempt == self._attempts:
                do()

        self._runner.world.agenda.after(int(in_ms), lambda: agent.awake(act))

    def _ask(self, script: str) -> None:
        part = self._runner.part
        part.script = self._runner.world.script_of(part)
        self._asked = True
        if part.script != script:
            # Another agent may have started some.
            self._runner.parking.parked = {}
            self._give_up("the job runs another version of it")
            return
        self._later(START_WITHIN_S * 1_000, partial(self._give_up, "they have not reached it"))
        self._start(script)

    def cancel(self) -> None:
        """Start none, or wait no longer for some that the runner ends."""
        if self._pending:
            self._pending = False
            self._go_on()

    def _give_up(self, why: str) -> None:
        self._end()
        self._settle(Standby(why=why))

    def _end(self) -> None:
        if self.starting:
            grace_ms = self._runner.part.job.failure_stop_timeout_ms
            pids = {one.pid for one in self.starting.values()}
            in_ms = self._runner.world.random.choice((0, 50, grace_ms))
            self._runner.world.agenda.after(in_ms, partial(self.killed, pids))
        else:
            self._say_gone()

    def _settle(self, standby: Standby, kept: tuple[KeptWorker, ...] = ()) -> None:
        self._pending = False
        self._runner.world.count(f"standby: {standby.why or standby.state}")
        self._runner.part.post(events.StandbySettled(standby, kept))
        self._go_on()

    def hear(self, event: events.RunnerEvent) -> None:
        """Handle what the runner says of them."""
        if not (self._pending and self._asked):
            return
        match event:
            case events.WorkerExited():
                self._give_up("one has ended before it has parked")
            case events.WorkersGone() if event.kept:
                self._settle(Standby(StandbyState.READY), event.kept)
                self._measure_later(event.kept)
            case events.WorkersGone():
                self._settle(Standby())

    def _measure_later(self, kept: tuple[KeptWorker, ...]) -> None:
        part, attempt = self._runner.part, self._attempts
        measured = events.StandbySettled(Standby(StandbyState.READY, "", 1 << 20), kept)
        agent = part.agent

        def act() -> None:
            if attempt == self._attempts:
                part.post(measured)

        self._runner.world.agenda.after(int(CPUS_AFTER_S * 1_000), lambda: agent.awake(act))

    # -------------------------------------------------------------- a round

    def let_start(self, assignment: Assignment) -> None:
        """Start a round's workers once the node is ready, and these have settled."""
        part, world = self._runner.part, self._runner.world
        if part.job.standby != HOT:
            self._runner.start(assignment)
            return
        if self._pending and part.state.standby.state is not StandbyState.STARTING:
            self._give_up("its node got a seat, and they are outdated")
        self._waits, agent = assignment, part.agent
        prepare = partial(agent.awake, partial(self._prepared, assignment))
        world.agenda.after(world.random.choice((0, 5, 300)), prepare)

    def _prepared(self, assignment: Assignment) -> None:
        if self._waits is not assignment:
            return  # It is over.
        if self._pending:
            self._runner.world.count("a round waits for standbys")
            why = "its node got a seat before they were ready"
            self._later(SEATED_WITHIN_S * 1_000, partial(self._give_up, why))
        else:
            self._go_on()

    def _go_on(self) -> None:
        """Request a round's workers, which are started once no standby is starting."""
        self._later_round, self._waits = self._waits, None
        if self._later_round is not None and self.starting:
            self._runner.started = (self._later_round.run, self._later_round.round)
            self._end()
        else:
            self._begin_later()

    def _begin_later(self) -> None:
        if (agent := self._runner.part.agent).frozen:
            agent.awake(self._begin_later)
            return
        line, self._later_round = self._later_round, None
        if line is not None:
            self._runner.start(line)

    def cancel_start(self) -> None:
        """Let no round wait any more: it is over. Standbys are not used for another one."""
        state, waits = self._runner.part.state.standby.state, self._waits or self._later_round
        self._waits = self._later_round = None
        if waits is not None and state is StandbyState.READY:
            self._runner.parking.parked = {}
            self._runner.tell(events.KeptGone())
        elif waits is not None:
            # Those that are being ended: with the runner, if the node exits now.
            self._runner.parking.end_at_once()
            if state is StandbyState.COLD:
                self.killed()

    # -------------------------------------------------------------- the runner

    def _start(self, script: str) -> None:
        runner, world = self._runner, self._runner.world
        part = runner.part
        if runner.is_fenced or runner.parking.parked:
            self._say_gone()  # Another agent has started these.
            return
        if self.starting:
            return
        world.standbys.check_start(part, script)
        of, size = (part.rdzv_id, part.state.run, STANDBY), part.job.local_world_size
        hot = Hot(script, world.agenda.now_ms)
        self.starting = starting = {
            rank: Parked(of, world.new_pid(rank), None, False, hot=hot) for rank in range(size)
        }
        in_ms = (
            SLOW_MS if world.happens("standby is slow") else world.random.choice((5, 300, 3_000))
        )
        fate = self._exit if world.happens("standby ends") else self._park
        if not world.happens("standby never parks"):
            world.agenda.after(in_ms, partial(fate, starting))

    def _exit(self, starting: dict[int, Parked]) -> None:
        if self.starting is starting:
            rank, one = next(iter(starting.items()))
            self._runner.tell(events.WorkerExited(STANDBY, rank, one.pid, 1, None, age_ms=0))

    def _park(self, starting: dict[int, Parked]) -> None:
        if self._runner.part.agent.frozen:
            self._runner.part.agent.awake(partial(self._park, starting))
        elif self.starting is starting:
            self._runner.parking.parked, self.starting = starting, {}
            self._say_gone()
            for rank, one in starting.items():
                self._runner.parking.perhaps_dies(rank, one.pid)

    def killed(self, pids: Collection[int] | None = None) -> None:
        """Nothing is left of those with these process ids, or of any."""
        if self.starting and (pids is None or self.starting[0].pid in pids):
            self.starting = {}
            self._say_gone()
            self._runner.world.buried(self._runner.part.agent)
            self._begin_later()

    def vanish(self) -> None:
        """No process is left, nor, if the runner has died, anybody to ask for one."""
        self.starting, self._pending = {}, False
        self._waits = self._later_round = None

    def _say_gone(self) -> None:
        parked = self._runner.parking.parked
        claims = (KeptWorker(n, pid=one.pid) for n, one in parked.items() if one.hot is not None)
        self._runner.tell(events.WorkersGone(STANDBY, kept=tuple(claims)))
