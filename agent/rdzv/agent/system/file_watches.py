"""Notifies subscribers when a file changes or appears, using inotify instead of polling."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from rdzv.agent.system.accounts import Identity, acting_as
from rdzv.agent.system.inotify import (
    IN_ATTRIB,
    IN_CREATE,
    IN_DELETE_SELF,
    IN_MODIFY,
    IN_MOVED_TO,
    Inotify,
)

log = logging.getLogger("rdzv.agent")

FALLBACK_POLL_S = 0.1
"""The polling interval for files that cannot be watched. torchrun polls all of them."""

_POLLED = 0
"""The watch number for a file that cannot be watched; inotify counts from 1."""
_CHANGED = IN_MODIFY | IN_ATTRIB | IN_DELETE_SELF
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
        self._inotify: Inotify | None = None
        try:
            self._inotify = Inotify()
        except OSError as error:
            text = "inotify is not available (%s); checking files every %g s instead"
            log.warning(text, error, FALLBACK_POLL_S)
        else:
            loop.add_reader(self._inotify, self._read)

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
        if (inotify := self._inotify) is None:
            raise OSError
        with suppress(FileNotFoundError):
            return inotify.add_watch(path, _CHANGED)
        folder = inotify.add_watch(path.parent, IN_CREATE | IN_MOVED_TO)
        with suppress(FileNotFoundError):
            # The file may have appeared in the meantime; its folder's watch would then fire without
            # effect.
            return inotify.add_watch(path, _CHANGED)
        return folder

    def disarm(self, source: Watched) -> None:
        with self._lock:
            watch, source.watch = source.watch, None
            if watch is None or watch not in self._sources:
                return
            self._sources[watch].discard(source)
            if not self._sources[watch]:
                del self._sources[watch]
                if self._inotify is not None:
                    self._inotify.remove_watch(watch)

    def close(self) -> None:
        """Stop all notifications."""
        with self._lock:
            self._closed = True
            self._sources.clear()
            if self._inotify is not None:
                self._loop.remove_reader(self._inotify)
                self._inotify.close()
                self._inotify = None

    def _wake_later(self, source: Watched) -> None:
        self._loop.call_later(FALLBACK_POLL_S, self._wake, [source])

    def _read(self) -> None:
        assert self._inotify is not None
        with self._lock:
            self._fires += 1
            fired = self._inotify.read()
            if fired is None:  # Events were lost, so any file may have changed.
                fired = list(self._sources)
            woken = [source for watch in fired for source in self._sources.pop(watch, ())]
        self._wake(woken)

    def _wake(self, sources: Iterable[Watched]) -> None:
        for source in sources:
            source.watch = None
            source.wake()
