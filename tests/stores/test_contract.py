"""One contract for every store: an unverified fake is not to be trusted."""

from __future__ import annotations

import asyncio
import base64
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from etcd_cluster import EtcdCluster

from rdzv.core.model import (
    Cause,
    Departure,
    Ended,
    EndedRun,
    Failure,
    JobSpec,
    Membership,
    NodeState,
    Offer,
    Participant,
    Result,
    Round,
    RoundEnd,
    ScaleUp,
    Settings,
    Spent,
    SubmittedRun,
)
from rdzv.errors import (
    InvalidRequestError,
    LimitExceededError,
    RendezvousConnectionError,
    RendezvousStateError,
    StoreRefusedError,
)
from rdzv.stores import codec, sqlite_file
from rdzv.stores.base import (
    DOCUMENT_BYTES,
    DeposedError,
    Record,
    RevisionConflictError,
    Store,
    Stored,
)
from rdzv.stores.election import Election
from rdzv.stores.etcd import EtcdStore
from rdzv.stores.etcd_client import EtcdClient
from rdzv.stores.memory import MemoryStore
from rdzv.stores.sqlite import SqliteStore
from rdzv.structs import replace

HISTORY_ROWS = 20


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One real etcd for all tests; each has a prefix of its own."""
    with EtcdCluster.running(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture(
    params=["memory", *(pytest.param(each, marks=pytest.mark.slow) for each in ("sqlite", "etcd"))]
)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    async with AsyncExitStack() as stack:
        opened: Store
        if request.param == "memory":
            opened = MemoryStore(HISTORY_ROWS)
        elif request.param == "sqlite":
            opened = await SqliteStore.open(tmp_path / "data", HISTORY_ROWS)
        else:
            cluster: EtcdCluster = request.getfixturevalue("etcd")
            config = cluster.config(f"/{tmp_path.name}")
            client = await stack.enter_async_context(EtcdClient.connected(config))
            election = await stack.enter_async_context(Election.running(client, "here:1"))
            opened = EtcdStore(client, await election.campaign(), HISTORY_ROWS)
        yield opened
        await opened.close()


def membership(rdzv_id: str = "job-7") -> Membership:
    """A membership in which every field has a value."""
    offer = Offer("10.0.0.5", 8, "trainer", "rack-1", "n1.local", "m1", 4711, True, 5_000)
    failure = Failure(3, 3, 99, None, 9, "killed — ☠", "trace\nback", 1_234, True, "n1", "10.0.0.5")
    end = RoundEnd(Cause.WORKER_FAILURE, "rank 3 failed", 5_000, True, (failure,), True, keep=False)
    ended = Ended(Result.FAILED, "restarts spent", 6_000, True, (failure,))
    return Membership(
        rdzv_id=rdzv_id,
        run="0badcafe",
        run_number=3,
        settings=Settings(1, 4, 3, 600_000, 30_000, ScaleUp.ON_RESTART, 60_000),
        began_at_ms=1_763_700_000_000,
        round=Round(
            number=5,
            participants=(
                Participant(
                    "n1",
                    (1_763_700_000 << 32) + 1,
                    offer,
                    0,
                    0,
                    8,
                    kept=(0, 7),
                    charged_suspects=(3,),
                ),
            ),
            master_addr="10.0.0.5",
            master_port=4711,
            use_agent_store=True,
            restarts=1,
            at_ms=4_000,
            gone=("n1",),
            end=end,
            source=7,
            resume_step=1 << 53,
            fruitless=True,
        ),
        next_round=6,
        restarts=(4_500,),
        store_failures=1,
        last_failures=(failure,),
        departures=(Departure("n2", NodeState.LOST, "lease", 3_000, "10.0.0.6", 8, "x"),),
        ended=ended,
        earlier=(EndedRun("feed", ended),),
    )


def record(text: str, rdzv_id: str = "job-7") -> Record:
    return Record(1_763_700_000_000, rdzv_id, "0badcafe", "NodeJoined", text)


async def test_what_was_written_is_read_back_equal(store: Store) -> None:
    assert await store.load("job-7") is None
    revision = await store.compare_and_swap("job-7", membership(), 0)
    assert revision > 0
    stored = await store.load("job-7")
    assert stored is not None
    assert (stored.membership, stored.revision) == (membership(), revision)


async def test_each_write_names_the_revision_before_it(store: Store) -> None:
    first = await store.compare_and_swap("job-7", membership(), 0)
    later = replace(membership(), run_number=4)
    revision = await store.compare_and_swap("job-7", later, first)
    assert revision > first
    stored = await store.load("job-7")
    assert stored is not None
    assert (stored.membership.run_number, stored.revision) == (4, revision)


@pytest.mark.parametrize("named", ["none", "the first", "one to come"])
async def test_a_lost_race_writes_nothing(store: Store, named: str) -> None:
    first = await store.compare_and_swap("job-7", membership(), 0)
    second = await store.compare_and_swap("job-7", membership(), first)
    revision = {"none": 0, "the first": first, "one to come": second + 1}[named]
    with pytest.raises(RevisionConflictError, match="job-7") as refused:
        await store.compare_and_swap(
            "job-7", replace(membership(), run_number=9), revision, [record("lost")]
        )
    assert refused.value.definite
    stored = await store.load("job-7")
    assert stored is not None
    assert (stored.membership.run_number, stored.revision) == (3, second)
    assert await store.history("job-7", 10) == ()


async def test_a_job_that_does_not_exist_has_no_revision_but_0(store: Store) -> None:
    with pytest.raises(RevisionConflictError):
        await store.compare_and_swap("job-7", membership(), 1)
    assert await store.list() == ()


async def test_of_many_at_once_exactly_one_wins(store: Store) -> None:
    async def race(number: int) -> bool:
        try:
            await store.compare_and_swap("job-7", replace(membership(), run_number=number), 0)
        except RevisionConflictError:
            return False
        return True

    assert sum(await asyncio.gather(*(race(number) for number in range(8)))) == 1


async def test_jobs_are_listed_in_order(store: Store) -> None:
    for rdzv_id in ("b", "a", "c"):
        await store.compare_and_swap(rdzv_id, membership(rdzv_id), 0)
    assert await store.list() == ("a", "b", "c")


@pytest.mark.slow
async def test_all_jobs_are_read_many_at_a_time(store: Store) -> None:
    assert [page async for page in store.pages()] == []
    names = [f"job {number}/ä" for number in range(230)]
    revisions = await asyncio.gather(
        *(store.compare_and_swap(name, membership(name), 0) for name in names)
    )
    found = [one for page in [page async for page in store.pages()] for one in page]
    assert dict(found) == {
        name: Stored(membership(name), revision)
        for name, revision in zip(names, revisions, strict=True)
    }
    assert len(found) == len(names)


async def test_history_rides_on_the_commit_and_is_read_oldest_first(store: Store) -> None:
    await store.compare_and_swap("job-7", membership(), 0, [record("one"), record("two")])
    await store.append([record("three"), record("else", "job-8")])
    assert [r.data for r in await store.history("job-7", 10)] == ["one", "two", "three"]
    assert [r.data for r in await store.history("job-7", 2)] == ["two", "three"]
    assert await store.history("job-8", 10) == (record("else", "job-8"),)
    assert await store.history("job-9", 10) == ()


async def test_names_do_not_get_in_each_others_way(store: Store) -> None:
    """One name may begin with another, or look like a path, or contain a separator of keys."""
    names = sorted(("a", "a/b", "a-b", "a0", "a:b@c._", "a%2Fb", "A", "/", ".", "ä ☠", "a" * 128))
    for name in names:
        await store.compare_and_swap(name, membership(name), 0, [record(name, name)])
    assert await store.list() == tuple(names)
    for name in names:
        stored = await store.load(name)
        assert stored is not None
        assert stored.membership.rdzv_id == name
        assert await store.history(name, 10) == (record(name, name),)


async def test_a_long_history_is_read_whole(store: Store) -> None:
    rows = [record(f"{number} {'x' * 900}") for number in range(HISTORY_ROWS - 1)]
    await store.append(rows)
    await store.append([])
    await store.append([record("the last")])
    assert await store.history("job-7", 2**31 - 1) == (*rows, record("the last"))
    assert await store.history("job-7", 0) == ()


async def test_history_is_bounded_for_each_job(store: Store) -> None:
    await store.append([record("kept", "job-8")])
    for number in range(100):
        await store.append([record(str(number))])
    rows = await store.history("job-7", 1_000)
    assert [r.data for r in rows] == [str(number) for number in range(80, 100)]
    assert len(await store.history("job-8", 1_000)) == 1


# ---------------------------------------------------------------- successes


def finishing(*succeeded: str, **changes: Any) -> Membership:
    """A job of which these nodes have succeeded, and whose run has not ended."""
    job = replace(membership(), **{"ended": None, **changes})
    assert job.round is not None
    return replace(job, round=replace(job.round, succeeded=succeeded))


async def succeed_one_by_one(store: Store, nodes: Sequence[str]) -> int:
    revision = await store.compare_and_swap("job-7", finishing(), 0)
    for count, node in enumerate(nodes, 1):
        job = finishing(*nodes[:count])
        revision = await store.compare_and_swap("job-7", job, revision, [record(node)])
    return revision


NODES = ("n3", "n1", "n☠", "n2")


async def test_successes_are_read_back_in_their_order(store: Store) -> None:
    revision = await succeed_one_by_one(store, NODES)
    jobs = [
        finishing(*NODES, "n5", "n4"),
        finishing(*NODES, "n5", "n4", "n6"),
        # More than a success has changed.
        finishing(*NODES, "n5", "n4", "n6", "n7", store_failures=2),
        finishing("n4", *NODES, "n5", "n6", "n7", "n8", store_failures=2),
        finishing(),
    ]
    for job in (finishing(*NODES), *jobs):
        if job in jobs:
            revision = await store.compare_and_swap("job-7", job, revision)
        expected = Stored(job, revision)
        assert await store.load("job-7") == expected
        assert [page async for page in store.pages()] == [[("job-7", expected)]]
    assert [r.data for r in await store.history("job-7", 10)] == list(NODES)


async def test_in_memory_too_a_success_encodes_no_membership() -> None:
    store = MemoryStore()
    await succeed_one_by_one(store, NODES[:2])
    before, revision = store.jobs["job-7"]
    await store.compare_and_swap("job-7", finishing(*NODES), revision)
    assert store.jobs["job-7"] == (before, revision + 1)
    assert store.jobs["job-7"][0] is before


async def test_a_run_that_ends_or_a_round_that_begins_takes_no_success_with_it(
    store: Store,
) -> None:
    revision = await succeed_one_by_one(store, NODES)
    round_ = membership().round
    assert round_ is not None
    following = finishing("n9", round=replace(round_, number=6))
    for job in (finishing(*NODES, "n9", ended=membership().ended), following):
        revision = await store.compare_and_swap("job-7", job, revision)
        assert await store.load("job-7") == Stored(job, revision)


@pytest.mark.parametrize("whole", [False, True], ids=["a success", "the whole"])
async def test_a_race_is_lost_against_a_success_too(store: Store, *, whole: bool) -> None:
    before = await succeed_one_by_one(store, NODES[:3])
    revision = await store.compare_and_swap("job-7", finishing(*NODES), before)
    lost = finishing("n7") if whole else finishing(*NODES, "n7")
    for named in (0, before, revision + 1):
        with pytest.raises(RevisionConflictError, match="job-7"):
            await store.compare_and_swap("job-7", lost, named, [record("lost")])
        with pytest.raises(RevisionConflictError, match="job-7"):
            await store.delete("job-7", named)
    assert await store.load("job-7") == Stored(finishing(*NODES), revision)
    assert await store.compare_and_swap("job-7", lost, revision) > revision


async def test_a_deleted_job_leaves_no_success_behind(store: Store) -> None:
    await store.delete("job-7", await succeed_one_by_one(store, NODES))
    assert await store.load("job-7") is None
    again = finishing(*NODES, "n9")
    revision = await store.compare_and_swap("job-7", again, 0)
    assert await store.load("job-7") == Stored(again, revision)


# ---------------------------------------------------------------- forgetting


async def test_a_deleted_job_is_gone_with_its_history(store: Store) -> None:
    revision = await store.compare_and_swap("job-7", membership(), 0, [record("one")])
    for beside in ("job-7/0", "job-70", "job-"):
        await store.compare_and_swap(beside, membership(beside), 0, [record("kept", beside)])
    await store.append([record(str(number)) for number in range(HISTORY_ROWS)])
    await store.delete("job-7", revision)
    assert await store.load("job-7") is None
    assert await store.history("job-7", 1_000) == ()
    assert await store.list() == ("job-", "job-7/0", "job-70")
    for beside in ("job-7/0", "job-70", "job-"):
        assert await store.load(beside) is not None
        assert await store.history(beside, 10) == (record("kept", beside),)


async def test_a_job_of_a_deleted_name_begins_anew(store: Store) -> None:
    first = await store.compare_and_swap("job-7", membership(), 0, [record("of before")])
    await store.append([record("else", "job-8")])
    await store.delete("job-7", first)
    with pytest.raises(RevisionConflictError):
        await store.compare_and_swap("job-7", membership(), first)
    await store.compare_and_swap("job-7", membership(), 0, [record("one")])
    for number in range(100):
        await store.append([record(str(number))])
    texts = [r.data for r in await store.history("job-7", 1_000)]
    assert texts == [str(number) for number in range(80, 100)]
    assert await store.history("job-8", 10) == (record("else", "job-8"),)


@pytest.mark.parametrize("named", ["none", "the first", "one to come"])
async def test_a_job_written_since_is_not_deleted(store: Store, named: str) -> None:
    first = await store.compare_and_swap("job-7", membership(), 0, [record("one")])
    second = await store.compare_and_swap("job-7", membership(), first)
    revision = {"none": 0, "the first": first, "one to come": second + 1}[named]
    with pytest.raises(RevisionConflictError, match=f"job job-7 .*has revision {second}, not"):
        await store.delete("job-7", revision)
    stored = await store.load("job-7")
    assert stored is not None
    assert stored.revision == second
    assert await store.history("job-7", 10) == (record("one"),)


async def test_deleting_what_is_not_there_changes_nothing(store: Store) -> None:
    await store.append([record("one")])
    await store.delete("job-7", 0)
    with pytest.raises(RevisionConflictError, match="has revision 0, not 1"):
        await store.delete("job-7", 1)
    assert await store.list() == ()
    assert await store.history("job-7", 10) == (record("one"),)


# ---------------------------------------------------------------- documents


async def test_a_document_is_read_back_with_its_revision(store: Store) -> None:
    assert await store.load_document("cordoned") is None
    first = await store.swap_document("cordoned", b"", 0)
    assert first > 0
    assert await store.load_document("cordoned") == (b"", first)
    data = bytes(range(256))
    second = await store.swap_document("cordoned", data, first)
    assert second > first
    assert await store.load_document("cordoned") == (data, second)
    assert await store.load_document("cordon") is None


async def test_documents_are_listed_in_order_and_are_no_jobs(store: Store) -> None:
    for name in ("b", "a-b", "a"):
        await store.swap_document(name, name.encode(), 0)
    await store.compare_and_swap("a", membership("a"), 0)
    assert await store.list_documents() == ("a", "a-b", "b")
    assert await store.list() == ("a",)
    stored = await store.load("a")
    assert stored is not None
    await store.delete("a", stored.revision)
    assert await store.list_documents() == ("a", "a-b", "b")


@pytest.mark.parametrize("named", ["none", "the first", "one to come"])
async def test_a_document_written_since_is_not_overwritten(store: Store, named: str) -> None:
    first = await store.swap_document("cordoned", b"1", 0)
    second = await store.swap_document("cordoned", b"2", first)
    revision = {"none": 0, "the first": first, "one to come": second + 1}[named]
    with pytest.raises(RevisionConflictError, match="document cordoned") as refused:
        await store.swap_document("cordoned", b"lost", revision)
    assert refused.value.definite
    assert await store.load_document("cordoned") == (b"2", second)
    with pytest.raises(RevisionConflictError):
        await store.swap_document("other", b"lost", second)
    assert await store.list_documents() == ("cordoned",)


async def test_of_many_first_documents_exactly_one_wins(store: Store) -> None:
    async def race(number: int) -> bool:
        try:
            await store.swap_document("cordoned", b"%d" % number, 0)
        except RevisionConflictError:
            return False
        return True

    assert sum(await asyncio.gather(*(race(number) for number in range(8)))) == 1


@pytest.mark.slow
async def test_documents_are_bounded(store: Store) -> None:
    large = os.urandom(DOCUMENT_BYTES)
    revision = await store.swap_document("cordoned", large, 0)
    with pytest.raises(
        LimitExceededError, match="cordoned would have 1048577 bytes, and a store takes 1048576; "
    ) as refused:
        await store.swap_document("cordoned", large + b"x", revision)
    assert refused.value.definite
    assert await store.load_document("cordoned") == (large, revision)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "A", "a\n", "n1"])
async def test_a_name_that_no_document_has_is_refused(store: Store, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="lower-case letters and -"):
        await store.swap_document(name, b"", 0)
    assert await store.list_documents() == ()


# ---------------------------------------------------------------- leadership, and the end


async def test_leadership_grows_with_every_take_over(store: Store) -> None:
    assert [await store.take_over() for _ in range(3)] == [1, 2, 3]
    assert await store.take_over(at_least=1_000) == 1_000
    assert await store.take_over(at_least=5) == 1_001


async def test_no_leadership_is_given_twice(store: Store) -> None:
    numbers = await asyncio.gather(*(store.take_over() for _ in range(8)))
    assert sorted(numbers) == list(range(1, 9))


@pytest.mark.slow
async def test_what_sqlite_says_of_its_place_is_its_folder(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path)
    assert store.place == f"{tmp_path} (sqlite)"
    await store.close()


async def test_a_closed_store_refuses(store: Store) -> None:
    await store.close()
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: store.load("job-7"),
        lambda: store.delete("job-7", 0),
        lambda: store.load_document("cordoned"),
        lambda: store.swap_document("cordoned", b"", 0),
        store.list_documents,
    ]
    for call in calls:
        with pytest.raises(RendezvousConnectionError, match="closed") as refused:
            await call()
        assert refused.value.definite


# ---------------------------------------------------------------- etcd alone


@pytest.mark.slow
async def test_nothing_is_deleted_nor_a_document_written_once_another_leads(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    async with (
        EtcdClient.connected(etcd.config(f"/{tmp_path.name}")) as client,
        Election.running(client, "old:1") as election,
        Election.running(client, "new:1") as other,
    ):
        old = EtcdStore(client, await election.campaign())
        job = await old.compare_and_swap("job-7", membership(), 0, [record("kept")])
        document = await old.swap_document("cordoned", b"kept", 0)
        await election.resign()
        new = EtcdStore(client, await other.campaign())
        reader = EtcdStore(client)
        calls: list[Callable[[EtcdStore], Awaitable[object]]] = [
            lambda store: store.delete("job-7", job),
            lambda store: store.delete("job-7", 0),
            lambda store: store.delete("job-9", 0),
            lambda store: store.swap_document("cordoned", b"lost", document),
            lambda store: store.swap_document("other", b"lost", 0),
        ]
        for call in calls:
            with pytest.raises(DeposedError, match="new:1 leads now; nothing was written"):
                await call(old)
            with pytest.raises(DeposedError, match="only reads"):
                await call(reader)
        assert await reader.load_document("cordoned") == (b"kept", document)
        assert await new.history("job-7", 10) == (record("kept"),)
        await new.delete("job-7", job)
        assert await reader.list() == ()


def of_many_nodes(succeeded: int) -> Membership:
    """A job whose membership is far larger than a success."""
    round_ = membership().round
    assert round_ is not None
    participants = tuple(replace(round_.participants[0], node_id=f"n{n}") for n in range(300))
    nodes = tuple(f"n{n}" for n in range(succeeded))
    return finishing(*nodes, round=replace(round_, participants=participants))


@pytest.mark.slow
async def test_the_next_leader_reads_what_single_nodes_have_succeeded_in(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    async with (
        EtcdClient.connected(etcd.config(f"/{tmp_path.name}")) as client,
        Election.running(client, "old:1") as election,
        Election.running(client, "new:1") as other,
    ):
        old = EtcdStore(client, await election.campaign())
        revision = await old.compare_and_swap("job-7", of_many_nodes(1), 0)
        whole, _ = client.get(f"/{tmp_path.name}/jobs/job-7".encode())
        for count in range(2, 6):
            revision = await old.compare_and_swap("job-7", of_many_nodes(count), revision)
        assert client.get(f"/{tmp_path.name}/jobs/job-7".encode())[0] == whole
        await election.resign()

        new = EtcdStore(client, await other.campaign())
        assert await new.load("job-7") == Stored(of_many_nodes(5), revision)
        # What another process has written is written whole first.
        for count in range(6, 9):
            revision = await new.compare_and_swap("job-7", of_many_nodes(count), revision)
            assert await EtcdStore(client).load("job-7") == Stored(of_many_nodes(count), revision)
        assert client.get(f"/{tmp_path.name}/jobs/job-7".encode())[0] != whole


@pytest.mark.slow
async def test_a_success_that_comes_late_is_written_before_the_rest_or_never(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    """A write without an answer may be on its way still when the job is written once more."""
    async with (
        EtcdClient.connected(etcd.config(f"/{tmp_path.name}")) as client,
        Election.running(client, "here:1") as election,
    ):
        fence = await election.campaign()
        late, store = EtcdStore(client, fence), EtcdStore(client, fence)
        first = await late.compare_and_swap("job-7", finishing("n1"), 0)
        await late.compare_and_swap("job-7", finishing("n1", "n2"), first)
        # It is there already, and was not known.
        with pytest.raises(RevisionConflictError, match="has later successes"):
            await store.compare_and_swap("job-7", finishing(), first)
        stored = await store.load("job-7")
        assert stored is not None
        assert stored.membership == finishing("n1", "n2")
        revision = await store.compare_and_swap("job-7", finishing(), stored.revision)
        # It comes after the job was written.
        with pytest.raises(RevisionConflictError):
            await late.compare_and_swap("job-7", finishing("n1", "n2", "n3"), stored.revision)
        assert await store.load("job-7") == Stored(finishing(), revision)


# ---------------------------------------------------------------- sqlite alone


@pytest.mark.slow
async def test_a_success_of_a_large_job_writes_little(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path)
    await store.compare_and_swap("job-7", of_many_nodes(1), 0)
    before = (tmp_path / "rdzv.db-wal").stat().st_size
    for count in range(2, 12):
        await store.compare_and_swap("job-7", of_many_nodes(count), count - 1)
    assert len(codec.encode(of_many_nodes(1))) > 60_000
    # A commit of SQLite writes whole pages, of 4 KiB.
    assert (tmp_path / "rdzv.db-wal").stat().st_size - before < 10 * 5 * 4_200
    await store.close()
    reader = await SqliteStore.look(tmp_path)
    assert await reader.load("job-7") == Stored(of_many_nodes(11), 11)
    await reader.close()


@pytest.mark.slow
async def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path)
    await store.compare_and_swap("job-7", membership(), 0, [record("one")])
    gone = await store.compare_and_swap("job-8", membership("job-8"), 0, [record("x", "job-8")])
    await store.delete("job-8", gone)
    await store.swap_document("cordoned", b"n1", 0)
    await store.take_over()
    await store.close()

    store = await SqliteStore.open(tmp_path)
    stored = await store.load("job-7")
    assert stored is not None
    assert (stored.membership, stored.revision) == (membership(), 1)
    assert [r.data for r in await store.history("job-7", 10)] == ["one"]
    assert (await store.list(), await store.history("job-8", 10)) == (("job-7",), ())
    assert await store.load_document("cordoned") == (b"n1", 1)
    assert await store.take_over() == 2
    await store.close()


@pytest.mark.slow
async def test_history_that_was_over_its_bound_is_cut_on_disk_after_a_restart(
    tmp_path: Path,
) -> None:
    store = await SqliteStore.open(tmp_path, 1_000)
    await store.append([record(str(number)) for number in range(50)])
    await store.close()
    store = await SqliteStore.open(tmp_path, HISTORY_ROWS)
    await store.append([record("last")])
    await store.close()
    with sqlite3.connect(tmp_path / "rdzv.db") as db:
        assert db.execute("SELECT count(*) FROM history").fetchone() == (HISTORY_ROWS,)
    db.close()


@pytest.mark.slow
async def test_a_second_server_on_the_directory_is_refused(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path)
    with pytest.raises(
        InvalidRequestError, match=f"{tmp_path} is in use by rdzvd pid {os.getpid()}"
    ):
        await SqliteStore.open(tmp_path)
    await store.close()
    await (await SqliteStore.open(tmp_path)).close()


@pytest.mark.slow
def test_a_killed_server_leaves_no_lock_behind(tmp_path: Path) -> None:
    script = (
        "import os, sys, signal; from pathlib import Path;"
        "from rdzv.stores import sqlite_file;"
        "sqlite_file.claim_directory(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert killed.returncode == -9
    os.close(sqlite_file.claim_directory(tmp_path))


async def test_a_directory_that_can_not_be_used_is_refused(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    for directory in (in_the_way, in_the_way / "below"):
        with pytest.raises(InvalidRequestError, match=rf"{directory} cannot be used: .*--data-dir"):
            await SqliteStore.open(directory)


@pytest.mark.slow
async def test_a_job_that_can_not_be_read_is_named_and_left_untouched(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path)
    await store.compare_and_swap("good", membership("good"), 0)
    damaged = b'{"format":4,"membership":{"rdzv_id":7}}'
    with sqlite3.connect(tmp_path / "rdzv.db") as db:
        db.execute("INSERT INTO job VALUES ('bad', 1, ?)", (damaged,))
    with pytest.raises(RendezvousStateError, match=r"job bad in .*rdzv\.db cannot be read"):
        await store.load("bad")
    assert await store.list() == ("bad", "good")
    assert await store.load("good") is not None
    assert db.execute("SELECT membership FROM job WHERE rdzv_id = 'bad'").fetchone() == (damaged,)
    db.close()
    await store.close()


@pytest.mark.slow
async def test_a_write_that_the_disk_refuses_is_definite(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path)
    await store.compare_and_swap("job-7", membership(), 0)
    other = sqlite3.connect(tmp_path / "rdzv.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreRefusedError, match="locked"):
        await store.compare_and_swap("job-7", membership(), 1)
    other.execute("ROLLBACK")
    other.close()
    assert await store.compare_and_swap("job-7", membership(), 1) == 2
    await store.close()


NFS = (
    "26 1 8:1 / / rw - ext4 /dev/sda1 rw\n31 26 0:27 / /mnt/my\\040home rw - nfs4 filer:/home rw\n"
)


def test_the_file_system_is_that_of_the_innermost_latest_mount(tmp_path: Path) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(NFS + "40 31 0:9 / /mnt rw - tmpfs a rw\n41 31 0:9 / /mnt rw - xfs b rw\n")
    kinds = {
        path: sqlite_file.filesystem_of(Path(path), mountinfo)
        for path in ("/var/lib/rdzv", "/mnt/my home/x", "/mnt/other", "/mnt")
    }
    assert list(kinds.values()) == ["ext4", "nfs4", "xfs", "xfs"]
    assert sqlite_file.filesystem_of(Path("/"), tmp_path / "missing") == ""


# ---------------------------------------------------------------- codec


def test_the_envelope_names_its_format() -> None:
    data = codec.encode(membership())
    assert data.startswith(b'{"format":4,"membership":{"rdzv_id":"job-7"')
    assert codec.decode(data, "here") == membership()


@pytest.mark.parametrize(
    "change",
    [
        {"submission": SubmittedRun(JobSpec(("t.py",), env=(("K", "v"),)), "ada", 5, ("n1",))},
        {"settings": Settings(1, 2, scale_up=ScaleUp.AFTER, scale_up_after_ms=5)},
        {"settings": Settings(1, 2, max_preemptions=0)},
        {"settings": Settings(1, 2, max_store_failures=0)},
        {"settings": Settings(1, 2, no_progress_restarts=3)},
        {"owner": "ada"},
        {"secret": "5e1f"},
    ],
)
def test_what_a_job_may_have_is_stored(change: dict[str, Any]) -> None:
    full = replace(membership(), **change)
    assert codec.decode(codec.encode(full), "here") == full


def test_what_a_run_has_spent_is_kept() -> None:
    spent = Spent(
        preemptions=1, store_failures=2, soon=3, without_progress=4, furthest_step=2**64 - 1
    )
    ended = Ended(Result.FAILED, "no progress", 5, no_progress=True)
    full = replace(membership(), spent=spent, ended=ended)
    assert codec.decode(codec.encode(full), "here") == full


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"format":5,"membership":{}}', "here has format 5, and this rdzvd reads only 4; it was"),
        (b'{"format":3,"membership":{}}', "Start the rdzvd version that wrote it, or remove it"),
        (b"", "here cannot be read"),
        (b"\xff\xfe", "here cannot be read"),
        (b'{"membership":{}}', "missing required field `format`"),
        (b'{"format":4,"membership":{"rdzv_id":"x"}}', "missing required field"),
    ],
)
def test_what_can_not_be_read_says_why(data: bytes, says: str) -> None:
    with pytest.raises(RendezvousStateError, match=r"left untouched") as refused:
        codec.decode(data, "here")
    assert says in str(refused.value)


async def test_history_that_one_transaction_of_etcd_can_not_hold_comes_with_the_commit(
    store: Store,
) -> None:
    texts = [base64.b64encode(random.Random(n).randbytes(60_000)).decode() for n in range(8)]
    records = [record(text) for text in texts]
    await store.compare_and_swap("job-7", membership(), 0, records)
    assert list(await store.history("job-7", 20)) == records
