"""Tells how far the workers are, which each says in the file that RDZV_PROGRESS_FILE names.

A worker writes its step, in decimal, whenever it likes; `docs/progress.md` has what it may write.
Changes are noticed by inotify, and told to the server at most once a second, however many there
are. It is for people: nothing waits for it, and what is wrong with a file is a warning. Only one
thing is decided by it, at the end of a round: whether that has moved the job on, beyond the highest
step so far. That a file is not written any more is for `hangs` to see, if that is asked for.

The files are in a temporary folder, whatever --log-dir is. A log folder may be on a network disk:
there a write would cost a worker milliseconds a step, and the agent could hang in a read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rdzv.agent.core.model import Assignment
from rdzv.agent.system.accounts import Identity, acting_as, open_untrusted, write_anew
from rdzv.agent.system.file_watches import Watches
from rdzv.agent.system.folder_trees import remove_tree
from rdzv.structs import struct

log = logging.getLogger("rdzv.agent")

WINDOW_MS = 60_000
"""A rate is that of the last minute, or of the last step if that took longer."""
INTERVAL_MS = 1_000
"""How often the server hears of progress at most."""
INTERVAL_MS_PER_NODE = 2
"""The same for each node of the round: so one job's nodes say it 500 times a second at most."""
PREFIX = "rdzv_progress_"
"""How the names of the temporary folders begin."""
MAX_BYTES = 64
"""A file that holds more is none of a step."""
MAX_STEP = 2**64 - 1
MAX_REMOVED = 10_000
"""How many files are removed while nothing else goes on; there are a few for each worker."""

# ---------------------------------------------------------------------- what a file says, and rates


def read_step(content: bytes) -> int | None:
    r"""Read a step: a decimal number, with white space around it if need be.

    None for nothing, as when the file is about to be written anew.

    >>> read_step(b"1204"), read_step(b"   1204\n"), read_step(b"\n")
    (1204, 1204, None)

    Raises:
        ValueError: it is something else.

    """
    digits = content.strip()
    if not digits:
        return None
    if len(content) > MAX_BYTES or not digits.isdigit() or int(digits) > MAX_STEP:
        raise ValueError(f"{content[:MAX_BYTES]!r} is no step; write a decimal number from 0 on")
    return int(digits)


@struct(frozen=True)
class Pace:
    """The steps of one worker, and when they were seen: enough of them to tell its rate."""

    seen: tuple[tuple[int, int], ...] = ()
    """Time and step, oldest first: those of the window, and at least the last two."""

    def after(self, step: int, at_ms: int) -> Pace:
        """Take note of a step; one that goes back, as after a snapshot was loaded, begins anew."""
        if self.seen and step < self.seen[-1][1]:
            return Pace(((at_ms, step),))
        *earlier, last = (*self.seen, (at_ms, step))
        recent = [one for one in earlier if at_ms - one[0] <= WINDOW_MS] or earlier[-1:]
        return Pace((*recent, last))

    @property
    def step(self) -> int | None:
        """The last step; None before the first."""
        return self.seen[-1][1] if self.seen else None

    @property
    def at_ms(self) -> int:
        """When the last step was seen."""
        return self.seen[-1][0]

    @property
    def rate(self) -> float:
        """Steps a second, from the first to the last that is remembered; 0 if there is but one."""
        if len(self.seen) < 2:
            return 0.0
        (first_ms, first), (last_ms, last) = self.seen[0], self.seen[-1]
        return (last - first) * 1000 / max(last_ms - first_ms, 1)


@struct(frozen=True)
class RankProgress:
    """How far one worker is."""

    rank: int
    step: int
    age_ms: int
    """How long ago the step was seen."""
    rate: float
    """Steps a second; 0 if it is not known."""


@struct(frozen=True)
class Report:
    """How far the workers of one round on this node are; only those that have said anything."""

    run: str
    round: int
    ranks: tuple[RankProgress, ...]


# ---------------------------------------------------------------------- the files


@dataclass(eq=False, slots=True)
class _File:
    """The file of one worker, which waits for its changes."""

    path: Path
    rank: int
    woken: Callable[[_File], None]
    identity: Identity | None = None
    watch: int | None = None
    pace: Pace = field(default_factory=Pace)
    furthest: int | None = None
    """The highest step that was seen; its pace forgets it when the steps go back."""
    warned: bool = False

    def wake(self) -> None:
        self.woken(self)

    def look(self, at_ms: int) -> bool:
        """Read the file; say whether it has another step than before. The first bad one warns."""
        try:
            with acting_as(self.identity):
                step = read_step(_content(self.path))
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            if not self.warned:
                self.warned = True
                log.warning("progress of RANK %d: %s: %s", self.rank, self.path, error)
            return False
        if step is None or step == self.pace.step:
            return False
        self.pace = self.pace.after(step, at_ms)
        self.furthest = step if self.furthest is None else max(self.furthest, step)
        return True


def _content(path: Path) -> bytes:
    """Return what a file holds; of one that is just being written over, nothing."""
    fd = open_untrusted(path, os.O_RDONLY)
    try:
        first, again = (os.pread(fd, MAX_BYTES + 1, 0) for _ in range(2))
        # A worker that writes now notifies when it is done.
        return first if first == again else b""
    finally:
        os.close(fd)


class ProgressFiles:
    """The files of one job's workers on this node: where they are, and what they say.

    For each round: `open_round` before the workers start, `close_round` when they are gone. `say`
    is called with the present progress when it has changed, at most once a second, and by
    `say_again`. At the end, `close`.
    """

    def __init__(
        self,
        say: Callable[[Report], None],
        below: Path | None = None,
        identity: Identity | None = None,
    ) -> None:
        """Say progress with `say`; the files are `below` a folder, or in the temporary one.

        They belong to the workers' account, and are handled with its rights.
        """
        self._say = say
        self._identity = identity
        self._below = below
        self._folder: Path | None = None
        self._watches: Watches | None = None
        self._assignment: Assignment | None = None
        self._files: tuple[_File, ...] = ()
        self._changed: dict[_File, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looked_at_ms = 0

    def open_round(self, assignment: Assignment, local_world_size: int) -> None:
        """Make room for the files of a round, and wait for them. Without room, workers get none."""
        self.close_round()
        try:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._below))
                if self._identity is not None:
                    os.chown(self._folder, self._identity.uid, self._identity.gid)
            paths = self._paths(self._folder, assignment, local_world_size)
            with acting_as(self._identity):
                for path in paths:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_anew(path, b"")
        except OSError as error:
            log.warning("no place for progress files (%s); status shows no progress", error)
            return
        self._follow(assignment, paths)

    def resume(self, folder: Path | None, assignment: Assignment | None, size: int) -> None:
        """Go on with what an agent before this one made: its folder, and the files of a round."""
        self._folder = folder
        if folder is not None and assignment is not None:
            self._follow(assignment, self._paths(folder, assignment, size))
            for file in self._files:
                self._wake(file)

    @property
    def folder(self) -> Path | None:
        """Where the files are; None before there are any."""
        return self._folder

    @staticmethod
    def _paths(folder: Path, assignment: Assignment, local_world_size: int) -> list[Path]:
        return [
            folder / f"round_{assignment.round}" / str(local_rank) / "progress"
            for local_rank in range(local_world_size)
        ]

    def _follow(self, assignment: Assignment, paths: list[Path]) -> None:
        if self._watches is None:
            self._watches = Watches(asyncio.get_running_loop())
        self._assignment = assignment
        self._files = tuple(
            _File(path, assignment.rank_first + local_rank, self._wake, self._identity)
            for local_rank, path in enumerate(paths)
        )
        for file in self._files:
            self._watches.arm(file)

    def file(self, local_rank: int) -> str:
        """Return where a worker of the round may say how far it is; empty: nowhere."""
        return str(self._files[local_rank].path) if self._files else ""

    def beside(self, name: str) -> Path | None:
        """Return a path beside the round's files, which goes with them; None: there is no place."""
        return self._files[0].path.parents[1] / name if self._files else None

    def say_again(self) -> None:
        """Say how far the workers are to a server that may not know it."""
        if self._assignment is not None:
            self._report(self._assignment)

    def furthest(self) -> int | None:
        """Return the highest step that any worker of the round was at; None if none was said.

        What was written last is looked at now.
        """
        now_ms = _now_ms()
        for file in self._files:
            file.look(now_ms)
        steps = [file.furthest for file in self._files if file.furthest is not None]
        return max(steps, default=None)

    def close_round(self) -> None:
        """Take note that the workers are gone: forget them, and remove their files."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._changed.clear()
        if self._watches is not None:
            for file in self._files:
                self._watches.disarm(file)
        if self._folder is not None and self._assignment is not None:
            self._remove(self._folder / f"round_{self._assignment.round}")
        self._files, self._assignment = (), None

    def close(self) -> None:
        """Forget everything."""
        self.close_round()
        if self._watches is not None:
            self._watches.close()
            self._watches = None
        if self._folder is not None:
            self._remove(self._folder)
            self._folder = None

    def _remove(self, path: Path) -> None:
        # The next agent removes the rest.
        with contextlib.suppress(OSError):
            remove_tree(path, self._identity, MAX_REMOVED)

    def _wake(self, file: _File) -> None:
        """Look at a file soon, and not before it is time to say something again."""
        assignment = self._assignment
        if assignment is None or file not in self._files:
            return
        self._changed[file] = None
        if self._timer is None:
            pause_ms = max(INTERVAL_MS, INTERVAL_MS_PER_NODE * assignment.group_world_size)
            delay_ms = max(self._looked_at_ms + pause_ms - _now_ms(), 0)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_ms / 1000, self._look, assignment)

    def _look(self, assignment: Assignment) -> None:
        self._timer, self._looked_at_ms = None, _now_ms()
        files, self._changed = tuple(self._changed), {}
        assert self._watches is not None
        for file in files:
            # Before the look: what is written after it wakes us again.
            self._watches.arm(file)
        if [file for file in files if file.look(self._looked_at_ms)]:
            self._report(assignment)

    def _report(self, assignment: Assignment) -> None:
        now_ms = _now_ms()
        ranks = tuple(
            RankProgress(file.rank, file.pace.step, now_ms - file.pace.at_ms, file.pace.rate)
            for file in self._files
            if file.pace.step is not None
        )
        if ranks:
            self._say(Report(assignment.run, assignment.round, ranks))


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
