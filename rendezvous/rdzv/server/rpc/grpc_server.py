"""gRPC's server, modified to survive calls with arbitrary paths, and to log nothing of callers.

HTTP/2 allows paths that are not UTF-8, and gRPC decodes the path before the caller is known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NoReturn

import grpc.aio
from grpc._cython import cygrpc
from grpc.aio import _server

_NO_TEXT = "Invalid encoding on"
"""The beginning of gRPC's log line about metadata that is not text. The line contains a traceback
and quotes the value, which may be a damaged token. It is not needed, because the call is refused
and the refusal is logged."""


def grpc_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]
) -> grpc.aio.Server:
    """Return a gRPC server.

    Generated services register their methods with it. Calls to other methods are answered with
    UNIMPLEMENTED.
    """
    logging.getLogger("grpc._cython.cygrpc").addFilter(_quotes_nobody)
    server: Any = _Server(interceptors, options)
    return server  # type: ignore[no-any-return]


def _quotes_nobody(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_NO_TEXT)


class _Server(_server.Server):
    def __init__(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        options: Sequence[tuple[str, Any]],
    ) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, None, (), interceptors, tuple(options), None)


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """A server whose loop survives a path that is not UTF-8.

    gRPC's loop decodes the path of a call to an unregistered method, and an error there shuts down
    the whole server: in version 1.85.1, a single frame is enough. The loop in version 1.78.0
    tolerates such a path and does not call the method below.
    """

    def _make_request_call_future(self, method: bytes | None) -> Any:
        if method is not None:
            return super()._make_request_call_future(method)
        return asyncio.get_running_loop().create_task(self._refuse_the_unknown())

    async def _refuse_the_unknown(self) -> NoReturn:
        """Answer calls to unregistered methods without reading their paths.

        Ends when the server does, with an exception that gRPC's loop expects.
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
    """A method table without handlers, passed to gRPC."""

    def resolve_handler(self, _: object) -> None:
        """Return None, so that gRPC answers UNIMPLEMENTED."""
