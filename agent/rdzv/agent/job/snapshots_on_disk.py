"""Decides when this node's snapshots of a job are written to disk, which its runner has done.

That is now and then, when this node is to leave, and at the end, when no worker is left. A node has
only its own parts, so all nodes of a round must write the same mark: it is the first one that
became whole, by the server's clock, in a period. Of a state that all nodes hold alike, the first
node writes it; at the end, and when it is to leave, each does, as the others may be gone.
"""

from __future__ import annotations

import asyncio
import logging

from rdzv.agent.core.model import Assignment
from rdzv.agent.launch.launch import Launch
from rdzv.agent.runner_link import RunnerLink, SnapshotsWritten
from rdzv.core.model import SnapshotMark

log = logging.getLogger("rdzv.agent")

LAST_TIMEOUT_S = 600.0
"""How long the end of a job waits for what is written at last."""

_MODULE = "rdzv.worker.write_snapshots"


class SnapshotsOnDisk:
    """What of one job was written on this node."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._files = launch.snapshot_files
        self._period: int | None = None
        """The period of the last mark that became whole."""
        self._writing: SnapshotMark | None = None
        self._written: SnapshotMark | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def announced(
        self, runner: RunnerLink, mark: SnapshotMark, whole_ms: int, line: Assignment | None
    ) -> None:
        """Write a mark that has become whole, if it is the first one of a period."""
        if self._files is None or not self._files.every_s or not whole_ms or line is None:
            return
        period = int(whole_ms / (1000 * self._files.every_s))
        is_first = self._period is not None and period > self._period
        self._period = period
        if is_first and (mark.shards > 1 or line.group_rank == 0):
            self.write(runner, mark, line.run)

    def write(self, runner: RunnerLink, mark: SnapshotMark | None, run: str) -> None:
        """Have what is held of a mark written, unless it was, or another one is being written."""
        launch, files = self._launch, self._files
        if files is None or mark is None or mark == self._written or self._writing is not None:
            return
        if not runner.writes_snapshots:
            return
        self._writing = mark
        self._idle.clear()
        argv = (launch.python, "-m", _MODULE, str(files.folder), "--run", run)
        keep = ("--keep", str(files.keep))
        runner.write_snapshots(mark, (*argv, *keep), launch.environ, launch.chdir, launch.identity)

    def note(self, event: SnapshotsWritten) -> None:
        """Note what the runner says of it."""
        mark, self._writing = self._writing, None
        self._idle.set()
        rdzv_id = self._launch.job.rdzv_id
        folder = None if self._files is None else self._files.folder
        if event.reason:
            text = "%s: the snapshot of step %d is not written to %s: %s"
            log.warning(text, rdzv_id, event.step, folder, event.reason)
        else:
            self._written = mark
            log.info("%s: the snapshot of step %d is written to %s", rdzv_id, event.step, folder)

    async def write_last(self, runner: RunnerLink, mark: SnapshotMark | None, run: str) -> None:
        """Have a mark written, and wait until it is, for a limited time."""
        try:
            async with asyncio.timeout(LAST_TIMEOUT_S):
                await self._idle.wait()
                self.write(runner, mark, run)
                await self._idle.wait()
        except TimeoutError:
            text = "%s: the last snapshot is not on disk after %g s, and is given up"
            log.error(text, self._launch.job.rdzv_id, LAST_TIMEOUT_S)

    def note_runner_gone(self) -> None:
        """Wait for nothing any more: the runner is gone, and what it held."""
        self._writing = None
        self._idle.set()
