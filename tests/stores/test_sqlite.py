"""The SQLite store: waiting writes share one commit, and each writer gets its own result."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rdzv.core.model import Membership, Round, Settings
from rdzv.errors import RendezvousConnectionError, StoreRefusedError
from rdzv.stores import sqlite_connection
from rdzv.stores.base import Record, RevisionConflictError, Stored
from rdzv.stores.sqlite import SqliteStore
from rdzv.structs import replace

pytestmark = pytest.mark.slow

WRITERS = 40


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    opened = await SqliteStore.open(tmp_path)
    yield opened
    await opened.close()


def membership(rdzv_id: str, reason: str = "") -> Membership:
    return Membership(rdzv_id, reason, 1, Settings(1, 2), 0)


def record(rdzv_id: str, text: str = "x") -> Record:
    return Record(1, rdzv_id, "run", "NodeJoined", text)


async def write(store: SqliteStore, rdzv_id: str, revision: int = 0, run: str = "") -> int:
    return await store.compare_and_swap(
        rdzv_id, membership(rdzv_id, run), revision, [record(rdzv_id)]
    )


async def statements(store: SqliteStore) -> list[str]:
    """Return a list to which every statement will be appended."""
    seen: list[str] = []
    await store.connection.call(lambda: store.connection.db.set_trace_callback(seen.append))
    return seen


async def pragma(store: SqliteStore, text: str) -> int:
    number: int = await store.connection.call(
        lambda: store.connection.db.execute(f"PRAGMA {text}").fetchone()[0]
    )
    return number


async def all_of(store: SqliteStore, *revisions: int) -> list[int | BaseException]:
    """Write one job for each revision, at once; return the results."""
    return await asyncio.gather(
        *(write(store, f"job-{n}", revision) for n, revision in enumerate(revisions)),
        return_exceptions=True,
    )


# ---------------------------------------------------------------- one commit for many


async def test_many_writers_share_few_commits(store: SqliteStore) -> None:
    seen = await statements(store)
    assert await all_of(store, *[0] * WRITERS) == [1] * WRITERS
    # Not one: the first are written while the others arrive.
    assert seen.count("COMMIT") < WRITERS / 2
    assert len(await store.list()) == WRITERS
    assert len(await store.history("job-7", 10)) == 1


async def test_a_lost_race_among_others_is_its_own(store: SqliteStore) -> None:
    outcomes = await all_of(store, *[3 if n % 2 else 0 for n in range(WRITERS)])
    assert [type(o) for o in outcomes[:4]] == [int, RevisionConflictError] * 2
    assert await store.list() == tuple(sorted(f"job-{n}" for n in range(0, WRITERS, 2)))
    assert await store.history("job-1", 10) == ()


@pytest.mark.quick
async def test_of_two_in_one_commit_the_second_has_lost(store: SqliteStore) -> None:
    first, second = await asyncio.gather(
        write(store, "job-7", run="first"),
        write(store, "job-7", run="second"),
        return_exceptions=True,
    )
    assert (first, type(second)) == (1, RevisionConflictError)
    stored = await store.load("job-7")
    assert stored is not None
    assert stored.membership.run == "first"


async def test_one_that_can_not_be_written_spoils_no_other(store: SqliteStore) -> None:
    too_large = record("job-7", "x" * 2_000_000)
    free = await pragma(store, "page_count") + 100
    await pragma(store, f"max_page_count = {free}")
    *others, failed = await asyncio.gather(
        *(write(store, f"job-{n}") for n in range(5)),
        store.compare_and_swap("large", membership("large"), 0, [too_large]),
        return_exceptions=True,
    )
    assert others == [1] * 5
    assert isinstance(failed, StoreRefusedError)
    assert "full" in str(failed)
    assert len(await store.list()) == 5


async def test_what_waits_is_bounded(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_connection, "MOST_WAITING", 3)
    # Nothing is written before this returns to the loop's thread.
    busy = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold() -> None:
        asyncio.run_coroutine_threadsafe(busy.wait(), loop).result(timeout=60)

    held = asyncio.create_task(store.connection.call(hold))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(write(store, f"job-{n}")) for n in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(StoreRefusedError, match="3 writes wait already"):
        await write(store, "job-9")
    busy.set()
    assert await asyncio.gather(*waiting) == [1, 1, 1]
    await held


async def test_a_caller_that_was_cancelled_harms_no_other(store: SqliteStore) -> None:
    tasks = [asyncio.create_task(write(store, f"job-{n}")) for n in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [int, asyncio.CancelledError, int]


# ---------------------------------------------------------------- failures


async def test_a_full_disk_is_definite_and_passes(store: SqliteStore) -> None:
    assert await write(store, "job-7") == 1
    await pragma(store, f"max_page_count = {await pragma(store, 'page_count')}")
    huge = [record("job-7", "x" * 100_000)]
    with pytest.raises(StoreRefusedError, match="full; nothing was written"):
        await store.compare_and_swap("job-7", membership("job-7"), 1, huge)
    with pytest.raises(StoreRefusedError, match="full"):
        await store.append(huge)
    stored = await store.load("job-7")
    assert stored is not None
    assert stored.revision == 1
    await pragma(store, "max_page_count = 1000000")
    assert await store.compare_and_swap("job-7", membership("job-7"), 1, huge) == 2


async def test_a_success_that_was_rolled_back_is_written_with_the_next(store: SqliteStore) -> None:
    def of(*succeeded: str) -> Membership:
        round_ = Round(1, (), "host", 1, True, 0, 0, succeeded=succeeded)
        return replace(membership("job-7"), round=round_)

    assert await store.compare_and_swap("job-7", of("n1"), 0) == 1
    await pragma(store, f"max_page_count = {await pragma(store, 'page_count')}")
    huge = [record("job-7", "x" * 100_000)]
    with pytest.raises(StoreRefusedError, match="full"):
        await store.compare_and_swap("job-7", of("n1", "n2"), 1, huge)
    await pragma(store, "max_page_count = 1000000")
    for revision, succeeded in enumerate((("n1", "n2", "n3"), ("n1", "n2", "n3", "n4")), 2):
        assert await store.compare_and_swap("job-7", of(*succeeded), revision - 1) == revision
        assert await store.load("job-7") == Stored(of(*succeeded), revision)


class CommitFails:
    """A connection whose COMMIT fails: before it, or after it has happened."""

    def __init__(
        self, db: sqlite3.Connection, happens: bool, error: sqlite3.Error | None = None
    ) -> None:
        self._db = db
        self._happens = happens
        self._failure = error or sqlite3.OperationalError("disk I/O error")

    def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        if statement != "COMMIT":
            return self._db.execute(statement, *values)
        if self._happens:
            self._db.execute(statement)
        raise self._failure

    def __getattr__(self, name: str) -> object:
        return getattr(self._db, name)


@pytest.mark.parametrize("happens", [False, True])
async def test_a_commit_that_fails_is_indefinite_for_all_in_it(
    store: SqliteStore, happens: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert await write(store, "job-0") == 1
    real = store.connection.db
    store.connection.db = CommitFails(real, happens)  # type: ignore[assignment]
    outcomes = await all_of(store, 7, *[0] * WRITERS)
    store.connection.db = real
    lost, *others = outcomes
    assert isinstance(lost, RevisionConflictError)
    assert {type(outcome) for outcome in others} == {RendezvousConnectionError}
    assert not any(getattr(outcome, "definite", True) for outcome in others)
    assert all("the commit failed and may have happened" in str(one) for one in others)
    assert "a bug" not in caplog.text
    assert len(await store.list()) == (WRITERS + 1 if happens else 1)
    # And it continues: the connection has no forgotten transaction.
    assert await write(store, "job-0", 1) == 2


async def test_a_disk_that_is_full_at_the_commit_is_definite(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorname = "SQLITE_FULL"
    real = store.connection.db
    monkeypatch.setattr(store.connection, "db", CommitFails(real, happens=False, error=full))
    with pytest.raises(StoreRefusedError, match="full; nothing was written"):
        await write(store, "job-0")
    monkeypatch.setattr(store.connection, "db", real)
    assert await write(store, "job-0") == 1


class RollbackFails(CommitFails):
    """A connection whose COMMIT fails, and then every attempt to drop its transaction."""

    def __init__(self, db: sqlite3.Connection, error: BaseException) -> None:
        super().__init__(db, happens=False)
        self._error = error

    def rollback(self) -> None:
        raise self._error


@pytest.mark.parametrize("error", [sqlite3.OperationalError("disk I/O error"), KeyError("a bug")])
async def test_what_is_raised_beside_a_commit_reaches_everyone_who_waits(
    store: SqliteStore, error: BaseException
) -> None:
    """It was lost in the writer's thread, and the caller waited forever with its job's lock."""
    assert await write(store, "job-0") == 1
    real = store.connection.db
    store.connection.db = RollbackFails(real, error)  # type: ignore[assignment]
    async with asyncio.timeout(60):
        lost, *others = await all_of(store, 7, *[0] * WRITERS)
        assert isinstance(lost, RevisionConflictError)
        # On a busy machine, all may come after that commit, and are refused for certain.
        kinds = {type(outcome) for outcome in others}
        assert kinds <= {RendezvousConnectionError, StoreRefusedError}
        # Nor does the next write include anything left over from this one.
        with pytest.raises(RendezvousConnectionError):
            await write(store, "job-99")
        store.connection.db = real
        assert await store.list() == ("job-0",) or real.in_transaction
        assert await write(store, "job-0", 1) == 2
        assert await store.list() == ("job-0",)


async def test_history_stays_bounded_over_commits_that_failed(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path, history_rows=20)
    for n in range(60):
        if n % 10 == 9:
            real = store.connection.db
            store.connection.db = CommitFails(real, happens=False)  # type: ignore[assignment]
            with pytest.raises(RendezvousConnectionError):
                await store.append([record("job-7")])
            store.connection.db = real
        await store.append([record("job-7", str(n))])
    assert (await store.survey()).events <= 22
    assert [row.data for row in await store.history("job-7", 2)] == ["58", "59"]
    await store.close()


# ---------------------------------------------------------------- all or nothing


@pytest.mark.quick
async def test_many_writes_are_one_commit(store: SqliteStore) -> None:
    seen = await statements(store)
    async with store.all_or_nothing():
        assert await store.take_over(at_least=41) == 41
        for n in range(5):
            assert await write(store, f"job-{n}") == 1
    assert seen.count("COMMIT") == 1
    assert len(await store.list()) == 5
    assert await store.take_over() == 42


async def test_if_the_body_fails_nothing_is_written(store: SqliteStore) -> None:
    class BodyError(Exception):
        pass

    async def body() -> None:
        async with store.all_or_nothing():
            await write(store, "job-7")
            raise BodyError

    with pytest.raises(BodyError):
        await body()
    assert await store.list() == ()
    assert await write(store, "job-7") == 1
