"""Notifies subscribers when a file changes or appears, using inotify instead of polling."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import struct
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from rdzv.agent.system.accounts import Identity, acting_as

log = logging.getLogger("rdzv.agent")

_FALLBACK_POLL_S = 0.1
"""The polling interval for files that cannot be watched. torchrun polls all of them."""

_IN_MODIFY = 0x2
_IN_ATTRIB = 0x4
_IN_MOVED_TO = 0x80
_IN_CREATE = 0x100
_IN_DELETE_SELF = 0x400
_IN_Q_OVERFLOW = 0x4000
_IN_ONESHOT = 0x80000000
_EVENT = struct.Struct("iIII")
_CHUNK = 1 << 16
_POLLED = 0
"""The watch number for a file that cannot be watched; inotify counts from 1."""
_CHANGED = _IN_MODIFY | _IN_ATTRIB | _IN_DELETE_SELF
"""The file was written to, or replaced by another file, in which case the old file loses a link."""


class Watched(Protocol):
    """A file's subscriber."""

    watch: int | None
    """The active watch, or None if there is none now."""

    @property
    def path(self) -> Path:
        """The file, which need not exist yet."""

    @property
    def identity(self) -> Identity | None:
        """The account whose rights are used to watch it, or None for this process's own."""

    def wake(self) -> None:
        """Handle a possible change to the file. Called in the event loop."""


class Watches:
    """Wakes each source once when its file changes, is replaced or appears.

    Without inotify, or once a limit of inotify has been reached, sources are woken at an interval.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch in this event loop, until `close`."""
        self._loop = loop
        self._lock = threading.Lock()
        self._sources: dict[int, set[Watched]] = {}
        self._closed = False
        self._fires = 0
        """The number of watches that have fired, possibly including one that is just being set."""
        self._fd: int | None = None
        try:
            self._fd = _inotify_init()
        except OSError as error:
            text = "inotify is not available (%s); checking files every %g s instead"
            log.warning(text, error, _FALLBACK_POLL_S)
        else:
            loop.add_reader(self._fd, self._read)

    def arm(self, source: Watched) -> None:
        """Wake a source at the next change to its file, or to its folder if the file is missing.

        Hangs if a file server does, but other sources are still armed and woken.
        """
        with self._lock:
            if self._closed:
                return
            fires = self._fires
        try:
            with acting_as(source.identity):
                watch = self._add(source.path)
        except OSError:
            watch = _POLLED
        with self._lock:
            if self._closed:
                return
            source.watch = watch
            if watch == _POLLED:
                self._loop.call_soon_threadsafe(self._wake_later, source)
            elif self._fires != fires:
                # One of them may be this watch, which was not known yet.
                self._loop.call_soon_threadsafe(self._wake, [source])
            else:
                self._sources.setdefault(watch, set()).add(source)

    def _add(self, path: Path) -> int:
        if (fd := self._fd) is None:
            raise OSError
        with suppress(FileNotFoundError):
            return _inotify_add_watch(fd, path, _CHANGED)
        folder = _inotify_add_watch(fd, path.parent, _IN_CREATE | _IN_MOVED_TO)
        with suppress(FileNotFoundError):
            # The file may have appeared in the meantime; its folder's watch would then fire without
            # effect.
            return _inotify_add_watch(fd, path, _CHANGED)
        return folder

    def disarm(self, source: Watched) -> None:
        """Stop waking a source."""
        with self._lock:
            watch, source.watch = source.watch, None
            if watch is None or watch not in self._sources:
                return
            self._sources[watch].discard(source)
            if not self._sources[watch]:
                del self._sources[watch]
                if self._fd is not None:
                    _inotify_rm_watch(self._fd, watch)

    def close(self) -> None:
        """Stop all notifications."""
        with self._lock:
            self._closed = True
            self._sources.clear()
            if self._fd is not None:
                self._loop.remove_reader(self._fd)
                os.close(self._fd)
                self._fd = None

    def _wake_later(self, source: Watched) -> None:
        self._loop.call_later(_FALLBACK_POLL_S, self._wake, [source])

    def _read(self) -> None:
        assert self._fd is not None
        with self._lock:
            self._fires += 1
            woken = [
                source
                for watch in self._fired(os.read(self._fd, _CHUNK))
                for source in self._sources.pop(watch, ())
            ]
        self._wake(woken)

    def _fired(self, data: bytes) -> list[int]:
        """Return the watches that fired, or all watches if events were lost."""
        fired, position = [], 0
        while position < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, position)
            position += _EVENT.size + length
            if mask & _IN_Q_OVERFLOW:
                return list(self._sources)
            fired.append(watch)
        return fired

    def _wake(self, sources: Iterable[Watched]) -> None:
        for source in sources:
            source.watch = None
            source.wake()


_libc = ctypes.CDLL(None, use_errno=True)


def _inotify_init() -> int:
    return _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))


def _inotify_add_watch(fd: int, path: Path, mask: int) -> int:
    """Add a watch that is removed after one event."""
    encoded = ctypes.c_char_p(os.fsencode(path))
    return _checked(_libc.inotify_add_watch(fd, encoded, ctypes.c_uint32(mask | _IN_ONESHOT)))


def _inotify_rm_watch(fd: int, watch: int) -> None:
    _libc.inotify_rm_watch(fd, watch)  # Fails if the watch has just fired.


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
