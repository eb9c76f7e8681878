"""One port for the nodes' rendezvous and the workers' store: connections are told apart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest

from rdzv.agent.node import shared_port
from rdzv.agent.node.server_hosting import serving_itself, serving_others
from rdzv.agent.node.shared_port import shared
from rdzv.errors import RendezvousConnectionError
from rdzv.transport.addresses import listen_at
from rdzv.transport.endpoints import Endpoint

pytestmark = pytest.mark.slow

GRPC = b"PRI * HTTP/2.0\r\n"
STORE = b"\x00\x01\x02\x03"


@contextlib.asynccontextmanager
async def answering(name: bytes) -> AsyncIterator[Endpoint]:
    """A server that echoes its input after its name, and ends after `bye`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (data := await reader.read(100)) and b"bye" not in data:
            writer.write(name + data)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()


@contextlib.asynccontextmanager
async def one_port(store: bool = True, rendezvous: bool = True) -> AsyncIterator[int]:
    async with answering(b"grpc:") as grpc, answering(b"store:") as its_store:

        async def find_store() -> Endpoint | None:
            return its_store if store else None

        listening = listen_at("localhost", 0)
        port = listening.getsockname()[1]
        async with asyncio.timeout(60), shared(listening, grpc if rendezvous else None, find_store):
            yield port


async def ask(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await reader.read(100)
    writer.close()
    return answer


async def test_each_connection_reaches_the_server_that_it_is_for() -> None:
    async with one_port() as port:
        assert await ask(port, GRPC) == b"grpc:" + GRPC
        assert await ask(port, STORE) == b"store:" + STORE


@pytest.mark.quick
async def test_a_first_message_is_passed_on_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The c10d store of torch closes a connection whose first message arrives in pieces."""
    pieces: list[bytes] = []

    async def recorded(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await open_connection(host, port)
        write = writer.write
        monkeypatch.setattr(writer, "write", lambda data: (pieces.append(data), write(data)))
        return reader, writer

    open_connection = asyncio.open_connection
    monkeypatch.setattr(asyncio, "open_connection", recorded)
    async with one_port() as port:
        await ask(port, STORE)
    assert pieces == [STORE, STORE]


async def test_a_connection_ends_with_its_server_and_the_server_hears_of_its_end() -> None:
    async with one_port() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(STORE)
        await reader.readexactly(len(b"store:") + len(STORE))
        writer.write(b"bye")
        assert b"bye" not in await reader.read()
        writer.close()


async def test_a_connection_for_nobody_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rdzv.agent"):
        async with one_port(store=False, rendezvous=False) as port:
            assert await ask(port, STORE) == b""
            assert await ask(port, GRPC) == b""
    words = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert words == [
        "it is for a store, but no round is running",
        "this is the store of a single-node job, not an rdzvd",
    ]


@pytest.mark.quick
async def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_port, "FIRST_BYTES_TIMEOUT_S", 0.01)
    async with one_port() as port:
        assert await ask(port, b"P") == b""


async def test_open_connections_end_with_the_port() -> None:
    async with one_port() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GRPC)
        await reader.readexactly(1)
    await reader.read()
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await ask(port, GRPC)


@pytest.mark.quick
async def test_a_port_that_is_taken_is_refused_with_the_remedy() -> None:
    """It may be an rdzvd, for which the line lacks a name: that is said, as nothing else shows it.

    Under static it was taken for the job's own server, and the job ran in it under the name "none".
    """
    with listen_at("127.0.0.1", 0) as taken:
        at = Endpoint("127.0.0.1", taken.getsockname()[1])
        for serving in (serving_itself(at, "none"), serving_others(at, "none", alone=True)):
            with pytest.raises(RendezvousConnectionError, match="in use by another process") as end:
                async with serving:
                    pass
            missing = f"--rdzv-backend=rdzv --rdzv-endpoint={at} --rdzv-id=NAME"
            assert f"if that is an rdzvd, what is missing is {missing};" in str(end.value)
        async with serving_others(at, "none"):
            pass
