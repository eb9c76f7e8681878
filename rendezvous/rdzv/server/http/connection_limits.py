"""Limits the number of HTTP connections, and how long each may take to send its first request.

aiohttp accepts every connection, and waits for the first request without a time limit. Here, a
connection that exceeds the limit, or that sends no request in time, is sent an error and closed.
Other connections are not affected.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from http import HTTPStatus

from aiohttp import web

from rdzv.server.rpc.grpc_listener import HANDSHAKE_MS
from rdzv.transport.endpoints import Listen

_END_OF_HEADERS = b"\r\n\r\n"
_MAX_HEADER_BYTES = 32 * 1024
"""More than aiohttp accepts, so that aiohttp answers larger headers with its own error."""


CONNECTIONS = 2_048

CONNECTIONS_PER_PEER = 512
"""The number of connections from one address. Browsers behind a proxy share one."""


FIRST_REQUEST_S = 10.0


class ConnectionLimits:
    """Creates and counts the protocols for one server's connections."""

    def __init__(self, handlers: Callable[[], asyncio.Protocol]) -> None:
        """Pass each connection to a protocol from `handlers` once its first request has arrived."""
        self.handlers = handlers
        self._open: list[tuple[str, asyncio.Transport]] = []
        """The connections that were open when the last one began, with their peers."""
        self.waiting: set[_Connection] = set()
        """The connections whose first request has not arrived yet."""

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self)

    def refusal_of(self, transport: asyncio.Transport) -> str:
        peer = str((transport.get_extra_info("peername") or ("?",))[0])
        self._open = [(other, one) for other, one in self._open if not one.is_closing()]
        if len(self._open) >= CONNECTIONS:
            return f"this server has {CONNECTIONS} connections; try again later"
        if sum(1 for other, _ in self._open if other == peer) >= CONNECTIONS_PER_PEER:
            return f"{peer} has {CONNECTIONS_PER_PEER} connections here; close some"
        self._open.append((peer, transport))
        return ""

    def close(self) -> None:
        for connection in tuple(self.waiting):
            connection.refuse(503, "this server is stopping")


class _Connection(asyncio.Protocol):
    """A connection whose first request has not arrived yet. Its headers are buffered until then."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._limits.waiting.add(self)
        self._timer = asyncio.get_running_loop().call_later(
            FIRST_REQUEST_S, self.refuse, 408, f"no request within {FIRST_REQUEST_S:g} s"
        )
        if why := self._limits.refusal_of(transport):
            self.refuse(503, why)

    def data_received(self, data: bytes) -> None:
        if self not in self._limits.waiting:
            return  # It has been refused.
        self._received += data
        if _END_OF_HEADERS in self._received or len(self._received) > _MAX_HEADER_BYTES:
            self.connection_lost(None)
            handler = self._limits.handlers()
            self._transport.set_protocol(handler)
            handler.connection_made(self._transport)
            handler.data_received(bytes(self._received))

    def refuse(self, status: int, why: str) -> None:
        self.connection_lost(None)
        text = f"{why}\n".encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: text/plain\r\n"
            f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        )
        self._transport.write(head.encode() + text)
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.waiting.discard(self)
        self._timer.cancel()


class GuardedSite(web.BaseSite):
    """A listener for an aiohttp application, with connection limits."""

    def __init__(self, runner: web.AppRunner, listen: Listen, tls: ssl.SSLContext | None) -> None:
        super().__init__(runner, ssl_context=tls)
        assert runner.server is not None
        self._limits = ConnectionLimits(runner.server)
        self._listen = listen

    @property
    def name(self) -> str:
        scheme = "http" if self._ssl_context is None else "https"
        return f"{scheme}://{self._listen}"

    async def start(self) -> None:
        await super().start()
        self._server = await asyncio.get_running_loop().create_server(
            self._limits,
            self._listen.host,
            self._listen.port,
            ssl=self._ssl_context,
            ssl_handshake_timeout=None if self._ssl_context is None else HANDSHAKE_MS / 1000,
            backlog=self._backlog,
        )

    async def stop(self) -> None:
        await super().stop()
        self._limits.close()
