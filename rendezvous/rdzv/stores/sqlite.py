"""The default store: one SQLite file in a directory that one rdzvd owns.

Write-ahead log and `synchronous=FULL`, so a commit that was answered survives a power cut. All
calls run in one thread of the store's own: the event loop never waits for a disk, and SQLite
never sees two threads.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rdzv.core.model import Membership
from rdzv.errors import (
    InvalidRequestError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
)
from rdzv.stores import codec
from rdzv.stores.base import (
    HISTORY_ROWS,
    Record,
    RevisionConflictError,
    Stored,
    StoreRefusedError,
)

SCHEMA_VERSION = 1
"""Kept in `PRAGMA user_version`. A newer one than this is refused and left untouched."""

MOUNTINFO = Path("/proc/self/mountinfo")

_SCHEMA = """
CREATE TABLE job (
    rdzv_id TEXT PRIMARY KEY,
    revision INTEGER NOT NULL,
    membership BLOB NOT NULL
);
CREATE TABLE history (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    rdzv_id TEXT NOT NULL,
    run TEXT NOT NULL,
    unix_ms INTEGER NOT NULL,
    name TEXT NOT NULL,
    text TEXT NOT NULL
);
CREATE INDEX history_of_job ON history (rdzv_id, seq);
CREATE TABLE leadership (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    number INTEGER NOT NULL
);
INSERT INTO leadership VALUES (1, 0);
"""

_NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "afs", "ceph", "lustre", "gpfs", "beegfs"}
    | {"fuse.sshfs", "fuse.glusterfs"}
)
"""The write-ahead log needs shared memory between processes, and flock that means something."""

T = TypeVar("T")


class SqliteStore:
    """Memberships, history and leadership in `DIR/rdzv.db`. Made by `SqliteStore.open`."""

    def __init__(self, directory: Path, history_rows: int, lock: int) -> None:
        self._path = directory / "rdzv.db"
        self._directory = directory
        self._history_rows = history_rows
        self._lock = lock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sqlite")
        self._closed = False
        self._unpruned: dict[str, int] = {}
        """Rows written for a job since its history was last cut."""

    @classmethod
    async def open(
        cls, directory: Path, history_rows: int = HISTORY_ROWS, mountinfo: Path = MOUNTINFO
    ) -> SqliteStore:
        """Open the data directory, creating it if need be, and lock it against other servers.

        Raises:
            InvalidRequestError: the directory can not be used, is in use, or is on a network
                file system.
            RendezvousStateError: its data is damaged, or was written by a newer rdzvd.

        """
        lock = claim_directory(directory, mountinfo)
        store = cls(directory, history_rows, lock)
        try:
            await store._call(store._open)
        except BaseException:
            await store.close()
            raise
        return store

    @property
    def place(self) -> str:
        """Where the data is, for people."""
        return f"{self._directory} (sqlite)"

    async def load(self, rdzv_id: str) -> Stored | None:
        """Return a job as it was last written; None if it never was."""
        return await self._call(self._load, rdzv_id)

    async def compare_and_swap(
        self,
        rdzv_id: str,
        membership: Membership,
        revision: int,
        records: Sequence[Record] = (),
    ) -> int:
        """Write a membership and its records in one commit; return the new revision."""
        return await self._call(self._swap, rdzv_id, membership, revision, records)

    async def list(self) -> tuple[str, ...]:
        """Return the rdzv_ids of all stored jobs, in order."""
        return await self._call(self._list)

    async def append(self, records: Sequence[Record]) -> None:
        """Write records that no membership carries."""
        await self._call(self._append, records)

    async def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        """Return the newest records of a job, at most `limit`, oldest first."""
        return await self._call(self._read_history, rdzv_id, min(limit, self._history_rows))

    async def take_over(self, at_least: int = 0) -> int:
        """Return a leadership number above all that this store has given."""
        return await self._call(self._take_over, at_least)

    async def close(self) -> None:
        """Finish the calls under way, close the file and release the directory."""
        if self._closed:
            return
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()
        os.close(self._lock)

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        if self._closed:
            raise StoreRefusedError("the store is closed: this server is stopping")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, function, *arguments)

    # ---------------------------------------------------- in the store's thread

    def _open(self) -> None:
        with self._reading():
            self._db = sqlite3.connect(self._path, isolation_level=None, timeout=1.0)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise RendezvousStateError(
                f"{self._path} has schema version {version}, and this rdzvd knows up to "
                f"{SCHEMA_VERSION}; it was left untouched. Start the rdzvd version that wrote it"
            )
        with self._reading():
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
        if version == 0:
            with self._transaction():
                # Not executescript(): it would commit before it begins.
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _close(self) -> None:
        if hasattr(self, "_db"):
            self._db.close()

    def _load(self, rdzv_id: str) -> Stored | None:
        with self._reading():
            row = self._db.execute(
                "SELECT membership, revision FROM job WHERE rdzv_id = ?", (rdzv_id,)
            ).fetchone()
        if row is None:
            return None
        data, revision = row
        return Stored(codec.decode(bytes(data), f"job {rdzv_id} in {self._path}"), revision)

    def _swap(
        self, rdzv_id: str, membership: Membership, revision: int, records: Sequence[Record]
    ) -> int:
        data = codec.encode(membership)
        with self._transaction():
            row = self._db.execute(
                "SELECT revision FROM job WHERE rdzv_id = ?", (rdzv_id,)
            ).fetchone()
            held = row[0] if row else 0
            if held != revision:
                raise RevisionConflictError(
                    f"job {rdzv_id} in {self._path} has revision {held}, not {revision}: "
                    "another server has written it"
                )
            self._db.execute(
                "INSERT OR REPLACE INTO job VALUES (?, ?, ?)", (rdzv_id, revision + 1, data)
            )
            self._record(records)
        return revision + 1

    def _append(self, records: Sequence[Record]) -> None:
        with self._transaction():
            self._record(records)

    def _record(self, records: Sequence[Record]) -> None:
        self._db.executemany(
            "INSERT INTO history (rdzv_id, run, unix_ms, name, text) VALUES (?, ?, ?, ?, ?)",
            [(r.rdzv_id, r.run, r.unix_ms, r.name, r.text) for r in records],
        )
        for record in records:
            # A job not yet written to by this process may be over its bound already.
            seen = self._unpruned.get(record.rdzv_id, self._history_rows)
            self._unpruned[record.rdzv_id] = seen + 1
        for rdzv_id in {record.rdzv_id for record in records}:
            self._prune(rdzv_id)

    def _prune(self, rdzv_id: str) -> None:
        """Cut a job's history to its bound; not at every row, for finding the place is a scan."""
        if self._unpruned[rdzv_id] <= self._history_rows // 10:
            return
        self._db.execute(
            "DELETE FROM history WHERE rdzv_id = ?1 AND seq <= (SELECT seq FROM history "
            "WHERE rdzv_id = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)",
            (rdzv_id, self._history_rows),
        )
        self._unpruned[rdzv_id] = 0

    def _list(self) -> tuple[str, ...]:
        with self._reading():
            rows = self._db.execute("SELECT rdzv_id FROM job ORDER BY rdzv_id").fetchall()
        return tuple(row[0] for row in rows)

    def _read_history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        with self._reading():
            rows = self._db.execute(
                "SELECT unix_ms, rdzv_id, run, name, text FROM history WHERE rdzv_id = ? "
                "ORDER BY seq DESC LIMIT ?",
                (rdzv_id, limit),
            ).fetchall()
        return tuple(Record(*row) for row in reversed(rows))

    def _take_over(self, at_least: int) -> int:
        with self._transaction():
            held: int = self._db.execute("SELECT number FROM leadership").fetchone()[0]
            number = max(held + 1, at_least)
            self._db.execute("UPDATE leadership SET number = ?", (number,))
        return number

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Map what SQLite raises while nothing is written."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._foreign(error) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit the body as a whole; until COMMIT begins, every failure is definite."""
        with self._reading():
            self._db.execute("BEGIN IMMEDIATE")
        try:
            with self._reading():
                yield
        except BaseException:
            self._rollback()
            raise
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._rollback()
            raise RendezvousConnectionError(
                f"{self._path}: the commit failed and may have happened: {error}"
            ) from error

    def _rollback(self) -> None:
        if self._db.in_transaction:
            with self._reading():
                self._db.execute("ROLLBACK")

    def _foreign(self, error: sqlite3.Error) -> RendezvousError:
        damaged = isinstance(error, sqlite3.DatabaseError) and (
            getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))
        )
        if damaged:
            return RendezvousStateError(
                f"{self._path} is damaged: {error}; it was left untouched. Restore it from a "
                "backup, or start with an empty data directory"
            )
        return StoreRefusedError(f"{self._path}: {error}; nothing was written")


def claim_directory(directory: Path, mountinfo: Path = MOUNTINFO) -> int:
    """Create the data directory, lock it, and return the descriptor that holds the lock.

    Raises:
        InvalidRequestError: it can not be used, is in use, or is on a network file system.

    """
    lock_path = directory / "lock"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InvalidRequestError(
            f"data directory {directory} can not be used: {error.strerror or error}; give a "
            "directory that this user may write to with --data-dir, or use --store memory"
        ) from error
    try:
        _refuse_network_filesystem(directory, mountinfo)
        _lock(lock, directory)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _lock(lock: int, directory: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        raise InvalidRequestError(
            f"data directory {directory} is in use by rdzvd pid {holder}; stop that one first, "
            "or give this one another directory with --data-dir"
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _refuse_network_filesystem(directory: Path, mountinfo: Path) -> None:
    kind = filesystem_of(directory.resolve(), mountinfo)
    if kind in _NETWORK_FILESYSTEMS:
        raise InvalidRequestError(
            f"data directory {directory} is on {kind}, a network file system, where SQLite may "
            "lose commits; give a directory on a local disk with --data-dir"
        )


def filesystem_of(path: Path, mountinfo: Path = MOUNTINFO) -> str:
    """Return the type of the file system that an absolute path is on; empty if unknown."""
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        return ""
    depth, kind = -1, ""
    for line in lines:
        # "36 35 98:0 /root /mount/point options [tags...] - type source options"
        before, _, after = line.partition(" - ")
        mount = Path(_unescape(before.split(" ")[4]))
        # Of two mounts on one place, the later hides the earlier.
        if path.is_relative_to(mount) and len(mount.parts) >= depth:
            depth, kind = len(mount.parts), after.split(" ")[0]
    return kind


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)
