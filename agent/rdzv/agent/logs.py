"""Where a run's files are on this node: worker logs and error files, by round and LOCAL_RANK.

::

    LOG_DIR/RDZV_ID-RUN/NODE_ID/round_3/0/{stdout.log,stderr.log,error.json}
    LOG_DIR/RDZV_ID-RUN/NODE_ID/attempt_1 -> round_3       (the latest round of restart 1)

Nothing here is ever deleted by the agent. With LOG_DIR=/dev/null there are no files.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rdzv.agent.core.model import Assignment
from rdzv.agent.launch import NO_FILES


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """The files of one worker of one round."""

    stdout: Path
    stderr: Path
    error: Path


class RunLogs:
    """The log directory of one job on one node."""

    def __init__(self, log_dir: Path | None, rdzv_id: str, node_id: str) -> None:
        self._base = log_dir
        self._rdzv_id = rdzv_id
        self._node_id = node_id

    def open_round(self, assignment: Assignment, local_world_size: int) -> list[WorkerFiles]:
        """Make the directories of a round's workers; return their files by LOCAL_RANK.

        Raises:
            OSError: a directory can not be made.

        """
        if self._base == NO_FILES:
            return [WorkerFiles(NO_FILES, NO_FILES, NO_FILES)] * local_world_size
        if self._base is None:
            # Not before there is something to keep: a node that never ran leaves nothing behind.
            self._base = Path(tempfile.mkdtemp(prefix="rdzv_"))
        run_dir = self._base / f"{self._rdzv_id}-{assignment.run}" / self._node_id
        round_dir = run_dir / f"round_{assignment.round}"
        files = []
        for local_rank in range(local_world_size):
            directory = round_dir / str(local_rank)
            directory.mkdir(parents=True, exist_ok=True)
            files.append(
                WorkerFiles(
                    directory / "stdout.log", directory / "stderr.log", directory / "error.json"
                )
            )
        _point(run_dir / f"attempt_{assignment.restarts}", round_dir.name)
        return files


def _point(link: Path, target: str) -> None:
    """Point a symlink at another target in one step, so that a reader never finds it missing."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    temporary.symlink_to(target)
    temporary.replace(link)
