"""The SQLite file: created as a whole, and unchanged byte for byte if refused."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import typing
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rdzv.core.model import Membership, Settings
from rdzv.errors import (
    InvalidRequestError,
    RendezvousError,
    RendezvousStateError,
    StoreRefusedError,
)
from rdzv.server.replication import offline
from rdzv.stores import sqlite_file
from rdzv.stores.base import RevisionConflictError
from rdzv.stores.sqlite import SqliteStore
from rdzv.stores.sqlite_file import StoreMark
from tests.support.settings import rdzvd_settings

pytestmark = pytest.mark.slow


def files(directory: Path) -> dict[str, bytes]:
    """Everything in a data directory but the lock, which is no data."""
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.name != "lock"}


@pytest.mark.parametrize("new", [True, False])
async def test_nobody_else_may_read_what_is_stored(tmp_path: Path, new: bool) -> None:
    """Environments of submitted jobs are in it, however readable somebody has made it."""
    umask = os.umask(0)
    try:
        directory = tmp_path / "data"
        if not new:
            await (await SqliteStore.open(directory)).close()
            (directory / "rdzv.db").chmod(0o644)
        store = await SqliteStore.open(directory)
        await store.take_over()
        found = {p.name: p.stat().st_mode & 0o077 for p in directory.iterdir() if p.name != "lock"}
        await store.close()
    finally:
        os.umask(umask)
    assert found.keys() >= {"rdzv.db", "rdzv.db-wal"}
    assert set(found.values()) == {0}
    if new:
        assert directory.stat().st_mode & 0o077 == 0


def killed(path: Path, *statements: str) -> None:
    """Run statements on a file, and die."""
    script = (
        "import os, sqlite3, sys\n"
        "db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "for statement in sys.argv[2:]: db.execute(statement)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, str(path), *statements], check=False
    )
    assert done.returncode == -9


def killed_while_open(path: Path, *statements: str) -> None:
    """Write to a file, and die, so that the written data is only in the log beside it."""
    killed(path, *statements)
    assert sqlite_file.beside(path, "-wal").stat().st_size > 0


async def opened_and_closed(directory: Path) -> None:
    await (await SqliteStore.open(directory)).close()


async def new_file(directory: Path) -> Path:
    await opened_and_closed(directory)
    return directory / "rdzv.db"


# ---------------------------------------------------------------- a new file


@pytest.mark.quick
async def test_a_new_file_is_ours_and_of_the_present_schema(tmp_path: Path) -> None:
    path = await new_file(tmp_path)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (sqlite_file.SCHEMA_VERSION,)
        assert db.execute("PRAGMA application_id").fetchone() == (int.from_bytes(b"rdzv", "big"),)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert files(tmp_path).keys() == {"rdzv.db", "rdzv.db-mark"}


@pytest.mark.quick
async def test_every_commit_is_flushed_to_the_disk(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path)
    full = 2
    found = await store.connection.call(
        lambda: store.connection.db.execute("PRAGMA synchronous").fetchone()
    )
    assert found == (full,)
    await store.close()


@pytest.mark.parametrize("left", ["rdzv.db.new", "rdzv.db.new-journal", "rdzv.db"])
async def test_what_a_crash_left_while_the_file_was_made_is_no_harm(
    tmp_path: Path, left: str
) -> None:
    (tmp_path / left).write_bytes(b"" if left == "rdzv.db" else b"half a file")
    await new_file(tmp_path)
    assert files(tmp_path).keys() == {"rdzv.db", "rdzv.db-mark"}


# ---------------------------------------------------------------- what is refused stays as it was


def _no_database(path: Path) -> None:
    path.write_text("not a database" * 100)


def _of_another_version(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("DROP TABLE mark")
        db.execute("PRAGMA user_version = 4")


def _newer_by_its_log(path: Path) -> None:
    killed_while_open(path, "PRAGMA user_version = 9")


def _of_another_program(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("CREATE TABLE bookmarks (url)")


def _without_tables(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")


def _of_another_program_with_our_version(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA application_id = 7")


def _cut_in_half(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _damaged_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:4200] = os.urandom(104)
    path.write_bytes(data)


def _damaged_with_a_log(path: Path) -> None:
    killed_while_open(path, "UPDATE leadership SET number = 7")
    _damaged_page(path)


def _gone_but_for_its_log(path: Path) -> None:
    killed_while_open(path, "UPDATE leadership SET number = 7")
    path.unlink()


def _emptied_but_for_its_log(path: Path) -> None:
    killed_while_open(path, "UPDATE leadership SET number = 7")
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_no_database, r"is damaged: file is not a database; .*--restore"),
        (
            _of_another_version,
            r"schema version 4, .* only \d+; .* Start the rdzvd .* or move",
        ),
        (_newer_by_its_log, r"schema version 9, .* Start the rdzvd version that wrote it"),
        (_of_another_program, r"is a database of another program, .* Move it away"),
        (_without_tables, r"of an rdzvd before its first release; .* Move it away"),
        (_of_another_program_with_our_version, r"is a database of another program"),
        (_cut_in_half, r"is damaged: .*--restore"),
        (_damaged_page, r"is damaged: .*--restore"),
        (_damaged_with_a_log, r"is damaged: .*--restore"),
        (_gone_but_for_its_log, r"is missing, and rdzv\.db-wal is there: .* Bring all files back"),
        (_emptied_but_for_its_log, r"is empty, and rdzv\.db-wal is there"),
    ],
)
async def test_what_is_refused_is_left_byte_for_byte(
    tmp_path: Path, spoil: Callable[[Path], None], says: str
) -> None:
    path = await new_file(tmp_path)
    spoil(path)
    before = files(tmp_path)
    with pytest.raises(RendezvousError, match=says) as refused:
        await SqliteStore.open(tmp_path)
    assert str(path) in str(refused.value)
    assert files(tmp_path) == before
    assert await problem_seen(tmp_path)
    assert files(tmp_path) == before


async def problem_seen(directory: Path) -> str:
    """Return the problems found by a check."""
    try:
        store = await SqliteStore.look(directory)
        try:
            return "".join((await store.survey()).problems)
        finally:
            await store.close()
    except RendezvousError as error:
        return str(error)


async def test_a_file_that_is_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rdzv.db").mkdir()
    with pytest.raises(InvalidRequestError, match=r"rdzv\.db cannot be written: Is a directory"):
        await SqliteStore.open(tmp_path)


def test_all_that_sqlite_finds_is_said(tmp_path: Path) -> None:
    """Only its first line was intact, which names the database and nothing else."""
    path = tmp_path / "x.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("CREATE TABLE one (x)")
        db.execute("CREATE TABLE two (x)")
        db.execute("PRAGMA writable_schema = ON")
        db.execute("DELETE FROM sqlite_schema")
    with closing(sqlite3.connect(path)) as db:
        found = sqlite_file.problems_in(db)
    assert [re.sub("[: ]+(is )?", " ", line) for line in found] == [
        "Page 2 never used",
        "Page 3 never used",
    ]


# ---------------------------------------------------------------- commits that were lost


async def commit(store: SqliteStore, name: str) -> None:
    await store.compare_and_swap(name, Membership(name, "run", 1, Settings(1, 2), 0), 0)


async def crashed(directory: Path) -> Path:
    """Leave a store as a killed server does: of six jobs the last three are only in the log."""
    made = directory / "made"
    store = await SqliteStore.open(made)
    for name in ("a", "b", "c"):
        await commit(store, name)
    await store.connection.call(
        lambda: store.connection.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    )
    shutil.copytree(made, directory / "earlier")
    for name in ("d", "e", "f"):
        await commit(store, name)
    left = directory / "left"
    shutil.copytree(made, left)
    await store.close()
    return left / "rdzv.db"


def _without_log(path: Path) -> None:
    wal(path).unlink()


def _log_cut(path: Path) -> None:
    os.truncate(wal(path), wal(path).stat().st_size - 4096)


def _log_empty(path: Path) -> None:
    wal(path).write_bytes(b"")


def _log_damaged(path: Path) -> None:
    data = bytearray(wal(path).read_bytes())
    data[len(data) // 2] ^= 1
    wal(path).write_bytes(data)


def _log_head_damaged(path: Path) -> None:
    data = bytearray(wal(path).read_bytes())
    data[17] ^= 1
    wal(path).write_bytes(data)


def _an_older_file(path: Path) -> None:
    wal(path).unlink()
    shutil.copy(path.parents[1] / "earlier" / "rdzv.db", path)


def _another_store(path: Path) -> None:
    wal(path).unlink()
    shutil.copy(path.parents[1] / "another" / "rdzv.db", path)


def wal(path: Path) -> Path:
    return sqlite_file.beside(path, "-wal")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_without_log, "it has 3 commits, and 6 were stored. .*rdzv.db-wal is missing"),
        (_log_cut, "it has 5 commits, and 6 were stored. .*damaged, or of another time"),
        (_log_empty, "it has 3 commits, and 6 were stored"),
        (_log_damaged, r"it has \d commits, and 6 were stored"),
        (_log_head_damaged, "it has 3 commits, and 6 were stored"),
        (_an_older_file, "it has 3 commits, and 6 were stored"),
        (_another_store, "it belongs to another store"),
    ],
)
async def test_a_store_that_has_lost_commits_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], says: str
) -> None:
    """Three of six jobs were gone, an ended one ran again, and no error was reported."""
    path = await crashed(tmp_path)
    another = await SqliteStore.open(tmp_path / "another")
    for number in range(8):
        await commit(another, f"x{number}")
    await another.close()
    spoil(path)
    before = files(path.parent)
    with pytest.raises(RendezvousStateError, match=f"has lost commits: {says}") as refused:
        await SqliteStore.open(path.parent)
    assert "remove rdzv.db-mark, to continue" in str(refused.value)
    assert files(path.parent) == before
    assert re.search(f"has lost commits: {says}", await problem_seen(path.parent))
    assert files(path.parent) == before
    # The one way to continue without the lost data.
    sqlite_file.beside(path, "-mark").unlink()
    await opened_and_closed(path.parent)
    assert sqlite_file.beside(path, "-mark").exists()


def _as_it_is(path: Path) -> None:
    pass


def _folded_by_another_program(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("SELECT count(*) FROM job").fetchone()
    assert not wal(path).exists()


def _mark(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        sqlite_file.beside(path, "-mark").write_text(text)

    return write


def _earlier_mark(path: Path) -> None:
    """As after a power cut, before which it was not flushed, or a kill right after a commit."""
    name = "rdzv.db-mark"
    shutil.copy(path.parents[1] / "earlier" / name, path.with_name(name))


@pytest.mark.parametrize(
    "change",
    [
        *(_as_it_is, _folded_by_another_program, _earlier_mark),
        *(_mark(""), _mark("\0" * 60), _mark("rdzv-mark-1 feed 00000000000000000009 00000000\n")),
    ],
)
async def test_a_store_that_has_lost_nothing_is_not_refused(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    path = await crashed(tmp_path)
    change(path)
    assert await problem_seen(path.parent) == ""
    store = await SqliteStore.open(path.parent)
    assert await store.list() == ("a", "b", "c", "d", "e", "f")
    await commit(store, "g")
    await store.close()
    assert await problem_seen(path.parent) == ""
    inside = StoreMark(counted_in(path).store, 7)
    assert sqlite_file.read_mark(path) == inside == counted_in(path)


def counted_in(path: Path) -> StoreMark:
    with closing(sqlite3.connect(path)) as db:
        return sqlite_file.counted(db)


async def test_a_store_without_a_mark_is_accepted_once_and_given_one(tmp_path: Path) -> None:
    path = await crashed(tmp_path)
    sqlite_file.beside(path, "-mark").unlink()
    store = await SqliteStore.open(path.parent)
    assert len(await store.list()) == 6
    await commit(store, "g")
    shutil.copytree(path.parent, tmp_path / "again")
    await store.close()
    _without_log(tmp_path / "again" / "rdzv.db")
    with pytest.raises(RendezvousStateError, match="has lost commits"):
        await SqliteStore.open(tmp_path / "again")


async def test_what_writes_nothing_is_no_commit(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path)
    await store.append([])
    with pytest.raises(RevisionConflictError):
        await store.swap_document("cordoned", b"n1", 7)
    assert sqlite_file.read_mark(tmp_path / "rdzv.db") == store.connection.mark
    assert store.connection.mark.number == 0
    async with store.all_or_nothing():
        await commit(store, "a")
        await commit(store, "b")
    assert store.connection.mark.number == 1
    await store.close()


async def test_a_mark_that_can_not_be_written_costs_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = await SqliteStore.open(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(sqlite_file.os, "pwrite", refuse)
        await commit(store, "a")
    assert "cannot write the commit count" in caplog.text
    await store.close()
    assert (await problem_seen(tmp_path)) == ""


# ---------------------------------------------------------------- looking changes nothing


async def test_a_look_sees_what_is_in_the_log_and_leaves_it_there(tmp_path: Path) -> None:
    path = await new_file(tmp_path)
    killed_while_open(path, "UPDATE leadership SET number = 4711")
    before = files(tmp_path)
    store = await SqliteStore.look(tmp_path)
    assert (await store.survey()).leadership == 4711
    with pytest.raises(StoreRefusedError, match="readonly"):
        await store.take_over()
    await store.close()
    assert files(tmp_path) == before
    assert await _leadership(tmp_path) == 4711


async def test_where_there_are_no_links_a_look_takes_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    path = await new_file(tmp_path)
    killed_while_open(path, "UPDATE leadership SET number = 4711")
    before = files(tmp_path)
    monkeypatch.setattr(os, "link", refuse)
    assert await _leadership(tmp_path) == 4711
    assert files(tmp_path) == before


async def _leadership(directory: Path) -> int:
    store = await SqliteStore.look(directory)
    try:
        return (await store.survey()).leadership
    finally:
        await store.close()


async def test_a_look_beside_a_server_says_who_it_is(tmp_path: Path) -> None:
    server = await SqliteStore.open(tmp_path)
    await server.take_over(at_least=4711)
    beside = await SqliteStore.look(tmp_path)
    survey = await beside.survey()
    assert (survey.used_by, survey.leadership) == (f"rdzvd pid {os.getpid()}", 4711)
    assert await server.take_over() == 4712
    assert (await beside.survey()).leadership == 4712
    await beside.close()
    await server.close()


async def test_no_server_starts_while_somebody_looks(tmp_path: Path) -> None:
    await new_file(tmp_path)
    (tmp_path / "lock").write_text(f"{2**22 + 1}\n")  # No pid is that high.
    looking = await SqliteStore.look(tmp_path)
    with pytest.raises(InvalidRequestError, match=r"in use by another process \(perhaps"):
        await SqliteStore.open(tmp_path)
    await looking.close()
    await opened_and_closed(tmp_path)


async def test_what_a_killed_look_left_is_tidied_up(tmp_path: Path) -> None:
    (tmp_path / ".look-4711").mkdir()
    (tmp_path / ".look-4711" / "rdzv.db").write_bytes(b"x")
    await new_file(tmp_path)
    assert files(tmp_path).keys() == {"rdzv.db", "rdzv.db-mark"}


# ---------------------------------------------------------------- the directory


MOUNTINFO = "26 1 8:1 / / rw - ext4 /dev/sda1 rw\n31 26 0:27 / {place} rw - {kind} filer:/x rw\n"


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph"])
async def test_network_file_systems_are_refused_before_anything_is_made(
    tmp_path: Path, kind: str
) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(MOUNTINFO.format(place=tmp_path / "mnt", kind=kind))
    directory = tmp_path / "mnt" / "data"
    with pytest.raises(InvalidRequestError, match=rf"{directory} is on {kind}, .*--data-dir"):
        await SqliteStore.open(directory, mountinfo=mountinfo)
    assert not (tmp_path / "mnt").exists()


async def test_what_is_mounted_at_the_first_access_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(MOUNTINFO.format(place=tmp_path / "other", kind="nfs"))
    really_open = os.open

    def mounting(*words: Any) -> int:
        mountinfo.write_text(MOUNTINFO.format(place=tmp_path, kind="nfs"))
        return really_open(*words)

    monkeypatch.setattr(sqlite_file.os, "open", mounting)
    with pytest.raises(InvalidRequestError, match=rf"{tmp_path / 'data'} is on nfs, "):
        await SqliteStore.open(tmp_path / "data", mountinfo=mountinfo)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "virtiofs"])
async def test_local_file_systems_are_not_refused(tmp_path: Path, kind: str) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(MOUNTINFO.format(place=tmp_path, kind=kind))
    await (await SqliteStore.open(tmp_path / "data", mountinfo=mountinfo)).close()


async def test_a_link_to_a_network_file_system_is_refused(tmp_path: Path) -> None:
    mountinfo, there, here = (tmp_path / name for name in ("mountinfo", "there", "here"))
    mountinfo.write_text(MOUNTINFO.format(place=there, kind="nfs4"))
    there.mkdir()
    here.mkdir()
    (here / "rdzv.db").symlink_to(there / "rdzv.db")
    with pytest.raises(InvalidRequestError, match="is on nfs4"):
        await SqliteStore.open(here, mountinfo=mountinfo)
    assert not any(there.iterdir())


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that other users can reach, which pytest's are not."""
    with tempfile.TemporaryDirectory(prefix="rdzv-test-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


# Everything is imported before the rights are dropped: such a user may not read the interpreter's
# files.
AS_NOBODY = """
import asyncio, os, sys
from pathlib import Path
from rdzv.errors import RendezvousError
from rdzv.stores.sqlite import SqliteStore

async def main(begin):
    store = await begin(Path(sys.argv[2]))
    print((await store.survey()).leadership)
    await store.close()

if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
try:
    asyncio.run(main(getattr(SqliteStore, sys.argv[1])))
except RendezvousError as error:
    print(f"{type(error).__name__}: {error}")
"""


def as_nobody(begin: str, directory: Path) -> str:
    """Open a data directory, or check it, as a user without rights; return the outcome."""
    command = [sys.executable, "-c", AS_NOBODY, begin, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=True)
    return done.stdout.strip()


@pytest.mark.slow
async def test_a_directory_without_permission_is_refused(public_folder: Path) -> None:
    data = public_folder / "data"
    path = await new_file(data)
    (data / "lock").unlink()
    data.chmod(0o555)
    before = path.read_bytes()
    said = await asyncio.to_thread(as_nobody, "open", data)
    assert said.startswith(f"InvalidRequestError: data directory {data} cannot be used: Permission")
    assert "--data-dir" in said
    assert path.read_bytes() == before
    data.chmod(0o755)


async def test_a_file_that_is_a_link_stays_one(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    file = await new_file(there)
    killed_while_open(file, "UPDATE leadership SET number = 4711")
    (here / "rdzv.db").symlink_to(file)
    assert await _leadership(here) == 4711
    await opened_and_closed(here)
    assert (here / "rdzv.db").is_symlink()
    assert await _leadership(here) == 4711


@pytest.mark.slow
async def test_a_file_without_permission_is_refused(public_folder: Path) -> None:
    data = public_folder / "data"
    path = await new_file(data)
    path.chmod(0o444)
    for name in ("", "lock"):
        (data / name).chmod(0o777)
    said = await asyncio.to_thread(as_nobody, "open", data)
    assert said.startswith(
        f"InvalidRequestError: {path} cannot be written: Permission denied; give"
    )
    # It may be read, so a check is allowed, though it cannot create links in the directory.
    data.chmod(0o555)
    assert await asyncio.to_thread(as_nobody, "look", data) == "0"
    path.chmod(0o400)
    said = await asyncio.to_thread(as_nobody, "look", data)
    assert said.startswith("InvalidRequestError")
    assert "cannot be read: Permission denied" in said
    data.chmod(0o755)


def test_a_read_only_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(sqlite_file.os, "open", refuse)
    with pytest.raises(
        InvalidRequestError, match=r"used: Read-only file system; give .*--data-dir"
    ):
        sqlite_file.claim_directory(tmp_path)


@pytest.mark.parametrize("data_there", [True, False])
async def test_a_disk_without_room_is_named_whether_there_is_data_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_there: bool
) -> None:
    """With data there the start said "disk I/O error", and --check that all was in order."""
    if data_there:
        await opened_and_closed(tmp_path)
    config = rdzvd_settings(data_dir=tmp_path)
    assert (await offline.check(config)).problems == ()

    def full(**_: object) -> typing.IO[bytes]:
        return Path("/dev/full").open("wb")

    def no_notes(path: Path, mode: str) -> sqlite3.Connection:
        raise sqlite3.OperationalError("disk I/O error")

    before = files(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sqlite_file, "connect", no_notes)
        patch.setattr(sqlite_file.tempfile, "TemporaryFile", full)
        with pytest.raises(InvalidRequestError, match="No space left on device; make sure"):
            await SqliteStore.open(tmp_path)
        found = await offline.check(config)
    assert files(tmp_path) == before
    (problem,) = found.problems
    assert (
        problem
        == f"{tmp_path} cannot be written to: No space left on device; nothing can be stored"
    )
    assert found.lines[-1] == "1 problem(s) found"


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(sqlite_file.os, "pwrite", refuse)
        with pytest.raises(InvalidRequestError, match=r"used: No space left on device; give"):
            sqlite_file.claim_directory(tmp_path)
    os.close(sqlite_file.claim_directory(tmp_path))
