"""Creates the SQLite file, inspects it without changing it, and replaces it to migrate it.

If a file is refused, not a single byte of it or of its write-ahead log is changed. A file is
therefore first inspected through separate links, and never changed in place: a new or migrated file
is created next to it, and then replaces it as a whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from rdzv.errors import InvalidRequestError, RendezvousError, RendezvousStateError
from rdzv.stores import sqlite_mark, sqlite_migrations, sqlite_schema
from rdzv.stores.base import StoreRefusedError
from rdzv.stores.sqlite_schema import APPLICATION_ID, SCHEMA_VERSION, TABLES

log = logging.getLogger("rdzv.stores")

_WAL, _JOURNAL = "-wal", "-journal"
_BESIDE = (_WAL, _JOURNAL, "-shm", sqlite_mark.SUFFIX)
_LOOKING = ".look-"

_OWNER_ALONE = 0o600

_ROOM_BYTES = 64 * 1024
"""The number of bytes written at start to test for free space; with less, nothing can be stored."""

_MOST_PROBLEMS = 20


def prepare(path: Path) -> None:
    """Ensure that a complete file with the current schema exists.

    The caller has locked its directory. If this raises an exception, the file is unchanged.

    Raises:
        InvalidRequestError: this user may not write to it.
        RendezvousStateError: the file is damaged, belongs to another program or a newer rdzvd, or
            could not be migrated.

    """
    # If `path` is a link, SQLite's own files are next to the real file.
    path = path.resolve()
    with mapped(path):
        try_room(path.parent)
    for left in path.parent.glob(f"{_LOOKING}*"):
        shutil.rmtree(left, ignore_errors=True)
    version = inspect(path)
    if version is not None:
        # The file contains the environments of submitted jobs. SQLite gives its other files the
        # same mode.
        for suffix in ("", *_BESIDE):
            with contextlib.suppress(OSError):
                beside(path, suffix).chmod(_OWNER_ALONE)
    if version is None:
        _create(path)
    elif version < SCHEMA_VERSION:
        _migrate(path, version)


def inspect(path: Path) -> int | None:
    """Return the schema version of a file without changing it, or None if it has no data.

    Raises:
        InvalidRequestError: this user may not write to it.
        RendezvousStateError: it is damaged, or its data is not from this rdzvd.

    """
    _check_writable(path)
    if not has_data(path):
        return None
    mark = sqlite_mark.read(path)
    with mapped(path), looking(path) as db:
        version = identify(db, path) if _tables(db) else None
        if problems := problems_in(db):
            raise _damaged(path, "; ".join(problems))
        if lost := sqlite_mark.lost(mark, sqlite_mark.counted(db)):
            raise RendezvousStateError(f"{path} {why_incomplete(path, lost)}")
    return version


def why_incomplete(path: Path, lost: str) -> str:
    """Explain that a file has lost commits, naming the files to inspect and the remedies."""
    wal, mark = beside(path, _WAL), beside(path, sqlite_mark.SUFFIX)
    log = "damaged, or of another time" if wal.exists() else "missing"
    return (
        f"has lost commits: {lost}. Its write-ahead log {wal.name} is {log}, or the file was "
        "replaced by an older one; everything was left untouched. Bring the files back as they "
        f"were; or move {path.name} and all that is named {path.name}-... away, and restore a "
        f"backup with --restore; or remove {mark.name}, to continue without the lost data"
    )


def identify(db: sqlite3.Connection, path: Path) -> int:
    """Return the schema version of an open file.

    Raises:
        RendezvousStateError: it was written by another program or a newer rdzvd.

    """
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise RendezvousStateError(
            f"{path} has schema version {version}, and this rdzvd knows up to {SCHEMA_VERSION}; "
            "it was left untouched. Start the rdzvd version that wrote it"
        )
    known = version > 0 and _tables(db) >= TABLES
    if version > 1:
        known &= db.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID
    if not known:
        raise RendezvousStateError(
            f"{path} is a database of another program; it was left untouched. Move it away, or "
            "give another directory with --data-dir"
        )
    return version


def _tables(db: sqlite3.Connection) -> set[str]:
    return {row[0] for row in db.execute("SELECT name FROM sqlite_schema")}


def problems_in(db: sqlite3.Connection, check: str = "quick_check") -> tuple[str, ...]:
    """Return the structural faults of an open file, as described by SQLite."""
    found = db.execute(f"PRAGMA {check}({_MOST_PROBLEMS})").fetchall()
    # One row may contain several lines; the first names only the database.
    lines = tuple(line for (row,) in found for line in row.splitlines() if line != "ok")
    return tuple(line for line in lines if not line.startswith("***")) or lines


@contextmanager
def looking(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a file to which no process writes, with all committed data, without changing anything.

    SQLite creates files next to each file it opens, even for reading. It is therefore given the
    file under another name, in a separate folder.
    """
    real = path.resolve()
    with ExitStack() as stack:
        shown = stack.enter_context(_shown(real))
        db = stack.enter_context(closing(connect(shown, "ro")))
        yield db


@contextmanager
def _shown(path: Path) -> Iterator[Path]:
    files = [p for suffix in ("", _WAL, _JOURNAL) if (p := beside(path, suffix)).exists()]
    # An interrupted transaction has to be rolled back, which would change the file.
    if not beside(path, _JOURNAL).exists():
        with ExitStack() as stack:
            try:
                folder = Path(
                    stack.enter_context(
                        tempfile.TemporaryDirectory(prefix=_LOOKING, dir=path.parent)
                    )
                )
                for file in files:
                    os.link(file, folder / file.name)
            except OSError:
                # The file system has no links, or the file belongs to another user: make a copy,
                # which is slower.
                pass
            else:
                yield folder / path.name
                return
    with tempfile.TemporaryDirectory(prefix=_LOOKING) as name:
        for file in files:
            shutil.copyfile(file, Path(name, file.name))
        with closing(connect(Path(name, path.name), "rw")) as db:
            # This rolls back, so that the copy can be read like any other.
            db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        yield Path(name, path.name)


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Open an existing file for reading (`ro`) or for reading and writing (`rw`)."""
    uri = f"file:{quote(str(path))}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=1.0)


def beside(path: Path, suffix: str) -> Path:
    """Return the path of a file that SQLite keeps next to another, such as `rdzv.db-wal`."""
    return path.with_name(path.name + suffix)


def has_data(path: Path) -> bool:
    """Return whether a file exists and contains data.

    Raises:
        RendezvousStateError: only some of the files that SQLite wrote exist.

    """
    path = path.resolve()
    if path.exists() and path.stat().st_size:
        return True
    for rest in (beside(path, _WAL), beside(path, sqlite_mark.SUFFIX)):
        if rest.exists() and rest.stat().st_size:
            raise RendezvousStateError(
                f"{path} is {'empty' if path.exists() else 'missing'}, and {rest.name} is there: "
                "part of the data is missing; everything was left untouched. Bring all files "
                "back, or move the rest away"
            )
    return False


def try_room(directory: Path) -> None:
    """Check that there is enough free space to store anything. The test data is removed.

    Raises:
        OSError: there is no space, or nothing can be written.

    """
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(bytes(_ROOM_BYTES))
        file.flush()
        os.fsync(file.fileno())


def _check_writable(path: Path) -> None:
    # SQLite would open it anyway, and then refuse the first write.
    for file in (path, *(beside(path, suffix) for suffix in _BESIDE)):
        try:
            if file.exists():
                os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise InvalidRequestError(
                f"{file} cannot be written: {error.strerror or error}; give it to the user that "
                "runs rdzvd, or give another directory with --data-dir"
            ) from error


def _create(path: Path) -> None:
    new = path.with_name(f"{path.name}.new")
    _remove(new)
    with mapped(path):
        _touch(new)
        with closing(sqlite3.connect(new, isolation_level=None)) as db:
            sqlite_schema.create(db)
            db.execute("PRAGMA journal_mode = WAL")
        # The existing file is empty, or `inspect` would have found data.
        for suffix in _BESIDE:
            beside(path, suffix).unlink(missing_ok=True)
        put(new, path)


def _touch(path: Path) -> None:
    """Create a file that is readable only by its owner."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, _OWNER_ALONE))


def _copy(path: Path, to: Path) -> None:
    _touch(to)
    shutil.copyfile(path, to)


def _migrate(path: Path, version: int) -> None:
    copy = path.with_name(f"{path.name}.migrating")
    former = path.with_name(f"{path.name}.schema-{version}")
    try:
        _remove(copy)
        for suffix in ("", _WAL, _JOURNAL):
            if beside(path, suffix).exists():
                _copy(beside(path, suffix), beside(copy, suffix))
        fold(copy)
        _copy(copy, beside(former, ".new"))
        with closing(connect(copy, "rw")) as db:
            sqlite_migrations.migrate(db, version)
        # It is opened again, because a connection trusts its cache.
        with closing(connect(copy, "rw")) as db:
            if problems := problems_in(db):
                raise sqlite3.DatabaseError("; ".join(problems))
        # From here on the file changes, but not its content. The log, which would be wrong next to
        # the new file, is folded into the old one.
        fold(path)
        put(beside(former, ".new"), former)
        put(copy, path)
    except (sqlite3.Error, OSError) as error:
        _remove(copy)
        _remove(beside(former, ".new"))
        raise RendezvousStateError(
            f"{path} could not be migrated from schema version {version} to {SCHEMA_VERSION}: "
            f"{error}; it was left as it was. Start the rdzvd version that wrote it, or make "
            "room for two copies of it and try again"
        ) from error
    log.warning(
        "migrated %s from schema version %d to %d; the old version is saved in %s",
        *(path, version, SCHEMA_VERSION, former),
    )


def fold(path: Path) -> None:
    """Move all committed data into the file itself, leaving no log next to it."""
    with closing(connect(path, "rw")) as db:
        busy, _, _ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise sqlite3.OperationalError("another program has it open")


def put(new: Path, path: Path) -> None:
    """Rename a complete, closed file over another, safely even in case of a power failure.

    Raises:
        OSError: `path` is unchanged, unless only the final sync of its folder failed.

    """
    with new.open("rb") as file:
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove(path: Path) -> None:
    for suffix in ("", *_BESIDE):
        beside(path, suffix).unlink(missing_ok=True)


# ------------------------------------------------------------------------------------ errors


@contextmanager
def mapped(path: Path) -> Iterator[None]:
    """Map exceptions of SQLite or the system to our own in a block that writes nothing."""
    try:
        yield
    except sqlite3.Error as error:
        raise foreign(path, error) from error
    except OSError as error:
        raise InvalidRequestError(
            f"{path} cannot be used: {error.strerror or error}; make sure that rdzvd may write "
            "there and has room, or give another directory with --data-dir"
        ) from error


def foreign(path: Path, error: sqlite3.Error) -> RendezvousError:
    """Return our own error for one that SQLite raised when nothing was written."""
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return _damaged(path, str(error))
    return StoreRefusedError(f"{path}: {error}; nothing was written")


def _damaged(path: Path, problem: str) -> RendezvousStateError:
    return RendezvousStateError(
        f"{path} is damaged: {problem}; it was left untouched. Move it away, and fill an empty "
        "data directory from a backup with --restore"
    )
