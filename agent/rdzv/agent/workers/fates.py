"""What became of each worker in this node's last round, and the summary of that for the user.

A worker may have failed, have failed as a consequence, or have been ended by the agent.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from rdzv.agent.core import commands, events
from rdzv.agent.core.model import (
    EXIT_DENIED,
    EXIT_FAILED,
    EXIT_NO_PROGRESS,
    EXIT_TRY_AGAIN,
    AgentState,
    Outcome,
)
from rdzv.agent.system.error_files import describe_exit, signal_name
from rdzv.core.model import Assignment, Failure
from rdzv.core.root_cause import is_connection_error, referring
from rdzv.core.words import counted, duration
from rdzv.launch_options.kinds import root_cause_exit
from rdzv.structs import field_names, struct

if TYPE_CHECKING:
    from rdzv.agent.workers.event_log import EventLog


@struct(frozen=True)
class StopOrder:
    """How the agent told a worker to end."""

    signum: int
    at_ms: int
    may_park: bool = False
    """Whether a worker that can be kept is asked to park instead."""


@dataclass(slots=True)
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
    why_killed: str = ""
    """Why the worker was killed instead of parked; empty if it was not."""
    failed: bool = False
    stopped: StopOrder | None = None
    """How the agent told the worker to end, if it did. Failing afterwards does not count as a
    failure.
    """


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
        self.workers: tuple[WorkerFate, ...] = ()
        """The last round's workers, by LOCAL_RANK; empty before the first round."""
        self._local_world_size = local_world_size
        self._now_ms = now_ms
        self._event_log = event_log
        self._assignment: Assignment | None = None

    def begin(self, assignment: Assignment, pids: Mapping[int, int] | None = None) -> None:
        """Begin a round. If it began under a previous agent, `pids` has its running workers."""
        self._assignment = assignment
        first, role_first = assignment.rank_first, assignment.role_rank_first
        self.workers = tuple(
            WorkerFate(n, first + n, role_first + n, (pids or {}).get(n))
            for n in range(self._local_world_size)
        )

    def worker_started(self, local_rank: int, pid: int) -> None:
        """Record that a worker is running. Starts are recorded in LOCAL_RANK order, as in torch."""
        recorded = self._started_in_order()
        self.workers[local_rank].pid = pid
        for worker in self.workers[recorded : self._started_in_order()]:
            self._event_log.worker_started(worker)

    def worker_not_kept(self, local_rank: int, pid: int, reason: str) -> None:
        if (fate := self._find(local_rank, pid)) is not None:
            fate.why_killed = reason

    def note(
        self, event: events.Event, state: AgentState, doing: Sequence[commands.Command]
    ) -> None:
        match event:
            case events.WorkerExited() if self._is_current(event.round):
                failed = event.local_rank in {failure.local_rank for failure in state.failures}
                self._end(self.workers[event.local_rank], event, failed=failed)
            case events.KeptExited():
                if (fate := self._find(event.local_rank, event.pid)) is not None:
                    self._end(fate, event, failed=fate.failed)
            case events.Fenced() if self._is_current(event.round):
                self._stop(state.alive, signal.SIGKILL)
        for command in doing:
            self._record_command(command, state)

    def _record_command(self, command: commands.Command, state: AgentState) -> None:
        match command:
            case commands.SayJoin():
                self._event_log.joining(self._now_ms())
            case commands.StartWorkers():
                self._event_log.round_complete(command.assignment, self._now_ms())
                self.begin(command.assignment)
            case commands.NotifyWorkers(signum=int(signum)) if self._is_current(command.round):
                self._stop(state.alive, signum)
            case commands.StopWorkers() if self._is_current(command.round):
                signum = signal.SIGTERM if command.signum is None else command.signum
                if command.grace_ms == 0:
                    signum = signal.SIGKILL
                self._stop(state.alive & {*command.not_kept}, signal.SIGKILL)
                may_park = command.keep_ms is not None
                self._stop(state.alive - {*command.not_kept}, signum, may_park=may_park)
            case commands.EndKept():
                for fate in self.workers:
                    if fate.local_rank in command.charged:
                        fate.failed, fate.stopped = True, None
                kept = {worker.local_rank for worker in state.kept} - {*command.charged}
                self._stop(kept, signal.SIGTERM if command.grace_ms else signal.SIGKILL)

    def _stop(self, local_ranks: Collection[int], signum: int, *, may_park: bool = False) -> None:
        """Record that workers are told to end. The first stop counts, unless it let them park."""
        stop = StopOrder(signum, self._now_ms(), may_park)
        for fate in self.workers:
            if fate.stopped is None or fate.stopped.may_park:
                fate.stopped = stop if fate.local_rank in local_ranks else fate.stopped

    def _end(
        self, fate: WorkerFate, exited: events.WorkerExited | events.KeptExited, *, failed: bool
    ) -> None:
        fate.exit_code, fate.signal, fate.failed = exited.exit_code, exited.signal, failed
        fate.ended_ms = self._now_ms()
        if failed:
            fate.stopped = None

    def outcome(self, outcome: Outcome) -> NodeOutcome:
        """Combine the outcome with the fates of the last workers, and record it."""
        known = {name: getattr(outcome, name) for name in field_names(Outcome)}
        restarts = 0 if self._assignment is None else self._assignment.restarts
        ending = NodeOutcome(**known, workers=self.workers, restarts=restarts)
        self._event_log.ended(ending, self._now_ms())
        return ending

    def _find(self, local_rank: int, pid: int) -> WorkerFate | None:
        return next((w for w in self.workers if (w.local_rank, w.pid) == (local_rank, pid)), None)

    def _is_current(self, round_: int) -> bool:
        return self._assignment is not None and self._assignment.round == round_

    def _started_in_order(self) -> int:
        return sum(1 for _ in takewhile(lambda worker: worker.pid is not None, self.workers))


# ---------------------------------------------------------------------- the summary


def summary(rdzv_id: str, outcome: NodeOutcome) -> str:
    """Describe the outcome and, after a failure, which worker failed first in the last round."""
    lines = [f"{rdzv_id}: {outcome.text}"]
    if outcome.failures:
        first, *others = outcome.failures
        lines = [referring(lines[0], first), "Root cause, the first failure of the last round:"]
        lines += _indented(_in_full(first))
        if is_connection_error(first):
            lines.append("It is itself a broken connection: look at its other end.")
        followed = [failure for failure in others if is_connection_error(failure)]
        beside = [failure for failure in others if not is_connection_error(failure)]
        if followed:
            lines += ["Failed because of it, when their connections broke:", *_in_short(followed)]
        if beside:
            lines += ["Failed at the same time, perhaps because of it:", *_in_short(beside)]
        if outcome.restarts:
            before = f"Workers had failed before ({counted(outcome.restarts, 'restart')})"
            lines.append(f"{before}: see `round N ended` above, or `rdzvctl explain`.")
    if outcome.exit_code != 0:
        lines += _stopped(outcome.workers)
    return "\n".join(lines)


def root_cause_exit_code(outcome: NodeOutcome) -> tuple[int, str]:
    """Return the exit code that --exit-code=root-cause asks for, and why it is 1 all the same.

    Every node of a job that has failed knows the same root cause.
    """
    if outcome.exit_code != EXIT_FAILED:
        return outcome.exit_code, ""
    cause = outcome.failures[0] if outcome.failures else None
    ended = (cause.exit_code, cause.signal) if cause is not None else (None, None)
    return root_cause_exit(*ended, own=(EXIT_TRY_AGAIN, EXIT_DENIED, EXIT_NO_PROGRESS))


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _in_full(failure: Failure) -> list[str]:
    return [_worker(failure), failure.message, *failure.traceback.splitlines()]


def _in_short(failures: Sequence[Failure]) -> list[str]:
    return _indented(
        f"{_worker(failure)}: {failure.message.partition(chr(10))[0]}" for failure in failures
    )


def _worker(failure: Failure) -> str:
    where = f"rank {failure.rank} (local_rank {failure.local_rank}) on {failure.node_id}"
    how = describe_exit(failure.exit_code, failure.signal)
    return f"{where} ({failure.address}), pid {failure.pid}: {how}"


def _stopped(workers: Sequence[WorkerFate]) -> list[str]:
    by_end: dict[str, list[int]] = {}
    for fate in workers:
        if fate.stopped is not None and fate.pid is not None:
            by_end.setdefault(_end(fate, fate.stopped), []).append(fate.local_rank)
    if not by_end:
        return []
    ended = counted(sum(map(len, by_end.values())), "worker")
    ends = (f"local_rank {ranges(ranks)}: {end}" for end, ranks in by_end.items())
    return [f"Ended by this node's agent ({ended} of {len(workers)}):", *_indented(ends)]


def _end(fate: WorkerFate, stop: StopOrder) -> str:
    sent = signal_name(stop.signum)
    if fate.exit_code is None and fate.signal is None:
        return f"{sent}; not seen to end"
    if fate.signal == signal.SIGKILL and fate.why_killed:
        return f"SIGKILL: {fate.why_killed}"
    if stop.signum in (signal.SIGKILL, fate.signal):
        return sent
    if fate.signal == signal.SIGKILL:
        return f"{sent}, and SIGKILL {duration(fate.ended_ms - stop.at_ms)} later"
    return f"{sent}, which it answered with {describe_exit(fate.exit_code, fate.signal)}"


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as a list of ranges.

    >>> ranges([0, 2, 3, 4, 7, 8])
    '0, 2-4, 7, 8'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return ", ".join(parts)
