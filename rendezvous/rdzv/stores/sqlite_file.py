"""The data directory, its SQLite file, and the count of commits beside it.

The directory is locked, and refused on network file systems. If a file is refused, not a single
byte of it or of its write-ahead log is changed. A file is therefore first inspected through
separate links. A new one is created next to its place.

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

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from rdzv.errors import (
    InvalidRequestError,
    RendezvousError,
    RendezvousStateError,
    StoreRefusedError,
)
from rdzv.structs import struct

SCHEMA_VERSION = 5
"""The schema version, stored in `PRAGMA user_version`. Files of any other version are refused."""

_APPLICATION_ID = int.from_bytes(b"rdzv", "big")
"""Stored in `PRAGMA application_id` to recognize files of other programs."""

_SCHEMA = f"""
BEGIN;
CREATE TABLE job (
    rdzv_id TEXT PRIMARY KEY,
    revision INTEGER NOT NULL,
    membership BLOB NOT NULL
);
-- The nodes that have succeeded since the job's row was written; the newest revision is the job's.
CREATE TABLE success (
    rdzv_id TEXT NOT NULL,
    revision INTEGER NOT NULL,
    node_ids TEXT NOT NULL,
    PRIMARY KEY (rdzv_id, revision)
) WITHOUT ROWID;
-- Not AUTOINCREMENT, which writes one more page per commit. A job's newest row is deleted only with
-- all other rows of the job, so no row's number is ever below that of an older row of its job.
CREATE TABLE history (
    seq INTEGER PRIMARY KEY,
    rdzv_id TEXT NOT NULL,
    run TEXT NOT NULL,
    unix_ms INTEGER NOT NULL,
    name TEXT NOT NULL,
    data TEXT NOT NULL
);
CREATE INDEX history_of_job ON history (rdzv_id, seq);
CREATE TABLE leadership (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    number INTEGER NOT NULL
);
INSERT INTO leadership VALUES (1, 0);
CREATE TABLE document (
    name TEXT PRIMARY KEY,
    revision INTEGER NOT NULL,
    data BLOB NOT NULL
);
CREATE TABLE mark (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    store TEXT NOT NULL,
    number INTEGER NOT NULL
);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
_TABLES = frozenset(("job", "success", "history", "leadership", "document", "mark"))

_WAL = "-wal"
_MARK = "-mark"
_BESIDE = (_WAL, "-shm", _MARK)
_LOOKING = ".look-"

_OWNER_ALONE = 0o600

_ROOM_BYTES = 64 * 1024
"""The number of bytes written at start to test for free space; with less, nothing can be stored."""

_MOST_PROBLEMS = 20

_HEAD = "rdzv-mark-1"
_LENGTH = len(f"{_HEAD} {'':16} {'':20} {'':8}\n")

MOUNTINFO = Path("/proc/self/mountinfo")

_NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "coda", "lustre", "gpfs"}
    | {"beegfs", "ocfs2", "gfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.cephfs", "fuse.s3fs"}
)
"""File systems whose files may be in use by another machine at the same time. flock, the
write-ahead log's shared memory and fsync do not work there as on a local disk. 9p is one of them,
because it keeps locks within its guest. virtiofs is not, because it is the local disk of many
containers."""


def prepare(path: Path) -> None:
    """Ensure that a complete file exists.

    The caller has locked its directory. If this raises an exception, the file is unchanged.
    """
    # If `path` is a link, SQLite's own files are next to the real file.
    path = path.resolve()
    with mapped(path):
        try_room(path.parent)
    for left in path.parent.glob(f"{_LOOKING}*"):
        shutil.rmtree(left, ignore_errors=True)
    _check_writable(path)
    if not has_data(path):
        _create(path)
        return
    inspect(path)
    # The file contains the environments of submitted jobs. SQLite gives its other files the same
    # mode.
    for suffix in ("", *_BESIDE):
        with contextlib.suppress(OSError):
            beside(path, suffix).chmod(_OWNER_ALONE)


def inspect(path: Path) -> None:
    """Check a file that has data, without changing it."""
    mark = read_mark(path)
    with mapped(path), looking(path) as db:
        identify(db, path)
        if problems := problems_in(db):
            raise _damaged(path, "; ".join(problems))
        if lost := lost_commits(mark, counted(db)):
            raise RendezvousStateError(f"{path} {why_incomplete(path, lost)}")


def why_incomplete(path: Path, lost: str) -> str:
    """Explain that a file has lost commits, naming the files to inspect and the remedies."""
    wal, mark = beside(path, _WAL), beside(path, _MARK)
    log = "damaged, or of another time" if wal.exists() else "missing"
    return (
        f"has lost commits: {lost}. Its write-ahead log {wal.name} is {log}, or the file was "
        "replaced by an older one; everything was left untouched. Bring the files back as they "
        f"were; or move {path.name} and all that is named {path.name}-... away, and restore a "
        f"backup with --restore; or remove {mark.name}, to continue without the lost data"
    )


def identify(db: sqlite3.Connection, path: Path) -> None:
    """Check that an open file is this rdzvd's."""
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    ours = db.execute("PRAGMA application_id").fetchone()[0] == _APPLICATION_ID
    if ours and version != SCHEMA_VERSION:
        raise RendezvousStateError(
            f"{path} has schema version {version}, and this rdzvd reads only {SCHEMA_VERSION}; it "
            "was left untouched. Start the rdzvd version that wrote it, or move it and all that is "
            f"named {path.name}-... away to begin without its data"
        )
    tables = {row[0] for row in db.execute("SELECT name FROM sqlite_schema")}
    if not ours or not tables >= _TABLES:
        raise RendezvousStateError(
            f"{path} is a database of another program, or of an rdzvd before its first release; it "
            "was left untouched. Move it away, or give another directory with --data-dir"
        )


def problems_in(db: sqlite3.Connection, check: str = "quick_check") -> tuple[str, ...]:
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
    files = [file for suffix in ("", _WAL) if (file := beside(path, suffix)).exists()]
    with ExitStack() as stack:
        try:
            name = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=_LOOKING, dir=path.parent)
            )
            for file in files:
                os.link(file, Path(name, file.name))
        except OSError:
            # The file system has no links, or the file belongs to another user: make a copy, which
            # is slower.
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix=_LOOKING))
            for file in files:
                shutil.copyfile(file, Path(name, file.name))
        yield Path(name, path.name)


def connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"file:{quote(str(path))}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=1.0)


def beside(path: Path, suffix: str) -> Path:
    """Return the path of a file that SQLite keeps next to another, such as `rdzv.db-wal`."""
    return path.with_name(path.name + suffix)


def has_data(path: Path) -> bool:
    """Return whether a file exists and contains data."""
    path = path.resolve()
    if path.exists() and path.stat().st_size:
        return True
    for rest in (beside(path, _WAL), beside(path, _MARK)):
        if rest.exists() and rest.stat().st_size:
            raise RendezvousStateError(
                f"{path} is {'empty' if path.exists() else 'missing'}, and {rest.name} is there: "
                "part of the data is missing; everything was left untouched. Bring all files "
                "back, or move the rest away"
            )
    return False


def try_room(directory: Path) -> None:
    """Check that there is enough free space to store anything. The test data is removed."""
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
    with mapped(path):
        for suffix in ("", "-journal", *_BESIDE):
            beside(new, suffix).unlink(missing_ok=True)
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, _OWNER_ALONE))
        with closing(sqlite3.connect(new, isolation_level=None)) as db:
            db.executescript(_SCHEMA)
            db.execute("INSERT INTO mark VALUES (1, ?, 0)", (secrets.token_hex(8),))
            db.execute("PRAGMA journal_mode = WAL")
        # The existing file is empty, or it would have data.
        for suffix in _BESIDE:
            beside(path, suffix).unlink(missing_ok=True)
        with new.open("rb") as file:
            os.fsync(file.fileno())
        new.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


# ------------------------------------------------------------------------------------ the mark


@struct(frozen=True)
class StoreMark:
    """A store's random name and its number of commits."""

    store: str
    number: int


def counted(db: sqlite3.Connection) -> StoreMark:
    return StoreMark(*db.execute("SELECT store, number FROM mark").fetchone())


def count_commit(db: sqlite3.Connection) -> int:
    """Count one more commit, inside its transaction, and return its number."""
    # Fetch all rows, because an unfinished statement would block the commit.
    ((number,),) = db.execute("UPDATE mark SET number = number + 1 RETURNING number").fetchall()
    return int(number)


def read_mark(path: Path) -> StoreMark | None:
    """Return the mark next to a file, or None if it is missing or unreadable.

    A mark may be unreadable after a power failure.
    """
    try:
        head, store, number, check = beside(path.resolve(), _MARK).read_text("ascii").split()
    except (FileNotFoundError, PermissionError, ValueError):
        return None
    if head != _HEAD or check != _check(store, number):
        return None
    return StoreMark(store, int(number))


class MarkFile:
    """The mark next to a file, kept open for repeated writing."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        """Open the mark file, creating it if needed, and keep it open until the stack is closed."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(beside(path.resolve(), _MARK), flags, 0o600)
        stack.callback(os.close, self._fd)
        # After a power failure the file may be longer.
        os.ftruncate(self._fd, _LENGTH)

    def write(self, mark: StoreMark) -> None:
        """Overwrite the previous mark. All marks have the same length."""
        number = f"{mark.number:020}"
        text = f"{_HEAD} {mark.store} {number} {_check(mark.store, number)}\n"
        os.pwrite(self._fd, text.encode("ascii"), 0)


def lost_commits(outside: StoreMark | None, inside: StoreMark) -> str:
    """Explain which commits a file has lost; return "" if none are known to be lost.

    `outside` must be read before the file, because a server may be writing to both.

    >>> lost_commits(StoreMark("a", 7), StoreMark("a", 8)), lost_commits(None, StoreMark("a", 8))
    ('', '')
    >>> lost_commits(StoreMark("a", 7), StoreMark("a", 3))
    'it has 3 commits, and 7 were stored'
    """
    if outside is None:
        return ""
    if inside.store != outside.store:
        return "it belongs to another store than the number of commits beside it"
    if inside.number < outside.number:
        return f"it has {inside.number} commits, and {outside.number} were stored"
    return ""


def _check(store: str, number: str) -> str:
    return f"{zlib.crc32(f'{store} {number}'.encode()):08x}"


# ------------------------------------------------------------------------------ the directory


def claim_directory(directory: Path, mountinfo: Path = MOUNTINFO) -> int:
    """Create the data directory, lock it, and return the descriptor that holds the lock."""
    # Check this before anything is created there.
    _refuse_network_filesystem(directory, mountinfo)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        # Check this again, because an automounter mounts at the first access and the file may be a
        # link.
        _refuse_network_filesystem(directory, mountinfo)
        _refuse_network_filesystem(directory / "rdzv.db", mountinfo)
        _lock(lock, directory)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _unusable(directory: Path, error: OSError) -> InvalidRequestError:
    return InvalidRequestError(
        f"data directory {directory} cannot be used: {error.strerror or error}; give a "
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


def share_directory(directory: Path) -> tuple[int | None, str]:
    """Prevent servers from using a directory; return the open lock file and any lock holder."""
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
    """Return the lock's holder. Servers write their pid into the file and leave it there."""
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
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        return ""
    depth, kind = -1, ""
    for line in lines:
        # "36 35 98:0 /root /mount/point options [tags...] - type source options"
        before, _, after = line.partition(" - ")
        mount = Path(_unescape(before.split(" ")[4]))
        # Of two mounts on the same path, the later one hides the earlier one.
        if path.is_relative_to(mount) and len(mount.parts) >= depth:
            depth, kind = len(mount.parts), after.split(" ")[0]
    return kind


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


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
