"""The fate of each worker in this node's last round: how it ended, and whether the agent ended it.

`FateRecorder` records each fate as it happens; `summary` reports it to the user when the job is
over.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from rdzv.agent.core import commands, events
from rdzv.agent.core.model import AgentState, Assignment, Outcome
from rdzv.structs import field_names, replace, struct

if TYPE_CHECKING:
    from rdzv.agent.workers.event_log import EventLog


@struct(frozen=True)
class Stop:
    """How the agent told a worker to end."""

    signum: int
    at_ms: int
    """When the worker was told, by the agent's clock."""
    may_park: bool = False
    """Whether a worker that can be kept is asked to park instead."""


@struct(frozen=True)
class WorkerFate:
    """The history of one worker, from its start to its end."""

    local_rank: int
    rank: int
    role_rank: int
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    """The signal that ended the worker. Without an exit code either, it has not ended or never
    started.
    """
    ended_ms: int = 0
    """When the worker ended, by the agent's clock."""
    why_killed: str = ""
    """Why the worker was killed instead of parked; empty if it was not."""
    failed: bool = False
    """Whether the worker failed by itself."""
    stopped: Stop | None = None
    """How the agent told the worker to end, if it did. Failing afterwards does not count as a
    failure.
    """


@struct(frozen=True)
class LocalRound:
    """The workers of one round on this node."""

    assignment: Assignment
    workers: tuple[WorkerFate, ...]
    """The workers, by LOCAL_RANK."""

    @classmethod
    def begin(cls, assignment: Assignment, local_world_size: int) -> LocalRound:
        """Return a round whose workers are about to be started."""
        first, role_first = assignment.rank_first, assignment.role_rank_first
        fates = (WorkerFate(n, first + n, role_first + n) for n in range(local_world_size))
        return cls(assignment, tuple(fates))

    def started(self, local_rank: int, pid: int) -> LocalRound:
        """Return the round after a worker's start."""
        return self._with(local_rank, pid=pid)

    def told_to_end(self, alive: Collection[int], stop: Stop) -> LocalRound:
        """Return the round after the workers in `alive` were told to end.

        Each worker keeps its first stop, unless that stop allowed it to park.
        """
        return replace(
            self,
            workers=tuple(
                replace(fate, stopped=stop)
                if fate.local_rank in alive and (fate.stopped is None or fate.stopped.may_park)
                else fate
                for fate in self.workers
            ),
        )

    def charged(self, local_ranks: Collection[int]) -> LocalRound:
        """Return the round after these parked workers were charged, and so have failed."""
        return replace(
            self,
            workers=tuple(
                replace(fate, failed=True, stopped=None) if fate.local_rank in local_ranks else fate
                for fate in self.workers
            ),
        )

    def not_kept(self, local_rank: int, reason: str) -> LocalRound:
        """Return the round after a worker was killed instead of parked."""
        return self._with(local_rank, why_killed=reason)

    def ended(
        self,
        local_rank: int,
        exit_code: int | None,
        signal: int | None,
        at_ms: int,
        *,
        failed: bool,
    ) -> LocalRound:
        """Return the round after a worker's exit. A worker that was told to end has not failed."""
        return self._with(
            local_rank,
            exit_code=exit_code,
            signal=signal,
            ended_ms=at_ms,
            failed=failed,
            stopped=None if failed else self.workers[local_rank].stopped,
        )

    def _with(self, local_rank: int, **changes: object) -> LocalRound:
        before, fate = self.workers[:local_rank], self.workers[local_rank]
        changed: WorkerFate = replace(fate, **changes)  # type: ignore[arg-type]
        return replace(self, workers=(*before, changed, *self.workers[local_rank + 1 :]))


@struct(frozen=True)
class NodeOutcome(Outcome):
    """A job's outcome on this node, with the fates of its last workers."""

    workers: tuple[WorkerFate, ...] = ()
    restarts: int = 0
    """The restarts that had been spent when they were started."""


class FateRecorder:
    """Records the fates of a job's workers, based on the core's events and commands.

    Also sends torchrun's events to `event_log`; `now_ms` is the agent's clock.
    """

    def __init__(
        self, event_log: EventLog, local_world_size: int, now_ms: Callable[[], int]
    ) -> None:
        self._local_world_size = local_world_size
        self._now_ms = now_ms
        self._event_log = event_log
        self._round: LocalRound | None = None

    @property
    def workers(self) -> tuple[WorkerFate, ...]:
        """The last round's workers, by LOCAL_RANK; empty before the first round."""
        return () if self._round is None else self._round.workers

    async def open(self) -> None:
        """Start the event handler, if one was requested.

        Raises:
            InvalidRequestError: the requested handler is unknown.
        """
        await self._event_log.open()

    async def close(self) -> None:
        """Wait until the last events have been recorded."""
        await self._event_log.close()

    def resume(self, assignment: Assignment, pids: Mapping[int, int]) -> None:
        """Continue with a round that began under a previous agent."""
        self._round = LocalRound.begin(assignment, self._local_world_size)
        for local_rank, pid in pids.items():
            self._round = self._round.started(local_rank, pid)

    def worker_started(self, local_rank: int, pid: int) -> None:
        """Record that a worker is running. Starts are recorded in LOCAL_RANK order, as in torch."""
        if self._round is not None:
            recorded = _started_in_order(self._round)
            self._round = self._round.started(local_rank, pid)
            for worker in self._round.workers[recorded : _started_in_order(self._round)]:
                self._event_log.worker_started(worker)

    def worker_not_kept(self, local_rank: int, pid: int, reason: str) -> None:
        """Record that a worker that was asked to park is being killed."""
        if self._round is not None and self._has(local_rank, pid):
            self._round = self._round.not_kept(local_rank, reason)

    def note(
        self, event: events.Event, state: AgentState, doing: Sequence[commands.Command]
    ) -> None:
        """Process an event, the state after it, and the commands about to be carried out."""
        match event:
            case events.WorkerExited() if self._is_current(event.round):
                assert self._round is not None
                failed = event.local_rank in {failure.local_rank for failure in state.failures}
                self._round = self._round.ended(
                    event.local_rank, event.exit_code, event.signal, self._now_ms(), failed=failed
                )
            case events.KeptExited() if self._has(event.local_rank, event.pid):
                assert self._round is not None
                failed = self._round.workers[event.local_rank].failed
                self._round = self._round.ended(
                    event.local_rank, event.exit_code, event.signal, self._now_ms(), failed=failed
                )
            case events.Fenced() if self._is_current(event.round):
                assert self._round is not None
                stop = Stop(signals.SIGKILL, self._now_ms())
                self._round = self._round.told_to_end(state.alive, stop)
            case _:
                pass
        for command in doing:
            self._note_command(command, state)

    def _note_command(self, command: commands.Command, state: AgentState) -> None:
        match command:
            case commands.SayJoin():
                self._event_log.joining(self._now_ms())
            case commands.StartWorkers():
                self._event_log.round_complete(command.assignment, self._now_ms())
                self._round = LocalRound.begin(command.assignment, self._local_world_size)
            case commands.NotifyWorkers(signum=int(signum)) if self._is_current(command.round):
                assert self._round is not None
                stop = Stop(signals.Signals(signum), self._now_ms())
                self._round = self._round.told_to_end(state.alive, stop)
            case commands.StopWorkers() if self._is_current(command.round):
                assert self._round is not None
                signum = signals.SIGTERM if command.signum is None else command.signum
                if command.grace_ms == 0:
                    signum = signals.SIGKILL
                killed = Stop(signals.SIGKILL, self._now_ms())
                stop = Stop(signum, self._now_ms(), may_park=command.keep_ms is not None)
                ended = self._round.told_to_end(state.alive & {*command.not_kept}, killed)
                self._round = ended.told_to_end(state.alive - {*command.not_kept}, stop)
            case commands.EndKept() if self._round is not None:
                signum = signals.SIGTERM if command.grace_ms else signals.SIGKILL
                kept = {worker.local_rank for worker in state.kept} - {*command.charged}
                ended = self._round.charged(command.charged)
                self._round = ended.told_to_end(kept, Stop(signum, self._now_ms()))
            case _:
                pass

    def outcome(self, outcome: Outcome) -> NodeOutcome:
        """Combine the outcome with the fates of the last workers, and record it."""
        known = {name: getattr(outcome, name) for name in field_names(Outcome)}
        restarts = 0 if self._round is None else self._round.assignment.restarts
        ending = NodeOutcome(**known, workers=self.workers, restarts=restarts)
        self._event_log.ended(self._round, ending, self._now_ms())
        return ending

    def _has(self, local_rank: int, pid: int) -> bool:
        return any((one.local_rank, one.pid) == (local_rank, pid) for one in self.workers)

    def _is_current(self, round_: int) -> bool:
        return self._round is not None and self._round.assignment.round == round_


def _started_in_order(local: LocalRound) -> int:
    return sum(1 for _ in takewhile(lambda worker: worker.pid is not None, local.workers))
