"""A client that floods a server, is slow or silent is refused, and the others are served.

Served means that calls on new connections succeed, and that a node's heartbeat is answered.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from test_rdzvd import PATIENT, Node, Rdzvd, attached, control, hello, opened, rdzvd

from rdzv.v1 import rdzv_pb2 as pb

pytestmark = pytest.mark.timeout(240)

PATIENCE_S = 60.0

JOBS = "rdzv.bounds.JOBS_PER_NODE"
COMMANDS = "rdzv.server.rpc.node_messages.COMMANDS_PER_SECOND"
HANDSHAKE = "rdzv.server.rpc.grpc_listener.HANDSHAKE_MS"
FIRST_REQUEST = "rdzv.server.http.connection_limits.FIRST_REQUEST_S"
CONNECTIONS_PER_PEER = "rdzv.server.http.connection_limits.CONNECTIONS_PER_PEER"


@contextmanager
def server(folder: Path, *lines: str, **constants: int) -> Iterator[Rdzvd]:
    with rdzvd(
        *(folder, "--store=memory", "--http=127.0.0.1:0"),
        config=PATIENT + "\n".join(lines),
        constants=constants,
    ) as made:
        yield made


def http_port(made: Rdzvd) -> int:
    found = re.search(r"http on 127\.0\.0\.1:(\d+)", made.ready)
    assert found, made.ready
    return int(found[1])


class Witness:
    """A node that was there before, and callers that connect anew."""

    def __init__(self, address: str, node: Node) -> None:
        self._address = address
        self._node = node
        self._number = 0

    async def is_served(self) -> pb.ListJobsResponse:
        """Send a heartbeat and wait for the answer; connect, and list the jobs."""
        async with asyncio.timeout(PATIENCE_S):
            self._number += 1
            await self._node.say(heartbeat=pb.Heartbeat(number=self._number))
            assert (await self._node.hear("heard")).heard.number == self._number
            # Otherwise channels to one address share a connection.
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(self._address, options) as channel:
                found = await control(channel).ListJobs(pb.ListJobsRequest(), wait_for_ready=True)
        assert isinstance(found, pb.ListJobsResponse)
        return found


@asynccontextmanager
async def witness(made: Rdzvd) -> AsyncIterator[Witness]:
    async with attached(made.address, hello("witness")) as node:
        yield Witness(made.address, node)


def connect(port: int, count: int, stack: ExitStack) -> list[socket.socket]:
    """Open silent connections."""
    found = []
    for _ in range(count):
        found.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 30)))
    return found


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def ends(connection: socket.socket) -> bytes:
    """Read a connection until the server ends it; return the data."""
    connection.settimeout(PATIENCE_S)

    def read() -> bytes:
        said = b""
        try:
            while more := connection.recv(65536):
                said += more
        except ConnectionResetError:
            pass
        return said

    return await asyncio.to_thread(read)


# ---------------------------------------------------------------- floods


async def test_a_node_that_floods_with_joins_is_refused_and_fills_no_server(tmp_path: Path) -> None:
    with server(tmp_path, **{JOBS: 20, COMMANDS: 1}) as made:
        async with witness(made) as others, attached(made.address, hello("flood")) as flood:
            refusals: set[str] = set()
            too_often = asyncio.Event()

            async def listen() -> None:
                while True:
                    said = (await flood.hear("refused")).refused.message
                    refusals.add(said)
                    flood.heard.clear()
                    if "sends more than 1 commands a second" in said:
                        too_often.set()

            async def pour() -> None:
                for number in range(2_500):
                    await flood.join(f"job-{number}")

            listening = asyncio.create_task(listen())
            pouring = asyncio.create_task(pour())
            while not pouring.done():
                await others.is_served()
            await pouring
            async with asyncio.timeout(PATIENCE_S):
                await too_often.wait()
            listening.cancel()
            assert any(
                "flood is already in 20 jobs, and the limit is 20" in one for one in refusals
            )
            assert len((await others.is_served()).jobs) == 20


async def test_a_node_that_hears_nothing_costs_no_more_than_its_outbox(tmp_path: Path) -> None:
    with server(tmp_path) as made:
        # A client that does not read takes no more than a window of bytes from the server.
        options = [("grpc.http2.lookahead_bytes", 1_024), ("grpc.http2.bdp_probe", 0)]
        async with (
            witness(made) as others,
            grpc.aio.insecure_channel(made.address, options) as channel,
        ):
            deaf = await opened(channel, hello("deaf"))
            beat = pb.NodeMessage(heartbeat=pb.Heartbeat(number=1))

            async def pour() -> None:
                while True:
                    await deaf.write(beat)

            pouring = asyncio.create_task(pour())
            async with asyncio.timeout(PATIENCE_S):
                # It is not told, since that would come after the data it does not read.
                while "deaf reads its stream too slowly: 1024 messages wait" not in log_of(made):
                    await others.is_served()
            pouring.cancel()
            await others.is_served()


def log_of(made: Rdzvd) -> str:
    return made.stderr.read_text()


# ---------------------------------------------------------------- connections


async def test_two_thousand_connections_that_say_nothing_are_closed(tmp_path: Path) -> None:
    with server(tmp_path, **{HANDSHAKE: 2_000}) as made, ExitStack() as stack:
        async with witness(made) as others:
            idle = connect(port_of(made.address), 2_000, stack)
            await others.is_served()
            for connection in (idle[0], idle[-1]):
                await ends(connection)
            await others.is_served()


async def test_above_its_connections_a_server_lets_nobody_in_until_some_are_gone(
    tmp_path: Path,
) -> None:
    with (
        server(tmp_path, "[limits]", "connections = 30", **{HANDSHAKE: 2_000}) as made,
        ExitStack() as stack,
    ):
        async with witness(made) as others:
            crowd = connect(port_of(made.address), 100, stack)
            await ends(crowd[-1])
            await others.is_served()


async def test_giant_metadata_is_refused(tmp_path: Path) -> None:
    with server(tmp_path) as made:
        async with witness(made) as others, grpc.aio.insecure_channel(made.address) as channel:
            calls: Any = control(channel)
            for size in (10_000, 1_000_000):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await calls.ListJobs(
                        pb.ListJobsRequest(), metadata=(("giant", "x" * size),), timeout=60
                    )
                # Which of them depends on where it is noticed.
                assert refused.value.code().name in (
                    "RESOURCE_EXHAUSTED",
                    "UNAVAILABLE",
                    "INTERNAL",
                )
                await others.is_served()


# ---------------------------------------------------------------- HTTP


async def test_who_says_no_request_in_time_is_shown_out(tmp_path: Path) -> None:
    with (
        server(tmp_path, **{CONNECTIONS_PER_PEER: 40, FIRST_REQUEST: 1}) as made,
        ExitStack() as stack,
    ):
        async with witness(made) as others:
            port = http_port(made)
            crowd = connect(port, 41, stack)
            assert b"127.0.0.1 has 40 connections here; close some" in await ends(crowd[-1])
            crowd[0].sendall(b"GET /healthz HT")
            await others.is_served()
            for connection in crowd[:-1]:
                assert b"408 Request Timeout" in await ends(connection)
            [late] = connect(port, 1, stack)
            late.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert (await ends(late)).endswith(b"ok\n")


async def test_who_follows_and_does_not_read_is_dropped(tmp_path: Path) -> None:
    with server(tmp_path) as made, ExitStack() as stack:
        async with witness(made) as others, attached(made.address, hello("n1")) as n1:
            follow = b"GET /api/v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            for connection in connect(http_port(made), 50, stack):
                connection.sendall(follow)
            for number in range(40):
                await n1.join(f"job-{number}")
                await n1.hear("joined")
            assert len((await others.is_served()).jobs) == 40
