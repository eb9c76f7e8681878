"""All observers of one server's jobs: progress, stragglers, hangs, logs and stacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rdzv.core.model import State
from rdzv.errors import RendezvousConnectionError, RendezvousError
from rdzv.server.diagnosis.reported_hangs import ReportedHangs
from rdzv.server.diagnosis.round_reports import RoundReports
from rdzv.server.diagnosis.snapshot_tracking import SnapshotTracking
from rdzv.server.diagnosis.stack_archive import StackArchive
from rdzv.server.diagnosis.stack_collection import StackRelay
from rdzv.server.diagnosis.worker_logs import WorkerLogs

if TYPE_CHECKING:
    from rdzv.server.driver import Driver


class Diagnosis:
    """One server's observers. Only `hangs` ever changes a job."""

    def __init__(self, driver: Driver) -> None:
        clock, send = driver.clock, driver.streams.send
        self.rounds = RoundReports(driver)
        self.snapshots = SnapshotTracking(send)
        self.logs = WorkerLogs(clock, send)
        self.stacks = StackRelay(clock, send)
        self.stack_archive = StackArchive(driver.store)
        self.hangs = ReportedHangs(driver)

    def note_state(self, state: State) -> None:
        """React to a job's new state by dropping everything observed in a round that is over."""
        self.rounds.note_state(state)
        self.snapshots.tidy(state)
        self.hangs.note_state(state)

    def note_gone(self, node_id: str) -> None:
        self.logs.note_gone(node_id)
        self.stacks.note_gone(node_id)
        self.snapshots.note_gone(node_id)

    def close(self, error: RendezvousError) -> None:
        """End every reader and every collection with an error; leave hangs to the next server."""
        self.logs.close(RendezvousConnectionError(str(error)))
        self.hangs.close()
        self.stacks.close()
