"""Routes the events of a job's runner to the agent core and to the rounds they belong to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from rdzv.agent import runner_link
from rdzv.agent.agent_metrics_interface import JobMeter
from rdzv.agent.core import events
from rdzv.agent.handover import leaked_processes
from rdzv.agent.job.context import JobContext
from rdzv.agent.job.copies_of_snapshots import CopiesOfSnapshots
from rdzv.agent.job.snapshots_on_disk import SnapshotsOnDisk
from rdzv.agent.job.worker_starts import WorkerStarts
from rdzv.agent.system.error_files import WorkerError, describe_exit, signal_name
from rdzv.agent.system.side_thread import in_time

log = logging.getLogger("rdzv.agent")

SWEEP_WITHIN_S = 10.0
"""How long it may take to find and kill a dead runner's processes, as the kernel may be slow."""
SWEEP_AGAIN_S = 1.0
"""The delay before another attempt. Until one succeeds, the processes count as alive."""


class RunnerEventRouter:
    """Handles the events of one job's runner in the order in which they were sent."""

    def __init__(
        self,
        context: JobContext,
        disk: SnapshotsOnDisk,
        copies: CopiesOfSnapshots,
        socket: Path | None,
        meter: Callable[[], JobMeter],
        starts: WorkerStarts,
        prepared: Callable[[], None],
    ) -> None:
        """Handle a job's events, and pass them on to its current `meter` and to `starts`.

        `prepared` is called whenever a zygote is ready, or lost. `socket` is the runner's socket
        for the next agent, if the runner outlives this one.
        """
        self._context = context
        self._disk = disk
        self._copies = copies
        self._rdzv_id = context.launch.job.rdzv_id
        self._socket = socket
        self._meter = meter
        self._starts = starts
        self._prepared = prepared
        self._ending_leftovers: asyncio.Task[None] | None = None

    def hear(self, event: runner_link.RunnerEvent) -> asyncio.Future[None] | None:
        """Handle an event. Returns a future for its completion, unless it is handled at once."""
        tasks = self._context.tasks
        match event:
            case runner_link.WorkerExited() if event.exit_code != 0:
                return tasks.start(self._take_failure(event), f"exit in {self._rdzv_id}")
            case runner_link.SnapshotsWritten():
                self._disk.note(event)
                return None
            case runner_link.RunnerExited():
                self._disk.note_runner_gone()
                lost = self._lose_runner(event)
                self._ending_leftovers = tasks.start(lost, f"runner of {self._rdzv_id}")
                return self._ending_leftovers
            case _:
                self._context.decisions.guard(self._take, event)
                return None

    async def leftovers_ended(self, within_s: float) -> None:
        """Wait until no processes of a dead runner remain.

        Raises:
            TimeoutError: some may remain.
        """
        if self._ending_leftovers is not None:
            async with asyncio.timeout(within_s):
                await asyncio.shield(self._ending_leftovers)

    async def _take_failure(self, exited: runner_link.WorkerExited) -> None:
        """Handle a failed worker's exit after reading its error file, or after a timeout."""
        if (round_ := self._context.round_of(exited.round)) is not None:
            late, error = await round_.explain_failure(exited)
            self._note(late)
            round_.worker_exited(late, error)

    def _note(self, event: runner_link.RunnerEvent) -> None:
        self._meter().runner_said(event)
        self._starts.runner_said(event)

    def _take(self, event: runner_link.RunnerEvent) -> None:
        self._note(event)
        post = self._context.decisions.post
        match event:
            case (
                runner_link.WorkerStarted() | runner_link.WorkerExited() | runner_link.WorkersGone()
            ):
                self._take_of_round(event)
            case runner_link.WorkerSuspected():
                post(
                    events.WorkerSuspected(
                        round=event.round,
                        local_rank=event.local_rank,
                        pid=event.pid,
                        message=event.message,
                        traceback=event.traceback,
                        age_ms=event.age_ms,
                    )
                )
            case runner_link.WorkerResumed():
                if event.is_unwatched:
                    self._context.observers.watch_for_hangs()
                post(events.WorkerResumed(event.round, event.local_rank))
            case runner_link.WorkerNotKept():
                self._context.fates.worker_not_kept(event.local_rank, event.pid, event.reason)
            case runner_link.KeptExited():
                fate = (event.exit_code, event.signal)
                post(events.KeptExited(event.local_rank, event.pid, *fate))
            case runner_link.KeptGone():
                post(events.KeptGone())
            case runner_link.WorkersStartFailed():
                post(events.StartFailed(event.round, event.reason))
            case runner_link.WorkersStuck():
                post(events.WorkersStuck(event.round, tuple(event.pids)))
            case runner_link.WorkersFenced():
                age_ms = max(runner_link.boottime_ms() - event.at_ms, 0)
                post(events.Fenced(event.round, age_ms))
            case runner_link.SnapshotsHeld():
                self._copies.note(self._context, event)
                post(events.SnapshotsHeld(event.snapshots, event.carrier, event.missing))
            case runner_link.ZygoteReady() | runner_link.ZygoteLost():
                self._prepared()
            case runner_link.StoreHostReady():
                post(events.StoreHostReady(event.round))
            case runner_link.StoreHostExited():
                how = describe_exit(event.exit_code, event.signal)
                post(events.StoreHostExited(event.round, how))
            case runner_link.ServeFailed():
                pass  # The workers will end with this process; nothing else follows from it.
            case runner_link.RunnerRefused():
                log.error("%s: the job's runner cannot continue: %s", self._rdzv_id, event.reason)
                self._context.runner.kill()

    def _take_of_round(
        self, event: runner_link.WorkerStarted | runner_link.WorkerExited | runner_link.WorkersGone
    ) -> None:
        """Route an event to its round, ignoring events of older rounds."""
        if (round_ := self._context.round_of(event.round)) is None:
            return
        match event:
            case runner_link.WorkerStarted():
                round_.worker_started(event.local_rank, event.pid)
            case runner_link.WorkerExited():
                round_.worker_exited(event, WorkerError("", "", 0))
            case runner_link.WorkersGone():
                round_.workers_gone(event.kept)

    async def _lose_runner(self, event: runner_link.RunnerExited) -> None:
        """Kill the processes that a dead runner left behind, then report the runner's end."""
        self._meter().runner_said(event)
        if event.exit_code != 0 or not self._has_ended:
            while not await self._end_leftovers():  # noqa: ASYNC110
                await asyncio.sleep(SWEEP_AGAIN_S)
        if not self._has_ended:
            self._context.decisions.post(
                events.RunnerLost(f"its runner {_how_lost(event.exit_code)}")
            )

    @property
    def _has_ended(self) -> bool:
        return self._context.ended.done()

    async def _end_leftovers(self) -> bool:
        """Kill a dead runner's processes. Returns False if they could not be searched for."""
        try:
            await runner_link.sweep_orphans()
            if self._socket is not None:
                # If the runner had been adopted, they are now children of init.
                mark = leaked_processes.mark_of(self._socket)
                await in_time(SWEEP_WITHIN_S, leaked_processes.kill_leaked, mark)
        except OSError as error:
            text = "%s: cannot search for processes left behind by the job's dead runner: %s"
            log.error(text, self._rdzv_id, error)
            return False
        return True


def _how_lost(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was killed by {signal_name(-exit_code)}, and its workers with it"
    how = "" if exit_code is None else f" with exit code {exit_code}"
    return f"ended unexpectedly{how}, and its workers with it"
