"""gRPC's server, as far as bytes of a peer that it does not bear would end it, or fill the log.

What HTTP/2 lets through as a header need not be UTF-8, and is the peer's before anybody has asked
who that is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NoReturn

import grpc.aio
from grpc._cython import cygrpc
from grpc.aio import _server

log = logging.getLogger("rdzv.service")


def grpc_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]
) -> grpc.aio.Server:
    """Return a server, to which services are added by methods that are registered.

    All that protoc generates are. Every other call is answered UNIMPLEMENTED, by whatever name.
    """
    logging.getLogger("grpc._cython.cygrpc").addFilter(_without_bytes_of_peers)
    server: Any = _Server(interceptors, options)
    return server  # type: ignore[no-any-return]


def _without_bytes_of_peers(record: logging.LogRecord) -> bool:
    """Drop what would be a traceback, with bytes of the peer's choice, for each header.

    gRPC reads such a header as Latin-1 and goes on, so there is nothing to tell.
    """
    if str(record.msg).startswith("Invalid encoding on"):
        log.debug("a header of a call is no UTF-8; it is read as Latin-1")
        return False
    return True


class _Server(_server.Server):
    def __init__(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        options: Sequence[tuple[str, Any]],
    ) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, None, (), interceptors, tuple(options), None)


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """The server whose loop a path that is no UTF-8 does not end.

    The loop of gRPC decodes the path of a call to what is not registered, and an error there shuts
    the whole server down: one frame would end it, at 1.85.1. 1.78.0 has another loop, which bears
    it and knows nothing of the method below.
    """

    def _make_request_call_future(self, method: bytes | None) -> Any:
        if method is not None:
            return super()._make_request_call_future(method)
        return asyncio.get_running_loop().create_task(self._refuse_the_unknown())

    async def _refuse_the_unknown(self) -> NoReturn:
        """Answer calls to what is not registered, without a look at their path.

        It ends as the server does, by an error that the loop of gRPC knows.
        """
        loop = asyncio.get_running_loop()
        answering: set[asyncio.Task[None]] = set()
        while True:
            call = await self._request_call()
            refusal = cygrpc._handle_rpc("", _NoMethods(), (), call, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(refusal, call, loop, ""))
            answering.add(task)
            task.add_done_callback(answering.discard)


class _NoMethods:
    """What gRPC asks for the handler of a call."""

    def resolve_handler(self, _: object) -> None:
        """Have none, which gRPC answers by UNIMPLEMENTED."""
