"""Watches one job on this node, and keeps what users ask for when it is over."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from rdzv.agent.core import commands, events
from rdzv.agent.core.model import AgentState, Assignment, Outcome
from rdzv.agent.launch.launch import Launch
from rdzv.agent.workers.event_log import EventLog
from rdzv.agent.workers.fates import LocalRound, NodeOutcome, Stop
from rdzv.structs import field_names


class Witness:
    """Sees every event and every command of one job; decides nothing.

    `now_ms` is the agent's clock, `error_file` says where a worker leaves word of its failure.
    """

    def __init__(
        self, launch: Launch, now_ms: Callable[[], int], error_file: Callable[[int], Path]
    ) -> None:
        self._local_world_size = launch.job.local_world_size
        self._now_ms = now_ms
        self._event_log = EventLog(launch, now_ms(), error_file)
        self._round: LocalRound | None = None

    async def open(self) -> None:
        """Get ready to record events.

        Raises:
            InvalidRequestError: the handler that was asked for is not known.
        """
        await self._event_log.open()

    async def close(self) -> None:
        """Let the last events be recorded."""
        await self._event_log.close()

    def resume(self, assignment: Assignment, pids: Mapping[int, int]) -> None:
        """Go on with a round that an agent before this one has seen begin."""
        self._round = LocalRound.begin(assignment, self._local_world_size)
        for local_rank, pid in pids.items():
            self._round = self._round.started(local_rank, pid)

    def worker_started(self, local_rank: int, pid: int) -> None:
        """Take note that a worker runs; record starts by LOCAL_RANK, as torch does."""
        if self._round is not None:
            recorded = _started_in_order(self._round)
            self._round = self._round.started(local_rank, pid)
            for worker in self._round.workers[recorded : _started_in_order(self._round)]:
                self._event_log.worker_started(worker)

    def note(
        self, event: events.Event, state: AgentState, doing: Sequence[commands.Command]
    ) -> None:
        """Take note of an event, the state that it has led to, and what is about to be done."""
        match event:
            case events.WorkerExited() if self._is_current(event.round):
                assert self._round is not None
                failed = event.local_rank in {failure.local_rank for failure in state.failures}
                self._round = self._round.ended(
                    event.local_rank, event.exit_code, event.signal, failed=failed
                )
            case events.Fenced() if self._is_current(event.round):
                assert self._round is not None
                self._round = self._round.told_to_end(state.alive, Stop(signal.SIGKILL, 0))
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
                stop = Stop(signal.Signals(signum), command.left_ms)
                self._round = self._round.told_to_end(state.alive, stop)
            case commands.StopWorkers() if self._is_current(command.round):
                assert self._round is not None
                signum = signal.SIGTERM if command.signum is None else command.signum
                if command.grace_ms == 0:
                    signum = signal.SIGKILL
                stop = Stop(signum, command.grace_ms)
                self._round = self._round.told_to_end(state.alive, stop)
            case _:
                pass

    def outcome(self, outcome: Outcome) -> NodeOutcome:
        """Add what became of the last workers to how it ended, and record it."""
        workers = () if self._round is None else self._round.workers
        known = {name: getattr(outcome, name) for name in field_names(Outcome)}
        ending = NodeOutcome(**known, workers=workers)
        self._event_log.ended(self._round, ending, self._now_ms())
        return ending

    def _is_current(self, round_: int) -> bool:
        return self._round is not None and self._round.assignment.round == round_


def _started_in_order(local: LocalRound) -> int:
    """Count the workers that were started, by LOCAL_RANK up to the first that was not."""
    return sum(1 for _ in takewhile(lambda worker: worker.pid is not None, local.workers))
