"""Decides when this node's snapshots of a job are written to disk. The runner writes them.

They are written periodically, when this node is about to leave, and at the end, when no workers
remain. Each node has only its own parts, so all nodes of a round must write the same mark: the
first mark that became whole in each period, by the server's clock. If all nodes hold the same
state, only the first node writes it. At the end, and before leaving, every node writes its state,
because the other nodes may be gone.
"""

from __future__ import annotations

import asyncio
import logging

from rdzv.agent.core.events import SnapshotsWritten
from rdzv.agent.launch.launch import Launch
from rdzv.agent.runner_link import RunnerLink
from rdzv.core.model import Assignment, SnapshotMark

log = logging.getLogger("rdzv.agent")

LAST_TIMEOUT_S = 600.0
"""How long the end of a job waits for the last snapshot to be written."""

_MODULE = "rdzv.worker.write_snapshots"


class SnapshotsOnDisk:
    """Writes one job's snapshots on this node to disk."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._files = launch.snapshot_files
        self._period: int | None = None
        """The period in which the last mark became whole."""
        self._writing: SnapshotMark | None = None
        self._written: SnapshotMark | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def announced(
        self, runner: RunnerLink, mark: SnapshotMark, whole_ms: int, assignment: Assignment | None
    ) -> None:
        """Write a mark that has become whole, if it is the first one in its period."""
        if self._files is None or not self._files.every_s or not whole_ms or assignment is None:
            return
        period = int(whole_ms / (1000 * self._files.every_s))
        is_first = self._period is not None and period > self._period
        self._period = period
        if is_first and (mark.shards > 1 or assignment.group_rank == 0):
            self.write(runner, mark, assignment.run)

    def write(self, runner: RunnerLink, mark: SnapshotMark | None, run: str) -> None:
        """Start writing this node's snapshots of a mark, unless some are being written.

        Does nothing if this mark was the last one written.
        """
        launch, files = self._launch, self._files
        if files is None or mark is None or mark == self._written or self._writing is not None:
            return
        self._writing = mark
        self._idle.clear()
        argv = (launch.python, "-m", _MODULE, str(files.folder), "--run", run)
        keep = ("--keep", str(files.keep))
        runner.write_snapshots(mark, (*argv, *keep), launch.environ, launch.chdir, launch.identity)

    def note(self, event: SnapshotsWritten) -> None:
        """Record that the runner has written the snapshots, or why it could not."""
        self._writing = None
        self._idle.set()
        rdzv_id = self._launch.job.rdzv_id
        folder = None if self._files is None else self._files.folder
        if event.reason:
            text = "%s: the snapshot of step %d was not written to %s: %s"
            log.warning(text, rdzv_id, event.mark.step, folder, event.reason)
        else:
            self._written = event.mark
            log.info("%s: wrote the snapshot of step %d to %s", rdzv_id, event.mark.step, folder)

    async def write_last(self, runner: RunnerLink, mark: SnapshotMark | None, run: str) -> None:
        """Write a mark, waiting a limited time for it to be written."""
        try:
            async with asyncio.timeout(LAST_TIMEOUT_S):
                await self._idle.wait()
                self.write(runner, mark, run)
                await self._idle.wait()
        except TimeoutError:
            text = "%s: gave up writing the last snapshot to disk after %g s"
            log.error(text, self._launch.job.rdzv_id, LAST_TIMEOUT_S)

    def note_runner_gone(self) -> None:
        """Stop waiting, because the runner and its snapshots are gone."""
        self._writing = None
        self._idle.set()
