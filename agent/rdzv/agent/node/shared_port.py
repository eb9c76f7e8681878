"""One port for two protocols: the job's rendezvous, and its round's c10d store.

torchrun's static backend serves its store at the port that the command line names, so scripts
connect to it with `init_method="tcp://HOST:PORT"`. Here the rendezvous listens at that port. A
connection's first bytes distinguish the two: a gRPC client sends the HTTP/2 preface, a store client
a number. Each connection is relayed to its server; `env://` reaches the store directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

from rdzv.transport.endpoints import Endpoint

PREFACE = b"PRI"
"""The first bytes of a gRPC connection. A store client begins with a small number."""

FIRST_BYTES_TIMEOUT_S = 10.0
"""How long a client may take to send its first bytes; in both protocols the client sends first."""

CHUNK = 1 << 16

log = logging.getLogger("rdzv.agent")

FindStore = Callable[[], Awaitable[Endpoint | None]]


@contextlib.asynccontextmanager
async def shared(
    listening: socket.socket, rendezvous: Endpoint | None, find_store: FindStore
) -> AsyncIterator[None]:
    """Relay to one of two servers, or to the store alone. What is for neither is closed."""
    async with asyncio.TaskGroup() as tasks:
        ends: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = tasks.create_task(_connect(reader, writer, rendezvous, find_store))
            ends.add(task)
            task.add_done_callback(ends.discard)

        server = await asyncio.start_server(accept, sock=listening)
        try:
            yield
        finally:
            server.close()
            for task in ends:
                task.cancel()


async def _connect(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    rendezvous: Endpoint | None,
    find_store: FindStore,
) -> None:
    try:
        async with asyncio.timeout(FIRST_BYTES_TIMEOUT_S):
            first = await _first_bytes(reader)
        server = rendezvous if first.startswith(PREFACE) else await find_store()
        if server is None:
            peer = writer.get_extra_info("peername")
            log.warning("closed a connection from %s: %s", peer, _why_closed(first))
            return
        far_reader, far_writer = await asyncio.open_connection(server.host, server.port)
        try:
            far_writer.write(first)
            await _carry_both(reader, writer, far_reader, far_writer)
        finally:
            far_writer.close()
    except (OSError, asyncio.IncompleteReadError, TimeoutError):
        # The client or the server is gone; the client sees its connection end.
        pass
    finally:
        writer.close()


async def _first_bytes(reader: asyncio.StreamReader) -> bytes:
    """Return all that the client has sent at once, at least enough to tell the protocols.

    torch's store closes a connection whose first message arrives in pieces.
    """
    first = b""
    while len(first) < len(PREFACE):
        if not (part := await reader.read(CHUNK)):
            raise asyncio.IncompleteReadError(first, len(PREFACE))
        first += part
    return first


def _why_closed(first: bytes) -> str:
    if first.startswith(PREFACE):
        return "this is the store of a single-node job, not an rdzvd"
    return "it is for a store, but no round is running"


async def _carry_both(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Relay in both directions until one side ends; neither protocol half-closes."""
    ways = {
        asyncio.ensure_future(_carry(reader, far_writer)),
        asyncio.ensure_future(_carry(far_reader, writer)),
    }
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
