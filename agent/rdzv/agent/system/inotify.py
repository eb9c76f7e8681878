"""Linux's inotify: watches of files and folders, each of which fires once."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

IN_MODIFY = 0x2
IN_ATTRIB = 0x4
IN_MOVED_TO = 0x80
IN_CREATE = 0x100
IN_DELETE_SELF = 0x400
IN_Q_OVERFLOW = 0x4000
IN_ONESHOT = 0x80000000

EVENT = struct.Struct("iIII")
"""The head of an event: watch, mask, cookie, and the length of the name that follows."""
_READ_BYTES = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


class Inotify:
    """An inotify instance. Every call raises `OSError` if the kernel refuses it."""

    def __init__(self) -> None:
        """Open an instance; each user may have only a few of them."""
        self._fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def fileno(self) -> int:
        """Return the descriptor, which is readable when watches have fired."""
        return self._fd

    def add_watch(self, path: Path, mask: int) -> int:
        """Watch a file or folder for one event; return the number of the watch, from 1."""
        encoded = ctypes.c_char_p(os.fsencode(path))
        watch_mask = ctypes.c_uint32(mask | IN_ONESHOT)
        return _checked(_libc.inotify_add_watch(self._fd, encoded, watch_mask))

    def remove_watch(self, watch: int) -> None:
        """Remove a watch; one that has just fired is gone already."""
        _libc.inotify_rm_watch(self._fd, watch)

    def read(self) -> list[int] | None:
        """Return the watches that have fired; None if the kernel lost events."""
        return fired_watches(os.read(self._fd, _READ_BYTES))

    def close(self) -> None:
        """Close the instance, which removes its watches."""
        os.close(self._fd)


def fired_watches(events: bytes) -> list[int] | None:
    """Return the watches named by the events that inotify wrote; None if it lost some."""
    watches, position = [], 0
    while position < len(events):
        watch, mask, _, name_bytes = EVENT.unpack_from(events, position)
        position += EVENT.size + name_bytes
        if mask & IN_Q_OVERFLOW:
            return None
        watches.append(watch)
    return watches


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
