"""The default store: one SQLite file in a directory that one rdzvd owns.

Write-ahead log and `synchronous=FULL`, so a commit that was answered survives a power cut. All
calls run in one thread of the store's own: the event loop never waits for a disk, and SQLite
never sees two threads. What is to be written meanwhile waits, and is written in one commit.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import sqlite3
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rdzv.core.model import Membership
from rdzv.errors import InvalidRequestError, RendezvousConnectionError, RendezvousError
from rdzv.stores import codec, sqlite_mark
from rdzv.stores.base import (
    HISTORY_ROWS,
    Page,
    Record,
    RevisionConflictError,
    Stored,
    StoreRefusedError,
    check_document,
    read,
)
from rdzv.stores.sqlite_file import (
    DOCUMENTS_SINCE,
    SCHEMA_VERSION,
    connect,
    foreign,
    has_data,
    identify,
    looking,
    mapped,
    prepare,
    problems_in,
    why_incomplete,
)
from rdzv.stores.sqlite_mark import Mark, MarkFile
from rdzv.structs import struct

log = logging.getLogger("rdzv.stores")

MOUNTINFO = Path("/proc/self/mountinfo")

_NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "coda", "lustre", "gpfs"}
    | {"beegfs", "ocfs2", "gfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.cephfs", "fuse.s3fs"}
)
"""Where another machine may have the same files: there flock, the write-ahead log's shared memory
and fsync do not work as on a disk. 9p too: it keeps locks to its own guest.
virtiofs is not among them: it is the local disk of many containers."""

JOBS_PER_PAGE = 100
"""Some milliseconds for ended jobs; the largest that run are a megabyte each."""

_MOST_AT_ONCE = 256
"""Writes in one commit: more would not be faster, and the first would wait for the last."""
_MOST_WAITING = 65_536
"""Writes that wait for one: far above one for each job."""

T = TypeVar("T")


@struct(frozen=True)
class Survey:
    """The result of a check that an operator asked for."""

    path: Path
    schema_version: int
    size_bytes: int
    events: int
    leadership: int
    used_by: str
    """The process that has the directory: `rdzvd pid 4711`; empty if none has."""
    problems: tuple[str, ...]
    """Faults that were found, in sentences that begin with their verb."""


@dataclass(slots=True, eq=False)
class _Write:
    """One caller's writes, and their outcome."""

    apply: Callable[[], Any]
    answer: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None

    def run(self) -> None:
        """Write, inside a transaction. A lost race writes nothing, and harms no other."""
        self.result, self.error = None, None
        try:
            self.result = self.apply()
        except RevisionConflictError as error:
            self.error = error


class SqliteStore:
    """Memberships, history, documents and leadership in `DIR/rdzv.db`. Made by `open` or `look`."""

    def __init__(self, directory: Path, history_rows: int) -> None:
        self._path = directory / "rdzv.db"
        self._directory = directory
        self._history_rows = history_rows
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sqlite")
        self._closed = False
        self._locked = ExitStack()
        """Resources that are released when the file is closed."""
        self._opened = ExitStack()
        """The connection, and what it needs; of the store's thread."""
        self._used_by = ""
        self._schema_version = SCHEMA_VERSION
        self._waiting: deque[_Write] = deque()
        self._whole = False
        """A transaction is open that spans many writes."""
        self._changes = 0
        """The connection's change counter when the transaction began."""
        self._lost = ""
        """Commits that it has lost, if it is only looked at."""
        self._unpruned: dict[str, int] = {}
        """Rows written for a job since its history was last cut."""

    @classmethod
    async def open(
        cls, directory: Path, history_rows: int = HISTORY_ROWS, mountinfo: Path = MOUNTINFO
    ) -> SqliteStore:
        """Open the data directory, creating it if need be, and lock it against other servers.

        A file of an older schema is migrated, and a copy of it is kept. A file that is refused is
        left as it was, byte for byte.

        Raises:
            InvalidRequestError: the directory can not be used, is in use, or is on a network
                file system.
            RendezvousStateError: its data is damaged, was written by a newer rdzvd or by another
                program, or could not be migrated.

        """
        lock = claim_directory(directory, mountinfo)
        store = cls(directory, history_rows)
        store._locked.callback(os.close, lock)
        return await store._begun(store._open)

    @classmethod
    async def look(cls, directory: Path, history_rows: int = HISTORY_ROWS) -> SqliteStore:
        """Open a data directory to read, also while a server has it. Every write is refused.

        Nothing is changed. No server can start on the directory until the store is closed.

        Raises:
            InvalidRequestError: it can not be read.
            RendezvousStateError: there is no data of this rdzvd in it, or it is damaged.

        """
        store = cls(directory, history_rows)
        try:
            lock, store._used_by = _share_directory(directory)
            if lock is not None:
                store._locked.callback(os.close, lock)
            return await store._begun(store._open_to_read)
        except OSError as error:
            raise InvalidRequestError(
                f"data directory {directory} can not be read: {error.strerror or error}; look at "
                "it as the user that runs rdzvd"
            ) from error

    async def _begun(self, begin: Callable[[], None]) -> SqliteStore:
        try:
            await self._call(begin)
        except BaseException:
            await self.close()
            raise
        return self

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
        return await self._write(partial(self._swap, rdzv_id, membership, revision, records))

    async def delete(self, rdzv_id: str, revision: int) -> None:
        """Forget a job and its history in one commit."""
        await self._write(partial(self._delete, rdzv_id, revision))

    async def list(self) -> tuple[str, ...]:
        """Return the rdzv_ids of all stored jobs, in order."""
        return await self._call(self._list)

    async def pages(self) -> AsyncGenerator[Page, None]:
        """Yield all stored jobs, `JOBS_PER_PAGE` at a time."""
        after = ""
        while page := await self._call(self._read_page, after):
            yield page
            after = page[-1][0]

    async def append(self, records: Sequence[Record]) -> None:
        """Write records that no membership carries."""
        await self._write(partial(self._record, records))

    async def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        """Return the newest records of a job, at most `limit`, oldest first."""
        return await self._call(self._read_history, rdzv_id, min(limit, self._history_rows))

    async def load_document(self, name: str) -> tuple[bytes, int] | None:
        """Return a document as it was last written, and its revision; None if it never was."""
        return await self._call(self._load_document, name)

    async def swap_document(self, name: str, data: bytes, revision: int) -> int:
        """Write a document; return the new revision."""
        check_document(name, data)
        return await self._write(partial(self._swap_document, name, data, revision))

    async def list_documents(self) -> tuple[str, ...]:
        """Return the names of all documents, in order."""
        return await self._call(self._list_documents)

    async def take_over(self, at_least: int = 0) -> int:
        """Return a leadership number above all that this store has given."""
        return await self._write(partial(self._take_over, at_least))

    @asynccontextmanager
    async def all_or_nothing(self) -> AsyncIterator[None]:
        """Make one commit of all that the body writes; if it fails, nothing of it is written."""
        await self._call(self._begin_whole)
        try:
            yield
        except BaseException:
            await self._call(self._drop_whole)
            raise
        await self._call(self._commit_whole)

    async def survey(self) -> Survey:
        """Return what is in the file, and what is wrong with it; reads all of it."""
        return await self._call(self._survey)

    async def close(self) -> None:
        """Finish the calls under way, close the file and release the directory."""
        if self._closed:
            return
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._opened.close)
        self._thread.shutdown()
        self._locked.close()

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        self._check_open()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, function, *arguments)

    async def _write(self, apply: Callable[[], T]) -> T:
        self._check_open()
        if len(self._waiting) >= _MOST_WAITING:
            raise StoreRefusedError(f"{self._path}: {_MOST_WAITING} writes wait already; try again")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._waiting.append(_Write(apply, answer))
        # Whichever of these comes first takes all that wait with it.
        self._thread.submit(self._commit_waiting, loop)
        return await answer

    def _check_open(self) -> None:
        if self._closed:
            raise StoreRefusedError("the store is closed: this server is stopping")

    # ---------------------------------------------------- in the store's thread

    def _open(self) -> None:
        prepare(self._path)
        with self._reading():
            self._db = self._opened.enter_context(closing(connect(self._path, "rw")))
            mode = self._db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            self._db.execute("PRAGMA synchronous = FULL")
        if mode != "wal":
            raise InvalidRequestError(
                f"{self._path} can have no write-ahead log on this file system; give a directory "
                "on a local disk with --data-dir"
            )
        with mapped(self._path):
            if (mark := sqlite_mark.counted(self._db)) is None:
                self._db.execute("BEGIN IMMEDIATE")
                sqlite_mark.make_table(self._db)
                self._db.execute("COMMIT")
                mark = sqlite_mark.counted(self._db)
            assert mark is not None, "the table was just made"
            self._mark, self._mark_file = mark, MarkFile(self._path, self._opened)
            self._mark_file.write(mark)

    def _open_to_read(self) -> None:
        if not has_data(self._path):
            raise InvalidRequestError(f"{self._path} holds no data yet; rdzvd will create it")
        # Before the file: a server may go on with both.
        mark = sqlite_mark.read(self._path)
        # Beside a server its own notes must be used; where there is none, none must be made.
        opened = closing(connect(self._path, "ro")) if self._used_by else looking(self._path)
        with self._reading():
            self._db = self._opened.enter_context(opened)
            self._schema_version = identify(self._db, self._path)
            self._lost = sqlite_mark.lost(mark, sqlite_mark.counted(self._db))

    def _load(self, rdzv_id: str) -> Stored | None:
        with self._reading():
            row = self._db.execute(
                "SELECT membership, revision FROM job WHERE rdzv_id = ?", (rdzv_id,)
            ).fetchone()
        if row is None:
            return None
        data, revision = row
        return Stored(codec.decode(bytes(data), f"job {rdzv_id} in {self._path}"), revision)

    def _list(self) -> tuple[str, ...]:
        with self._reading():
            rows = self._db.execute("SELECT rdzv_id FROM job ORDER BY rdzv_id").fetchall()
        return tuple(row[0] for row in rows)

    def _read_page(self, after: str) -> Page:
        with self._reading():
            rows = self._db.execute(
                "SELECT rdzv_id, revision, membership FROM job WHERE rdzv_id > ? "
                "ORDER BY rdzv_id LIMIT ?",
                (after, JOBS_PER_PAGE),
            ).fetchall()
        return [
            (name, read(codec.decode, bytes(data), revision, f"job {name} in {self._path}"))
            for name, revision, data in rows
        ]

    def _read_history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        with self._reading():
            rows = self._db.execute(
                "SELECT unix_ms, rdzv_id, run, name, text FROM history WHERE rdzv_id = ? "
                "ORDER BY seq DESC LIMIT ?",
                (rdzv_id, limit),
            ).fetchall()
        return tuple(Record(*row) for row in reversed(rows))

    def _load_document(self, name: str) -> tuple[bytes, int] | None:
        if self._schema_version < DOCUMENTS_SINCE:
            return None
        with self._reading():
            row = self._db.execute(
                "SELECT data, revision FROM document WHERE name = ?", (name,)
            ).fetchone()
        return (bytes(row[0]), row[1]) if row else None

    def _list_documents(self) -> tuple[str, ...]:
        if self._schema_version < DOCUMENTS_SINCE:
            return ()
        with self._reading():
            rows = self._db.execute("SELECT name FROM document ORDER BY name").fetchall()
        return tuple(row[0] for row in rows)

    def _survey(self) -> Survey:
        with self._reading():
            problems = [f"is damaged: {what}" for what in problems_in(self._db, "integrity_check")]
            pages, page_bytes, events, leadership = (
                self._db.execute(query).fetchone()[0]
                for query in (
                    "PRAGMA page_count",
                    "PRAGMA page_size",
                    "SELECT count(*) FROM history",
                    "SELECT number FROM leadership",
                )
            )
        return Survey(
            path=self._path,
            schema_version=self._schema_version,
            size_bytes=pages * page_bytes,
            events=events,
            leadership=leadership,
            used_by=self._used_by,
            problems=(
                *problems,
                *([why_incomplete(self._path, self._lost)] if self._lost else []),
            ),
        )

    # ---------------------------------------------------- in a transaction, in the store's thread

    def _swap(
        self, rdzv_id: str, membership: Membership, revision: int, records: Sequence[Record]
    ) -> int:
        self._check_job(rdzv_id, revision)
        self._db.execute(
            "INSERT INTO job VALUES (?1, ?2, ?3) "
            "ON CONFLICT DO UPDATE SET revision = ?2, membership = ?3",
            (rdzv_id, revision + 1, codec.encode(membership)),
        )
        self._record(records)
        return revision + 1

    def _delete(self, rdzv_id: str, revision: int) -> None:
        self._check_job(rdzv_id, revision)
        if revision:
            self._db.execute("DELETE FROM job WHERE rdzv_id = ?", (rdzv_id,))
            self._db.execute("DELETE FROM history WHERE rdzv_id = ?", (rdzv_id,))
            self._unpruned.pop(rdzv_id, None)

    def _swap_document(self, name: str, data: bytes, revision: int) -> int:
        row = self._db.execute("SELECT revision FROM document WHERE name = ?", (name,)).fetchone()
        self._check_revision(f"document {name}", row, revision)
        self._db.execute(
            "INSERT INTO document VALUES (?1, ?2, ?3) "
            "ON CONFLICT DO UPDATE SET revision = ?2, data = ?3",
            (name, revision + 1, data),
        )
        return revision + 1

    def _check_job(self, rdzv_id: str, revision: int) -> None:
        row = self._db.execute("SELECT revision FROM job WHERE rdzv_id = ?", (rdzv_id,)).fetchone()
        self._check_revision(f"job {rdzv_id}", row, revision)

    def _check_revision(self, what: str, row: tuple[int] | None, revision: int) -> None:
        held = row[0] if row else 0
        if held != revision:
            raise RevisionConflictError(
                f"{what} in {self._path} has revision {held}, not {revision}: "
                "another server has written it"
            )

    def _record(self, records: Sequence[Record]) -> None:
        self._db.executemany(
            "INSERT INTO history (rdzv_id, run, unix_ms, name, text) VALUES (?, ?, ?, ?, ?)",
            [(r.rdzv_id, r.run, r.unix_ms, r.name, r.data) for r in records],
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

    def _take_over(self, at_least: int) -> int:
        held: int = self._db.execute("SELECT number FROM leadership").fetchone()[0]
        number = max(held + 1, at_least)
        self._db.execute("UPDATE leadership SET number = ?", (number,))
        return number

    # ---------------------------------------------------- commits, in the store's thread

    def _commit_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        """Write what waits, in one commit, and answer all of it at once."""
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MOST_AT_ONCE))]
        if not batch:
            return
        try:
            self._commit(batch)
        except BaseException as error:
            # An error in this thread would be lost, and each caller waits with its job's lock.
            log.exception("a bug of rdzvd, please report it: %s", self._path)
            unknown = RendezvousConnectionError(
                f"{self._path}: what was written may have been, or not: {error!r}"
            )
            _fail([write for write in batch if write.error is None], unknown)
        loop.call_soon_threadsafe(_answer, batch)

    def _commit(self, batch: Sequence[_Write]) -> None:
        """Write a batch as a whole. Until COMMIT begins, every failure is definite."""
        try:
            if not self._whole:
                self._begin()
        except RendezvousError as error:
            _fail(batch, error)
            return
        try:
            with self._reading():
                for write in batch:
                    write.run()
        except Exception as error:
            _fail(batch, error)
            if self._whole:
                return
            self._rollback()
            if len(batch) > 1:
                # One has spoilt it for all; which one it was shows when each is alone.
                for write in batch:
                    self._commit([write])
            return
        try:
            if not self._whole:
                self._end()
        except RendezvousError as error:
            # A race that was lost inside the batch is lost whatever became of the commit.
            _fail([write for write in batch if write.error is None], error)

    def _begin_whole(self) -> None:
        self._begin()
        self._whole = True

    def _drop_whole(self) -> None:
        self._whole = False
        self._rollback()

    def _commit_whole(self) -> None:
        self._whole = False
        self._end()

    def _begin(self) -> None:
        with self._reading():
            if self._db.in_transaction:
                # It could not be rolled back when it failed.
                self._db.rollback()
            self._db.execute("BEGIN IMMEDIATE")
            self._changes = self._db.total_changes

    def _end(self) -> None:
        number = self._mark.number
        try:
            if self._db.total_changes != self._changes:
                number = sqlite_mark.count(self._db)
        except sqlite3.Error as error:
            self._rollback()
            raise foreign(self._path, error) from error
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._rollback()
            raise RendezvousConnectionError(
                f"{self._path}: the commit failed and may have happened: {error}"
            ) from error
        if number != self._mark.number:
            self._note_commit(number)

    def _note_commit(self, number: int) -> None:
        """Write down that a commit has happened, before anyone hears of it."""
        self._mark = Mark(self._mark.store, number)
        try:
            self._mark_file.write(self._mark)
        except OSError as error:
            # The commit is there; only that it is, is not known elsewhere.
            log.warning("the number of commits can not be written beside %s: %s", self._path, error)

    def _rollback(self) -> None:
        """Drop a transaction; where that fails, it is tried again before the next begins."""
        # The counts may be wrong now, so every job counts as over its bound.
        self._unpruned.clear()
        if self._db.in_transaction:
            try:
                self._db.rollback()
            except sqlite3.Error as error:
                log.error("%s: what was not written can not be rolled back: %s", self._path, error)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Map what SQLite raises while nothing is written."""
        try:
            yield
        except sqlite3.Error as error:
            raise foreign(self._path, error) from error


def _fail(batch: Sequence[_Write], error: Exception) -> None:
    for write in batch:
        write.error = error


def _answer(batch: Sequence[_Write]) -> None:
    for write in batch:
        if write.answer.done():
            continue  # Its caller was cancelled.
        if write.error is not None:
            write.answer.set_exception(write.error)
        else:
            write.answer.set_result(write.result)


# ------------------------------------------------------------------------------------ the directory


def claim_directory(directory: Path, mountinfo: Path = MOUNTINFO) -> int:
    """Create the data directory, lock it, and return the descriptor that holds the lock.

    Raises:
        InvalidRequestError: it can not be used, is in use, or is on a network file system.

    """
    # Before anything is made there.
    _refuse_network_filesystem(directory, mountinfo)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        # Again, for an automounter mounts at the first access; and the file may be a link.
        _refuse_network_filesystem(directory, mountinfo)
        _refuse_network_filesystem(directory / "rdzv.db", mountinfo)
        _lock(lock, directory)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _unusable(directory: Path, error: OSError) -> InvalidRequestError:
    return InvalidRequestError(
        f"data directory {directory} can not be used: {error.strerror or error}; give a "
        "directory that this user may write to with --data-dir, or use --store memory"
    )


def _lock(lock: int, directory: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InvalidRequestError(
            f"data directory {directory} is in use by {_holder(lock)}; stop that one first, or "
            "give this one another directory with --data-dir"
        ) from error
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        raise _unusable(directory, error) from error


def _share_directory(directory: Path) -> tuple[int | None, str]:
    """Keep servers off a directory; return the lock, and its present holder, if any."""
    try:
        lock = os.open(directory / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, ""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return lock, _holder(lock)
    return lock, ""


def _holder(lock: int) -> str:
    """Name the lock's holder. Only servers write their pid into the file, and it stays there."""
    pid = os.pread(lock, 32, 0).decode(errors="replace").strip()
    if pid.isdigit() and Path("/proc", pid).exists():
        return f"rdzvd pid {pid}"
    return "another process (perhaps rdzvd --check, or an rdzvd in another container)"


def _refuse_network_filesystem(path: Path, mountinfo: Path) -> None:
    kind = filesystem_of(path.resolve(), mountinfo)
    if kind in _NETWORK_FILESYSTEMS:
        raise InvalidRequestError(
            f"data directory {path} is on {kind}, a network file system, where SQLite may lose "
            "commits; give a directory on a local disk with --data-dir"
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
