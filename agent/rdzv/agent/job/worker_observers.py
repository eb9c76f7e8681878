"""The observers of one job's workers, opened anew for each round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rdzv.agent.core.model import Assignment
from rdzv.agent.job.drain_notice_file import NoticeFile
from rdzv.agent.job.reports_to_server import Reports
from rdzv.agent.launch.launch import Launch
from rdzv.agent.observers.arrival_watch import ArrivalWatch
from rdzv.agent.observers.hang_watch import HangWatch
from rdzv.agent.observers.held_exits import HeldExits
from rdzv.agent.observers.progress_files import ProgressFiles
from rdzv.agent.observers.snapshot_file_watch import SnapshotFileWatch


class WorkerObservers:
    """Observes one job's workers on this node.

    For each round, call `open_round`, then `watch` when its workers are started, `stop_watching`
    when they are being ended, and `close_round` when they are gone.
    """

    def __init__(self, launch: Launch, reports: Reports) -> None:
        self._local_world_size = launch.job.local_world_size
        self.progress = ProgressFiles(reports.report, launch.progress_dir, launch.identity)
        self.notice = NoticeFile(self.progress.beside, launch.identity)
        self.snapshot_file = SnapshotFileWatch(launch.snapshot, identity=launch.identity)
        self._hangs = HangWatch(
            launch.job.rdzv_id,
            launch.hang_timeout,
            reports.report,
            reports.records,
            launch.identity,
        )
        self._records = reports.records
        self.held_exits = HeldExits(launch.job.rdzv_id, reports.records, reports.report)
        self._arrivals = ArrivalWatch(
            launch.job.rdzv_id, reports.records, reports.report, reports.read_clock
        )

    def open_round(self, assignment: Assignment) -> None:
        """Prepare the files through which the workers and the agent communicate in a round."""
        self.progress.open_round(assignment, self._local_world_size)
        self.notice.open_round()
        self.notice.take_back()

    def resume_round(self, folder: Path | None, assignment: Assignment | None) -> None:
        """Continue with the previous agent's files. `assignment` is None if no round is open."""
        self.progress.resume(folder, assignment, self._local_world_size)
        self.notice.open_round()

    def watch(self, assignment: Assignment, running: Mapping[int, int] | None = None) -> None:
        """Watch a round's workers as they start; `running` has the pids of running ones."""
        self._hangs.open_round(assignment)
        self._arrivals.open_round(assignment)
        self.held_exits.open_round(assignment)
        for local_rank, pid in (running or {}).items():
            self.worker_started(local_rank, pid)

    def worker_started(self, local_rank: int, pid: int) -> None:
        file = self.progress.file(local_rank)
        self._hangs.worker_started(local_rank, pid, file)
        self._arrivals.worker_started(local_rank, pid, file)

    def watch_for_hangs(self) -> None:
        """Watch for hangs from now on, as with `--hang-timeout=auto`, unless already watching."""
        self._hangs.watch_anyway()

    def worker_exited(self, local_rank: int) -> None:
        self._hangs.worker_exited(local_rank)
        self._arrivals.worker_exited(local_rank)

    def stop_watching(self) -> None:
        """Stop watching all workers, because they are being ended."""
        self._hangs.close_round()
        self._arrivals.close_round()
        self.held_exits.close_round()

    def close_round(self) -> int | None:
        """Close a round whose workers are gone. Returns the highest step reached by any of them."""
        self.stop_watching()
        self._records.forget()
        step = self.progress.furthest()
        self.progress.close_round()
        return step

    def say_again(self) -> None:
        """Repeat the reports on progress and hung workers, for a server that may not have them."""
        self.progress.say_again()
        self._hangs.say_again()

    def close(self) -> None:
        """Stop watching, and remove the workers' files."""
        self.stop_watching()
        self.progress.close()
