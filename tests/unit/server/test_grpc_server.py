"""Bytes that gRPC rejects, before any authentication: the server continues to serve."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rdzv import errors
from rdzv.runtime.clock import Clock
from rdzv.server.driver import Driver
from rdzv.server.operations.handlers import Server
from rdzv.server.replication.replica import Replica
from rdzv.server.rpc import grpc_listener
from rdzv.server.rpc.grpc_listener import grpc_server, serving
from rdzv.server.settings.server_settings import Timings
from rdzv.stores.memory import MemoryStore
from rdzv.transport.endpoints import Listen
from rdzv.v1 import rdzv_pb2 as pb
from tests.support.settings import rdzvd_settings

pytestmark = pytest.mark.slow

LONG_S = 100
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
HEADERS = {
    b":method": b"POST",
    b":scheme": b"http",
    b":path": b"/grpc.health.v1.Health/Check",
    b":authority": b"h",
    b"content-type": b"application/grpc",
    b"te": b"trailers",
}
PING_ACK = b"\0\0\x08\x06\x01\0\0\0\0later..."
DATA, RESET, PING = 0, 3, 6
"""Types of HTTP/2 frames."""
CALLS_AT_ONCE = 1_500
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def call(headers: dict[bytes, bytes]) -> bytes:
    """Call an rpc, in HTTP/2 without compression, and without a request."""
    return PREFACE + headers_frame(headers, 1, flags=5)


def headers_frame(headers: dict[bytes, bytes], stream: int, flags: int) -> bytes:
    block = b"".join(
        b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value
        for name, value in headers.items()
    )
    return frame_head(len(block), 1, flags, stream) + block


def frame_head(length: int, kind: int, flags: int, stream: int) -> bytes:
    return length.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")


def calls(count: int) -> bytes:
    """Call one rpc often at once, with empty requests, and then ping."""
    asked = (
        headers_frame(HEADERS, stream, flags=4) + frame_head(5, DATA, 1, stream) + bytes(5)
        for stream in range(1, 2 * count, 2)
    )
    return PREFACE + b"".join(asked) + frame_head(8, 6, 0, 0) + b"later..."


def frames(received: bytes) -> Counter[int]:
    """Count the whole frames that were received, by type."""
    counted: Counter[int] = Counter()
    at = 0
    while at + 9 <= len(received):
        counted[received[at + 3]] += 1
        at += 9 + int.from_bytes(received[at : at + 3], "big")
    return counted


@asynccontextmanager
async def server(timings: Timings | None = None) -> AsyncIterator[Listen]:
    clock = Clock()
    config = rdzvd_settings(store="memory", timings=timings or Timings())
    replica = Replica(clock, "memory", "1.2.3")
    async with Driver.running(MemoryStore(), clock, config) as driver:
        replica.lead(driver)
        async with serving(Server(replica, clock, config)) as bound:
            yield bound


async def answer(at: Listen, said: bytes, end: bytes) -> bytes:
    """Return the data that a connection receives, up to the given words."""
    reader, writer = await asyncio.open_connection(at.host, at.port)
    try:
        writer.write(said)
        async with asyncio.timeout(LONG_S):
            return await reader.readuntil(end)
    finally:
        writer.close()


async def until_hung_up(at: Listen, said: bytes) -> None:
    """Send data, and wait until the server has closed the connection."""
    reader, writer = await asyncio.open_connection(at.host, at.port)
    try:
        writer.write(said)
        async with asyncio.timeout(LONG_S):
            await reader.read()
    finally:
        writer.close()


def above_debug(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines about calls; lines about a slow machine do not matter."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno > logging.DEBUG and record.name != "rdzv.driver"
    ]


async def test_a_path_that_is_no_utf8_is_unknown_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with server() as at, grpc.aio.insecure_channel(str(at)) as channel:
        health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=LONG_S)
        await watch.read()
        for _ in range(3):
            heard = await answer(at, call({**HEADERS, b":path": b"/\xc9"}), b"Method not found!")
            assert b"\x0bgrpc-status\x0212" in heard, "UNIMPLEMENTED"
        assert not watch.done(), "the streams of others go on"
        assert await health.Check(health_pb2.HealthCheckRequest(), timeout=LONG_S)
        watch.cancel()
    assert above_debug(caplog) == []


@pytest.mark.slow
async def test_a_header_that_is_no_utf8_leaves_nothing_of_it_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Pings get no answer here, which ends such a connection.
    async with server(Timings(ping_interval_ms=200, ping_timeout_ms=200)) as at:
        for name, value in ((b"\xaamine", b""), (b"x", b"\xaamine")):
            await until_hung_up(at, call({**HEADERS, name: value}))
    assert above_debug(caplog) == []
    assert "mine" not in caplog.text


@pytest.mark.quick
async def test_a_method_that_nobody_has_is_unimplemented() -> None:
    async with server() as at, grpc.aio.insecure_channel(str(at)) as channel:
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary("/rdzv.v1.Control/OfALaterVersion")(b"", timeout=LONG_S)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_what_is_no_message_of_reflection_is_refused_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with server() as at, grpc.aio.insecure_channel(str(at)) as channel:
        stream = channel.stream_stream(REFLECTION)(timeout=LONG_S)
        await stream.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be read") as refused:
            await stream.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert above_debug(caplog) == []


@pytest.mark.parametrize(
    ("first", "code", "error"),
    [
        # A node that is only busy tries again.
        (None, errors.RendezvousConnectionError.code, "no hello within 0.05 s"),
        (b"\xff\xff\xff", errors.InvalidRequestError.code, "a message cannot be read"),
        (pb.NodeMessage(heartbeat=pb.Heartbeat()).SerializeToString(),
         errors.InvalidRequestError.code, "the first message of a stream must be a hello"),
    ],
)  # fmt: skip
async def test_a_node_that_does_not_begin_with_a_hello_is_refused(
    caplog: pytest.LogCaptureFixture,
    first: bytes | None,
    code: str,
    error: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rdzv.server.rpc.rendezvous_service.HELLO_TIMEOUT_S", 0.05)
    async with server() as at, grpc.aio.insecure_channel(str(at)) as channel:
        stream = channel.stream_stream("/rdzv.v1.Rendezvous/Attach")(timeout=LONG_S)
        if first is not None:
            await stream.write(first)
        trailing = dict(await stream.trailing_metadata() or ())
        assert trailing[errors.ERROR_CODE_METADATA_KEY] == code
        assert error in (await stream.details() or "")
    assert above_debug(caplog) == []


async def test_a_server_of_grpc_that_ends_by_itself_ends_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[grpc.aio.Server] = []

    def keeping(*args: Any) -> grpc.aio.Server:
        made.append(grpc_server(*args))
        return made[-1]

    monkeypatch.setattr(grpc_listener, "grpc_server", keeping)
    with pytest.raises(errors.RendezvousStateError, match="has ended by itself"):
        async with asyncio.timeout(LONG_S), server():
            await made[0].stop(0)
            await asyncio.Event().wait()


async def test_a_server_answers_a_call_without_pinging_the_caller() -> None:
    """Its pings would cost a server of thousands of nodes as much as their messages."""
    async with server() as at:
        with socket.create_connection((at.host, at.port), LONG_S) as caller:
            caller.sendall(calls(3))
            seen = await ends_of(3, caller, b"")
            caller.sendall(frame_head(8, PING, 0, 0) + b"at last.")
            received = b""
            while b"at last." not in received:
                received += await asyncio.get_running_loop().sock_recv(caller, 65536)
    # The answer to the ping that follows the calls, and to the last one.
    assert (seen + frames(received))[PING] == 2


async def ends_of(count: int, caller: socket.socket, received: bytes) -> Counter[int]:
    """Wait until so many calls of a connection have ended; return the frames by their types."""
    caller.setblocking(False)
    async with asyncio.timeout(LONG_S):
        while (seen := frames(received))[DATA] + seen[RESET] < count:
            received += await asyncio.get_running_loop().sock_recv(caller, 65536)
    return seen


@pytest.mark.slow
async def test_calls_wait_for_a_server_that_is_busy_and_none_is_cancelled() -> None:
    """A thousand nodes and more call at once after a restart, and one event loop takes them."""
    each = 100
    with ExitStack() as stack:
        async with server() as at:
            read: dict[socket.socket, bytes] = {}
            # Nothing is awaited here, so the server cannot take the calls yet.
            for _ in range(CALLS_AT_ONCE // each):
                caller = stack.enter_context(socket.create_connection((at.host, at.port), LONG_S))
                caller.sendall(calls(each))
                read[caller] = b""
                while PING_ACK not in read[caller]:
                    read[caller] += caller.recv(65536)
            ended: Counter[int] = Counter()
            for caller, received in read.items():
                ended += await ends_of(each, caller, received)
    assert (ended[DATA], ended[RESET]) == (CALLS_AT_ONCE, 0)
