"""Starts the local worker group: command lines, environment, files, CPUs, console."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rdzv import structs
from rdzv.agent.core.environ import without_round, worker_environ
from rdzv.agent.launch import numa
from rdzv.agent.launch.launch import NO_FILES, Launch, check_startable, script_digest
from rdzv.agent.observers.collective_records import with_hook
from rdzv.agent.output.console_tee import OutputStream, Tee, line_prefix
from rdzv.agent.output.logs_specs import LogsSpecs
from rdzv.agent.output.run_files import (
    RoundOutput,
    RunLogs,
    WorkerOutput,
    Written,
    usual_output,
)
from rdzv.agent.runner.requests import STANDBY, WorkerSpec, ZygoteSpec
from rdzv.agent.system.side_thread import ANSWER_WITHIN_S, Aside
from rdzv.agent.workers import warm
from rdzv.core.model import Assignment
from rdzv.errors import InvalidRequestError
from rdzv.transport.addresses import missing_interfaces, socket_interfaces

log = logging.getLogger("rdzv.agent")

DRAIN_TIMEOUT_S = 5.0
"""How long writing the workers' last output to the console may take."""

_PASSED_ON = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
"""Variables that torchrun reads from its own environment when it creates a worker's."""


class LocalWorkerGroup:
    """Specifies how to start each worker of a round, and shows the workers' output."""

    def __init__(
        self,
        launch: Launch,
        progress_file: Callable[[int], str],
        notice_file: Callable[[], str] = str,
        console: Callable[[], Tee] = Tee,
    ) -> None:
        """Specify a launch's workers. `progress_file` returns the progress file for a LOCAL_RANK.

        `notice_file` returns the notice file, which all workers share. `console` opens the console
        when there is output to show for the first time.
        """
        self._launch = launch
        self._progress_file = progress_file
        self._notice_file = notice_file
        output, job = launch.output, launch.job
        self._logs = RunLogs(
            output.log_dir,
            job.rdzv_id,
            job.node_id,
            output.run_dir,
            launch.identity,
            needed=output.asks_for_files,
        )
        specs = launch.output.logs_specs
        self._logs_specs = LogsSpecs(launch.job.local_world_size) if specs else None
        self._files = Aside(ANSWER_WITHIN_S, f"{job.rdzv_id}: its script, program and logs")
        self._open_console = console
        self._tee: Tee | None = None
        self.written = Written(launch.identity)
        self.zygote: ZygoteSpec | None = None
        """The zygote from which the workers are forked, once known; None if they start cold."""
        self.script = ""
        """A digest of the script, as it was when workers were last started."""
        self._told_cold: dict[int, str] = {}
        self._interfaces: dict[str, str] = {}
        self._gpus: tuple[str, ...] = ()

    async def prepare(self) -> None:
        """Determine the workers' CPUs, load the --logs-specs class, and specify the zygote.

        Raises `InvalidRequestError` if --numa-binding cannot be applied, or the class or a module
        named by --logs-specs or --warm does not exist.
        """
        if self._logs_specs is not None:
            await self._logs_specs.open(self._launch)
        if self._launch.numa_binding is not None:
            self._gpus = await numa.visible_gpu_pci_addresses(
                self._launch.environ, account=self._launch.account
            )
            for local_rank in range(self._launch.job.local_world_size):
                self._cpus(local_rank)
        for text in missing_interfaces(self._launch.environ):
            log.warning("%s", text)
        if self._launch.warm or self._launch.warm_restarts:
            await self._prepare_zygote()

    async def _prepare_zygote(self) -> None:
        if self._launch.warm and (why := await warm.check_warm(self._launch)):
            log.warning("workers will start cold: %s", why)
            return
        size = self._launch.job.local_world_size
        environ = self._environ(self._launch.environ, warm.NO_ROUND, 0)
        environ = self._traced(environ)
        self.zygote = warm.zygote_spec(self._launch, environ, [self._cpus(n) for n in range(size)])

    async def open_round(
        self, assignment: Assignment, address: str
    ) -> tuple[tuple[WorkerOutput, ...], list[WorkerSpec]]:
        """Create a round's files, and follow the ones that are teed.

        Returns each worker's output paths and specification. Waits for the file systems, and for
        the --logs-specs class if one is used.

        Raises:
            InvalidRequestError: files that existed at the join no longer exist, or their server
                does not answer.
            OSError: the files cannot be created, or the --logs-specs class does not answer.
        """
        self._interfaces = socket_interfaces(address, self._launch.environ)
        try:
            folder = await self._files.answer(self._make_files, assignment)
        except TimeoutError as error:
            what = "cannot check its script, program or logs"
            raise InvalidRequestError(f"{what}: {error}") from error
        if self._logs_specs is None:
            size = self._launch.job.local_world_size
            output = usual_output(folder, self._launch.output, size)
        else:
            environs = self._environs_to_reify(assignment)
            output = await self._logs_specs.reify(assignment.round, environs)
        try:
            self._duplicate(output)
        except OSError as error:
            raise OSError(f"cannot write the filtered log: {error}") from error
        self.written.begin(assignment, output)
        workers = enumerate(output.workers)
        return output.workers, [self._worker(assignment, n, worker) for n, worker in workers]

    async def open_standby(
        self, run: str, script: str
    ) -> tuple[tuple[WorkerOutput, ...], list[WorkerSpec]]:
        """Like `open_round`, for workers without a round; their output is not teed.

        Raises `InvalidRequestError` if the script is another, and what `open_round` raises.
        """
        if self._logs_specs is not None:
            raise InvalidRequestError("--logs-specs makes files for workers with ranks only")
        no_round = structs.replace(warm.NO_ROUND, run=run)
        folder = await self._files.answer(self._make_files, no_round)
        if self.script != script:
            raise InvalidRequestError(
                f"the job runs another version of {self._launch.script}, by its digest: {script} "
                f"there, and {self.script} here; make them the same"
            )
        size = self._launch.job.local_world_size
        output = usual_output(folder, self._launch.output, size).workers
        return output, [self._worker(no_round, n, one) for n, one in enumerate(output)]

    def _make_files(self, assignment: Assignment) -> Path:
        """Create a round's folder, unless --logs-specs does. May hang, so it runs in a thread.

        Raises:
            InvalidRequestError: files that existed at the join no longer exist.
            OSError: the files cannot be created.
        """
        check_startable(self._launch)
        self.script = script_digest(self._launch)
        if self._logs_specs is not None:
            return NO_FILES
        try:
            return self._logs.open_round(assignment, self._launch.job.local_world_size)
        except TimeoutError:
            raise
        except OSError as error:
            raise OSError(f"cannot write to the log directory: {error}") from error

    def _environs_to_reify(self, assignment: Assignment) -> dict[int, dict[str, str]]:
        own = self._launch.environ
        base = {name: own[name] for name in _PASSED_ON if name in own}
        size = self._launch.job.local_world_size
        environs = {n: self._environ(base, assignment, n) for n in range(size)}
        for environ in environs.values():
            del environ["TORCHELASTIC_ERROR_FILE"]
        return environs

    def resume_round(self, assignment: Assignment, workers: tuple[WorkerOutput, ...]) -> None:
        self.written.begin(assignment, RoundOutput(workers, {}))

    def close_round(self) -> None:
        self.written.end_round()
        if self._tee is not None:
            self._tee.unfollow()

    async def close(self) -> None:
        """Show the workers' last output, waiting a limited time; remove an empty log folder."""
        if self._logs_specs is not None:
            await self._logs_specs.close()
        if self._tee is not None:
            await self._tee.drain(DRAIN_TIMEOUT_S)
            self._tee.close()
        with contextlib.suppress(TimeoutError):
            await self._files.answer(self._logs.close)

    def _worker(self, assignment: Assignment, local_rank: int, output: WorkerOutput) -> WorkerSpec:
        if assignment.round != STANDBY:
            self._follow(assignment, local_rank, output)
        if self._logs_specs is not None:
            environ = {**self._launch.environ, **output.environ}
        else:
            environ = self._environ(self._launch.environ, assignment, local_rank, output.error)
        if assignment.round == STANDBY:
            environ = without_round(environ)
        return self._warmed(
            WorkerSpec(
                local_rank=local_rank,
                argv=self._launch.argv(local_rank),
                env=self._traced(environ),
                cwd=None if self._launch.chdir is None else str(self._launch.chdir),
                stdout=None if output.stdout is None else str(output.stdout),
                stderr=None if output.stderr is None else str(output.stderr),
                cpus=self._cpus(local_rank),
                identity=self._launch.identity,
            )
        )

    def _warmed(self, worker: WorkerSpec) -> WorkerSpec:
        if self.zygote is None:
            return worker
        if why := warm.why_cold(self.zygote, worker):
            if self._told_cold.get(worker.local_rank) != why:
                log.info("local_rank %d will start cold: %s", worker.local_rank, why)
            self._told_cold[worker.local_rank] = why
            return worker
        return replace(worker, warm=True)

    def _environ(
        self,
        base: Mapping[str, str],
        assignment: Assignment,
        local_rank: int,
        error_file: Path = NO_FILES,
    ) -> dict[str, str]:
        launch = self._launch
        if launch.master is not None and assignment.use_agent_store:
            at = launch.master
            assignment = structs.replace(assignment, master_addr=at.host, master_port=at.port)
        return worker_environ(
            {**base, **self._interfaces},
            assignment,
            rdzv_id=launch.job.rdzv_id,
            role=launch.role,
            local_rank=local_rank,
            local_world_size=launch.job.local_world_size,
            error_file="" if error_file == NO_FILES else str(error_file),
            progress_file=self._progress_file(local_rank),
            notice_file=self._notice_file(),
            virtual_local_rank=launch.virtual_local_rank,
        )

    def _traced(self, environ: dict[str, str]) -> dict[str, str]:
        return with_hook(environ) if self._launch.collective_trace else environ

    def _cpus(self, local_rank: int) -> tuple[int, ...] | None:
        binding, size = self._launch.numa_binding, self._launch.job.local_world_size
        if binding is None:
            return None
        return tuple(sorted(numa.bound_cpus(binding, local_rank, size, self._gpus)))

    # ------------------------------------------------------------------ output

    def _follow(self, assignment: Assignment, local_rank: int, output: WorkerOutput) -> None:
        if not self._launch.output.console:
            return
        rank = assignment.rank_first + local_rank
        template, role = self._launch.output.prefix_template, self._launch.role
        prefix = line_prefix(template, role, rank, local_rank)
        for stream, file in output.teed.items():
            self._console().follow(file, prefix, stream)

    def _duplicate(self, output: RoundOutput) -> None:
        asked = {
            OutputStream.OUT: self._launch.output.stdout_filters,
            OutputStream.ERR: self._launch.output.stderr_filters,
        }
        for stream, filters in asked.items():
            if filters:
                self._console().duplicate(stream, output.filtered[stream], filters)

    def _console(self) -> Tee:
        if self._tee is None:
            self._tee = self._open_console()
        return self._tee
