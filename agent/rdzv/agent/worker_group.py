"""How the local worker group is started: command lines, environment, files, CPUs, console."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rdzv.agent import numa
from rdzv.agent.core.environ import worker_environ
from rdzv.agent.core.model import Assignment
from rdzv.agent.launch import NO_FILES, Launch
from rdzv.agent.logs import RunLogs, WorkerFiles
from rdzv.agent.runner import WorkerSpec
from rdzv.agent.tee import Route, Stream, Tee, line_prefix, route

DRAIN_TIMEOUT_S = 5.0
"""How long the console may take for what the workers have still written."""


class LocalWorkerGroup:
    """Says, round by round, how each worker is started, and shows what it writes."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._logs = RunLogs(launch.output.log_dir, launch.job.rdzv_id, launch.job.node_id)
        self._files: Sequence[WorkerFiles] = ()
        self._tee: Tee | None = None
        self._gpus: tuple[str, ...] = ()

    async def prepare(self) -> None:
        """Find out what the workers will be bound to.

        Raises:
            InvalidRequestError: the GPUs that they are to be near can not be found.
        """
        if self._launch.numa_binding is not None:
            self._gpus = await numa.visible_gpu_pci_addresses(os.environ)
            for local_rank in range(self._launch.job.local_world_size):
                self._cpus(local_rank)

    def open_round(self, assignment: Assignment) -> list[WorkerSpec]:
        """Make the files of a round, follow those that are teed, and say how to start each worker.

        Raises:
            OSError: a file or folder can not be made.
        """
        size = self._launch.job.local_world_size
        self._files = self._logs.open_round(assignment, size)
        self._duplicate(self._files[0].stdout.parent.parent)
        return [self._worker(assignment, local_rank) for local_rank in range(size)]

    def close_round(self) -> None:
        """Take note that the workers are gone: nothing more is written."""
        if self._tee is not None:
            self._tee.unfollow()

    def error_file(self, local_rank: int) -> Path:
        """Return where a worker of the round leaves word of its failure."""
        return self._files[local_rank].error

    async def close(self) -> None:
        """Show what the workers have still written, as far as the console takes it."""
        if self._tee is not None:
            await self._tee.drain(DRAIN_TIMEOUT_S)
            self._tee.close()

    def _worker(self, assignment: Assignment, local_rank: int) -> WorkerSpec:
        launch, files = self._launch, self._files[local_rank]
        return WorkerSpec(
            local_rank=local_rank,
            argv=launch.argv(local_rank),
            env=worker_environ(
                os.environ,
                assignment,
                rdzv_id=launch.job.rdzv_id,
                role=launch.role,
                local_rank=local_rank,
                local_world_size=launch.job.local_world_size,
                error_file="" if files.error == NO_FILES else str(files.error),
                virtual_local_rank=launch.virtual_local_rank,
            ),
            cwd=None,
            stdout=self._open_stream(assignment, local_rank, Stream.OUT, files.stdout),
            stderr=self._open_stream(assignment, local_rank, Stream.ERR, files.stderr),
            cpus=self._cpus(local_rank),
        )

    def _cpus(self, local_rank: int) -> tuple[int, ...] | None:
        binding, size = self._launch.numa_binding, self._launch.job.local_world_size
        if binding is None:
            return None
        return tuple(sorted(numa.bound_cpus(binding, local_rank, size, self._gpus)))

    # ------------------------------------------------------------------ output

    def _open_stream(
        self, assignment: Assignment, local_rank: int, stream: Stream, file: Path
    ) -> str | None:
        """Return the file that a stream goes to, None for the console; follow it if it is teed."""
        to = self._route(local_rank, stream, file)
        if to.followed and to.file is not None:
            rank = assignment.rank_first + local_rank
            template, role = self._launch.output.prefix_template, self._launch.role
            self._console().follow(to.file, line_prefix(template, role, rank, local_rank), stream)
        return None if to.file is None else str(to.file)

    def _route(self, local_rank: int, stream: Stream, file: Path) -> Route:
        output = self._launch.output
        return route(
            file,
            redirect=bool(output.redirects.get(local_rank, 0) & stream),
            tee=bool(output.tee.get(local_rank, 0) & stream),
            shown=output.shown_ranks is None or local_rank in output.shown_ranks,
        )

    def _duplicate(self, folder: Path) -> None:
        """Keep the lines that were asked for by --duplicate-*-filters in files of their own."""
        output = self._launch.output
        if output.stdout_filters:
            path = folder / "filtered_stdout.log"
            self._console().duplicate(Stream.OUT, path, output.stdout_filters)
        if output.stderr_filters:
            path = folder / "filtered_stderr.log"
            self._console().duplicate(Stream.ERR, path, output.stderr_filters)

    def _console(self) -> Tee:
        if self._tee is None:
            self._tee = Tee()
        return self._tee
