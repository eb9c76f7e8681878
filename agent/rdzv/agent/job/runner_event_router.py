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
from rdzv.agent.job.worker_starts import LocalStarts
from rdzv.agent.system.error_files import describe_exit, signal_name
from rdzv.agent.system.side_thread import in_time
from rdzv.runtime.clock import monotonic_ms
from rdzv.structs import replace

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
        starts: LocalStarts,
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

    def hear(self, event: events.RunnerEvent) -> asyncio.Future[None] | None:
        """Handle an event. Returns a future for its completion, unless it is handled at once."""
        tasks = self._context.tasks
        match event:
            case events.WorkerExited() if event.exit_code != 0:
                return tasks.start(self._take_failure(event), f"exit in {self._rdzv_id}")
            case events.SnapshotsWritten():
                self._disk.note(event)
                return None
            case events.RunnerExited():
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

    async def _take_failure(self, exited: events.WorkerExited) -> None:
        """Handle a failed worker's exit after reading its error file, or after a timeout."""
        if (round_ := self._context.round_of(exited.round)) is not None:
            explained = await round_.explain_failure(exited)
            self._note(explained)
            round_.worker_exited(explained)

    def _note(self, event: events.RunnerEvent) -> None:
        self._meter().runner_said(event)
        self._starts.runner_said(event)

    def _take(self, event: events.RunnerEvent) -> None:
        self._note(event)
        post = self._context.decisions.post
        match event:
            case events.WorkerStarted() | events.WorkerExited() | events.WorkersGone():
                self._take_of_round(event)
            case events.WorkerResumed():
                if event.is_unwatched:
                    self._context.observers.watch_for_hangs()
                post(event)
            case events.WorkerNotKept():
                self._context.fates.worker_not_kept(event.local_rank, event.pid, event.reason)
            case events.Fenced():
                ago_ms = max(runner_link.boottime_ms() - event.at_ms, 0)
                post(replace(event, at_ms=monotonic_ms() - ago_ms))
            case events.SnapshotsHeld():
                self._copies.note(self._context, event)
                post(event)
            case events.ZygoteReady() | events.ZygoteLost():
                self._prepared()
            case events.StoreHostExited():
                post(replace(event, reason=describe_exit(event.exit_code, event.signal)))
            case (
                events.WorkerSuspected()
                | events.StartFailed()
                | events.KeptExited()
                | events.KeptGone()
                | events.WorkersStuck()
                | events.StoreHostReady()
            ):
                post(event)
            case events.ServeFailed():
                pass  # The workers will end with this process; nothing else follows from it.
            case events.RunnerRefused():
                log.error("%s: the job's runner cannot continue: %s", self._rdzv_id, event.reason)
                self._context.runner.kill()

    def _take_of_round(
        self, event: events.WorkerStarted | events.WorkerExited | events.WorkersGone
    ) -> None:
        """Route an event to its round, ignoring events of older rounds."""
        if (round_ := self._context.round_of(event.round)) is None:
            return
        match event:
            case events.WorkerStarted():
                round_.worker_started(event.local_rank, event.pid)
            case events.WorkerExited():
                round_.worker_exited(event)
            case events.WorkersGone():
                round_.workers_gone(event.kept)

    async def _lose_runner(self, event: events.RunnerExited) -> None:
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
