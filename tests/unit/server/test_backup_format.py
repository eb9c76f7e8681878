"""Backups: complete and unchanged, or refused before anything is written."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from rdzv.core.model import Membership, Settings
from rdzv.ctl.new_files import new_file
from rdzv.errors import InvalidRequestError, RendezvousConnectionError, RendezvousStateError
from rdzv.server.operations.handlers import CHUNK_BYTES, in_chunks
from rdzv.stores import backup
from rdzv.stores.base import DOCUMENT_BYTES, Record, Stored
from rdzv.stores.memory import MemoryStore

pytestmark = pytest.mark.slow

HEADER = backup.BackupHeader("memory", 4711, 1_763_700_000_000)
DOCUMENTS = {"cordoned": b'["n1"]', "large": bytes(range(256)) * (DOCUMENT_BYTES // 256)}


def membership(rdzv_id: str, number: int = 1) -> Membership:
    return Membership(rdzv_id, "run", number, Settings(1, 2), 0, next_round=number)


def record(rdzv_id: str, text: str) -> Record:
    return Record(1_763_700_000_000, rdzv_id, "run", "NodeJoined", text)


async def filled() -> MemoryStore:
    """Return a store of three jobs: a long history, a difficult name, and neither."""
    store = MemoryStore()
    texts = [f"event {n} — ☠\n" for n in range(250)]
    await store.compare_and_swap("a", membership("a"), 0, [record("a", text) for text in texts])
    hard = "b\n☠"
    await store.compare_and_swap(hard, membership(hard), 0, [record(hard, "one")])
    await store.compare_and_swap("c", membership("c"), 0)
    for name, data in DOCUMENTS.items():
        await store.swap_document(name, data, 0)
    return store


async def data_of(store: MemoryStore) -> bytes:
    return b"".join([line async for line in backup.lines(store, HEADER)])


def counts(summary: backup.Summary) -> tuple[int, int, int]:
    return summary.trailer.jobs, summary.trailer.events, summary.trailer.documents


@pytest.mark.quick
async def test_what_is_restored_is_what_was_saved() -> None:
    store = await filled()
    data = await data_of(store)
    other = MemoryStore()
    done = await backup.restore(other, io.BytesIO(data), "FILE")
    assert (done.header, counts(done)) == (HEADER, (3, 251, 2))
    assert await other.list_documents() == tuple(DOCUMENTS)
    for name, written in DOCUMENTS.items():
        assert await other.load_document(name) == (written, 1)
    assert await other.list() == await store.list()
    for rdzv_id in await store.list():
        before, after = await store.load(rdzv_id), await other.load(rdzv_id)
        assert before is not None and after is not None
        assert after.membership == before.membership
        assert await other.history(rdzv_id, 1000) == await store.history(rdzv_id, 1000)


async def test_history_is_restored_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    other, portions = MemoryStore(), []
    append = other.append

    async def counted(records: Sequence[Record]) -> None:
        portions.append(len(records))
        await append(records)

    monkeypatch.setattr(other, "append", counted)
    await backup.restore(other, io.BytesIO(await data_of(await filled())), "FILE")
    assert portions == [100, 100, 50, 1]


async def test_leadership_goes_on_above_that_of_the_backup() -> None:
    other = MemoryStore()
    await backup.restore(other, io.BytesIO(await data_of(await filled())), "FILE")
    assert await other.take_over() > HEADER.leadership


async def test_a_store_that_was_further_keeps_its_leadership() -> None:
    other = MemoryStore()
    await other.take_over(at_least=9_000)
    await backup.restore(other, io.BytesIO(await data_of(await filled())), "FILE")
    assert await other.take_over() > 9_001


async def test_people_can_read_it() -> None:
    lines = (await data_of(await filled())).splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds[:5] == ["backup", "document", "document", "job", "event"]
    assert kinds[-3:] == ["event", "job", "end"]
    assert json.loads(lines[0]) == {
        "kind": "backup",
        "source": "memory",
        "leadership": 4711,
        "unix_ms": 1_763_700_000_000,
        "format": 3,
    }
    assert json.loads(lines[3])["stored"]["membership"]["rdzv_id"] == "a"


@pytest.mark.quick
async def test_an_empty_store_has_a_backup() -> None:
    data = await data_of(MemoryStore())
    found = backup.verify(io.BytesIO(data), "FILE")
    assert (found.header, counts(found)) == (HEADER, (0, 0, 0))


async def test_a_store_that_is_not_empty_is_refused_and_unchanged() -> None:
    other = MemoryStore()
    await other.compare_and_swap("mine", membership("mine"), 0)
    with pytest.raises(
        InvalidRequestError, match=r"holds 1 job\(s\) already, .* move the old data"
    ):
        await backup.restore(other, io.BytesIO(await data_of(await filled())), "FILE")
    assert await other.list() == ("mine",)
    assert await other.take_over() == 1


async def test_a_store_of_documents_alone_is_not_empty() -> None:
    other = MemoryStore()
    await other.swap_document("mine", b"", 0)
    with pytest.raises(InvalidRequestError, match=r"holds 1 document\(s\) already, "):
        await backup.restore(other, io.BytesIO(await data_of(await filled())), "FILE")
    assert await other.list() == ()
    assert await other.list_documents() == ("mine",)


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _cut_at_a_line(data: bytes) -> bytes:
    return b"".join(data.splitlines(keepends=True)[:-1])


def _cut_by_one_byte(data: bytes) -> bytes:
    return data[:-1]


def _changed(data: bytes) -> bytes:
    assert data.count(b"event 7 ") == 1
    return data.replace(b"event 7 ", b"event 8 ")


def _a_line_less(data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(lines[:9] + lines[10:])


def _two_swapped(data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join([*lines[:7], lines[8], lines[7], *lines[9:]])


def _without_header(data: bytes) -> bytes:
    return data.partition(b"\n")[2]


def _newer(data: bytes) -> bytes:
    return data.replace(b'"format":3}', b'"format":4,"more":[]}', 1)


def _with_more(data: bytes) -> bytes:
    return data + b"\n"


def _twice(data: bytes) -> bytes:
    return _cut_at_a_line(data) + data


def _job_twice(data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join([*lines[:4], *lines[3:]])


def _document_twice(data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join([*lines[:2], *lines[1:]])


def _document_of_no_name(data: bytes) -> bytes:
    return data.replace(b'"name":"cordoned"', b'"name":"../other"')


def _document_too_large(data: bytes) -> bytes:
    return data.replace(b'"name":"large","data":"', b'"name":"large","data":"AAAA')


def _strange_history(data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join([*lines[:3], *lines[4:]])


def _foreign_membership(data: bytes) -> bytes:
    return data.replace(b'"membership":{"rdzv_id":"c"', b'"membership":{"rdzv_id":"d"')


def _unreadable_membership(data: bytes) -> bytes:
    return data.replace(b'"membership":{"rdzv_id":"c"', b'"membership":{"rdzv_id":7')


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_cut, "cut"),
        (_cut_at_a_line, "it ends too early: it was cut; take the whole file"),
        (_cut_by_one_byte, "it was cut"),
        (_changed, "it was changed"),
        (_a_line_less, "it was changed"),
        (_two_swapped, "it was changed"),
        (_without_header, "it is no backup; give a file that `rdzvctl backup` has written"),
        (_newer, "format 4, and this rdzvd reads only 3; use the rdzvd version that wrote it"),
        (lambda data: data.replace(b'"format":3}', b'"format":2}', 1), "it has format 2"),
        (_with_more, "there is data after its last line"),
        (_twice, "it holds more than one backup"),
        (_job_twice, "job a is in it twice"),
        (_document_twice, "document cordoned is in it twice"),
        (_document_of_no_name, "'../other' is not the name of a document"),
        (_document_too_large, "document large would have 1048579 bytes"),
        (_strange_history, "history of job a is not below that job"),
        (_foreign_membership, "job c is named d"),
        (_unreadable_membership, "job c in FILE cannot be read"),
        (lambda _: b"", "it is no backup"),
        (lambda _: b"\xff\xfe\n", "it is no backup"),
        (lambda _: b"x" * 100, "it is no backup"),
        (lambda _: b"[]\n", "it is no backup"),
        (lambda data: data.replace(b'"kind":"job"', b'"kind":"joke"', 1), "cannot be read"),
    ],
)
async def test_a_file_that_is_not_whole_is_refused_and_nothing_written(
    spoil: Callable[[bytes], bytes], says: str
) -> None:
    data = await data_of(await filled())
    spoilt = spoil(data)
    assert spoilt != data
    other = MemoryStore()
    with pytest.raises(RendezvousStateError, match="FILE") as refused:
        await backup.restore(other, io.BytesIO(spoilt), "FILE")
    assert says in str(refused.value)
    assert (await other.list(), await other.list_documents()) == ((), ())
    assert await other.take_over() == 1


# ---------------------------------------------------------------- on the wire


async def test_chunks_are_bounded_and_come_to_the_same() -> None:
    sizes = [10, CHUNK_BYTES * 3 + 7, 1, 1, CHUNK_BYTES - 2, 5, 0]
    lines = [bytes([number]) * size for number, size in enumerate(sizes)]

    async def given() -> AsyncIterator[bytes]:
        for line in lines:
            yield line

    chunks = [chunk async for chunk in in_chunks(given())]
    assert b"".join(chunks) == b"".join(lines)
    assert [len(chunk) for chunk in chunks[:-1]] == [CHUNK_BYTES] * (len(chunks) - 1)
    assert 0 < len(chunks[-1]) <= CHUNK_BYTES


# ---------------------------------------------------------------- while the job goes on


class BusyStore(MemoryStore):
    """A store in which, for a while, a job is written whenever its history is read."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._times = times
        self._revision = 0

    async def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        rows = await super().history(rdzv_id, limit)
        if self._times:
            self._times -= 1
            await self.write()
        return rows

    async def write(self) -> None:
        number = self._revision + 1
        rows = [record("a", str(number))]
        self._revision = await self.compare_and_swap(
            "a", membership("a", number), self._revision, rows
        )


@pytest.mark.quick
async def test_a_job_and_its_history_are_of_one_commit() -> None:
    store = BusyStore(times=3)
    await store.write()
    other = MemoryStore()
    await backup.restore(other, io.BytesIO(await data_of(store)), "FILE")
    stored = await other.load("a")
    assert isinstance(stored, Stored)
    rows = await other.history("a", 10)
    assert [row.data for row in rows] == ["1", "2", "3", "4"]
    assert stored.membership.run_number == 4


@pytest.mark.quick
async def test_a_job_that_never_rests_ends_the_backup() -> None:
    store = BusyStore(times=10_000)
    await store.write()
    with pytest.raises(RendezvousConnectionError, match="job a changes faster"):
        await data_of(store)


async def test_a_job_that_is_deleted_meanwhile_is_not_in_the_backup() -> None:
    store = await filled()
    saving = backup.lines(store, HEADER)
    saved = [await anext(saving) for _ in range(4)]
    assert b'"rdzv_id":"a"' in saved[-1]
    await store.delete("c", 1)
    saved += [line async for line in saving]
    done = backup.verify(io.BytesIO(b"".join(saved)), "FILE")
    assert counts(done) == (2, 251, 2)


class FailingStore(MemoryStore):
    """A store that accepts one job and then is away."""

    async def compare_and_swap(self, rdzv_id: str, *more: object) -> int:  # type: ignore[override]
        if rdzv_id != "a":
            raise RendezvousConnectionError("no answer")
        return await super().compare_and_swap(rdzv_id, *more)  # type: ignore[arg-type]


async def test_a_store_that_fails_half_way_is_said_to_hold_a_part() -> None:
    data = await data_of(await filled())
    with pytest.raises(
        RendezvousConnectionError, match=r"memory may hold a part of FILE now: no an"
    ):
        await backup.restore(FailingStore(), io.BytesIO(data), "FILE")


# ---------------------------------------------------------------- the file


@pytest.mark.quick
def test_a_file_is_there_as_a_whole_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with new_file(path, replace=False) as file:
        file.write(b"data")
        assert not path.exists()
    assert path.read_bytes() == b"data"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def _half(path: Path, replace: bool) -> None:
    with new_file(path, replace=replace) as file:
        file.write(b"half")
        raise RendezvousConnectionError("the server has gone")


@pytest.mark.quick
def test_if_the_body_fails_nothing_is_left_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(RendezvousConnectionError):
        _half(path, replace=False)
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"old")
    with pytest.raises(RendezvousConnectionError):
        _half(path, replace=True)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def _write(path: Path, replace: bool = False) -> None:
    with new_file(path, replace=replace) as file:
        file.write(b"new")


@pytest.mark.quick
def test_a_file_that_is_there_is_replaced_only_if_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(InvalidRequestError, match="already exists; give another name, or --force"):
        _write(path)
    assert path.read_bytes() == b"old"
    _write(path, replace=True)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.quick
def test_a_file_that_came_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def body() -> None:
        with new_file(path, replace=False) as file:
            file.write(b"new")
            path.write_bytes(b"theirs")

    with pytest.raises(InvalidRequestError, match="already exists"):
        body()
    assert path.read_bytes() == b"theirs"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.quick
@pytest.mark.parametrize("replace", [False, True])
def test_what_is_no_file_is_never_replaced(tmp_path: Path, replace: bool) -> None:
    for path in (tmp_path, Path("/dev/null")):
        with pytest.raises(InvalidRequestError, match="is not a regular file"):
            _write(path, replace)


@pytest.mark.quick
def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"none/file cannot be written: No such file"):
        _write(tmp_path / "none" / "file")
