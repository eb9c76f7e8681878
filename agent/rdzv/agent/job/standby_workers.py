"""The workers that this node starts before it has a seat, until they are parked, or why not."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rdzv.agent.core import events
from rdzv.agent.exit_causes import ExitedWorker, count_memory_kills, explain_exit
from rdzv.agent.output.run_files import WorkerOutput
from rdzv.agent.runner.requests import STANDBY, EndKept, KeepSpec
from rdzv.agent.system.error_files import describe_exit
from rdzv.agent.system.side_thread import in_time
from rdzv.core.model import KeptWorker, Standby, StandbyState
from rdzv.errors import InvalidRequestError

if TYPE_CHECKING:
    from rdzv.agent.job.job_driver import JobDriver

log = logging.getLogger("rdzv.agent")

START_WITHIN_S = 600.0
"""How long standbys may take to reach their function under @elastic."""
SEATED_WITHIN_S = 60.0
"""How long a round waits for standbys that are starting; then new workers take their place."""
CPUS_AFTER_S = 10.0
"""The time over which the CPUs that they use while they wait are measured."""
MEASURED_WITHIN_S = 5.0


class StandbyWorkers:
    """The standbys of one job on this node. `StandbySettled` says what has become of them."""

    def __init__(self, job: JobDriver) -> None:
        self._job = job
        self._task: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._kept: tuple[KeptWorker, ...] = ()
        self._outputs: tuple[WorkerOutput, ...] = ()
        self._memory_kills = count_memory_kills()
        self.zygote_settled = asyncio.Event()
        """Set unless a zygote is importing, of which standbys can be forked soon."""
        self.zygote_settled.set()

    def begin(self, script: str) -> None:
        """Start them, unless this node has another script, or take over those of another agent."""
        self.cancel()
        self._over, self._kept, self._outputs = asyncio.Event(), (), ()
        self._task = self._job.tasks.start(self._run(script), f"standbys of {self._job.rdzv_id}")

    def cancel(self) -> None:
        """Start none, or wait no longer for some that the runner ends."""
        if self._task is not None:
            self._task.cancel()

    def end_outdated(self) -> None:
        """End those that are starting if the round that begins must not wait for them."""
        if self._job.decisions.state.standby.state is not StandbyState.STARTING:
            self._give_up("its node got a seat, and they are outdated")

    async def settled(self) -> None:
        """Wait until none is starting. The runner ends those that a round does not wait for."""
        if self._task is None or self._task.done():
            return
        text = "%s: the round waits for up to %g s for standbys that are starting"
        log.info(text, self._job.rdzv_id, SEATED_WITHIN_S)
        await asyncio.wait([self._task], timeout=SEATED_WITHIN_S)
        self._give_up("its node got a seat before they were ready")

    # ------------------------------------------------------------------ the task

    async def _run(self, script: str) -> None:
        job = self._job
        try:
            await job.ready.wait()
            await self.zygote_settled.wait()
            if job.unready:
                raise InvalidRequestError(job.unready)
            run = job.decisions.state.run
            self._outputs, workers = await job.workers.open_standby(run, script)
        except (InvalidRequestError, OSError) as error:
            # Another agent may have started some, with the script as it was then.
            self._give_up(str(error))
            return
        self._memory_kills = count_memory_kills()
        began_s = time.monotonic()
        job.runner.start_workers(STANDBY, workers, KeepSpec((), None, None))
        try:
            async with asyncio.timeout(START_WITHIN_S):
                await self._over.wait()
        except TimeoutError:
            text = "they have not reached a function under @elastic within"
            self._give_up(f"{text} {START_WITHIN_S:g} s")
            return
        if not self._kept:
            self._settle(Standby())
            return
        self._settle(Standby(StandbyState.READY))
        log.info("%s: standby: ready after %.1f s", job.rdzv_id, time.monotonic() - began_s)
        job.tasks.start(self._measure(self._kept), f"standbys of {job.rdzv_id}")

    async def _measure(self, kept: tuple[KeptWorker, ...]) -> None:
        """Find out what the standbys cost while they wait."""
        pids, began_s = [one.pid for one in kept], time.monotonic()
        try:
            _, before_s = await in_time(MEASURED_WITHIN_S, used_by, pids)
            await asyncio.sleep(CPUS_AFTER_S)
            memory, used_s = await in_time(MEASURED_WITHIN_S, used_by, pids)
        except (OSError, ValueError):
            return  # One has ended, or the kernel does not tell.
        cpus = round((used_s - before_s) / (time.monotonic() - began_s), 3)
        gpu_bytes = sum(one.gpu_bytes for one in kept)
        if self._kept is kept:
            self._settle(Standby(StandbyState.READY, "", memory, gpu_bytes, cpus))

    def _settle(self, standby: Standby) -> None:
        self._job.post(events.StandbySettled(standby, self._kept))

    def _give_up(self, why: str) -> None:
        """End them. A round that starts before they have ended waits for that, in the runner."""
        if self._task is None or self._task.done():
            return
        self._task.cancel()
        self._job.runner.ask(EndKept(self._job.launch.job.failure_stop_timeout_ms))
        log.warning("%s: this node has no standby: %s", self._job.rdzv_id, why)
        self._settle(Standby(why=why))

    # ------------------------------------------------------------------ the runner's events

    def hear(self, event: events.RunnerEvent) -> asyncio.Future[None] | None:
        """Handle an event of the round `STANDBY`."""
        match event:
            case events.StartFailed():
                self._give_up(event.reason)
            case events.WorkerExited() if self._task is not None and not self._task.done():
                return self._job.tasks.start(self._end_by(event), "a standby's exit")
            case events.WorkersGone():
                self._kept = event.kept
                self._over.set()
        return None

    async def _end_by(self, event: events.WorkerExited) -> None:
        launch, text = self._job.launch, "its script ended without a function under @elastic"
        if event.exit_code != 0:
            text = describe_exit(event.exit_code, event.signal)
            if self._outputs:
                output = self._outputs[event.local_rank]
                kills = self._memory_kills
                files = (output.error, output.stderr, launch.chdir, launch.identity)
                worker = ExitedWorker(event.pid, event.signal, *files, kills)
                try:
                    error = await self._job.error_files.answer(explain_exit, worker)
                    text = f"{text}: {error.message}"
                except Exception as failure:
                    log.debug("%s: %r", self._job.rdzv_id, failure)
        self._give_up(f"before it has parked, local_rank {event.local_rank} ended: {text}")


def used_by(pids: Iterable[int]) -> tuple[int, float]:
    """Return the memory of processes, in bytes, and the CPU seconds that they have used.

    Pages that processes share count once in all. Raises `OSError` or `ValueError`.
    """
    memory, ticks = 0, 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        memory += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return memory, ticks / os.sysconf("SC_CLK_TCK")
