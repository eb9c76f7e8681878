"""The statements of the SQLite store: reads, and writes inside a transaction.

All of them run in the connection's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rdzv.core.model import Membership
from rdzv.stores import codec
from rdzv.stores.base import Page, Record, RevisionConflictError, Stored, read
from rdzv.stores.sqlite_connection import Connection
from rdzv.stores.sqlite_file import problems_in, why_incomplete
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


class Tables:
    """Jobs, history, documents and leadership in one file."""

    def __init__(self, connection: Connection, history_rows: int) -> None:
        self._connection = connection
        self._path = connection.path
        self._history_rows = history_rows
        self._unpruned: dict[str, int] = {}
        """The number of rows written for each job since its history was last pruned."""
        self._written: dict[str, Membership] = {}
        """The memberships of jobs of which single successes may be written next."""
        connection.on_rollback = self._forget_written

    def load(self, rdzv_id: str) -> Stored | None:
        with self._connection.reading():
            row = self._connection.db.execute(
                f"{_SELECT_JOBS} WHERE rdzv_id = ?", (rdzv_id,)
            ).fetchone()
        return self._stored(*row) if row else None

    def names(self) -> tuple[str, ...]:
        """Return the rdzv_ids of all jobs, in order."""
        with self._connection.reading():
            rows = self._connection.db.execute(
                "SELECT rdzv_id FROM job ORDER BY rdzv_id"
            ).fetchall()
        return tuple(row[0] for row in rows)

    def page(self, after: str) -> Page:
        """Return the next `JOBS_PER_PAGE` jobs after an rdzv_id."""
        with self._connection.reading():
            rows = self._connection.db.execute(
                f"{_SELECT_JOBS} WHERE rdzv_id > ? ORDER BY rdzv_id LIMIT ?",
                (after, JOBS_PER_PAGE),
            ).fetchall()
        return [(row[0], read(partial(self._stored, *row))) for row in rows]

    def _stored(self, rdzv_id: str, data: bytes, revision: int, later: str | None) -> Stored:
        where = f"job {rdzv_id} in {self._path}"
        lines = later.encode().split(b"\n") if later else []
        return Stored(
            codec.with_successes(codec.decode(bytes(data), where), lines, where), revision
        )

    def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        with self._connection.reading():
            rows = self._connection.db.execute(
                "SELECT unix_ms, rdzv_id, run, name, data FROM history WHERE rdzv_id = ? "
                "ORDER BY seq DESC LIMIT ?",
                (rdzv_id, limit),
            ).fetchall()
        return tuple(Record(*row) for row in reversed(rows))

    def load_document(self, name: str) -> tuple[bytes, int] | None:
        with self._connection.reading():
            row = self._connection.db.execute(
                "SELECT data, revision FROM document WHERE name = ?", (name,)
            ).fetchone()
        return (bytes(row[0]), row[1]) if row else None

    def document_names(self) -> tuple[str, ...]:
        """Return the names of all documents, in order."""
        with self._connection.reading():
            rows = self._connection.db.execute("SELECT name FROM document ORDER BY name").fetchall()
        return tuple(row[0] for row in rows)

    def survey(self, used_by: str) -> Survey:
        """Read and check the whole file, and return the findings."""
        with self._connection.reading():
            problems = [
                f"is damaged: {what}"
                for what in problems_in(self._connection.db, "integrity_check")
            ]
            pages, page_bytes, events, leadership = (
                self._connection.db.execute(query).fetchone()[0]
                for query in (
                    "PRAGMA page_count",
                    "PRAGMA page_size",
                    "SELECT count(*) FROM history",
                    "SELECT number FROM leadership",
                )
            )
        return Survey(
            path=self._path,
            size_bytes=pages * page_bytes,
            events=events,
            leadership=leadership,
            used_by=used_by,
            problems=(
                *problems,
                *(
                    [why_incomplete(self._path, self._connection.lost)]
                    if self._connection.lost
                    else []
                ),
            ),
        )

    # ---------------------------------------------------- in a transaction

    def swap(
        self, rdzv_id: str, membership: Membership, revision: int, records: Sequence[Record]
    ) -> int:
        """Write a job over the given revision, with its records, and return the new revision."""
        self._check_job(rdzv_id, revision)
        later = codec.later_successes(self._written.get(rdzv_id), membership)
        if later:
            self._connection.db.execute(
                "INSERT INTO success VALUES (?, ?, ?)",
                (rdzv_id, revision + 1, codec.encode_nodes(later).decode()),
            )
        else:
            self._connection.db.execute(
                "INSERT INTO job VALUES (?1, ?2, ?3) "
                "ON CONFLICT DO UPDATE SET revision = ?2, membership = ?3",
                (rdzv_id, revision + 1, codec.encode(membership)),
            )
            self._connection.db.execute("DELETE FROM success WHERE rdzv_id = ?", (rdzv_id,))
        if codec.may_have_more(membership):
            self._written[rdzv_id] = membership
        else:
            self._written.pop(rdzv_id, None)
        self.append(records)
        return revision + 1

    def delete(self, rdzv_id: str, revision: int) -> None:
        self._check_job(rdzv_id, revision)
        if revision:
            for table in ("job", "success", "history"):
                self._connection.db.execute(f"DELETE FROM {table} WHERE rdzv_id = ?", (rdzv_id,))
            self._unpruned.pop(rdzv_id, None)
            self._written.pop(rdzv_id, None)

    def swap_document(self, name: str, data: bytes, revision: int) -> int:
        row = self._connection.db.execute(
            "SELECT revision FROM document WHERE name = ?", (name,)
        ).fetchone()
        self._check_revision(f"document {name}", row, revision)
        self._connection.db.execute(
            "INSERT INTO document VALUES (?1, ?2, ?3) "
            "ON CONFLICT DO UPDATE SET revision = ?2, data = ?3",
            (name, revision + 1, data),
        )
        return revision + 1

    def _check_job(self, rdzv_id: str, revision: int) -> None:
        row = self._connection.db.execute(
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

    def append(self, records: Sequence[Record]) -> None:
        self._connection.db.executemany(
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
        self._connection.db.execute(
            "DELETE FROM history WHERE rdzv_id = ?1 AND seq <= (SELECT seq FROM history "
            "WHERE rdzv_id = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)",
            (rdzv_id, self._history_rows),
        )
        self._unpruned[rdzv_id] = 0

    def take_over(self, at_least: int) -> int:
        held: int = self._connection.db.execute("SELECT number FROM leadership").fetchone()[0]
        number = max(held + 1, at_least)
        self._connection.db.execute("UPDATE leadership SET number = ?", (number,))
        return number
