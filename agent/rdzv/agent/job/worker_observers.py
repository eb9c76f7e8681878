"""The observers of one job's workers, opened anew for each round, and the notice file beside them.

RDZV_NOTICE_FILE names the notice file (`docs/drain.md`). It exists once the node is about to leave,
holds one line of JSON, `{"deadline_unix": ..., "reason": ...}`, and is replaced atomically. Errors
only cause a warning, because the workers also get a signal.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from rdzv.agent.launch.launch import Launch
from rdzv.agent.observers.arrival_watch import ArrivalWatch
from rdzv.agent.observers.collective_records import RecordReader
from rdzv.agent.observers.hang_watch import HangWatch
from rdzv.agent.observers.held_exits import HeldExits
from rdzv.agent.observers.progress_files import ProgressFiles
from rdzv.agent.observers.server_clock import Reading
from rdzv.agent.observers.snapshot_file_watch import SnapshotFileWatch
from rdzv.agent.observers.stack_sampling import Target
from rdzv.agent.system.accounts import Identity, acting_as, write_anew
from rdzv.core.model import Assignment
from rdzv.messages import Arrivals, Hung, Progress


class WorkerObservers:
    """Observes one job's workers on this node.

    For each round, call `open_round`, then `watch` when its workers are started, `stop_watching`
    when they are being ended, and `close_round` when they are gone.
    """

    def __init__(
        self,
        launch: Launch,
        report: Callable[[Progress | Hung | Arrivals], None],
        read_clock: Callable[[], Reading | None],
    ) -> None:
        rdzv_id, identity = launch.job.rdzv_id, launch.identity
        self._local_world_size = launch.job.local_world_size
        self.running: dict[int, Target] = {}
        """The workers that have started and whose exits have not been processed, by LOCAL_RANK."""
        self.records = RecordReader(rdzv_id, on=launch.collective_trace, identity=identity)
        self.progress = ProgressFiles(report, launch.progress_dir, identity)
        self.notice = NoticeFile(lambda: self.progress.folder, identity)
        self.snapshot_file = SnapshotFileWatch(launch.snapshot, identity=identity)
        self._hangs = HangWatch(rdzv_id, launch.hang_timeout, report, self.records, identity)
        self.held_exits = HeldExits(rdzv_id, self.records, report)
        self._arrivals = ArrivalWatch(rdzv_id, self.records, self.running, report, read_clock)

    def open_round(self, assignment: Assignment) -> None:
        """Prepare the files through which the workers and the agent communicate in a round."""
        self.progress.open_round(assignment, self._local_world_size)
        self.notice.take_back()

    def resume_round(self, folder: Path | None, assignment: Assignment | None) -> None:
        self.progress.resume(folder, assignment, self._local_world_size)

    def watch(self, assignment: Assignment) -> None:
        self._hangs.open_round(assignment)
        self._arrivals.open_round(assignment)
        self.held_exits.open_round(assignment)

    def worker_started(self, assignment: Assignment, local_rank: int, pid: int) -> None:
        rank, file = assignment.rank_first + local_rank, self.progress.file(local_rank)
        self.running[local_rank] = Target(rank, local_rank, pid, file)
        self._hangs.worker_started(local_rank, pid, file)

    def watch_for_hangs(self) -> None:
        """Watch for hangs from now on, as with `--hang-timeout=auto`, unless already watching."""
        self._hangs.watch_anyway()

    def worker_exited(self, local_rank: int) -> None:
        self.running.pop(local_rank, None)
        self._hangs.worker_exited(local_rank)

    def stop_watching(self) -> None:
        self._hangs.close_round()
        self._arrivals.close_round()
        self.held_exits.close_round()

    def close_round(self) -> int | None:
        """Close a round whose workers are gone. Returns the highest step reached by any of them."""
        self.stop_watching()
        self.records.forget()
        self.running.clear()
        step = self.progress.furthest()
        self.progress.close_round()
        return step

    def say_again(self) -> None:
        self.progress.say_again()
        self._hangs.say_again()

    def close(self) -> None:
        self.stop_watching()
        self.progress.close()


log = logging.getLogger("rdzv.agent")
NAME = "notice"


class NoticeFile:
    """The notice file of a job on this node, in the same folder in all rounds."""

    def __init__(self, folder: Callable[[], Path | None], identity: Identity | None = None) -> None:
        self._folder = folder
        self._identity = identity

    @property
    def _path(self) -> Path | None:
        folder = self._folder()
        return None if folder is None else folder / NAME

    def path(self) -> str:
        """Return what the workers are given; empty if there is no folder for it."""
        return "" if self._path is None else str(self._path)

    def write(self, left_ms: int, reason: str) -> None:
        if (path := self._path) is None:
            return
        deadline = round(time.time() + left_ms / 1000, 3)
        line = json.dumps({"deadline_unix": deadline, "reason": reason}) + "\n"
        new = path.with_name(f"{NAME}.new")
        try:
            with acting_as(self._identity):
                write_anew(new, line.encode())
                new.replace(path)
        except OSError as error:
            log.warning("cannot write the notice file %s: %s", path, error.strerror)

    def take_back(self) -> None:
        if (path := self._path) is not None:
            try:
                with acting_as(self._identity):
                    path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("cannot remove the notice file %s: %s", path, error.strerror)
