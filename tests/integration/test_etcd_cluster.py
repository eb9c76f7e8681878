"""Three members of a real etcd, with TLS and users: one fails, then all, and work goes on.

The users' tokens expire within seconds, so every test that takes longer renews them.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from etcd_cluster import EtcdCluster, Member, Tls

from rdzv.core.model import Membership, Settings
from rdzv.errors import InvalidRequestError, RendezvousConnectionError, StoreRefusedError
from rdzv.stores.base import DeposedError, RevisionConflictError
from rdzv.stores.election import Election
from rdzv.stores.etcd import EtcdStore
from rdzv.stores.etcd_client import EtcdClient
from rdzv.stores.etcd_config import EtcdConfig
from rdzv.structs import replace

DEADLINE_S = 100.0
TOKEN_TTL_S = 2
MEMBERSHIP = Membership("job", "run", 0, Settings(1, 1), 0)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    options = (f"--auth-token-ttl={TOKEN_TTL_S}", "--bcrypt-cost=4")
    directory = tmp_path_factory.mktemp("etcd")
    with EtcdCluster.running(directory, 3, tls=True, options=options) as cluster:
        cluster.enable_authentication("/rdzv")
        yield cluster


@pytest.fixture
def cluster(etcd: EtcdCluster) -> Iterator[EtcdCluster]:
    """The cluster, complete again after each test."""
    yield etcd
    for member in etcd.members:
        if member.process is None:
            member.start()
        else:
            member.signal(signal.SIGCONT)
    etcd.wait_until_healthy()


@pytest.fixture
def config(cluster: EtcdCluster, tmp_path: Path) -> EtcdConfig:
    # Longer than an election among the members, so that their failure causes none of ours.
    return cluster.config(f"/rdzv/{tmp_path.name}", ttl_s=10)


@pytest.fixture(autouse=True)
async def _deadline() -> AsyncIterator[None]:
    async with asyncio.timeout(DEADLINE_S):
        yield


@dataclass
class Writer:
    """Counts up in one job, one commit after the other, whatever happens to etcd."""

    store: EtcdStore
    number: int = 0
    revision: int = 0
    doubts: int = 0
    gaps_s: list[float] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        last = time.monotonic()
        while True:
            try:
                await self._write()
            except DeposedError:
                raise
            except StoreRefusedError:
                await asyncio.sleep(0.05)
                continue
            except (RendezvousConnectionError, RevisionConflictError):
                self.doubts += 1
                await self._read_back()
                continue
            now = time.monotonic()
            self.gaps_s.append(now - last)
            last = now
            self.news.set()

    async def _write(self) -> None:
        membership = replace(MEMBERSHIP, run_number=self.number + 1)
        self.revision = await self.store.compare_and_swap("job", membership, self.revision)
        self.number += 1

    async def _read_back(self) -> None:
        while True:
            try:
                stored = await self.store.load("job")
            except RendezvousConnectionError:
                continue
            if stored is not None:
                # No confirmed write is lost, and no unsent one appears.
                assert stored.membership.run_number in (self.number, self.number + 1)
                self.number, self.revision = stored.membership.run_number, stored.revision
            return

    async def writes(self, count: int = 20) -> None:
        """Wait until it has written this often from now on."""
        for _ in range(count):
            self.news.clear()
            await self.news.wait()


@asynccontextmanager
async def writing(config: EtcdConfig) -> AsyncIterator[tuple[Writer, Election]]:
    """Lead and write until the body ends; then check that the store has all confirmed writes."""
    async with (
        EtcdClient.connected(config) as client,
        Election.running(client, "here:1") as election,
    ):
        store = EtcdStore(client, await election.campaign())
        writer = Writer(store)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(writer.run())
            await writer.writes()
            yield writer, election
            await writer.writes()
            task.cancel()
        assert election.proven
        print(f"longest gap {max(writer.gaps_s):.2f} s, {writer.doubts} in doubt, {writer.number}")


def first(config: EtcdConfig, member: Member) -> EtcdConfig:
    """Put one member before the others, so that it is the one in use."""
    others = (each for each in config.endpoints if each != member.endpoint)
    return replace(config, endpoints=(member.endpoint, *others))


# ---------------------------------------------------------------- members that fail


@pytest.mark.parametrize("role", ["leader", "follower"])
async def test_a_member_that_is_killed_costs_a_moment(
    cluster: EtcdCluster, config: EtcdConfig, role: str
) -> None:
    member = cluster.leader() if role == "leader" else cluster.follower()
    async with writing(first(config, member)) as (writer, _):
        member.kill()
        await writer.writes()
        member.start()


@pytest.mark.parametrize("role", ["leader", "follower"])
async def test_a_member_that_is_stopped_is_noticed(
    cluster: EtcdCluster, config: EtcdConfig, role: str
) -> None:
    member = cluster.leader() if role == "leader" else cluster.follower()
    async with (
        EtcdClient.connected(first(config, member)) as client,
        Election.running(client, "follower:1") as follower,
        writing(first(config, member)) as (writer, _),
    ):
        leader = await follower.changed(None)
        member.signal(signal.SIGSTOP)
        await writer.writes()
        # Reads there move to another member.
        await writer.store.take_over(77)
        while leader is None or leader.leadership != 77:
            leader = await follower.changed(leader)
        member.signal(signal.SIGCONT)


async def test_without_a_majority_leadership_ends_and_begins_anew_with_it(
    cluster: EtcdCluster, config: EtcdConfig
) -> None:
    config = replace(config, ttl_s=2)
    async with (
        EtcdClient.connected(config) as client,
        Election.running(client, "here:1") as election,
    ):
        store = EtcdStore(client, await election.campaign())
        number = await store.take_over()
        revision = await store.compare_and_swap("job", MEMBERSHIP, 0)
        for member in cluster.members[1:]:
            member.kill()
        assert "the last renewal is" in await election.lost()
        assert not election.proven
        with pytest.raises(RendezvousConnectionError):
            await store.compare_and_swap("job", MEMBERSHIP, revision)
        for member in cluster.members[1:]:
            member.start()
        store = EtcdStore(client, await election.campaign())
        assert await store.take_over() > number
        stored = await store.load("job")
        assert stored is not None
        assert stored.revision == revision


# ---------------------------------------------------------------- users and certificates


async def test_a_token_that_has_run_out_is_renewed(config: EtcdConfig) -> None:
    async with EtcdClient.connected(replace(config, user="root")) as client:
        key = f"{config.prefix}/key".encode()
        # Nothing is sent in the pauses, since any request renews a token.
        token = client.token
        await asyncio.sleep(TOKEN_TTL_S + 1)
        assert client.get(key)[0] is None
        assert client.token != token


async def test_a_write_with_a_token_that_has_run_out_is_made_once(config: EtcdConfig) -> None:
    async with (
        EtcdClient.connected(config) as client,
        Election.running(client, "here:1") as election,
        EtcdClient.connected(config) as idle,
    ):
        store = EtcdStore(idle, await election.campaign())
        revision = await store.compare_and_swap("job", MEMBERSHIP, 0)
        await asyncio.sleep(TOKEN_TTL_S + 1)
        await store.compare_and_swap("job", MEMBERSHIP, revision)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"password": "wrong"}, "user 'rdzv' or its password is refused"),
        ({"user": "nobody"}, "user 'nobody' or its password is refused"),
        ({"user": "", "password": ""}, "a user is asked for and none is given"),
        ({"prefix": "/else"}, "user 'rdzv' may not read it; .*readwrite --prefix /else/"),
        ({"cert": None, "key": None}, "a client certificate is given"),
        ({"ca": None}, "the CA has signed"),
    ],
)
async def test_a_mistake_is_named(config: EtcdConfig, given: dict[str, object], says: str) -> None:
    wrong = replace(config, timeout_ms=1_500, **given)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=f"etcd at 127.*{says}"):
        async with EtcdClient.connected(wrong):
            pass


async def test_members_that_another_authority_has_signed_are_not_trusted(
    config: EtcdConfig, tmp_path: Path
) -> None:
    stranger = Tls(tmp_path).authority("stranger")
    with pytest.raises(InvalidRequestError, match=r"CERTIFICATE_VERIFY_FAILED.*the CA has signed"):
        async with EtcdClient.connected(replace(config, ca=stranger, timeout_ms=1_500)):
            pass


async def test_plaintext_where_tls_is_spoken_is_refused_with_the_remedy(
    config: EtcdConfig,
) -> None:
    plain = replace(config, ca=None, cert=None, key=None, timeout_ms=1_500)
    with pytest.raises(RendezvousConnectionError, match="https"):
        async with EtcdClient.connected(plain):
            pass
