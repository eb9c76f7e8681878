"""One real etcd: which server leads, what the fence refuses, and broken connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from etcd_cluster import EtcdCluster, Proxy

from rdzv.core.model import Membership, Settings
from rdzv.errors import (
    InvalidRequestError,
    RendezvousConnectionError,
    RendezvousStateError,
    StoreRefusedError,
)
from rdzv.stores.base import DeposedError, Record, RevisionConflictError
from rdzv.stores.election import Election
from rdzv.stores.election_session import LOOP_TTLS, Leader
from rdzv.stores.etcd import EtcdStore
from rdzv.stores.etcd_client import EtcdClient, put
from rdzv.stores.etcd_config import EtcdConfig
from rdzv.structs import replace

DEADLINE_S = 100.0
TTL_S = 2
"""For leases that are meant to run out."""
LONG_TTL_S = 60
"""For others: no server should lose it only because it waits for the CPU."""
MEMBERSHIP = Membership("job", "run", 1, Settings(1, 1), 0)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster.running(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def config(etcd: EtcdCluster, tmp_path: Path) -> EtcdConfig:
    return etcd.config(f"/{tmp_path.name}", ttl_s=LONG_TTL_S)


@pytest.fixture
def short(config: EtcdConfig) -> EtcdConfig:
    return replace(config, ttl_s=TTL_S)


@pytest.fixture
async def client(config: EtcdConfig) -> AsyncIterator[EtcdClient]:
    async with EtcdClient.connected(config) as client:
        yield client


@pytest.fixture(autouse=True)
async def _deadline() -> AsyncIterator[None]:
    async with asyncio.timeout(4 * DEADLINE_S):
        yield


@asynccontextmanager
async def leading(
    config: EtcdConfig, address: str = "here:1"
) -> AsyncIterator[tuple[EtcdStore, Election, EtcdClient]]:
    async with (
        EtcdClient.connected(config) as client,
        Election.running(client, address) as election,
    ):
        yield EtcdStore(client, await election.campaign()), election, client


# ---------------------------------------------------------------- the client


async def test_pages_hold_everything_once_in_both_directions(client: EtcdClient) -> None:
    prefix = client.config.prefix.encode()
    keys = [prefix + b"/%02d" % number for number in range(25)]
    client.txn((), [put(key, b"x") for key in keys])
    start, end = prefix + b"/", prefix + b"0"
    for page in (1, 10, 25, 100):
        pages = list(client.scan(start, end, page=page))
        assert max(map(len, pages)) <= page
        assert [kv.key for found in pages for kv in found] == keys
        pages = list(client.scan(start, end, page=page, newest_first=True))
        assert [kv.key for found in pages for kv in found] == keys[::-1]


async def test_a_write_that_is_too_large_is_refused_before_it_is_sent(client: EtcdClient) -> None:
    key = client.config.prefix.encode() + b"/large"
    with pytest.raises(StoreRefusedError, match="above the 1500000 that etcd takes"):
        client.txn((), (put(key, b"x" * 1_500_000),))
    assert client.get(key)[0] is None


async def test_what_etcd_refuses_is_definite(client: EtcdClient) -> None:
    key = client.config.prefix.encode() + b"/key"
    with pytest.raises(StoreRefusedError, match="requested lease not found; nothing was written"):
        client.txn((), (put(key, b"x", lease=4711),))
    with pytest.raises(StoreRefusedError, match="duplicate key"):
        client.txn((), (put(key, b"x"), put(key, b"y")))
    client.revoke(4711)
    assert client.keep_alive(4711, 5.0) == 0


# ---------------------------------------------------------------- broken connections


@pytest.mark.parametrize("arrives", [True, False])
async def test_after_a_write_of_which_nobody_knows_a_read_tells(
    etcd: EtcdCluster, config: EtcdConfig, arrives: bool
) -> None:
    """The connection breaks after the request is sent, before the reply: the outcome is unknown."""
    async with (
        Proxy.running(etcd.members[0].endpoint) as proxy,
        EtcdClient.connected(replace(config, endpoints=(proxy.endpoint,))) as client,
        leading(config) as (direct, election, _),
    ):
        fence = await election.campaign()
        store = EtcdStore(client, fence)
        revision = await store.compare_and_swap("job", MEMBERSHIP, 0)
        later = replace(MEMBERSHIP, run_number=2)

        proxy.replies_pass, proxy.requests_pass = False, arrives
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(refusal(store, later, revision))
            if arrives:
                await until(partial(has_changed, direct, revision))
            else:
                await until(partial(has_lost, proxy, proxy.lost_bytes + A_WRITE_BYTES))
            proxy.cut()
        error = await writing
        assert type(error) is RendezvousConnectionError
        assert not error.definite

        proxy.replies_pass = proxy.requests_pass = True
        stored = await loaded(store)
        assert (stored.membership == later) is arrives
        assert (stored.revision != revision) is arrives


async def test_without_a_connection_nothing_was_written_for_sure(
    etcd: EtcdCluster, config: EtcdConfig
) -> None:
    async with (
        leading(config) as (_, election, _),
        Proxy.running(etcd.members[0].endpoint) as proxy,
    ):
        slow = replace(config, endpoints=(proxy.endpoint,), timeout_ms=1_500)
        async with EtcdClient.connected(slow) as client:
            store = EtcdStore(client, await election.campaign())
            await store.take_over()
            # It accepts, and says nothing, like a stopped member.
            proxy.replies_pass = False
            proxy.cut()
            with pytest.raises(StoreRefusedError, match="does not answer"):
                await store.load("job")
            error = await refusal(store, MEMBERSHIP, 0)
            assert isinstance(error, StoreRefusedError)
            assert error.definite


async def test_a_member_that_accepts_a_write_and_falls_silent_leaves_doubt(
    etcd: EtcdCluster, config: EtcdConfig
) -> None:
    async with (
        leading(config) as (_, election, _),
        Proxy.running(etcd.members[0].endpoint) as proxy,
    ):
        slow = replace(config, endpoints=(proxy.endpoint,), timeout_ms=1_500)
        async with EtcdClient.connected(slow) as client:
            store = EtcdStore(client, await election.campaign())
            await store.take_over()
            proxy.replies_pass = False
            error = await refusal(store, MEMBERSHIP, 0)
            assert type(error) is RendezvousConnectionError
            assert "no answer in time" in str(error)


async def test_an_etcd_that_is_not_there_is_named(config: EtcdConfig) -> None:
    nobody = EtcdConfig.parse("127.0.0.1:1,localhost:1", timeout_ms=500)
    with pytest.raises(RendezvousConnectionError, match=r"127\.0\.0\.1:1|localhost:1") as refused:
        async with EtcdClient.connected(nobody):
            pass
    assert refused.value.definite


A_WRITE_BYTES = 200
"""Less than any write of a membership has, and more than what keeps a connection alive."""


async def has_lost(proxy: Proxy, lost_bytes: int) -> bool:
    return proxy.lost_bytes >= lost_bytes


async def has_changed(store: EtcdStore, revision: int) -> bool:
    return bool((await loaded(store)).revision != revision)


async def until(holds: Callable[[], Awaitable[object]]) -> None:
    """Ask until the answer is yes, within the deadline of the test."""
    while not await holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def refusal(
    store: EtcdStore, membership: Membership, revision: int
) -> RendezvousConnectionError:
    with pytest.raises(RendezvousConnectionError) as refused:
        await store.compare_and_swap("job", membership, revision)
    return refused.value


async def loaded(store: EtcdStore) -> Any:
    stored = await store.load("job")
    assert stored is not None
    return stored


# ---------------------------------------------------------------- the store


async def test_whoever_does_not_lead_only_reads(config: EtcdConfig, client: EtcdClient) -> None:
    async with leading(config) as (store, _, _):
        await store.compare_and_swap("job", MEMBERSHIP, 0)
        reader = EtcdStore(client)
        assert (await loaded(reader)).membership == MEMBERSHIP
        for write in (
            reader.compare_and_swap("job", MEMBERSHIP, 0),
            reader.append([Record(0, "job", "run", "name", "text")]),
            reader.take_over(),
        ):
            with pytest.raises(DeposedError, match="does not lead, and only reads"):
                await write


async def test_nothing_is_written_once_another_leads(config: EtcdConfig) -> None:
    async with leading(config, "old:1") as (old, election, _), leading_next(config) as (then, new):
        revision = await old.compare_and_swap("job", MEMBERSHIP, 0, [record("kept")])
        assert await old.take_over(7) == 7
        await election.resign()
        store = await then()
        for write in (
            old.compare_and_swap("job", MEMBERSHIP, revision, [record("lost")]),
            old.compare_and_swap("job", MEMBERSHIP, 0, [record("lost")]),
            old.append([record("lost")]),
            old.take_over(1_000),
        ):
            with pytest.raises(DeposedError, match="new:1 leads now; nothing was written") as error:
                await write
            assert error.value.definite
        stored = await loaded(store)
        assert (stored.membership, stored.revision) == (MEMBERSHIP, revision)
        assert await store.history("job", 10) == (record("kept"),)
        # The number is in the store, not in the leader.
        assert await store.take_over() == 8
        leader = await new.changed(None)
        while leader is not None and leader.leadership == 0:  # The number is written after the key.
            leader = await new.changed(leader)
        assert leader == new.leader
        assert leader is not None
        assert leader.leadership == 8
        await new.resign()
        with pytest.raises(DeposedError, match=r"no server leads now|old:1 leads now"):
            await store.append([record("lost")])


@asynccontextmanager
async def leading_next(config: EtcdConfig) -> AsyncIterator[tuple[Any, Election]]:
    async with (
        EtcdClient.connected(config) as client,
        Election.running(client, "new:1") as election,
    ):

        async def then() -> EtcdStore:
            return EtcdStore(client, await election.campaign())

        yield then, election


async def test_a_key_deleted_and_made_anew_is_no_key_of_before(
    etcd: EtcdCluster, config: EtcdConfig
) -> None:
    async with leading(config) as (store, _, _):
        first = await store.compare_and_swap("job", MEMBERSHIP, 0)
        etcd.etcdctl("del", f"{config.prefix}/jobs/job")
        await store.compare_and_swap("job", MEMBERSHIP, 0)
        with pytest.raises(RevisionConflictError):
            await store.compare_and_swap("job", MEMBERSHIP, first)


@pytest.mark.parametrize("damaged", ["x", "{", "\x01", '{"format":9,"membership":{}}'])
async def test_what_can_not_be_read_is_named_and_left_untouched(
    etcd: EtcdCluster, config: EtcdConfig, damaged: str
) -> None:
    async with leading(config) as (store, _, client):
        etcd.etcdctl("put", "--", f"{config.prefix}/jobs/bad", damaged)
        with pytest.raises(RendezvousStateError, match=f"job bad in etcd at .*{config.prefix}"):
            await store.load("bad")
        assert await store.list() == ("bad",)
        kv, _ = client.get(f"{config.prefix}/jobs/bad".encode())
        assert kv is not None
        assert kv.value == damaged.encode()
        for key, read in (
            ("history/bad/0-1", store.history("bad", 10)),
            ("leadership", store.take_over()),
        ):
            etcd.etcdctl("put", "--", f"{config.prefix}/{key}", "x")
            with pytest.raises(RendezvousStateError, match="left untouched"):
                await read


async def test_history_that_is_too_much_for_one_transaction_is_written_in_several(
    config: EtcdConfig,
) -> None:
    async with leading(config) as (store, _, _):
        rows = [
            Record(0, f"job-{number % 200}", "run", "name", f"{number} {'y' * 2_000}")
            for number in range(1_000)
        ]
        await store.append(rows)
        for job in range(200):
            expected = tuple(row for row in rows if row.rdzv_id == f"job-{job}")
            assert await store.history(f"job-{job}", 10) == expected
        many = [record(f"{number} {'z' * 1_000}") for number in range(2_000)]
        revision = await store.compare_and_swap("job", MEMBERSHIP, 0, many)
        assert (await loaded(store)).revision == revision
        assert await store.history("job", 10_000) == tuple(many)


async def test_history_over_its_bound_is_deleted_also_after_a_change_of_leader(
    config: EtcdConfig,
) -> None:
    async with leading(config) as (_, election, client):
        store = EtcdStore(client, await election.campaign(), history_rows=1_000)
        for number in range(30):
            await store.append([record(f"{number}.1"), record(f"{number}.2")])
        await election.resign()
        store = EtcdStore(client, await election.campaign(), history_rows=20)
        await store.append([record("last")])
        start = f"{config.prefix}/history/job/".encode()
        pages = list(client.scan(start, start[:-1] + b"0", keys_only=True))
        assert sum(map(len, pages)) == 11
        texts = [row.data for row in await store.history("job", 100)]
        assert texts == ["20.2", *(f"{n}.{i}" for n in range(21, 30) for i in (1, 2)), "last"]


def record(text: str) -> Record:
    return Record(1_763_700_000_000, "job", "run", "NodeJoined", text)


# ---------------------------------------------------------------- the election


async def test_a_follower_sees_who_leads_and_every_replica(config: EtcdConfig) -> None:
    async with (
        leading(config, "first:1") as (store, first, _),
        EtcdClient.connected(config) as client,
    ):
        async with Election.running(client, "second:1", "0.2") as second:
            leader = await second.changed(None)
            assert leader is not None
            assert (leader.address, leader.leadership) == ("first:1", 0)
            assert second.leader == leader
            assert first.proven
            assert not second.proven
            assert await second.lost() == "this server has not led yet"
            await store.take_over(5)
            assert await second.changed(leader) == replace(leader, leadership=5)
            names = [(replica.address, replica.version) for replica in await second.replicas()]
            assert names == [("first:1", ""), ("second:1", "0.2")]
        assert [replica.address for replica in await first.replicas()] == ["first:1"]


async def test_a_leader_that_stops_is_followed_at_once(config: EtcdConfig) -> None:
    async with EtcdClient.connected(config) as client, Election.running(client, "next:1") as next_:
        async with leading(config, "first:1"):
            await next_.changed(None)
        # Otherwise it would be when the lease of the other has run out.
        async with asyncio.timeout(LONG_TTL_S / 2):
            await next_.campaign()
        assert next_.proven


async def test_a_leader_key_that_is_gone_ends_the_term(
    etcd: EtcdCluster, config: EtcdConfig
) -> None:
    async with leading(config) as (store, election, _):
        etcd.etcdctl("del", f"{config.prefix}/leader")
        assert await election.lost() == "its leader key is gone"
        assert not election.proven
        with pytest.raises(DeposedError):
            await store.take_over()
        fence = await election.campaign()
        assert election.proven
        assert fence == await election.campaign()


async def test_a_loop_that_stands_still_proves_nothing_even_before_it_looks_around(
    short: EtcdConfig,
) -> None:
    async with leading(short) as (_, election, _):
        assert election.proven
        # As in a process that hangs, and before any task has run.
        time.sleep((LOOP_TTLS + 1) * TTL_S)  # noqa: ASYNC251
        assert not election.proven
        assert "its event loop has stood still" in await election.lost()


async def test_a_leader_with_too_much_to_do_keeps_its_lease_and_its_word(
    config: EtcdConfig,
) -> None:
    """Thousands of nodes that come back at once must not end the leadership that they need."""
    ttl_s = 5 * TTL_S
    async with leading(replace(config, ttl_s=ttl_s)) as (_, election, _):
        for _ in range(2):
            # Each turn of the loop takes a quarter of the TTL, and more than a word lasts.
            time.sleep(ttl_s / 4)  # noqa: ASYNC251
            assert election.may_speak
            await asyncio.sleep(0)
        assert election.proven


async def test_what_is_heard_late_of_an_earlier_leader_ends_no_term(config: EtcdConfig) -> None:
    async with leading(config) as (_, election, _):
        fence = await election.campaign()
        leader = election.leader
        election.note_leader_key(None, fence.create_revision - 1)
        assert election.proven
        assert election.leader == leader


async def test_a_campaign_that_was_cancelled_can_be_taken_up(config: EtcdConfig) -> None:
    async with (
        leading(config, "first:1") as (_, first, _),
        EtcdClient.connected(config) as client,
        Election.running(client, "second:1") as second,
    ):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await second.campaign()
        await first.resign()
        await second.campaign()
        assert second.proven
        assert not first.proven


async def test_leadership_ends_before_anyone_else_can_have_it_if_etcd_is_cut_off(
    etcd: EtcdCluster, config: EtcdConfig, short: EtcdConfig
) -> None:
    async with (
        Proxy.running(etcd.members[0].endpoint) as proxy,
        leading(replace(short, endpoints=(proxy.endpoint,)), "cut:1") as cut,
        EtcdClient.connected(config) as client,
        Election.running(client, "other:1") as other,
    ):
        _, election, _ = cut
        await other.changed(None)
        proxy.replies_pass = proxy.requests_pass = False
        await other.campaign()
        # By the clock alone, whichever of the two has run by now.
        assert not election.proven
        assert "the last renewal is" in await election.lost()
        # It can reach etcd again, and takes part again.
        proxy.replies_pass = proxy.requests_pass = True
        proxy.cut()
        await other.resign()
        await election.campaign()
        assert election.proven


async def test_a_leader_that_lives_is_deposed_and_says_nothing_once_another_leads(
    etcd: EtcdCluster, config: EtcdConfig
) -> None:
    """It was found dead, and hears nothing of that: its lease would hold for long."""
    config = replace(config, ttl_s=10)
    async with (
        Proxy.running(etcd.members[0].endpoint) as proxy,
        leading(replace(config, endpoints=(proxy.endpoint,)), "cut:1") as (store, cut, _),
        EtcdClient.connected(config) as client,
        Election.running(client, "other:1") as other,
    ):
        leader = await other.changed(None)
        assert leader is not None
        assert await cut.regain_word()
        proxy.replies_pass = False
        assert await other.depose(leader)
        assert other.leader is None
        assert not await other.depose(leader)
        await other.campaign()
        # By the clock alone: it has heard nothing, and its lease has not ended.
        assert not cut.may_speak
        assert other.may_speak
        proxy.replies_pass = True
        proxy.cut()
        with pytest.raises(DeposedError, match="other:1 leads now"):
            await store.take_over()
        assert await cut.lost() in {"another server has deposed it", "its leader key is gone"}
        assert not await cut.regain_word()


async def test_a_deposed_leader_writes_nothing_while_its_key_is_still_there(
    config: EtcdConfig,
) -> None:
    async with (
        leading(replace(config, ttl_s=60), "deposed:1") as (store, deposed, _),
        EtcdClient.connected(config) as client,
        Election.running(client, "other:1") as other,
    ):
        leader = await other.changed(None)
        assert leader is not None
        assert await other.depose(leader)
        with pytest.raises(DeposedError, match="no server leads now; nothing was written"):
            await store.compare_and_swap("job", MEMBERSHIP, 0)
        assert await deposed.lost() == "another server has deposed it"
        assert await store.load("job") is None


async def test_only_a_leader_whose_word_is_known_to_end_is_deposed(
    etcd: EtcdCluster, config: EtcdConfig
) -> None:
    value = '{"address":"older:1","since_unix_ms":1,"leadership":1}'
    etcd.etcdctl("put", f"{config.prefix}/leader", value)
    async with EtcdClient.connected(config) as client, Election.running(client, "a:1") as election:
        leader = await election.changed(None)
        assert leader is not None
        assert not await election.depose(leader)
        etcd.etcdctl("del", f"{config.prefix}/leader")
        await election.campaign()
        own = election.leader
        assert own is not None
        assert not await election.depose(own)


async def test_a_leader_value_of_somebody_else_breaks_nothing(
    etcd: EtcdCluster, config: EtcdConfig
) -> None:
    etcd.etcdctl("put", f"{config.prefix}/leader", "gibberish")
    etcd.etcdctl("put", f"{config.prefix}/replicas/1", "gibberish")
    async with EtcdClient.connected(config) as client, Election.running(client, "a:1") as election:
        assert await election.changed(None) == Leader("unknown", 0, 0)
        await until(election.replicas)
        assert [replica.address for replica in await election.replicas()] == ["a:1"]
        etcd.etcdctl("del", f"{config.prefix}/leader")
        await election.campaign()


# ---------------------------------------------------------------- mistakes of configuration


async def test_a_user_where_nobody_is_asked_for_one_is_refused(config: EtcdConfig) -> None:
    with pytest.raises(InvalidRequestError, match=r"'me' cannot be checked: .* leave out user"):
        async with EtcdClient.connected(replace(config, user="me", password="x")):
            pass


async def test_encryption_where_there_is_none_is_refused(config: EtcdConfig) -> None:
    with pytest.raises(InvalidRequestError, match=r"Handshake .* speaks TLS there"):
        async with EtcdClient.connected(replace(config, tls=True)):
            pass
