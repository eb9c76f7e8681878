"""A driver whose clock the test moves and whose store fails on demand, and its nodes' streams."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from rdzv.core.commands import Command, Join, Resume
from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.fleet.nodes import AgentKind
from rdzv.core.model import Assignment, Membership, NodeState, Offer, Settings, State
from rdzv.core.snapshots import SnapshotsKnown
from rdzv.errors import RendezvousConnectionError, RendezvousError
from rdzv.messages import Announcement, Belief, Hello, Report
from rdzv.server.diagnosis.round_reports import Starts
from rdzv.server.driver import Driver
from rdzv.server.operations.node_operations import known_nodes, shown_nodes
from rdzv.server.sessions.streams import Stream
from rdzv.server.telemetry.server_metrics import Metrics
from rdzv.stores.base import Record, RevisionConflictError, Stored
from rdzv.stores.memory import MemoryStore
from rdzv.structs import replace
from rdzv.view.answers import JobStatus, JobSummary, Node
from tests.support.settings import rdzvd_settings

A = TypeVar("A", bound=Announcement)


@dataclass
class Call:
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.at_ms = 1_000_000
        self.calls: list[tuple[int, int, Call]] = []
        self._order = itertools.count()

    def now_ms(self) -> int:
        return self.at_ms

    def call_at(self, at_ms: int, callback: Callable[[], None]) -> Call:
        call = Call(callback)
        heapq.heappush(self.calls, (at_ms, next(self._order), call))
        return call

    async def advance(self, for_ms: int) -> None:
        """Let time pass; each timer fires at its time."""
        end_ms = self.at_ms + for_ms
        await settle()
        while self.calls and self.calls[0][0] <= end_ms:
            at_ms, _, call = heapq.heappop(self.calls)
            self.at_ms = max(self.at_ms, at_ms)
            if not call.cancelled:
                call.callback()
                await settle()
        self.at_ms = end_ms

    async def pause(self, for_ms: int) -> None:
        """Let time pass while the whole process stands still; then everything is late."""
        self.at_ms += for_ms
        await self.advance(0)


async def settle() -> None:
    """Let every task run as far as it can without time passing."""
    # The number of ready callbacks: asyncio does not show it, and sixty idle turns are most of the
    # time of the quick tests.
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    for _ in range(60):
        await asyncio.sleep(0)
        if not ready:
            return


class FlakyStore(MemoryStore):
    """A store whose writes can fail: before they happen, after, or with unknown outcome."""

    def __init__(self) -> None:
        super().__init__()
        self.away: RendezvousError | None = None
        self.reads = False
        """It can be read while it is away: its disk is full."""
        self.next_write: str = ""
        self.gate: asyncio.Event | None = None
        self.writes = 0
        self.before_write: Callable[[], None] = lambda: None

    async def load(self, rdzv_id: str) -> Stored | None:
        if self.away and not self.reads:
            raise self.away
        return await super().load(rdzv_id)

    async def compare_and_swap(
        self,
        rdzv_id: str,
        membership: Membership,
        revision: int,
        records: Sequence[Record] = (),
    ) -> int:
        self.before_write()
        if self.gate:
            await self.gate.wait()
        if self.away:
            raise self.away
        how, self.next_write = self.next_write, ""
        if how == "lost before":
            self.away = RendezvousConnectionError("no answer")
            raise self.away
        if how == "conflict":
            raise RevisionConflictError("somebody else has written it")
        new = await super().compare_and_swap(rdzv_id, membership, revision, records)
        self.writes += 1
        if how == "lost after":
            self.away = RendezvousConnectionError("no answer")
            raise self.away
        return new


def hello(node_id: str = "n1", instance: str = "one") -> Hello:
    return Hello(node_id, instance, AgentKind.DAEMON, "10.0.0.1", 99, 0, 0)


def a_stream(number: int = 1) -> Stream:
    """Return a stream of n1 that belongs to no server."""
    return Stream(number, 1, hello(), Metrics().counts)


class Server:
    def __init__(self, driver: Driver, clock: FakeClock) -> None:
        self.driver = driver
        self.clock = clock

    def attach(self, node_id: str, instance: str = "one", **more: object) -> Stream:
        return self.driver.connections.attach(replace(hello(node_id, instance), **more))  # type: ignore[arg-type]

    async def connect(self, node_id: str, *beliefs: Belief, **more: object) -> Stream:
        stream = self.attach(node_id, **more)  # type: ignore[arg-type]
        await self.driver.recovery.greet(stream, beliefs)
        await settle()
        return stream

    async def come_back(self, node_id: str, **more: object) -> Stream:
        """Connect a node whose workers of round 0 run."""
        stream = self.attach(node_id, **more)  # type: ignore[arg-type]
        resume = Resume(node_id, stream.incarnation, "run-1", 0)
        belief = Belief("job-7", "run-1", 0, has_workers=True, commands=(resume,))
        await self.driver.recovery.greet(stream, [belief])
        await settle()
        return stream

    async def hear(self, stream: Stream, command: Command, rdzv_id: str = "job-7") -> None:
        await self.driver.commands.hear(stream, rdzv_id, command)

    def report(self, stream: Stream, said: Report) -> None:
        self.driver.reports.take(stream, said)

    async def join(self, stream: Stream, nodes: tuple[int, int] = (2, 2)) -> None:
        await self.hear(stream, join(stream, nodes))
        await settle()

    async def live(self, for_ms: int, *streams: Stream) -> None:
        """Let time pass in which these nodes send their heartbeats."""
        for _ in range(for_ms // 1_000):
            for stream in streams:
                self.driver.connections.heard(stream)
            await self.clock.advance(1_000)

    async def pair(self) -> tuple[Stream, Stream]:
        """Two nodes in a round together that have read all their messages."""
        n1, n2 = await self.connect("n1"), await self.connect("n2")
        await self.join(n1)
        await self.join(n2)
        assert [type(read(stream)[-1]) for stream in (n1, n2)] == [Assignment, Assignment]
        return n1, n2

    async def status(self, rdzv_id: str = "job-7") -> JobStatus:
        return await self.driver.operations.status(rdzv_id)

    def nodes(self, *node_ids: str) -> list[Node]:
        return shown_nodes(self.driver, node_ids or sorted(known_nodes(self.driver)))

    def node(self, node_id: str) -> Node:
        return self.nodes(node_id)[0]

    async def change_node(self, change: str, node_id: str, *given: Any, **more: Any) -> Node:
        await getattr(self.driver.fleet, change)(node_id, *given, **more)
        return self.node(node_id)

    async def states(self, rdzv_id: str = "job-7") -> dict[str, NodeState]:
        return {n.node_id: n.state for n in (await self.status(rdzv_id)).nodes}

    async def listed(self) -> list[JobSummary]:
        summary = self.driver.operations.summary
        return [summary(job) async for job in self.driver.jobs.each() if job.membership.run]

    def state(self, rdzv_id: str) -> State:
        return self.driver.jobs.peek(rdzv_id) or State(
            Membership(rdzv_id, "", 0, Settings(1, 1), 0)
        )

    def progress(self, rdzv_id: str) -> tuple[RankProgress, ...]:
        return self.driver.rounds.progress(self.state(rdzv_id))

    def starts(self, rdzv_id: str) -> Mapping[str, Starts]:
        return self.driver.rounds.starts(self.state(rdzv_id))

    def snapshots(self, rdzv_id: str) -> SnapshotsKnown:
        return self.driver.snapshots.shown(self.state(rdzv_id))


@asynccontextmanager
async def server(
    store: MemoryStore | None = None,
    clock: FakeClock | None = None,
    store_name: str = "sqlite",
    **given: object,
) -> AsyncIterator[Server]:
    config = rdzvd_settings(store=store_name, **given)
    clock = clock or FakeClock()
    uids = (f"run-{number}" for number in itertools.count(1))
    async with Driver.running(
        store or MemoryStore(), clock, config, new_uid=lambda: next(uids)
    ) as driver:
        yield Server(driver, clock)


def join(stream: Stream, nodes: tuple[int, int] = (2, 2), **more: object) -> Join:
    offer = Offer("10.0.0.1", 2, machine="m1", store_port=4711)
    command = Join(stream.node_id, stream.incarnation, "", Settings(*nodes), offer)
    return replace(command, **more)  # type: ignore[arg-type]


def running(stream: Stream, line: Assignment) -> Belief:
    """The belief of a node whose workers run."""
    resume = Resume(stream.node_id, stream.incarnation, line.run, line.round)
    return Belief(line.rdzv_id, line.run, line.round, has_workers=True, commands=(resume,))


def read(stream: Stream) -> list[Announcement]:
    """Take everything out of a stream's outbox."""
    return stream.outbox.take_now()


def last(stream: Stream, kind: type[A]) -> A:
    """Take everything out of a stream's outbox, and return the last message, of this kind."""
    told = read(stream)[-1]
    assert isinstance(told, kind)
    return told


async def end_of(stream: Stream) -> RendezvousError | None:
    async with asyncio.timeout(60):
        return await stream.ended()
