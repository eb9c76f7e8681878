"""A run's files on this node: worker logs and error files, by round and LOCAL_RANK.

::

    LOG_DIR/RDZV_ID-RUN/NODE_ID/round_3/0/{stdout.log,stderr.log,error.json}
    LOG_DIR/RDZV_ID-RUN/NODE_ID/attempt_1 -> round_3       (the latest round of restart 1)
    LOG_DIR/RDZV_ID-RUN/NODE_ID/standby/0/...              (until its first round)

The agent never deletes these files. Without LOG_DIR, rdzvrun makes a temporary folder for them, and
removes it if no worker has written a file. With LOG_DIR=/dev/null there are none. If a submitted
job has no LOG_DIR of its own, its files are in the agent's state directory; see `run_folders`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from pathlib import Path

from rdzv.agent.launch.launch import NO_FILES, Output
from rdzv.agent.output.console_tee import OutputStream
from rdzv.agent.runner.requests import STANDBY
from rdzv.agent.system import temporary_folders
from rdzv.agent.system.accounts import Identity, acting_as
from rdzv.agent.system.folder_trees import remove_tree
from rdzv.core.model import Assignment
from rdzv.structs import struct

log = logging.getLogger("rdzv.agent")


@struct(frozen=True)
class WorkerOutput:
    """One worker's output paths."""

    stdout: Path | None
    """Its log, or None for the agent's own stdout."""
    stderr: Path | None
    error: Path
    teed: Mapping[OutputStream, Path] = field(default_factory=dict)
    """The files whose lines are copied to the console."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """The part of its environment that depends on these paths."""


@struct(frozen=True)
class RoundOutput:
    """The output paths of one round's workers."""

    workers: tuple[WorkerOutput, ...]
    filtered: Mapping[OutputStream, Path]
    """The files for the lines selected by --duplicate-stdout-filters and related options."""


@struct(frozen=True)
class WrittenRound:
    """The output locations of one round's workers."""

    number: int
    rank_first: int
    workers: tuple[WorkerOutput, ...]
    identity: Identity | None = None
    """The account whose rights are used to read them, or None for this process's own rights."""
    run: str = ""


KEPT_ROUNDS = 256
"""How many of the latest rounds' logs can be requested. Older ones are only on disk."""


class Written:
    """Gives readers access to the output files of a job's workers on this node, by round."""

    def __init__(self, identity: Identity | None = None) -> None:
        self._identity = identity
        self._rounds: dict[int, WrittenRound] = {}
        self._live: int | None = None
        self.ended = False
        self.listeners: set[Callable[[], object]] = set()
        """Called when a round begins or ends, and when the job ends."""

    @classmethod
    def before(cls, rounds: Iterable[WrittenRound]) -> Written:
        """Return the output of an ended job; if a round number is repeated, the last counts."""
        written = cls()
        written._rounds = {round_.number: round_ for round_ in rounds}
        written.ended = True
        return written

    @property
    def last(self) -> int | None:
        return max(self._rounds, default=None)

    def at(self, number: int) -> WrittenRound | None:
        return self._rounds.get(number)

    def next(self, number: int) -> WrittenRound | None:
        found = min((n for n in self._rounds if n >= number), default=None)
        return None if found is None else self._rounds[found]

    def is_over(self, number: int) -> bool:
        return number != self._live

    def begin(self, assignment: Assignment, output: RoundOutput) -> None:
        self._rounds[assignment.round] = WrittenRound(
            assignment.round, assignment.rank_first, output.workers, self._identity, assignment.run
        )
        self._live = assignment.round
        if len(self._rounds) > KEPT_ROUNDS:
            del self._rounds[min(self._rounds)]
        self._tell()

    def end_round(self) -> None:
        self._live = None
        self._tell()

    def end(self) -> None:
        self._live, self.ended = None, True
        self._tell()

    def _tell(self) -> None:
        for listener in tuple(self.listeners):
            listener()


class RunLogs:
    """The log directory for one job on one node."""

    def __init__(
        self,
        log_dir: Path | None,
        rdzv_id: str,
        node_id: str,
        run_dir: Path | None = None,
        identity: Identity | None = None,
        *,
        needed: bool = True,
    ) -> None:
        """Use a folder for this run below `log_dir`, or `run_dir` itself if given.

        Folders are created with the rights of the workers' account. Unless logs are `needed`, a
        machine without a folder for temporary files is not an error: there are no files then.
        """
        self._identity = identity
        self._needed = needed
        self._base = log_dir
        self._run_dir = run_dir
        self._rdzv_id = rdzv_id
        self._node_id = node_id
        self._temporary: tuple[Path, int] | None = None
        """The folder made because none was given, and its lock."""

    def open_round(self, assignment: Assignment, local_world_size: int) -> Path:
        """Create a round's folder, with a folder for each worker; return it, or `NO_FILES`."""
        with acting_as(self._identity):
            return self._open_round(assignment, local_world_size)

    def _open_round(self, assignment: Assignment, local_world_size: int) -> Path:
        if self._base is None and self._run_dir is None:
            # It is created only now, so that a node without any round leaves nothing behind.
            self._base = self._make_base()
        if self._base == NO_FILES:
            return NO_FILES
        run_dir = self._run_dir
        if run_dir is None:
            assert self._base is not None
            run_dir = self._base / f"{self._rdzv_id}-{assignment.run}" / self._node_id
        is_standby = assignment.round == STANDBY
        round_dir = run_dir / ("standby" if is_standby else f"round_{assignment.round}")
        for local_rank in range(local_world_size):
            (round_dir / str(local_rank)).mkdir(parents=True, exist_ok=True)
        if not is_standby:
            _point(run_dir / f"attempt_{assignment.restarts}", round_dir.name)
        return round_dir

    def _make_base(self) -> Path:
        try:
            self._temporary = temporary_folders.make(temporary_folders.LOGS)
        except OSError as error:
            if self._needed:
                raise
            text = (
                "workers get no error files (%s): if one fails, only its output says why; set "
                "TMPDIR to a folder that can be written, or give --log-dir"
            )
            log.warning(text, error)
            return NO_FILES
        return self._temporary[0]

    def close(self) -> None:
        """Remove a temporary folder in which no file was written; otherwise log where it is."""
        if self._temporary is None:
            return
        path, lock = self._temporary
        self._temporary = None
        if temporary_folders.has_files(path):
            log.info("%s: the workers' logs and error files are in %s", self._rdzv_id, path)
        else:
            with contextlib.suppress(OSError):
                remove_tree(path, self._identity)
        os.close(lock)


def usual_output(folder: Path, output: Output, local_world_size: int) -> RoundOutput:
    """Route the workers' streams to a round's folder, based on --redirects, --tee and the filter.

    The rules are those of `DefaultLogsSpecs.reify` in
    torch/distributed/elastic/multiprocessing/api.py.
    """
    filtered = {
        OutputStream.OUT: _file(folder, "filtered_stdout.log"),
        OutputStream.ERR: _file(folder, "filtered_stderr.log"),
    }
    workers = tuple(_worker(n, folder, output) for n in range(local_world_size))
    return RoundOutput(workers, filtered)


def _file(folder: Path, name: str) -> Path:
    return NO_FILES if folder == NO_FILES else folder / name


def _worker(local_rank: int, folder: Path, output: Output) -> WorkerOutput:
    logs: dict[OutputStream, Path | None] = {}
    teed = {}
    shown = output.shown_ranks is None or local_rank in output.shown_ranks
    for stream, name in ((OutputStream.OUT, "stdout.log"), (OutputStream.ERR, "stderr.log")):
        file, tee = _file(folder, f"{local_rank}/{name}"), output.tee.get(local_rank, 0) & stream
        if tee or output.redirects.get(local_rank, 0) & stream:
            logs[stream] = file
            if tee and shown:
                teed[stream] = file
        else:
            logs[stream] = None if shown else Path(os.devnull)
    error = _file(folder, f"{local_rank}/error.json")
    return WorkerOutput(logs[OutputStream.OUT], logs[OutputStream.ERR], error, teed)


def _point(link: Path, target: str) -> None:
    """Point a symlink at another target atomically, so that a reader never finds it missing."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    temporary.symlink_to(target)
    temporary.replace(link)
