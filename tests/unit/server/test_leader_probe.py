"""A stand-by watches the leader's process: what it does when connections end or are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rdzv.errors import RendezvousConnectionError
from rdzv.server.replication import replica
from rdzv.server.replication.replica import LeaderProbe
from rdzv.stores.election_session import Leader
from rdzv.structs import replace

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0


class FakeElection:
    """Says who leads, and notes who is deposed."""

    def __init__(self, address: str = "own:1") -> None:
        self.address = address
        self.leader: Leader | None = None
        self.deposed: list[Leader] = []
        self.refusals: list[RendezvousConnectionError] = []
        self.is_late = False
        """Whether another server has changed the term, which is not seen here yet."""
        self._news = asyncio.Condition()

    async def become(self, leader: Leader | None) -> None:
        async with self._news:
            self.leader = leader
            self._news.notify_all()

    async def changed(self, seen: Leader | None) -> Leader | None:
        async with self._news:
            await self._news.wait_for(lambda: self.leader != seen)
            return self.leader

    async def depose(self, leader: Leader) -> bool:
        if self.refusals:
            raise self.refusals.pop()
        self.deposed.append(leader)
        if self.is_late:
            await asyncio.sleep(0)
            return False
        await self.become(None)
        return True


class Process:
    """A leader's listening socket."""

    def __init__(self) -> None:
        self.accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self.port = 0

    async def start(self) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers.append(writer)
            self.accepted.put_nowait(writer)

        self._server = await asyncio.start_server(accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop_listening(self) -> None:
        assert self._server is not None
        self._server.close()

    async def end(self) -> None:
        self.stop_listening()
        for writer in self._writers:
            writer.transport.abort()
        # Each is closed by the loop.
        await asyncio.sleep(0)

    @property
    def leader(self) -> Leader:
        return Leader(f"127.0.0.1:{self.port}", 1_000, 3, word_ms=600)


@pytest.fixture(name="process")
async def _process(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Process]:
    monkeypatch.setattr(replica, "RETRY_S", 0.01)
    process = Process()
    await process.start()
    yield process
    await process.end()


@asynccontextmanager
async def probing(election: FakeElection) -> AsyncIterator[asyncio.Queue[Leader | None]]:
    """Yield the suspects, as they change."""
    suspects: asyncio.Queue[Leader | None] = asyncio.Queue()
    taking_part: Any = election
    probe = LeaderProbe(taking_part, lambda: suspects.put_nowait(probe.suspect))
    async with asyncio.timeout(DEADLINE_S):
        task = asyncio.create_task(probe.run())
        try:
            yield suspects
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.mark.quick
async def test_one_whose_connection_ends_and_that_refuses_another_is_deposed(
    process: Process,
) -> None:
    election = FakeElection()
    election.refusals = [RendezvousConnectionError("etcd is away for a moment")]
    async with probing(election) as suspects:
        await election.become(process.leader)
        connection = await process.accepted.get()
        process.stop_listening()
        connection.transport.abort()
        assert await suspects.get() == process.leader
        # No longer: another may lead.
        assert await suspects.get() is None
        assert election.deposed == [process.leader]


async def test_one_whose_term_another_server_has_changed_is_not_deposed_again(
    process: Process,
) -> None:
    election = FakeElection()
    election.is_late = True
    async with probing(election) as suspects:
        await election.become(process.leader)
        connection = await process.accepted.get()
        process.stop_listening()
        connection.transport.abort()
        assert await suspects.get() == process.leader
        while not election.deposed:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert election.deposed == [process.leader]


@pytest.mark.quick
async def test_one_that_ends_a_connection_and_accepts_another_is_left_alone(
    process: Process,
) -> None:
    election = FakeElection()
    async with probing(election) as suspects:
        await election.become(process.leader)
        connection = await process.accepted.get()
        connection.transport.abort()
        assert await suspects.get() == process.leader
        await process.accepted.get()
        assert await suspects.get() is None
        assert election.deposed == []


async def test_one_that_was_never_reached_is_left_to_its_lease(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall refuses as a dead process does; servers would depose each other without end."""
    process.stop_listening()
    election = FakeElection()
    refused: asyncio.Queue[None] = asyncio.Queue()
    connect = asyncio.open_connection

    async def counted(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await connect(host, port)
        except ConnectionRefusedError:
            refused.put_nowait(None)
            raise

    monkeypatch.setattr(asyncio, "open_connection", counted)
    async with probing(election):
        await election.become(process.leader)
        for _ in range(3):
            await refused.get()
        # The next term begins anew, at whatever the probe did before.
        await process.start()
        again = replace(process.leader, since_unix_ms=2_000)
        await election.become(again)
        connection = await process.accepted.get()
        assert election.deposed == []
        process.stop_listening()
        connection.transport.abort()
        await election.changed(again)
        assert election.deposed == [again]


async def test_the_former_process_of_this_very_address_is_deposed_once(process: Process) -> None:
    election = FakeElection("here:1")
    former = Leader("here:1", 1_000, 3, word_ms=600)
    async with probing(election):
        await election.become(former)
        await election.changed(former)
        assert election.deposed == [former]
        # Two servers that were given one address by mistake do not take turns.
        await election.become(replace(former, since_unix_ms=2_000))
        await election.become(process.leader)
        await process.accepted.get()
        assert election.deposed == [former]
