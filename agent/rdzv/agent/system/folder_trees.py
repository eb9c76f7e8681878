"""Measures and removes the folders that hold a job's files.

A job may put anything in them, so their files are accessed with the rights of the job's account.
The walk does not recurse, hold a descriptor for each level, or build full paths, so any depth
works; it follows no links, and enters no other file system. It stops after `MAX_NAMES` entries, so
that no folder can block the caller forever.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from rdzv.agent.system.accounts import Identity, acting_as
from rdzv.structs import struct

MAX_NAMES = 2_000_000
"""The maximum number of files and folders examined or removed in one call; the rest is left."""

_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@struct(frozen=True)
class Measure:
    """A folder's size on disk, and when anything in it last changed."""

    size_bytes: int = 0
    changed_s: float = 0.0

    def plus(self, status: os.stat_result, now_s: float) -> Measure:
        # A time in the future was set by hand; the change time (ctime) cannot be set.
        at = status.st_mtime if status.st_mtime <= now_s else status.st_ctime
        # This is the size on disk; a file with holes may be longer.
        return Measure(self.size_bytes + status.st_blocks * 512, max(self.changed_s, at))


def measure(top: Path, now_s: float, identity: Identity | None = None) -> Measure:
    found = Measure()
    with suppress(OSError), _Place(top, identity) as place:
        found = found.plus(place.status, now_s)
        folder = place.enter()
        with acting_as(identity):
            for _, _, status in _walk(folder, MAX_NAMES):
                found = found.plus(status, now_s)
    return found


def remove_tree(top: Path, identity: Identity | None = None, most: int = MAX_NAMES) -> None:
    """Remove a folder, as far as its account can; its parent is this agent's or the account's.

    A missing folder is not an error. Raises `OSError` if something is left; this is the first
    reason.
    """
    with suppress(FileNotFoundError), _Place(top, identity) as place:
        why: OSError | None = None
        try:
            folder = place.enter(force=True)
            with acting_as(identity):
                why = _clear(folder, most)
        except OSError as error:
            why = error
        try:
            place.remove()
        except OSError as error:
            raise why or error from error


def _clear(top: int, most: int) -> OSError | None:
    """Remove an open folder's content; return the first reason why anything is left."""
    first: OSError | None = None
    try:
        for folder, name, status in _walk(top, most, force=True):
            try:
                if stat.S_ISDIR(status.st_mode):
                    os.rmdir(name, dir_fd=folder)
                else:
                    os.unlink(name, dir_fd=folder)
            except FileNotFoundError:
                pass
            except OSError as error:
                first = first or error
    except OSError as error:
        first = first or error
    return first


class _Place:
    """The location of an account's folder, whose parent folder is held open."""

    def __init__(self, top: Path, identity: Identity | None) -> None:
        self._top = top
        self._identity = identity

    def __enter__(self) -> _Place:
        self._above = os.open(self._top.parent, _PLACE)
        try:
            # In this process's own folders, no other process replaces an entry, and the account
            # need not be able to enter them.
            own = os.fstat(self._above).st_uid == os.geteuid()
            self._rights = None if own else self._identity
            with acting_as(self._rights):
                self.status = _status(self._above, self._top.name)
        except OSError:
            os.close(self._above)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._above)

    def enter(self, *, force: bool = False) -> int:
        with acting_as(self._rights):
            return _enter(self._above, self._top.name, self.status, force=force)

    def remove(self) -> None:
        with acting_as(self._rights):
            os.rmdir(self._top.name, dir_fd=self._above)


def _status(folder: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _enter(folder: int, name: str, status: os.stat_result, *, force: bool = False) -> int:
    if force and status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        with suppress(OSError):
            os.chmod(name, stat.S_IRWXU, dir_fd=folder)
    return os.open(name, _LISTED, dir_fd=folder)


class _Level:
    """A folder on the way down: its name, its identity, and the entries not yet examined."""

    def __init__(self, name: str, folder: int, most: int) -> None:
        self.name = name
        self.status = os.fstat(folder)
        self.names: list[str] = []
        with suppress(OSError), os.scandir(folder) as found:
            self.names = [entry.name for entry in islice(found, most)]


def _walk(
    folder: int, most: int, *, force: bool = False
) -> Iterator[tuple[int, str, os.stat_result]]:
    """Yield each entry below an open folder as folder, name and status, then close the folder.

    A folder follows its content. With `force`, folders that their account has made inaccessible are
    also opened. Folders that cannot be entered are still yielded. Raises `OSError` if a folder was
    moved in the meantime.
    """
    try:
        levels = [_Level("", folder, most)]
        most -= len(levels[0].names)
        while True:
            level = levels[-1]
            if level.names:
                name, inner = level.names.pop(), None
                try:
                    status = _status(folder, name)
                except OSError:
                    continue
                # A file system mounted there does not belong to the job.
                if stat.S_ISDIR(status.st_mode) and status.st_dev == level.status.st_dev:
                    with suppress(OSError):
                        inner = _enter(folder, name, status, force=force)
                if inner is None:
                    yield folder, name, status
                    continue
                os.close(folder)
                folder = inner
                levels.append(_Level(name, folder, most))
                most -= len(levels[-1].names)
            elif len(levels) > 1:
                levels.pop()
                outer = os.open("..", _PLACE, dir_fd=folder)
                os.close(folder)
                folder = outer
                if not os.path.samestat(os.fstat(folder), levels[-1].status):
                    raise OSError(None, "it was moved in the meantime", level.name)
                yield folder, level.name, level.status
            else:
                return
    finally:
        os.close(folder)
