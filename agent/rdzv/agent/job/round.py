"""One round of a job on this node, run as one task from its announcement to its last process.

::

    announced --> files made --> workers started, and watched --> told to end --> none left --> over
        \\------------- `stop_workers` cancels the start --------------/

The task ends by posting `WorkersGone`, after which the core joins the next round, or leaves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING

from rdzv.agent.core import commands, events
from rdzv.agent.core.machine import rejoins_after_failure
from rdzv.agent.core.model import Phase
from rdzv.agent.exit_causes import ExitedWorker, count_memory_kills, explain_exit
from rdzv.agent.handover.handover_state import KeptState, KeptStop
from rdzv.agent.output.run_files import WorkerOutput
from rdzv.agent.runner.requests import KeepSpec, WorkerSpec
from rdzv.agent.runner_link.runner_link import RunnerHello
from rdzv.agent.system.error_files import unread
from rdzv.core.model import Assignment, KeptWorker, Moved, StandbyState
from rdzv.errors import InvalidRequestError
from rdzv.runtime.clock import monotonic_ms
from rdzv.runtime.tasks import single_error
from rdzv.structs import replace

if TYPE_CHECKING:
    from rdzv.agent.job.job_driver import JobDriver

log = logging.getLogger("rdzv.agent")


class LocalRound:
    """Call `begin` or `resume`, once. An error, but a failed start, ends the job on this node."""

    def __init__(self, job: JobDriver, assignment: Assignment) -> None:
        self.assignment = assignment
        self.kept_stop: KeptStop | None = None
        """The last command to stop the workers, or None if there was none."""
        self.outputs: tuple[WorkerOutput, ...] = ()
        """Each worker's output paths, by LOCAL_RANK; empty until the files are created."""
        self._job = job
        self._notified_by: commands.NotifyWorkers | None = None
        """The command that notified the workers, by a signal, that the node is leaving, if any."""
        self._task: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._start_is_over = False
        """Whether no more workers will be started."""
        self._start_failed = False
        self._memory_kills = count_memory_kills()
        """The kernel's counts of memory kills before the workers were started or adopted."""
        self._gone = asyncio.Event()
        self._kept: tuple[KeptWorker, ...] = ()
        """The workers that were parked when the round was over."""

    def begin(self) -> None:
        """Start the workers once this node is ready, and supervise them until the round is over."""
        self._job.standby.end_outdated()  # Also if it is stopped before it starts workers.
        self._job.observers.open_round(self.assignment)
        self._begin_task(self._run())

    def resume(self, kept: KeptState, hello: RunnerHello) -> None:
        """Take over the previous agent's workers, and supervise them until the round is over."""
        job, state = self._job, kept.state
        self.kept_stop, self._start_is_over = kept.stop, True
        if kept.outputs:
            self.outputs = kept.outputs
            job.workers.resume_round(self.assignment, self.outputs)
        if state.phase is Phase.RUNNING:
            job.observers.watch(self.assignment)
        for local_rank in hello.workers.keys() & state.alive:
            pid = hello.workers[local_rank]
            job.observers.worker_started(self.assignment, local_rank, pid)
        if not state.workers_gone:
            self._begin_task(self._await_end())

    def _begin_task(self, work: Coroutine[None, None, None]) -> None:
        name = f"round {self.assignment.round} of {self._job.launch.job.rdzv_id}"
        self._task = self._job.tasks.start(work, name)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # ------------------------------------------------------------------ the task

    async def _run(self) -> None:
        with single_error():
            async with asyncio.TaskGroup() as tasks:
                if not self._start_is_over:
                    self._starting = tasks.create_task(self._start())
                await self._await_end()

    async def _start(self) -> None:
        job, number = self._job, self.assignment.round
        try:
            workers = await self._prepare()
        except (InvalidRequestError, OSError) as error:
            self._start_failed = True
            job.store_socket.release()
            job.post(events.StartFailed(number, str(error)))
            return
        job.keep()
        # Before it waits for standbys, as a store host that is late ends the round.
        self._start_store_host()
        await job.standby.settled()
        job.observers.watch(self.assignment)
        job.runner.start_workers(number, workers, self._keep_spec())
        self._start_is_over = True
        if self._notified_by is not None:
            # The runner had not received the round yet.
            job.runner.ask(self._notified_by)

    @property
    def _is_hot(self) -> bool:
        return self._job.decisions.state.standby.state is StandbyState.READY

    def _keep_spec(self) -> KeepSpec | None:
        terms, assignment = self._job.launch.job, self.assignment
        if not terms.keep_timeout_ms:
            return None
        return KeepSpec(
            tuple(range(terms.local_world_size)) if self._is_hot else assignment.kept,
            assignment.source,
            assignment.resume_step,
            assignment.charged_suspects,
            terms.failure_stop_timeout_ms / 1000,
        )

    async def _prepare(self) -> list[WorkerSpec]:
        """Wait until this node is ready, and create the folders for the workers' files."""
        job = self._job
        await job.ready.wait()
        if job.unready:
            raise InvalidRequestError(job.unready)
        await job.observers.snapshot_file.begin_round()
        address = job.offer.address
        self.outputs, workers = await job.workers.open_round(self.assignment, address)
        return workers

    async def _await_end(self) -> None:
        """Wait until no process remains, then release the round's resources and report the end."""
        await self._gone.wait()
        job, number = self._job, self.assignment.round
        job.workers.close_round()
        step = job.observers.close_round()
        if self._start_failed:
            job.post(events.WorkersGone(number, kept=self._kept))
            return
        moved = Moved(step, snapshot_changed=await job.observers.snapshot_file.has_changed())
        # The checks need idle devices, which parked workers do not release.
        examines = rejoins_after_failure(job.decisions.state, number) and not self._kept
        if examines and (reason := await self._examine()):
            job.post(events.Unhealthy(number, reason))
        job.post(events.WorkersGone(number, moved, self._kept))

    async def _examine(self) -> str:
        """The node keeps its seat in the meantime, so no round is formed with an unhealthy node."""
        try:
            return "" if self._job.examine is None else await self._job.examine()
        except Exception:
            rdzv_id = self._job.launch.job.rdzv_id
            log.exception("%s: running this node's health checks raised an exception", rdzv_id)
            return ""

    # ------------------------------------------------------------------ the round's store

    def _start_store_host(self) -> None:
        """Start the store host on the offered socket, or free the port if it is not needed."""
        launch, assignment = self._job.launch, self.assignment
        listening = self._job.store_socket.take()
        if listening is None:
            if assignment.hosts_store:
                self._report_lost_socket()
            return
        with listening:
            if assignment.hosts_store and listening.getsockname()[1] != assignment.master_port:
                self._report_lost_socket()
            elif assignment.hosts_store:
                self._job.runner.start_store_host(
                    assignment.round, listening, launch.python, launch.environ, launch.identity
                )

    def _report_lost_socket(self) -> None:
        port = self.assignment.master_port
        reason = f"the agent that offered port {port} was restarted before the round began"
        self._job.post(events.StoreHostExited(self.assignment.round, reason))

    # ------------------------------------------------------------------ the core's commands

    def stop_workers(self, command: commands.StopWorkers) -> None:
        """End the workers. Those that have not been started never will be."""
        if not self._start_is_over and self._is_hot:
            # The core counts standbys as workers of this round, which they will not enter.
            self._job.runner.ask(commands.EndKept(self._job.launch.job.failure_stop_timeout_ms))
        self._cancel_start()
        self._job.observers.stop_watching()
        # Their store's port is not offered again.
        self._job.store_socket.release()
        self._job.runner.ask(command)

    def notify_workers(self, command: commands.NotifyWorkers) -> None:
        """The file is written before the signal is sent, so a signal handler will find it."""
        self._job.observers.notice.write(command.left_ms, command.reason)
        if command.signum is not None:
            self._notified_by = command
            self._job.runner.ask(command)

    def _cancel_start(self) -> None:
        self._start_is_over = True
        if self._starting is not None:
            self._starting.cancel()

    # ------------------------------------------------------------------ the runner's events

    def hear(self, event: events.WorkerStarted | events.WorkerExited | events.WorkersGone) -> None:
        job = self._job
        match event:
            case events.WorkerStarted():
                log.debug("started local_rank %d as pid %d", event.local_rank, event.pid)
                job.fates.worker_started(event.local_rank, event.pid)
                job.observers.worker_started(self.assignment, event.local_rank, event.pid)
            case events.WorkerExited():
                job.observers.worker_exited(event.local_rank)
                job.post(event)
            case events.WorkersGone():
                self._kept = event.kept
                self._cancel_start()
                self._gone.set()

    async def explain_failure(self, exited: events.WorkerExited) -> events.WorkerExited:
        """Return a failed worker's exit with the contents of its error file.

        If a collective failed, the server gets some time to ask all ranks for their stacks.
        """
        heard_ms, launch = monotonic_ms(), self._job.launch
        output = self.outputs[exited.local_rank]
        worker = ExitedWorker(
            exited.pid,
            exited.signal,
            output.error,
            output.stderr,
            launch.chdir,
            launch.identity,
            self._memory_kills,
            has_other_nodes=self.assignment.group_world_size > 1,
        )
        try:
            error = await self._job.error_files.answer(explain_exit, worker)
        except Exception as failure:
            error = unread(failure)
        observers = self._job.observers
        place = await observers.held_exits.hold(
            exited.local_rank,
            exited.pid,
            observers.progress.file(exited.local_rank),
            exited.signal,
        )
        if place:
            error = replace(error, message=f"{error.message} (in {place})")
        age_ms = exited.age_ms + monotonic_ms() - heard_ms
        return replace(
            exited,
            message=error.message,
            traceback=error.traceback,
            age_ms=max(age_ms, error.age_ms),
        )
