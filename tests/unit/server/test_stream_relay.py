"""rdzvd --relay, between nodes that the tests play and a real server, all over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest

from rdzv.errors import (
    ERROR_CODE_METADATA_KEY,
    LEADER_METADATA_KEY,
    LimitExceededError,
    RendezvousConnectionError,
)
from rdzv.server.security.tls import Tls
from rdzv.server.settings.config import Config, RelayTo, Timings
from rdzv.server.stream_relay import upstream
from rdzv.server.stream_relay.node_end import NODE_BYTES, NodeEnd
from rdzv.server.stream_relay.running import relaying
from rdzv.server.stream_relay.service import RelayService
from rdzv.server.stream_relay.upstream import Link, Upstream
from rdzv.transport.channels import PLAIN, Credentials
from rdzv.transport.endpoints import Listen, parse_endpoint
from rdzv.transport.node_stream import Backoff
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc
from tests.support.tls_files import Files
from tests.unit.server.test_relayed_streams import LONG_S, PATIENT, hello, join, server, until

from ports import free_port  # isort: skip

pytestmark = pytest.mark.slow


@asynccontextmanager
async def relay(
    *servers: Listen, timings: Timings | None = None, to: dict[str, Any] | None = None, **more: Any
) -> AsyncIterator[Listen]:
    config = Config(Listen("127.0.0.1", 0), Path("/nowhere"), timings=timings or Timings(), **more)
    endpoints = tuple(parse_endpoint(str(one)) for one in servers)
    tls = Tls(config.tls) if config.tls else None
    async with relaying(config, RelayTo(endpoints, **(to or {})), tls) as bound:
        yield bound


class Node:
    """One node's stream at a relay."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def say(self, frame: pb.FromNode) -> None:
        await self.call.write(pb.NodeMessage.FromString(frame.message))

    async def hears(self, body: str) -> pb.ServerMessage:
        async with asyncio.timeout(LONG_S):
            while isinstance(message := await self.call.read(), pb.ServerMessage):
                for one in (message, *message.more):
                    if one.HasField(cast(Any, body)):
                        return one
        raise AssertionError(f"{await self.call.code()} {await self.call.details()}")

    async def error(self) -> str:
        async with asyncio.timeout(LONG_S):
            trailing = dict(await self.call.trailing_metadata() or ())
            return f"{trailing.get(ERROR_CODE_METADATA_KEY)}: {await self.call.details()}"


@asynccontextmanager
async def node(
    at: Listen, number: int, credentials: Credentials = PLAIN, **more: Any
) -> AsyncIterator[Node]:
    async with credentials.aio_channel(parse_endpoint(str(at)), ()) as channel:
        stub: Any = rdzv_pb2_grpc.RendezvousStub(channel)
        made = Node(stub.Attach(metadata=credentials.metadata(parse_endpoint(str(at)))))
        await made.say(hello(number, **more))
        try:
            yield made
        finally:
            made.call.cancel()


async def test_nodes_of_two_relays_are_in_one_round() -> None:
    async with server() as s, relay(s.at) as one, relay(s.at) as other, AsyncExitStack() as stack:
        nodes = []
        for number, at in ((1, one), (2, one), (3, other), (4, s.at)):
            nodes.append(await stack.enter_async_context(node(at, number)))
            await nodes[-1].say(join(number, 4))
        ranks = [(await n.hears("round_completed")).round_completed.group_rank for n in nodes]
        assert sorted(ranks) == [0, 1, 2, 3]


async def test_a_node_that_is_gone_is_gone_and_one_whose_relay_is_gone_is_awaited() -> None:
    async with server() as s:
        async with relay(s.at) as at, node(at, 1) as first:
            await first.hears("welcome")
            async with node(at, 2, kind=pb.AGENT_KIND_FOREGROUND) as second:
                await second.hears("welcome")
            await until(lambda: s.state("n2") == "lost")
            assert s.state("n1") == "connected"
        await until(lambda: s.state("n1") == "away")
        assert s.away_for_ms("n1") == PATIENT.takeover_grace_ms


async def test_nodes_come_back_by_the_same_relay_when_the_server_has_changed() -> None:
    before, after = (Listen("127.0.0.1", free_port()) for _ in range(2))
    # Longer than this takes: a stream that comes while there is no server is held, not refused.
    held = Timings(leaderless_hold_ms=int(LONG_S * 1000))
    async with relay(before, after, timings=held) as at:
        async with server(listen=before) as s, node(at, 1) as first:
            await first.hears("welcome")
            s.replica.stand_by(RendezvousConnectionError("another leads"))
            # Which of the two ends comes first, is open.
            error = await first.error()
            assert "another leads" in error or "the relay has lost its server" in error
        async with node(at, 1) as again, server(listen=after) as s:
            await again.hears("welcome")
            assert s.state("n1") == "connected"


async def test_a_relay_outlives_a_server_that_ends_while_it_writes() -> None:
    """Its reader and its writer learn of the end; two errors ended the relay."""

    class Broken:
        async def write(self, message: pb.FromRelay) -> None:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, "Core")

    link = Link()
    link.open(NodeEnd(1), pb.RelayedCaller())
    async with asyncio.timeout(LONG_S):
        await link.write_all(Broken(), LONG_S)


async def test_a_server_that_cannot_be_reached_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "BACKOFF", Backoff(first_s=0.01, max_s=0.01))
    nobody = Listen("127.0.0.1", free_port())
    tried: list[float] = []
    aio_channel = Credentials.aio_channel
    monkeypatch.setattr(
        Credentials, "aio_channel", lambda *words: (tried.append(0), aio_channel(*words))[1]
    )
    async with relay(nobody):
        await until(lambda: len(tried) > 3)
    said = [text for text in caplog.messages if "the call to the server at" in text]
    assert len(said) == 1, caplog.text


async def test_the_stream_of_a_node_that_is_gone_ends_at_its_first_write() -> None:
    class Gone:
        """A call that can be read, but not written."""

        def __init__(self) -> None:
            self.messages, self.writes = [b"hello"], 0

        async def read(self) -> bytes:
            if not self.messages:
                await asyncio.get_running_loop().create_future()
            return self.messages.pop()

        async def write(self, message: bytes) -> None:
            self.writes += 1
            raise grpc.aio.UsageError("RPC already finished.")

        def invocation_metadata(self) -> None: ...

        def auth_context(self) -> dict[str, Any]:
            return {}

        def peer(self) -> str:
            return "ipv4:127.0.0.1:4711"

    class There:
        """The way to a server that has sent two messages, and then has ended the stream."""

        made = Link()

        async def link(self, timeout_s: float) -> Link:
            return self.made

    there, gone = There(), Gone()
    service = RelayService(cast(Upstream, there), Config(Listen("", 0), Path()), lambda: True)
    attached = asyncio.create_task(service.attach(None, gone))
    await until(lambda: there.made.nodes)
    for frame in (pb.ToNode(stream=1, message=b"1"), pb.ToNode(stream=1, message=b"2")):
        there.made.take(frame)
    there.made.take(pb.ToNode(stream=1, ended=pb.RelayedEnd()))
    async with asyncio.timeout(LONG_S):
        await attached
    assert (gone.writes, there.made.nodes) == (1, 0)


async def test_without_a_server_a_stream_is_refused_after_a_while() -> None:
    nobody = Listen("127.0.0.1", free_port())
    async with relay(nobody, timings=Timings(leaderless_hold_ms=10)) as at, node(at, 1) as first:
        assert "this relay cannot reach its server" in await first.error()


@pytest.mark.parametrize("by_relay", [False, True])
async def test_a_node_too_busy_to_send_its_hello_is_told_to_try_again(by_relay: bool) -> None:
    short = Timings(hello_timeout_ms=10)
    async with server(timings=short) as s, relay(s.at, timings=short) as relay_at:
        at = parse_endpoint(str(relay_at if by_relay else s.at))
        async with PLAIN.aio_channel(at, ()) as channel:
            stub: Any = rdzv_pb2_grpc.RendezvousStub(channel)
            silent = Node(stub.Attach())
            await silent.call.wait_for_connection()
            error = await silent.error()
    assert error.startswith(f"{RendezvousConnectionError.code}: no hello within 0.01 s")


async def test_the_end_of_a_stream_says_what_the_server_said() -> None:
    async with server() as s, relay(s.at) as at, node(at, 1) as first:
        await first.hears("welcome")
        async with node(at, 1) as second:
            await second.hears("welcome")
            assert "a newer one is open" in await first.error()
        await until(lambda: s.state("n1") == "away")


async def test_a_node_behind_a_relay_is_not_told_of_servers_that_stand_by() -> None:
    async with server() as s, relay(s.at) as at, node(at, 1) as first, node(s.at, 2) as second:
        await first.hears("welcome")
        await second.hears("welcome")
        s.driver.connections.note_standing_by(("b:1",))
        await second.hears("servers")
        await first.say(join(1, 1))
        async with asyncio.timeout(LONG_S):
            heard = [await first.call.read()]
            while not any(one.HasField("joined") for one in (heard[-1], *heard[-1].more)):
                heard.append(await first.call.read())
        assert not any(one.HasField("servers") for m in heard for one in (m, *m.more))


async def test_a_caller_of_anything_else_is_sent_to_the_server() -> None:
    async with server() as s, relay(s.at) as at, grpc.aio.insecure_channel(str(at)) as channel:
        stub: Any = rdzv_pb2_grpc.ControlStub(channel)
        for call in (stub.ListJobs(pb.ListJobsRequest()), stub.WatchJob(pb.GetStatusRequest())):
            trailing = dict(await call.trailing_metadata())
            assert trailing[ERROR_CODE_METADATA_KEY] == "NotLeaderError"
            assert trailing[LEADER_METADATA_KEY] == str(s.at)


async def test_a_node_is_who_its_certificate_or_token_says(tmp_path: Path) -> None:
    files = Files(tmp_path)
    shown = files.client("r1", "relay")
    to = {"ca": shown.ca, "cert": shown.cert, "key": shown.key}
    open_door = files.server(client_ca=False)
    async with (
        server(tls=files.server(), auth=True) as s,
        relay(s.at, to=to, tls=files.server()) as strict,
        relay(s.at, to=to, tls=open_door) as lax,
    ):
        _, text = await s.driver.tokens.create("n2", ["node"], 0)  # type: ignore[list-item]
        token = tmp_path / "token"
        token.write_text(text)
        by_token = Credentials(files.ca, token_file=token)
        async with (
            node(strict, 1, files.node("n1")) as first,
            node(lax, 2, by_token) as second,
            node(strict, 3, files.node("n4")) as stranger,
            node(lax, 5, Credentials(files.ca)) as nobody,
        ):
            await first.hears("welcome")
            await second.hears("welcome")
            proofs = [s.driver.streams.of(name).caller.proof for name in ("n1", "n2")]  # type: ignore[union-attr]
            assert proofs[0] == "certificate, by r1 (certificate)"
            assert proofs[1].startswith("token ")
            assert (await stranger.error()).startswith("DeniedError: n4")
            assert (await nobody.error()).startswith("UnauthenticatedError")


async def test_a_token_is_not_passed_on_where_others_could_read_it(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("rdzv_secret")
    elsewhere = Listen("192.0.2.1", 7)
    async with relay(elsewhere) as at, node(at, 1, Credentials(token_file=token)) as first:
        assert "passes no tokens on" in await first.error()


def taken(end: NodeEnd) -> bytes | None:
    return asyncio.run(end.take())


@pytest.mark.parametrize(
    "fill", [lambda end: [end.put(b"x") for _ in range(3)], lambda end: end.put(b"x" * NODE_BYTES)]
)
def test_what_waits_for_a_node_that_does_not_read_has_a_bound(
    fill: Callable[[NodeEnd], object],
) -> None:
    end = NodeEnd(3)
    fill(end)
    with pytest.raises(LimitExceededError, match="reads its stream too slowly"):
        end.put(b"y")


def test_what_waits_is_read_before_the_end() -> None:
    end = NodeEnd(3)
    end.put(b"a")
    end.end(None)
    end.end(LimitExceededError("too late to be the reason"))
    assert [taken(end), taken(end), end.error] == [b"a", None, None]
