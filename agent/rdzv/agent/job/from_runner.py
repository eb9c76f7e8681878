"""Passes the events of a job's runner on to the agent core, and to the round they are about."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from rdzv.agent.core import events
from rdzv.agent.handover import leaked_processes
from rdzv.agent.runner.requests import STANDBY
from rdzv.agent.runner.system import boottime_ms
from rdzv.agent.runner_link import agent_children
from rdzv.agent.system.error_files import describe_exit, signal_name
from rdzv.agent.system.side_thread import in_time
from rdzv.runtime.clock import monotonic_ms
from rdzv.structs import replace

if TYPE_CHECKING:
    from rdzv.agent.job.job_driver import JobDriver

log = logging.getLogger("rdzv.agent")

SWEEP_WITHIN_S = 10.0
"""How long it may take to find and kill a dead runner's processes, as the kernel may be slow."""
SWEEP_AGAIN_S = 1.0
"""The delay before another attempt. Until one succeeds, the processes count as alive."""


class RunnerEvents:
    """Handles the events of one job's runner in the order in which they were sent."""

    def __init__(self, job: JobDriver, socket: Path | None) -> None:
        self._job = job
        self._socket = socket
        self._ending_leftovers: asyncio.Task[None] | None = None

    def hear(self, event: events.RunnerEvent) -> asyncio.Future[None] | None:
        """Handle an event. Returns a future for its completion, unless it is handled at once."""
        job = self._job
        if getattr(event, "round", None) == STANDBY:
            return job.standby.hear(event)
        match event:
            case events.WorkerExited() if event.exit_code != 0:
                return job.tasks.start(self._handle_failure(event), f"exit in {job.rdzv_id}")
            case events.SnapshotsWritten():
                job.disk.note(event)
            case events.RunnerExited():
                job.disk.note_runner_gone()
                lost = self._lose_runner(event)
                self._ending_leftovers = job.tasks.start(lost, f"runner of {job.rdzv_id}")
                return self._ending_leftovers
            case _:
                job.decisions.guard(self._take, event)
        return None

    async def leftovers_ended(self, within_s: float) -> None:
        """Wait until no processes of a dead runner remain."""
        if self._ending_leftovers is not None:
            async with asyncio.timeout(within_s):
                await asyncio.shield(self._ending_leftovers)

    async def _handle_failure(self, exited: events.WorkerExited) -> None:
        if (round_ := self._job.round_of(exited.round)) is not None:
            self._take(await round_.explain_failure(exited))

    def _take(self, event: events.RunnerEvent) -> None:
        job = self._job
        job.counts.runner_said(event)
        job.starts.runner_said(event)
        match event:
            case events.WorkerStarted() | events.WorkerExited() | events.WorkersGone():
                # Events of older rounds are ignored.
                if (round_ := job.round_of(event.round)) is not None:
                    round_.hear(event)
            case events.WorkerResumed():
                if event.is_unwatched:
                    job.observers.watch_for_hangs()
                job.post(event)
            case events.WorkerNotKept():
                job.fates.worker_not_kept(event.local_rank, event.pid, event.reason)
            case events.Fenced():
                ago_ms = max(boottime_ms() - event.at_ms, 0)
                job.post(replace(event, at_ms=monotonic_ms() - ago_ms))
            case events.SnapshotsChanged():
                job.copies.note(job, event)
                job.post(event)
            case events.ZygoteReady() | events.ZygoteLost():
                job.prepared()
            case events.StoreHostExited():
                job.post(replace(event, reason=describe_exit(event.exit_code, event.signal)))
            case events.RunnerRefused():
                log.error("%s: the job's runner cannot continue: %s", job.rdzv_id, event.reason)
                job.runner.kill()
            case _:
                job.post(event)

    async def _lose_runner(self, event: events.RunnerExited) -> None:
        """Kill the processes that a dead runner left behind, then report the runner's end."""
        job = self._job
        job.counts.runner_said(event)
        if event.exit_code != 0 or not job.ended.done():
            while not await self._end_leftovers():  # noqa: ASYNC110
                await asyncio.sleep(SWEEP_AGAIN_S)
        if not job.ended.done():
            job.post(events.RunnerLost(f"its runner {_how_lost(event.exit_code)}"))

    async def _end_leftovers(self) -> bool:
        """Return False if they could not be searched for."""
        try:
            await agent_children.sweep_orphans()
            if self._socket is not None:
                # If the runner had been adopted, they are now children of init.
                mark = leaked_processes.mark_of(self._socket)
                await in_time(SWEEP_WITHIN_S, leaked_processes.kill_leaked, mark)
        except OSError as error:
            text = "%s: cannot search for processes left behind by the job's dead runner: %s"
            log.error(text, self._job.rdzv_id, error)
            return False
        return True


def _how_lost(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was killed by {signal_name(-exit_code)}, and its workers with it"
    how = "" if exit_code is None else f" with exit code {exit_code}"
    return f"ended unexpectedly{how}, and its workers with it"
