"""What gRPC alone costs a server: the minimum for a Python server of nodes' streams.

A server of grpc.aio and nothing else: it reads, writes, and decides nothing. As many clients as a
job has nodes, in several processes, do what nodes do, with messages of about the same number and
size:

* gather: each opens a connection and a stream and sends two messages; it receives three;
* round: each sends one message, and receives three.

`python bench/floor.py --nodes 100,1000 [--tls]` prints the CPU time of the server per client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc
from crowd import credentials_in
from measure import emit, end_on_sigterm, load, say_conditions
from processes import Asked, certified, cpu_s

from rdzv.transport.endpoints import Endpoint
from rdzv.transport.node_stream import STREAM_OPTIONS

METHOD = "/bench.Floor/Attach"
PROCESSES = 4
AT_ONCE = 64
TIMEOUT_S = 120.0
UP, DOWN = b"u" * 75, b"d" * 70

HERE = Path(__file__).parent


# ------------------------------------------------------------------------------------ the server


async def answer(_: object, context: Any) -> None:
    """Serve one client: three messages for two at first, then three for each."""
    await context.send_initial_metadata(())
    first = True
    while await context.read() is not grpc.aio.EOF:
        if first:
            await context.write(DOWN)
            await context.read()
        for _n in range(2 if first else 3):
            await context.write(DOWN)
        first = False


class Handlers(grpc.GenericRpcHandler):
    """Serves the only method."""

    def service(self, details: Any) -> Any:
        """Return its handler."""
        return grpc.stream_stream_rpc_method_handler(answer) if details.method == METHOD else None


async def serve(folder: str) -> None:
    """Serve until stdin ends; the first line on stdout is the port."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((Handlers(),))
    port = server.add_insecure_port("127.0.0.1:0") if not folder else _secure(server, Path(folder))
    await server.start()
    line = await asyncio.to_thread(sys.stdin.readline)
    while line:
        print(json.dumps({"port": port}), flush=True)
        line = await asyncio.to_thread(sys.stdin.readline)


def _secure(server: grpc.aio.Server, folder: Path) -> int:
    pair = ((folder / "server.key").read_bytes(), (folder / "server.crt").read_bytes())
    authority = (folder / "ca.crt").read_bytes()
    credentials = grpc.ssl_server_credentials([pair], authority, require_client_auth=True)
    return server.add_secure_port("localhost:0", credentials)


# ------------------------------------------------------------------------------------ the clients


class Clients:
    """The clients of one process."""

    def __init__(self) -> None:
        self._calls: list[Any] = []
        self._channels: list[grpc.aio.Channel] = []

    async def act(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Carry out a command from stdin."""
        at_once = asyncio.Semaphore(AT_ONCE)
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
            if asked["act"] == "gather":
                endpoint = Endpoint(asked["host"], asked["port"])
                for _ in range(asked["clients"]):
                    tasks.create_task(self._connect(endpoint, asked["tls"], at_once))
            else:
                for call in self._calls:
                    tasks.create_task(_tell(call, at_once))
        return {"clients": len(self._calls)}

    async def _connect(self, endpoint: Endpoint, tls: str, at_once: asyncio.Semaphore) -> None:
        async with at_once:
            channel = credentials_in(tls).aio_channel(endpoint, STREAM_OPTIONS)
            call = channel.stream_stream(METHOD)()
            await call.write(UP)
            await call.read()
            await call.write(UP)
            for _ in range(2):
                await call.read()
            self._channels.append(channel)
            self._calls.append(call)


async def _tell(call: Any, at_once: asyncio.Semaphore) -> None:
    async with at_once:
        await call.write(UP)
        for _ in range(3):
            await call.read()


async def connect() -> None:
    """Carry out commands until stdin ends."""
    clients = Clients()
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            answered = await clients.act(json.loads(line))
        except TimeoutError:
            answered = {"failed": f"no end of {line.strip()} in {TIMEOUT_S:g} s"}
        print(json.dumps(answered), flush=True)


# ------------------------------------------------------------------------------------ all of it


def measure(clients: int, folder: str) -> dict[str, float]:
    """Return the CPU time of the server, in ms per client, by act."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Asked.running(HERE / "floor.py", "serve", folder))
        port = server.ask(TIMEOUT_S, act="port")["port"]
        parts = [
            stack.enter_context(Asked.running(HERE / "floor.py", "connect"))
            for _ in range(PROCESSES)
        ]
        found = {}
        host = "localhost" if folder else "127.0.0.1"
        for act in ("gather", "round"):
            before_s = cpu_s(server.pid)
            for part in parts:
                share = clients // PROCESSES
                part.tell(act=act, host=host, port=port, tls=folder, clients=share)
            together = sum(part.answer(TIMEOUT_S)["clients"] for part in parts)
            found[act] = 1e3 * (cpu_s(server.pid) - before_s) / together
        return found


def main() -> None:
    """Serve, connect, or measure."""
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serve(sys.argv[2]))
        return
    if sys.argv[1:] == ["connect"]:
        asyncio.run(connect())
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default="100,1000", help="numbers of clients, with commas")
    parser.add_argument("--tls", action="store_true", help="with mutual TLS")
    chosen = parser.parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="rdzv-bench-") as temporary:
        say_conditions("floor", Path(temporary))
        if chosen.tls:
            certified(Path(temporary))
        for clients in map(int, chosen.nodes.split(",")):
            found = measure(clients, temporary if chosen.tls else "")
            told = "  ".join(f"{act} {ms:.3f}" for act, ms in found.items())
            emit(
                f"floor {'tls' if chosen.tls else 'plain'}  clients={clients:<6} CPU of the "
                f"server, ms a client: {told}  load {load():.0f}",
                bench="floor",
                clients=clients,
                tls=chosen.tls,
                cpu_ms=dict(found),
                load=load(),
            )


if __name__ == "__main__":
    main()
