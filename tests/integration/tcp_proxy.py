"""A link that a test can break: a TCP proxy between a node and its server.

    with proxy_to("127.0.0.1", 29400) as link:
        start_node(endpoint=link.endpoint)
        link.black_hole()      # packets vanish; both ends believe that they are connected
        link.restore()         # TCP continues where it was, as after a cable is plugged in again
        link.cut()             # every connection is reset, new ones are refused

It runs in its own thread, so that tests of either kind can use it. Nothing in it waits without a
deadline: a call that is not done in time raises `TimeoutError`, and so fails its test.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

PATIENCE_S = 100.0
_CHUNK_BYTES = 64 << 10
_MAX_BYTES = 4 << 20
"""The limit of what a caller may have sent before the link is back."""

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: close with a reset, and discard unsent data."""

T = TypeVar("T")


class TcpProxy:
    """One listening port; each connection to it is forwarded to one server while the link holds.

    Made by `proxy_to`. Each method's effect is complete when it returns.
    """

    def __init__(self, host: str, port: int) -> None:
        self._upstream = host, port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp_proxy")
        self._server: asyncio.Server | None = None
        self._holds = asyncio.Event()
        """Set while packets get through."""
        self._refuses = False
        self._connections: dict[asyncio.Task[None], set[asyncio.StreamWriter]] = {}
        self.port = 0

    @property
    def endpoint(self) -> str:
        """Where to connect, as HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    # ------------------------------------------------------------------ what tests do

    def black_hole(self) -> None:
        """Let nothing through, unnoticed: data sent meanwhile arrives after `restore`.

        New connections are accepted, as by a load balancer whose servers are unreachable; the
        server never sees those whose caller has given up by then.
        """
        self._call(self._holds.clear)

    def restore(self) -> None:
        """Let everything through again."""
        self._refuses = False
        self._call(self._holds.set)

    def cut(self) -> None:
        """Reset every connection, and each new one at once, until `restore`."""
        self._refuses = True
        self._call(self._reset_all)

    def reset(self) -> None:
        """Reset every connection; new ones are accepted."""
        self._call(self._reset_all)

    @property
    def connections(self) -> int:
        """The number of connections."""
        return self._call(lambda: len(self._connections))

    # ------------------------------------------------------------------ its life

    def start(self) -> None:
        """Listen on a port of loopback."""
        self._thread.start()
        self._run(self._listen())

    def stop(self) -> None:
        """Reset every connection, and leave nothing behind."""
        try:
            self._run(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(PATIENCE_S)
            assert not self._thread.is_alive(), "the proxy's thread does not end"
            self._loop.close()

    def _run(self, job: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(PATIENCE_S)

    def _call(self, job: Callable[[], T]) -> T:
        async def do() -> T:
            return job()

        return self._run(do())

    async def _listen(self) -> None:
        self._holds.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        ends = list(self._connections)
        self._reset_all()
        await asyncio.gather(*ends, return_exceptions=True)

    def _reset_all(self) -> None:
        for task, writers in self._connections.items():
            for writer in writers:
                _reset(writer)
            task.cancel()

    # ------------------------------------------------------------------ one connection

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = {writer}
        try:
            if not self._refuses:
                await self._join(reader, writer, self._connections[task])
        except* (OSError, TimeoutError, asyncio.CancelledError):
            pass  # Either side is gone, or the test has ended the connection.
        finally:
            for end in self._connections.pop(task):
                _reset(end)

    async def _join(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        writers: set[asyncio.StreamWriter],
    ) -> None:
        said = await self._wait_with(reader)
        if said is None:
            return
        async with asyncio.timeout(PATIENCE_S):
            up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        writers.add(up_writer)
        up_writer.write(said)
        async with asyncio.TaskGroup() as ways:
            ways.create_task(self._carry(reader, up_writer))
            ways.create_task(self._carry(up_reader, writer))

    async def _wait_with(self, reader: asyncio.StreamReader) -> bytes | None:
        """Wait until the link holds; return the data sent by then, None if the caller has gone."""
        said = bytearray()

        async def listen() -> None:
            while data := await reader.read(_CHUNK_BYTES):
                said.extend(data)
                if len(said) > _MAX_BYTES:
                    raise OSError("the caller says too much before it has heard anything")

        if self._holds.is_set():
            return b""
        listening = asyncio.create_task(listen())
        holding = asyncio.create_task(self._holds.wait())
        try:
            await asyncio.wait([listening, holding], return_when=asyncio.FIRST_COMPLETED)
            return None if listening.done() else bytes(said)
        finally:
            holding.cancel()
            listening.cancel()
            await asyncio.gather(holding, listening, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction to its end, which is forwarded, too."""
        while data := await reader.read(_CHUNK_BYTES):
            await self._holds.wait()
            writer.write(data)
            await writer.drain()
        await self._holds.wait()
        if writer.can_write_eof():
            writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


@contextlib.contextmanager
def proxy_to(host: str, port: int) -> Iterator[TcpProxy]:
    """Provide a breakable link to a server until the body ends."""
    proxy = TcpProxy(host, port)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
