"""Records, next to an SQLite file, how many commits it must have, to detect lost commits.

SQLite treats a write-ahead log that is missing, truncated or damaged as one that ends earlier,
without an error. Every commit is therefore counted in the file (table `mark`), and the number is
also written to `rdzv.db-mark`, after the commit and before any caller learns of it. A file with
fewer commits than that number has lost some.

The number is never flushed, so it costs no fsync. It outlives the process. After a power failure it
is never higher than what SQLite had flushed, so a power failure alone never causes a refusal.
Commits lost together with the number, as on a disk that was disconnected or rolled back as a whole,
are not detected; nor is damage inside an existing page.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import zlib
from contextlib import ExitStack
from pathlib import Path

from rdzv.structs import struct

SUFFIX = "-mark"

TABLE = """
CREATE TABLE mark (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    store TEXT NOT NULL,
    number INTEGER NOT NULL
)"""

_HEAD = "rdzv-mark-1"
_LENGTH = len(f"{_HEAD} {'':16} {'':20} {'':8}\n")


@struct(frozen=True)
class Mark:
    """A store's random name and its number of commits."""

    store: str
    number: int


def begin(db: sqlite3.Connection) -> None:
    """Give a new file, which has the table, its random name and no commits."""
    db.execute("INSERT INTO mark VALUES (1, ?, 0)", (secrets.token_hex(8),))


def counted(db: sqlite3.Connection) -> Mark:
    """Return the mark inside a file."""
    return Mark(*db.execute("SELECT store, number FROM mark").fetchone())


def count(db: sqlite3.Connection) -> int:
    """Count one more commit, inside its transaction, and return its number."""
    # Fetch all rows, because an unfinished statement would block the commit.
    ((number,),) = db.execute("UPDATE mark SET number = number + 1 RETURNING number").fetchall()
    return int(number)


def read(path: Path) -> Mark | None:
    """Return the mark next to a file, or None if it is missing or unreadable.

    A mark may be unreadable after a power failure.
    """
    try:
        head, store, number, check = _beside(path).read_text("ascii").split()
    except (FileNotFoundError, PermissionError, ValueError):
        return None
    if head != _HEAD or check != _check(store, number):
        return None
    return Mark(store, int(number))


class MarkFile:
    """The mark next to a file, kept open for repeated writing."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        """Open the mark file, creating it if needed, and keep it open until the stack is closed.

        Raises:
            OSError: it cannot be opened.

        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(_beside(path), flags, 0o600)
        stack.callback(os.close, self._fd)
        # After a power failure the file may be longer.
        os.ftruncate(self._fd, _LENGTH)

    def write(self, mark: Mark) -> None:
        """Overwrite the previous mark. All marks have the same length.

        Raises:
            OSError: the mark is still the previous one, or is unreadable.

        """
        number = f"{mark.number:020}"
        text = f"{_HEAD} {mark.store} {number} {_check(mark.store, number)}\n"
        os.pwrite(self._fd, text.encode("ascii"), 0)


def lost(beside: Mark | None, inside: Mark) -> str:
    """Explain which commits a file has lost; return "" if none are known to be lost.

    `beside` must be read before the file, because a server may be writing to both.

    >>> lost(Mark("a", 7), Mark("a", 8)), lost(None, Mark("a", 8))
    ('', '')
    >>> lost(Mark("a", 7), Mark("a", 3))
    'it has 3 commits, and 7 were stored'
    """
    if beside is None:
        return ""
    if inside.store != beside.store:
        return "it belongs to another store than the number of commits beside it"
    if inside.number < beside.number:
        return f"it has {inside.number} commits, and {beside.number} were stored"
    return ""


def _beside(path: Path) -> Path:
    real = path.resolve()
    return real.with_name(real.name + SUFFIX)


def _check(store: str, number: str) -> str:
    return f"{zlib.crc32(f'{store} {number}'.encode()):08x}"
