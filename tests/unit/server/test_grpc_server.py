"""Bytes that gRPC rejects, before any authentication: the server continues to serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rdzv.errors import RendezvousStateError
from rdzv.runtime.clock import MonotonicClock
from rdzv.server.driver import Driver
from rdzv.server.replication.replica import Replica
from rdzv.server.rpc import grpc_listener
from rdzv.server.rpc.grpc_listener import serving
from rdzv.server.rpc.grpc_server import grpc_server
from rdzv.server.settings.config import Config, Timings
from rdzv.stores.memory import MemoryStore
from rdzv.transport.endpoints import Listen

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
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def call(headers: dict[bytes, bytes]) -> bytes:
    """Call an rpc, in HTTP/2 without compression, and without a request."""
    block = b"".join(
        b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value
        for name, value in headers.items()
    )
    return PREFACE + len(block).to_bytes(3, "big") + b"\x01\x05\0\0\0\1" + block


@asynccontextmanager
async def server(timings: Timings | None = None) -> AsyncIterator[Listen]:
    clock = MonotonicClock()
    listen = Listen("127.0.0.1", 0)
    config = Config(listen, Path("/nowhere"), store="memory", timings=timings or Timings())
    replica = Replica(clock, "memory", "1.2.3")
    async with Driver.running(MemoryStore(), clock, config) as driver:
        replica.lead(driver)
        async with serving(replica, clock, config) as bound:
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


async def test_a_server_of_grpc_that_ends_by_itself_ends_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[grpc.aio.Server] = []

    def keeping(*args: Any) -> grpc.aio.Server:
        made.append(grpc_server(*args))
        return made[-1]

    monkeypatch.setattr(grpc_listener, "grpc_server", keeping)
    with pytest.raises(RendezvousStateError, match="has ended by itself"):
        async with asyncio.timeout(LONG_S), server():
            await made[0].stop(0)
            await asyncio.Event().wait()
