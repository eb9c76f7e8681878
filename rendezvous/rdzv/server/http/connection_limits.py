"""Limits the number of HTTP connections, and how long each may take to send its first request.

aiohttp accepts every connection, and waits for the first request without a time limit. Here, a
connection that exceeds the limit, or that sends no request in time, is sent an error and closed.
Other connections are not affected.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus

from aiohttp import web

from rdzv.server.rpc.grpc_listener import HANDSHAKE_MS
from rdzv.transport.endpoints import Listen

_END_OF_HEADERS = b"\r\n\r\n"
_MAX_HEADER_BYTES = 32 * 1024
"""More than aiohttp accepts, so that aiohttp answers larger headers with its own error."""


CONNECTIONS = 2_048
"""The number of connections to the HTTP port."""

CONNECTIONS_PER_PEER = 512
"""The number of connections from one address. Browsers behind a proxy share one."""


FIRST_REQUEST_S = 10.0
"""How long a new connection may take for its first request."""


class ConnectionLimits:
    """Creates and counts the protocols for one server's connections."""

    def __init__(self, handlers: Callable[[], asyncio.Protocol]) -> None:
        """Pass each connection to a protocol from `handlers` once its first request has arrived."""
        self.handlers = handlers
        self._inside: Counter[str] = Counter()
        self.waiting: set[_Connection] = set()
        """The connections whose first request has not arrived yet."""

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self)

    def enter(self, peer: str) -> str:
        """Count a new connection and return ""; if it exceeds a limit, return the reason."""
        if self._inside.total() >= CONNECTIONS:
            return f"this server has {CONNECTIONS} connections; try again later"
        if self._inside[peer] >= CONNECTIONS_PER_PEER:
            return f"{peer} has {CONNECTIONS_PER_PEER} connections here; close some"
        self._inside[peer] += 1
        return ""

    def leave(self, peer: str) -> None:
        self._inside[peer] -= 1
        if not self._inside[peer]:
            del self._inside[peer]

    def close(self) -> None:
        """Close all connections whose first request has not arrived yet."""
        for connection in tuple(self.waiting):
            connection.refuse(503, "this server is stopping")


class _Connection(asyncio.Protocol):
    """One connection. The headers of its first request are buffered until a handler takes over."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._peer: str | None = None
        """The address under which the connection is counted, or None if it is not counted."""
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._handler: asyncio.Protocol | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer = str((transport.get_extra_info("peername") or ("?",))[0])
        if why := self._limits.enter(peer):
            self.refuse(503, why)
            return
        self._peer = peer
        self._limits.waiting.add(self)
        seconds = FIRST_REQUEST_S
        self._timer = asyncio.get_running_loop().call_later(
            seconds, self.refuse, 408, f"no request within {seconds:g} s"
        )

    def data_received(self, data: bytes) -> None:
        if self._handler is not None:
            self._handler.data_received(data)
            return
        if self._peer is None:
            return
        self._received += data
        if _END_OF_HEADERS in self._received or len(self._received) > _MAX_HEADER_BYTES:
            self._hand_over()

    def _hand_over(self) -> None:
        assert self._transport is not None
        self._stop_waiting()
        self._handler = self._limits.handlers()
        self._handler.connection_made(self._transport)
        self._handler.data_received(bytes(self._received))
        self._received.clear()

    def refuse(self, status: int, why: str) -> None:
        """Send the reason for the refusal and close the connection."""
        assert self._transport is not None
        self._stop_waiting()
        text = f"{why}\n".encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: text/plain\r\n"
            f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        )
        self._transport.write(head.encode() + text)
        self._transport.close()

    def _stop_waiting(self) -> None:
        self._limits.waiting.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def eof_received(self) -> bool | None:
        return None if self._handler is None else self._handler.eof_received()

    def pause_writing(self) -> None:
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._handler is not None:
            self._handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._peer is not None:
            self._limits.leave(self._peer)
            self._peer = None
        if self._handler is not None:
            self._handler.connection_lost(exc)


class GuardedSite(web.BaseSite):
    """A listener for an aiohttp application, with connection limits."""

    def __init__(
        self,
        runner: web.AppRunner,
        listen: Listen,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(runner, ssl_context=tls)
        assert runner.server is not None
        self._limits = ConnectionLimits(runner.server)
        self._listen = listen

    @property
    def name(self) -> str:
        scheme = "http" if self._ssl_context is None else "https"
        return f"{scheme}://{self._listen}"

    async def start(self) -> None:
        """Start listening; raises `OSError` if the address cannot be used."""
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
        """Stop listening, and close connections that have not sent a request yet."""
        await super().stop()
        self._limits.close()
