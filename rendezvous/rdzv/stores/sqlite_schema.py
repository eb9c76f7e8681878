"""The schema of the SQLite file: its tables and its version.

`sqlite_migrations` has the way from each older version, and `sqlite_file` handles the file itself,
including copies, locks and free space.
"""

from __future__ import annotations

import sqlite3

from rdzv.stores import sqlite_mark

SCHEMA_VERSION = 4
"""The schema version, stored in `PRAGMA user_version`. A newer version is refused."""

APPLICATION_ID = int.from_bytes(b"rdzv", "big")
"""The application id, stored in `PRAGMA application_id` since schema 2 to recognize files of other
programs."""

DOCUMENTS_SINCE = 3
"""The schema version that added documents. A file opened read-only may be older."""

SUCCESSES_SINCE = 4
"""The schema version that added successes stored beside a membership."""

TABLES = frozenset({"job", "history", "leadership"})
"""The tables that exist in every schema."""

_JOB = """
CREATE TABLE job (
    rdzv_id TEXT PRIMARY KEY,
    revision INTEGER NOT NULL,
    membership BLOB NOT NULL
)"""
# Not AUTOINCREMENT, which writes one more page per commit. A job's newest row is deleted only with
# all other rows of the job, so no row's number is ever below that of an older row of its job.
# `text` is a record's data.
HISTORY = """
CREATE TABLE history (
    seq INTEGER PRIMARY KEY,
    rdzv_id TEXT NOT NULL,
    run TEXT NOT NULL,
    unix_ms INTEGER NOT NULL,
    name TEXT NOT NULL,
    text TEXT NOT NULL
)"""
HISTORY_INDEX = "CREATE INDEX history_of_job ON history (rdzv_id, seq)"
_LEADERSHIP = """
CREATE TABLE leadership (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    number INTEGER NOT NULL
)"""
DOCUMENT = """
CREATE TABLE document (
    name TEXT PRIMARY KEY,
    revision INTEGER NOT NULL,
    data BLOB NOT NULL
)"""
# The nodes that have succeeded since the job's row was written; the newest revision is the job's.
SUCCESS = """
CREATE TABLE success (
    rdzv_id TEXT NOT NULL,
    revision INTEGER NOT NULL,
    node_ids TEXT NOT NULL,
    PRIMARY KEY (rdzv_id, revision)
) WITHOUT ROWID"""


def create(db: sqlite3.Connection) -> None:
    """Create all tables of the current schema in an empty file, in one transaction."""
    db.execute("BEGIN")
    for statement in (_JOB, HISTORY, HISTORY_INDEX, _LEADERSHIP, DOCUMENT, SUCCESS):
        db.execute(statement)
    sqlite_mark.make_table(db)
    db.execute("INSERT INTO leadership VALUES (1, 0)")
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.execute("COMMIT")
