"""Detects whether a round has changed the file or folder named by --snapshot.

It has changed if its newest time, its size or its number of files differs from what was found
before. Nodes do not compare their results, because the path may be on each node's local disk; it is
enough that one has seen a change. Where it cannot be read in time it counts as changed, so that no
job is given up for that reason.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from rdzv.agent.system.accounts import Identity, acting_as
from rdzv.agent.system.side_thread import Aside

log = logging.getLogger("rdzv.agent")

TIMEOUT_S = 5.0
"""How long a round's end, or the first round's start, waits for the file system."""
MAX_ENTRIES = 20_000
"""How many of a folder's entries are examined, from the top, where new files are."""


Sight = tuple[int, int, int]
"""A path's newest time in nanoseconds, number of entries and size; all 0 if it does not exist."""


def look(path: Path) -> Sight:
    """Examine a file, or a folder with everything in it."""
    try:
        first = path.stat()
    except FileNotFoundError:
        return 0, 0, 0
    newest_ns, entries, size = first.st_mtime_ns, 1, 0
    if not stat.S_ISDIR(first.st_mode):
        return newest_ns, entries, first.st_size
    folders = deque([str(path)])
    while folders and entries < MAX_ENTRIES:
        # A file that disappears in the meantime is a change, which the next examination detects.
        with contextlib.suppress(FileNotFoundError), os.scandir(folders.popleft()) as found:
            for entry in islice(found, MAX_ENTRIES - entries):
                with contextlib.suppress(FileNotFoundError):
                    there = entry.stat(follow_symlinks=False)
                    newest_ns, entries = max(newest_ns, there.st_mtime_ns), entries + 1
                    if stat.S_ISDIR(there.st_mode):
                        folders.append(entry.path)
                    else:
                        size += there.st_size
    return newest_ns, entries, size


class SnapshotFileWatch:
    """Watches one job's snapshot file on this node; without a path, it does nothing."""

    def __init__(
        self,
        path: Path | None,
        look: Callable[[Path], Sight] = look,
        identity: Identity | None = None,
    ) -> None:
        self._path = path
        self._identity = identity
        self._look = look
        self._aside = Aside(TIMEOUT_S)
        self._last: Sight | None = None
        """The content when it was last examined, or None if unknown."""
        self._looked = False
        self._warned = False

    async def begin_round(self) -> None:
        if self._path is not None and not self._looked:
            await self._examine(self._path)

    async def has_changed(self) -> bool:
        """Return whether the path has changed since the last examination; True if unknown."""
        if self._path is None:
            return False
        before = self._last
        await self._examine(self._path)
        return before is None or self._last is None or before != self._last

    async def _examine(self, path: Path) -> None:
        self._last = None
        try:
            self._last = await self._aside.answer(self._see, path)
        except Exception as error:
            if not self._warned:
                self._warned = True
                text = "cannot examine --snapshot=%s (%s); counting that as progress"
                log.warning(text, path, getattr(error, "strerror", None) or error)
        self._looked = True

    def _see(self, path: Path) -> Sight:
        with acting_as(self._identity):
            return self._look(path)
