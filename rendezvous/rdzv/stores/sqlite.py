"""The default store: one SQLite file in a directory owned by one rdzvd.

It uses a write-ahead log and `synchronous=FULL`, so an acknowledged commit survives a power
failure. The statements are here; `sqlite_connection` has the thread and the commits, `sqlite_file`
the directory, the file and the count of commits beside it.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from rdzv.core.model import Membership
from rdzv.errors import InvalidRequestError
from rdzv.stores import codec
from rdzv.stores.base import (
    HISTORY_ROWS,
    Page,
    Record,
    RevisionConflictError,
    Stored,
    check_document,
    read,
)
from rdzv.stores.sqlite_connection import Connection
from rdzv.stores.sqlite_file import (
    MOUNTINFO,
    claim_directory,
    problems_in,
    share_directory,
    why_incomplete,
)
from rdzv.structs import struct

JOBS_PER_PAGE = 100
"""A page of ended jobs takes a few milliseconds; the largest live jobs have a megabyte each."""

_REVISION = (
    "coalesce((SELECT max(success.revision) FROM success WHERE success.rdzv_id = job.rdzv_id), "
    "job.revision)"
)

# One statement for a job and its successes, since a server may write between two.
_SELECT_JOBS = (
    f"SELECT rdzv_id, membership, {_REVISION}, (SELECT group_concat(node_ids, char(10)) FROM "
    "(SELECT node_ids FROM success WHERE success.rdzv_id = job.rdzv_id ORDER BY revision)) "
    "FROM job"
)


@struct(frozen=True)
class Survey:
    """The result of a check that an operator requested."""

    path: Path
    size_bytes: int
    events: int
    leadership: int
    used_by: str
    """The process that is using the directory, such as `rdzvd pid 4711`, or empty if there is none.
    """
    problems: tuple[str, ...]
    """The faults found, as sentences without their subject, which is the file."""


P = ParamSpec("P")
T = TypeVar("T")
Call = Callable[Concatenate["SqliteStore", P], T]
Method = Callable[Concatenate["SqliteStore", P], Coroutine[Any, Any, T]]


def _reading(call: Call[P, T]) -> Method[P, T]:
    """Return a method for the event loop that makes a call in the connection's thread."""

    async def calling(self: SqliteStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.connection.call(partial(call, self, *args, **kwargs))

    update_wrapper(calling, call)
    return calling


def _writing(call: Call[P, T]) -> Method[P, T]:
    """Return a method for the event loop that makes a call inside a transaction."""

    async def calling(self: SqliteStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.connection.write(partial(call, self, *args, **kwargs))

    update_wrapper(calling, call)
    return calling


class SqliteStore:
    """Memberships, history, documents and leadership in `DIR/rdzv.db`. Use `open` or `look`."""

    def __init__(self, directory: Path, history_rows: int) -> None:
        self._directory = directory
        self._history_rows = history_rows
        self._locked = ExitStack()
        self._used_by = ""
        self._path = directory / "rdzv.db"
        self.connection = Connection(self._path, on_rollback=self._forget_written)
        self._unpruned: dict[str, int] = {}
        """The number of rows written for each job since its history was last pruned."""
        self._written: dict[str, Membership] = {}
        """The memberships of jobs of which single successes may be written next."""

    @classmethod
    async def open(
        cls, directory: Path, history_rows: int = HISTORY_ROWS, mountinfo: Path = MOUNTINFO
    ) -> SqliteStore:
        """Open the data directory, creating it if needed, and lock it against other servers.

        If a file is refused, not a single byte of it is changed.
        """
        lock = claim_directory(directory, mountinfo)
        store = cls(directory, history_rows)
        store._locked.callback(os.close, lock)
        return await store._begun(store.connection.open)

    @classmethod
    async def look(cls, directory: Path, history_rows: int = HISTORY_ROWS) -> SqliteStore:
        """Open a data directory read-only, even while a server is using it. All writes are refused.

        Nothing is changed. No server can start on the directory until the store is closed.
        """
        store = cls(directory, history_rows)
        try:
            lock, store._used_by = share_directory(directory)
            if lock is not None:
                store._locked.callback(os.close, lock)
            return await store._begun(
                partial(store.connection.open_to_read, beside_server=bool(store._used_by))
            )
        except OSError as error:
            raise InvalidRequestError(
                f"data directory {directory} cannot be read: {error.strerror or error}; look at "
                "it as the user that runs rdzvd"
            ) from error

    async def _begun(self, begin: Callable[[], None]) -> SqliteStore:
        try:
            await self.connection.call(begin)
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def place(self) -> str:
        return f"{self._directory} (sqlite)"

    @property
    def _db(self) -> sqlite3.Connection:
        return self.connection.db

    @_reading
    def load(self, rdzv_id: str) -> Stored | None:
        row = self._db.execute(f"{_SELECT_JOBS} WHERE rdzv_id = ?", (rdzv_id,)).fetchone()
        return self._stored(*row) if row else None

    @_reading
    def list(self) -> tuple[str, ...]:
        rows = self._db.execute("SELECT rdzv_id FROM job ORDER BY rdzv_id").fetchall()
        return tuple(row[0] for row in rows)

    async def pages(self) -> AsyncGenerator[Page, None]:
        after = ""
        while page := await self._page(after):
            yield page
            after = page[-1][0]

    @_reading
    def _page(self, after: str) -> Page:
        rows = self._db.execute(
            f"{_SELECT_JOBS} WHERE rdzv_id > ? ORDER BY rdzv_id LIMIT ?", (after, JOBS_PER_PAGE)
        ).fetchall()
        return [(row[0], read(partial(self._stored, *row))) for row in rows]

    def _stored(self, rdzv_id: str, data: bytes, revision: int, later: str | None) -> Stored:
        where = f"job {rdzv_id} in {self._path}"
        lines = later.encode().split(b"\n") if later else []
        return Stored(
            codec.with_successes(codec.decode(bytes(data), where), lines, where), revision
        )

    @_reading
    def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        rows = self._db.execute(
            "SELECT unix_ms, rdzv_id, run, name, data FROM history WHERE rdzv_id = ? "
            "ORDER BY seq DESC LIMIT ?",
            (rdzv_id, min(limit, self._history_rows)),
        ).fetchall()
        return tuple(Record(*row) for row in reversed(rows))

    @_reading
    def load_document(self, name: str) -> tuple[bytes, int] | None:
        row = self._db.execute(
            "SELECT data, revision FROM document WHERE name = ?", (name,)
        ).fetchone()
        return (bytes(row[0]), row[1]) if row else None

    @_reading
    def list_documents(self) -> tuple[str, ...]:
        rows = self._db.execute("SELECT name FROM document ORDER BY name").fetchall()
        return tuple(row[0] for row in rows)

    @_reading
    def survey(self) -> Survey:
        problems = [f"is damaged: {what}" for what in problems_in(self._db, "integrity_check")]
        if self.connection.lost:
            problems.append(why_incomplete(self._path, self.connection.lost))
        pages, page_bytes, events, leadership = (
            self._db.execute(query).fetchone()[0]
            for query in (
                "PRAGMA page_count",
                "PRAGMA page_size",
                "SELECT count(*) FROM history",
                "SELECT number FROM leadership",
            )
        )
        size = pages * page_bytes
        return Survey(self._path, size, events, leadership, self._used_by, tuple(problems))

    async def close(self) -> None:
        if await self.connection.close():
            self._locked.close()

    # ---------------------------------------------------- in a transaction

    def all_or_nothing(self) -> AbstractAsyncContextManager[None]:
        """Commit all writes of the body at once. If the body fails, none of them is written."""
        return self.connection.all_or_nothing()

    @_writing
    def compare_and_swap(
        self,
        rdzv_id: str,
        membership: Membership,
        revision: int,
        records: Sequence[Record] = (),
    ) -> int:
        self._check_job(rdzv_id, revision)
        later = codec.later_successes(self._written.get(rdzv_id), membership)
        if later:
            self._db.execute(
                "INSERT INTO success VALUES (?, ?, ?)",
                (rdzv_id, revision + 1, codec.encode_nodes(later).decode()),
            )
        else:
            self._db.execute(
                "INSERT INTO job VALUES (?1, ?2, ?3) "
                "ON CONFLICT DO UPDATE SET revision = ?2, membership = ?3",
                (rdzv_id, revision + 1, codec.encode(membership)),
            )
            self._db.execute("DELETE FROM success WHERE rdzv_id = ?", (rdzv_id,))
        if codec.may_have_more(membership):
            self._written[rdzv_id] = membership
        else:
            self._written.pop(rdzv_id, None)
        self._append(records)
        return revision + 1

    @_writing
    def delete(self, rdzv_id: str, revision: int) -> None:
        self._check_job(rdzv_id, revision)
        if revision:
            for table in ("job", "success", "history"):
                self._db.execute(f"DELETE FROM {table} WHERE rdzv_id = ?", (rdzv_id,))
            self._unpruned.pop(rdzv_id, None)
            self._written.pop(rdzv_id, None)

    async def swap_document(self, name: str, data: bytes, revision: int) -> int:
        check_document(name, data)
        return await self._swap_document(name, data, revision)

    @_writing
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
        row = self._db.execute(
            f"SELECT {_REVISION} FROM job WHERE rdzv_id = ?", (rdzv_id,)
        ).fetchone()
        self._check_revision(f"job {rdzv_id}", row, revision)

    def _check_revision(self, what: str, row: tuple[int] | None, revision: int) -> None:
        held = row[0] if row else 0
        if held != revision:
            raise RevisionConflictError(
                f"{what} in {self._path} has revision {held}, not {revision}: "
                "another server has written it"
            )

    def _forget_written(self) -> None:
        """Forget what was noted of writes that may not have happened: jobs are written whole."""
        # Every job counts as over its limit.
        self._unpruned.clear()
        self._written.clear()

    @_writing
    def append(self, records: Sequence[Record]) -> None:
        self._append(records)

    def _append(self, records: Sequence[Record]) -> None:
        self._db.executemany(
            "INSERT INTO history (rdzv_id, run, unix_ms, name, data) VALUES (?, ?, ?, ?, ?)",
            [(r.rdzv_id, r.run, r.unix_ms, r.name, r.data) for r in records],
        )
        for record in records:
            # A job not yet written to by this process may already exceed its limit.
            seen = self._unpruned.get(record.rdzv_id, self._history_rows)
            self._unpruned[record.rdzv_id] = seen + 1
        for rdzv_id in {record.rdzv_id for record in records}:
            self._prune(rdzv_id)

    def _prune(self, rdzv_id: str) -> None:
        """Prune a job's history to its limit, but not for every row, because this takes a scan."""
        if self._unpruned[rdzv_id] <= self._history_rows // 10:
            return
        self._db.execute(
            "DELETE FROM history WHERE rdzv_id = ?1 AND seq <= (SELECT seq FROM history "
            "WHERE rdzv_id = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)",
            (rdzv_id, self._history_rows),
        )
        self._unpruned[rdzv_id] = 0

    @_writing
    def take_over(self, at_least: int = 0) -> int:
        held: int = self._db.execute("SELECT number FROM leadership").fetchone()[0]
        number = max(held + 1, at_least)
        self._db.execute("UPDATE leadership SET number = ?", (number,))
        return number
