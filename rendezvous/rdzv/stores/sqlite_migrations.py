"""The migration of a SQLite file from each older version of its schema."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping

from rdzv.stores.sqlite_schema import (
    APPLICATION_ID,
    DOCUMENT,
    HISTORY,
    HISTORY_INDEX,
    SCHEMA_VERSION,
    SUCCESS,
)


def migrate(db: sqlite3.Connection, version: int) -> None:
    """Migrate an open file from an older schema version to the current one, step by step."""
    for number in range(version, SCHEMA_VERSION):
        db.execute("BEGIN IMMEDIATE")
        MIGRATIONS[number](db)
        db.execute(f"PRAGMA user_version = {number + 1}")
        db.execute("COMMIT")


def _to_2(db: sqlite3.Connection) -> None:
    db.execute("ALTER TABLE history RENAME TO history_1")
    db.execute("DROP INDEX history_of_job")
    db.execute(HISTORY)
    db.execute("INSERT INTO history SELECT seq, rdzv_id, run, unix_ms, name, text FROM history_1")
    db.execute("DROP TABLE history_1")
    db.execute(HISTORY_INDEX)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")


def _to_3(db: sqlite3.Connection) -> None:
    db.execute(DOCUMENT)


def _to_4(db: sqlite3.Connection) -> None:
    db.execute(SUCCESS)


MIGRATIONS: Mapping[int, Callable[[sqlite3.Connection], None]] = {
    1: _to_2,
    2: _to_3,
    3: _to_4,
}
"""Steps from each older schema version to the next. Each step runs in one transaction."""
