"""The call of a relay: each node's stream in it is served as a call of its own would be.

The relay is played by the tests, over real gRPC: it says what it likes, and when.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest

from rdzv.core.fleet.nodes import NodesTuning
from rdzv.core.model import Settings
from rdzv.errors import ERROR_CODE_METADATA_KEY, RendezvousConnectionError
from rdzv.runtime.clock import MonotonicClock
from rdzv.server.driver import Driver
from rdzv.server.replication.replica import Replica
from rdzv.server.rpc import relayed_streams
from rdzv.server.rpc.grpc_listener import serving
from rdzv.server.security.callers import Role
from rdzv.server.settings.config import PROTOCOL_VERSION, Config, Limits
from rdzv.stores.memory import MemoryStore
from rdzv.structs import replace
from rdzv.transport.endpoints import Listen
from rdzv.transport.node_stream import settings_message
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc
from tests.support.tls_files import Files

pytestmark = pytest.mark.slow

LONG_S = 100
PATIENT = NodesTuning(lease_ms=60_000, lease_max_ms=60_000, takeover_grace_ms=120_000)


@dataclass
class Served:
    """A server, and what is needed to look at it."""

    at: Listen
    replica: Replica
    driver: Driver
    clock: MonotonicClock

    def state(self, node_id: str) -> str:
        record = self.driver.leases.records.get(node_id)
        if record is None:
            return "lost"
        return "connected" if record.stream is not None else "away"

    def away_for_ms(self, node_id: str) -> int:
        record = self.driver.leases.records[node_id]
        assert record.stream is None
        return record.until_ms - record.since_ms


@asynccontextmanager
async def server(tuning: NodesTuning = PATIENT, **more: Any) -> AsyncIterator[Served]:
    clock = MonotonicClock()
    listen = more.pop("listen", Listen("127.0.0.1", 0))
    config = Config(listen, Path("/nowhere"), store="memory", nodes_tuning=tuning, **more)
    replica = Replica(clock, "memory", "1.2.3")
    async with Driver.running(MemoryStore(), clock, config) as driver:
        replica.lead(driver)
        tls = None
        if config.tls is not None:
            from rdzv.server.security.tls import Tls

            tls = Tls(config.tls)
        async with serving(replica, clock, config, tls=tls) as bound:
            yield Served(bound, replica, driver, clock)


@dataclass
class Relay:
    """A relay that says what it is told to, and sorts what it hears by the node's stream."""

    call: Any
    leadership: int = 0
    beat_ms: int = 0
    heard: dict[int, list[pb.ServerMessage]] = field(default_factory=dict)
    ends: dict[int, pb.RelayedEnd] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def say(self, *frames: pb.FromNode) -> None:
        async with self._writing:
            await self.call.write(pb.FromRelay(frames=frames))

    async def hear(self) -> None:
        while isinstance(message := await self.call.read(), pb.ToRelay):
            for frame in message.frames:
                if frame.HasField("ended"):
                    self.ends[frame.stream] = frame.ended
                else:
                    one = pb.ServerMessage.FromString(frame.message)
                    said = self.heard.setdefault(frame.stream, [])
                    said.extend((one, *one.more))
            self._changed.set()

    async def until(self, what: Callable[[], object]) -> None:
        async with asyncio.timeout(LONG_S):
            while not what():
                self._changed.clear()
                await self._changed.wait()

    async def hears(self, stream: int, body: str) -> pb.ServerMessage:
        def found() -> list[pb.ServerMessage]:
            return [one for one in self.heard.get(stream, []) if one.HasField(cast(Any, body))]

        await self.until(found)
        return found()[0]

    async def is_ended(self, stream: int) -> pb.RelayedEnd:
        await self.until(lambda: stream in self.ends)
        return self.ends[stream]

    async def beat(self) -> None:
        while True:
            await self.say()
            await asyncio.sleep(self.beat_ms / 2000)


@asynccontextmanager
async def relay(
    at: Listen, channel: Any = None, *, beats: bool = True, metadata: Any = None
) -> AsyncIterator[Relay]:
    async with channel or grpc.aio.insecure_channel(str(at)) as opened:
        stub = rdzv_pb2_grpc.RendezvousStub(opened)
        call: Any = stub.Relay(metadata=metadata)
        hello = pb.RelayHello(protocol_version=PROTOCOL_VERSION, version="1.2.3")
        await call.write(pb.FromRelay(hello=hello))
        first = await call.read()
        assert isinstance(first, pb.ToRelay), await call.details()
        made = Relay(call, first.welcome.leadership, first.welcome.beat_ms)
        tasks = [asyncio.create_task(made.hear())]
        tasks += [asyncio.create_task(made.beat())] if beats else []
        try:
            yield made
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(LONG_S):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def opened(stream: int, **caller: Any) -> pb.FromNode:
    return pb.FromNode(stream=stream, opened=pb.RelayedCaller(**caller))


def said(stream: int, **body: Any) -> pb.FromNode:
    return pb.FromNode(stream=stream, message=pb.NodeMessage(**body).SerializeToString())


def hello(stream: int, **more: Any) -> pb.FromNode:
    return said(
        stream,
        hello=pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            node_id=f"n{stream}",
            instance=f"i{stream}",
            kind=more.pop("kind", pb.AGENT_KIND_DAEMON),
            address="10.0.0.1",
            pid=7,
            takes_several=True,
            **more,
        ),
    )


def join(stream: int, nodes: int) -> pb.FromNode:
    offer = pb.Offer(address="10.0.0.1", local_world_size=8, store_port=29_400 + stream)
    settings = settings_message(Settings(nodes, nodes))
    return said(stream, join=pb.Join(rdzv_id="job-7", settings=settings, offer=offer))


def arrive(stream: int, nodes: int) -> Sequence[pb.FromNode]:
    return opened(stream), hello(stream), join(stream, nodes)


async def test_nodes_behind_a_relay_form_a_round_with_one_that_is_not() -> None:
    async with server() as s, relay(s.at) as one, relay(s.at) as other:
        assert one.leadership == s.driver.leadership
        await one.say(*arrive(1, 3), *arrive(2, 3))
        await other.say(*arrive(3, 3))
        lines = [
            (await at.hears(stream, "round_completed")).round_completed
            for at, stream in ((one, 1), (one, 2), (other, 3))
        ]
        assert sorted(line.group_rank for line in lines) == [0, 1, 2]


async def test_a_heartbeat_is_answered_by_the_server_itself() -> None:
    # So a fence is renewed by what the leader has heard, never by what a relay has.
    async with server() as s, relay(s.at) as by:
        await by.say(opened(1), hello(1), said(1, heartbeat=pb.Heartbeat(number=41)))
        assert (await by.hears(1, "heard")).heard.number == 41


async def test_the_end_of_a_relay_is_the_end_of_no_node() -> None:
    async with server() as s:
        async with relay(s.at) as by:
            for stream, kind in ((1, pb.AGENT_KIND_DAEMON), (2, pb.AGENT_KIND_FOREGROUND)):
                await by.say(opened(stream), hello(stream, kind=kind))
                await by.hears(stream, "welcome")
        await until(lambda: s.state("n1") == s.state("n2") == "away")
        for node in ("n1", "n2"):
            assert s.away_for_ms(node) == PATIENT.takeover_grace_ms
            assert s.driver.leases.records[node].firm, "a failure elsewhere does not shorten it"
        async with relay(s.at) as another:
            again = pb.FromNode(stream=9, message=hello(2).message)
            await another.say(opened(9), again)
            await another.hears(9, "welcome")
            assert s.state("n2") == "connected"


@pytest.mark.parametrize("kind", [pb.AGENT_KIND_DAEMON, pb.AGENT_KIND_FOREGROUND])
async def test_a_node_whose_own_stream_breaks_is_away_as_without_a_relay(kind: Any) -> None:
    tuning = replace(PATIENT, reconnect_grace_ms=40_000)
    async with server(tuning) as s, relay(s.at) as by:
        await by.say(opened(1), hello(1, kind=kind), opened(2), hello(2))
        await by.hears(1, "welcome")
        await by.say(pb.FromNode(stream=1, broken=pb.RelayedBreak()))
        await until(lambda: s.state("n1") == "away")
        foreground = kind == pb.AGENT_KIND_FOREGROUND
        assert s.away_for_ms("n1") == (40_000 if foreground else 60_000)
        assert s.state("n2") == "connected"


async def test_a_silent_relay_is_cut_off_and_none_of_its_nodes_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relayed_streams, "SILENT_MOST_MS", 4_000)
    tuning = NodesTuning(lease_ms=2_000, lease_max_ms=2_000, takeover_grace_ms=120_000)
    async with server(tuning) as s, relay(s.at, beats=False) as by, relay(s.at) as other:
        await by.say(opened(1), hello(1, kind=pb.AGENT_KIND_FOREGROUND))
        await by.hears(1, "welcome")
        await other.say(opened(2), hello(2))
        # It is the silence of one relay alone, twice as long as a lease: the others are heard.
        async with asyncio.timeout(LONG_S):
            while not by.call.done():
                await other.say(said(2, heartbeat=pb.Heartbeat()))
                assert s.state("n1") != "lost"
                await asyncio.sleep(0.1)
        assert "nothing was heard of the relay" in await by.call.details()
        assert (s.state("n1"), s.state("n2")) == ("away", "connected")
        assert s.away_for_ms("n1") == 120_000


async def test_a_silent_node_behind_a_relay_that_is_heard_is_given_up() -> None:
    tuning = NodesTuning(lease_ms=2_000, lease_max_ms=2_000)
    async with server(tuning) as s, relay(s.at) as by:
        await by.say(opened(1), hello(1), opened(2), hello(2))
        await by.hears(1, "welcome")
        await by.hears(2, "welcome")
        async with asyncio.timeout(LONG_S):
            while s.state("n1") != "lost":
                await by.say(said(2, heartbeat=pb.Heartbeat()))
                await asyncio.sleep(0.1)
        assert "lease ran out" in (await by.is_ended(1)).message
        assert s.state("n2") == "connected"


async def test_a_beating_relay_is_not_cut_off() -> None:
    tuning = NodesTuning(lease_ms=2_000, lease_max_ms=2_000)
    async with server(tuning) as s, relay(s.at) as by:
        await asyncio.sleep(2.5)
        assert not by.call.done()
        await by.say(opened(1), hello(1))
        await by.hears(1, "welcome")


async def test_what_one_node_does_wrong_ends_its_stream_alone() -> None:
    async with server(limits=Limits(inbox=16)) as s, relay(s.at) as by:
        await by.say(opened(1), hello(1))
        await by.hears(1, "welcome")
        await by.say(
            opened(2),
            said(2, heartbeat=pb.Heartbeat()),
            opened(3),
            pb.FromNode(stream=3, message=b"\xff\xff"),
            opened(4),
            *[said(4, heartbeat=pb.Heartbeat())] * 17,
            said(99, heartbeat=pb.Heartbeat()),
        )
        assert "must be a hello" in (await by.is_ended(2)).message
        assert "cannot be read" in (await by.is_ended(3)).message
        assert (await by.is_ended(4)).code == "LimitExceededError"
        await by.say(said(1, heartbeat=pb.Heartbeat(number=1)))
        await by.hears(1, "heard")


async def test_a_node_that_has_left_and_finished_ends_in_order() -> None:
    async with server() as s, relay(s.at) as by:
        await by.say(opened(1), hello(1), pb.FromNode(stream=1, finished=pb.RelayedFinish()))
        assert (await by.is_ended(1)).code == ""
        assert s.state("n1") == "away"


async def test_a_server_that_stops_leading_ends_the_call() -> None:
    async with server() as s, relay(s.at) as by:
        await by.say(opened(1), hello(1))
        await by.hears(1, "welcome")
        s.replica.stand_by(RendezvousConnectionError("another leads"))
        assert await by.call.code() == grpc.StatusCode.UNAVAILABLE
        # Its next call is refused, as that of a node is.
        async with grpc.aio.insecure_channel(str(s.at)) as channel:
            again: Any = rdzv_pb2_grpc.RendezvousStub(channel).Relay()
            await again.write(pb.FromRelay())
            trailing = dict(await again.trailing_metadata())
            assert trailing[ERROR_CODE_METADATA_KEY] == "NotLeaderError"


async def test_who_may_relay_and_whom(tmp_path: Path) -> None:
    files = Files(tmp_path)
    config = {"tls": files.server(), "auth": True}

    def channel(credentials: Any, at: Listen) -> Any:
        from rdzv.transport.endpoints import parse_endpoint

        return credentials.aio_channel(parse_endpoint(str(at)), ())

    async with server(**config) as s:
        with pytest.raises(grpc.aio.AioRpcError, match="needs the role relay"):
            async with relay(s.at, channel(files.node("n1"), s.at)):
                pass
        async with relay(s.at, channel(files.client("r1", "relay"), s.at)) as by:
            await by.say(
                *(opened(1, name="n1", roles=["node"]), hello(1)),
                *(opened(2, name="n1", roles=["node"]), hello(2)),
                *(opened(3, name="ada", roles=["admin"]), hello(3)),
                *(opened(4), hello(4)),
                *(opened(5, authorization="Bearer rdzv_made_up"), hello(5)),
                *(opened(6, name="no name", roles=["node"]), hello(6)),
            )
            await by.hears(1, "welcome")
            assert s.driver.streams.of("n1").caller.proof == "certificate, by r1 (certificate)"
            ends = {stream: (await by.is_ended(stream)) for stream in (2, 3, 4, 5, 6)}
            assert "may not speak for node n2" in ends[2].message
            assert "needs the role" in ends[3].message, "nobody is an admin by way of a relay"
            codes = [ends[stream].code for stream in (4, 5, 6)]
            assert codes == ["UnauthenticatedError"] * 3


async def test_a_relay_whose_token_is_revoked_is_cut_off() -> None:
    async with server(auth=True) as s:
        token, text = await s.driver.tokens.create("r1", [Role.RELAY], 0)
        shown = (("authorization", f"Bearer {text}"),)
        async with relay(s.at, metadata=shown) as by:
            await by.say(opened(1, name="n1", roles=["node"]), hello(1))
            await by.hears(1, "welcome")
            await s.driver.tokens.revoke(token.id)
            assert await by.call.code() == grpc.StatusCode.UNAUTHENTICATED
            await until(lambda: s.state("n1") == "away")
