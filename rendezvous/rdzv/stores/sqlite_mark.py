"""How many commits an SQLite file must have: a number beside it, by which lost ones are found.

SQLite takes a write-ahead log that is missing, cut or damaged for one that ends earlier, and says
nothing. So every commit counts itself in the file (table `mark`), and the number is written into
`rdzv.db-mark` as well, after the commit and before anyone hears of it. A file that has fewer
commits than the number says has lost some.

The number is never flushed: it costs no fsync. It outlives the process, and after a power cut it is
at most as high as what SQLite had flushed before, so a power cut alone is never refused. What it
does not find: commits that were lost together with the number, as on a disk that was cut off or set
back as a whole, and what is wrong inside of a page that is there.
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
CREATE TABLE IF NOT EXISTS mark (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    store TEXT NOT NULL,
    number INTEGER NOT NULL
)"""

_HEAD = "rdzv-mark-1"
_LENGTH = len(f"{_HEAD} {'':16} {'':20} {'':8}\n")


@struct(frozen=True)
class Mark:
    """Which store it is, by a random name, and how many commits it has."""

    store: str
    number: int


def make_table(db: sqlite3.Connection) -> None:
    """Have a file count its commits from now on, unless it does; inside of a transaction."""
    db.execute(TABLE)
    db.execute("INSERT OR IGNORE INTO mark VALUES (1, ?, 0)", (secrets.token_hex(8),))


def counted(db: sqlite3.Connection) -> Mark | None:
    """Return what a file says of itself; None if it does not count its commits."""
    if not db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'mark'").fetchone():
        return None
    row = db.execute("SELECT store, number FROM mark").fetchone()
    return Mark(*row) if row else None


def count(db: sqlite3.Connection) -> int:
    """Count one more commit, inside of its transaction; return its number."""
    # All of it is fetched: a statement that is not at its end would keep the commit back.
    ((number,),) = db.execute("UPDATE mark SET number = number + 1 RETURNING number").fetchall()
    return int(number)


def read(path: Path) -> Mark | None:
    """Return what stands beside a file; None if nothing that can be read, as after a power cut."""
    try:
        head, store, number, check = _beside(path).read_text("ascii").split()
    except (FileNotFoundError, PermissionError, ValueError):
        return None
    if head != _HEAD or check != _check(store, number):
        return None
    return Mark(store, int(number))


class MarkFile:
    """The mark beside a file, held open to be written again and again."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        """Open it until the stack is closed, and make it if need be.

        Raises:
            OSError: it cannot be opened.

        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(_beside(path), flags, 0o600)
        stack.callback(os.close, self._fd)
        # After a power cut the file may be longer.
        os.ftruncate(self._fd, _LENGTH)

    def write(self, mark: Mark) -> None:
        """Write it over what stands there: all are as long.

        Raises:
            OSError: what stands there is the number before, or cannot be read.

        """
        number = f"{mark.number:020}"
        text = f"{_HEAD} {mark.store} {number} {_check(mark.store, number)}\n"
        os.pwrite(self._fd, text.encode("ascii"), 0)


def lost(beside: Mark | None, inside: Mark | None) -> str:
    """Say that a file has lost commits; empty if it has not, as far as can be known.

    `beside` has to be read before the file: a server may be writing to both.

    >>> lost(Mark("a", 7), Mark("a", 8)), lost(None, None)
    ('', '')
    >>> lost(Mark("a", 7), Mark("a", 3))
    'it has 3 commits, and 7 were stored'
    """
    if beside is None:
        return ""
    if inside is None:
        return f"it counts no commits, and {beside.number} were stored"
    if inside.store != beside.store:
        return "it is of another store than the number of commits that stands beside it"
    if inside.number < beside.number:
        return f"it has {inside.number} commits, and {beside.number} were stored"
    return ""


def _beside(path: Path) -> Path:
    real = path.resolve()
    return real.with_name(real.name + SUFFIX)


def _check(store: str, number: str) -> str:
    return f"{zlib.crc32(f'{store} {number}'.encode()):08x}"
