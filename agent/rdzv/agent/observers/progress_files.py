"""Reports the workers' progress, which each writes to the file named by RDZV_PROGRESS_FILE.

`docs/progress.md` has the format. Progress is for people, and an error with a file only causes a
warning. It decides one thing, at the end of a round: whether that has gone beyond the highest step.

The files are in a temporary folder, regardless of --log-dir, which may be on a network disk: a
write there would cost a worker milliseconds per step, and the agent could hang in a read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rdzv.agent.system import temporary_folders
from rdzv.agent.system.accounts import Identity, acting_as, open_untrusted, write_anew
from rdzv.agent.system.folder_trees import remove_tree
from rdzv.agent.system.temporary_folders import MAX_FILES, PROGRESS
from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.model import Assignment
from rdzv.messages import Progress
from rdzv.runtime.clock import monotonic_ms
from rdzv.structs import struct

log = logging.getLogger("rdzv.agent")

WINDOW_MS = 60_000
"""A rate covers the last minute, or the last step if that took longer."""
INTERVAL_MS = 1_000
"""The interval at which the files are read, and reported if they have changed."""
INTERVAL_MS_PER_NODE = 2
"""The same per node of the round, so that one job's nodes send at most 500 reports a second."""
FIRST_INTERVAL_MS = 100
"""The interval until a worker has made its first step of the round, which ends redone work."""
MAX_BYTES = 64
"""The size limit for a file that contains a step."""
MAX_STEP = 2**64 - 1

# ---------------------------------------------------------------------- file content, and rates


def read_step(content: bytes) -> int | None:
    r"""Parse a step: a decimal number, possibly surrounded by white space.

    Returns None for an empty file, for example one that is about to be rewritten.

    >>> read_step(b"1204"), read_step(b"   1204\n"), read_step(b"\n")
    (1204, 1204, None)

    Raises:
        ValueError: the content is something else.

    """
    digits = content.strip()
    if not digits:
        return None
    if len(content) > MAX_BYTES or not digits.isdigit() or int(digits) > MAX_STEP:
        raise ValueError(
            f"{content[:MAX_BYTES]!r} is not a step; write a decimal number, 0 or greater"
        )
    return int(digits)


@struct(frozen=True)
class WorkerPace:
    """One worker's recent steps with their times: enough to compute its rate."""

    seen: tuple[tuple[int, int], ...] = ()
    """Pairs of time and step, oldest first: those in the window, and at least the last two."""

    def after(self, step: int, at_ms: int) -> WorkerPace:
        """Add a step. A lower step, as after loading a snapshot, restarts the record."""
        if self.seen and step < self.seen[-1][1]:
            return WorkerPace(((at_ms, step),))
        *earlier, last = (*self.seen, (at_ms, step))
        recent = [one for one in earlier if at_ms - one[0] <= WINDOW_MS] or earlier[-1:]
        return WorkerPace((*recent, last))

    @property
    def step(self) -> int | None:
        return self.seen[-1][1] if self.seen else None

    @property
    def at_ms(self) -> int:
        return self.seen[-1][0]

    @property
    def rate(self) -> float:
        """Steps per second, from the first remembered step to the last; 0 if there is only one."""
        if len(self.seen) < 2:
            return 0.0
        (first_ms, first), (last_ms, last) = self.seen[0], self.seen[-1]
        return (last - first) * 1000 / max(last_ms - first_ms, 1)


# ---------------------------------------------------------------------- the files


@dataclass(eq=False, slots=True)
class _File:
    path: Path
    rank: int
    pace: WorkerPace = field(default_factory=WorkerPace)
    furthest: int | None = None
    """The highest step seen, which the pace forgets when the steps go back."""
    warned: bool = False

    def look(self, at_ms: int, identity: Identity | None) -> bool:
        """Read the file and return whether its step changed; warn about invalid content once."""
        try:
            with acting_as(identity):
                step = read_step(_content(self.path))
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            if not self.warned:
                self.warned = True
                text = "cannot read the progress of RANK %d from %s: %s"
                log.warning(text, self.rank, self.path, error)
            return False
        if step is None or step == self.pace.step:
            return False
        self.pace = self.pace.after(step, at_ms)
        self.furthest = step if self.furthest is None else max(self.furthest, step)
        return True


def _content(path: Path) -> bytes:
    """Return a file's content, or nothing if it is currently being rewritten."""
    fd = open_untrusted(path, os.O_RDONLY)
    try:
        first, again = (os.pread(fd, MAX_BYTES + 1, 0) for _ in range(2))
        return first if first == again else b""
    finally:
        os.close(fd)


class ProgressFiles:
    """The progress files of one job's workers on this node, and their content.

    `say` is called with the progress when it has changed, and by `say_again`. A kept worker
    continues with its file.
    """

    def __init__(
        self,
        say: Callable[[Progress], None],
        below: Path | None = None,
        identity: Identity | None = None,
        now_ms: Callable[[], int] = monotonic_ms,
    ) -> None:
        self._say = say
        self._now_ms = now_ms
        self._identity = identity
        self._below = below
        self.folder: Path | None = None
        self._lock: int | None = None
        self._assignment: Assignment | None = None
        self._files: tuple[_File, ...] = ()
        self._timer: asyncio.TimerHandle | None = None

    def open_round(self, assignment: Assignment, local_world_size: int) -> None:
        """Create and watch the files of a round's workers; on failure, they have no files."""
        self.close_round()
        try:
            if self.folder is None:
                self.folder, self._lock = temporary_folders.make(PROGRESS, self._below)
                if self._identity is not None:
                    os.chown(self.folder, self._identity.uid, self._identity.gid)
            paths = self._paths(self.folder, local_world_size)
            with acting_as(self._identity):
                for local_rank, path in enumerate(paths):
                    if local_rank not in assignment.kept or not path.exists():
                        path.parent.mkdir(parents=True, exist_ok=True)
                        write_anew(path, b"")
        except OSError as error:
            text = "cannot create progress files (%s); status will show no progress"
            log.warning(text, error)
            return
        self._follow(assignment, paths)

    def resume(self, folder: Path | None, assignment: Assignment | None, size: int) -> None:
        self.folder = folder
        if folder is not None and assignment is not None:
            self._follow(assignment, self._paths(folder, size))

    @staticmethod
    def _paths(folder: Path, local_world_size: int) -> list[Path]:
        return [folder / str(local_rank) / "progress" for local_rank in range(local_world_size)]

    def _follow(self, assignment: Assignment, paths: list[Path]) -> None:
        self._assignment = assignment
        self._files = tuple(
            _File(path, assignment.rank_first + local_rank) for local_rank, path in enumerate(paths)
        )
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(0, self._look, assignment)

    def file(self, local_rank: int) -> str:
        """Return the path of a worker's progress file in this round, or "" if there is none."""
        return str(self._files[local_rank].path) if self._files else ""

    def say_again(self) -> None:
        if self._assignment is not None:
            self._report(self._assignment)

    def furthest(self) -> int | None:
        """Read the files once more; return the highest step in the round, None if unreported."""
        now_ms = self._now_ms()
        for file in self._files:
            file.look(now_ms, self._identity)
        steps = [file.furthest for file in self._files if file.furthest is not None]
        return max(steps, default=None)

    def close_round(self) -> None:
        """Forget the workers. Parked workers may still write to their files."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._files, self._assignment = (), None

    def close(self) -> None:
        self.close_round()
        if self.folder is not None:
            self._remove(self.folder)
            self.folder = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _remove(self, path: Path) -> None:
        # The next agent removes the rest.
        with contextlib.suppress(OSError):
            remove_tree(path, self._identity, MAX_FILES)

    def _look(self, assignment: Assignment) -> None:
        now_ms = self._now_ms()
        if [file for file in self._files if file.look(now_ms, self._identity)]:
            self._report(assignment)
        if any(file.pace.step is not None for file in self._files):
            pause_ms = max(INTERVAL_MS, INTERVAL_MS_PER_NODE * assignment.group_world_size)
        else:
            pause_ms = FIRST_INTERVAL_MS
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(pause_ms / 1000, self._look, assignment)

    def _report(self, assignment: Assignment) -> None:
        now_ms = self._now_ms()
        ranks = tuple(
            RankProgress(
                file.rank, file.pace.step, now_ms - file.pace.at_ms, file.pace.rate or None
            )
            for file in self._files
            if file.pace.step is not None
        )
        if ranks:
            self._say(Progress(assignment.rdzv_id, assignment.run, assignment.round, ranks))
