"""gRPC's calls: the Control service, and the gate before each call, which answers errors."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from rdzv import errors
from rdzv.server.operations.handlers import Server
from rdzv.server.operations.table import OPERATIONS, Operation
from rdzv.server.security import callers
from rdzv.server.security.callers import Caller
from rdzv.server.security.roles import ATTACH, OPEN, READ, Call, Gate, Row, verb_of
from rdzv.structs import struct
from rdzv.transport.wire import CONTROL, write

if TYPE_CHECKING:
    AnyHandler = grpc.RpcMethodHandler[Any, Any]

CALLS: dict[str, Row | None] = {
    "/rdzv.v1.Rendezvous/Attach": ATTACH,
    **{f"/rdzv.v1.Control/{one.rpc}": one.row for one in OPERATIONS if one.rpc},
    # Probes by kubelets and load balancers cannot authenticate.
    "/grpc.health.v1.Health/Check": OPEN,
    "/grpc.health.v1.Health/Watch": OPEN,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": READ,
}
"""The rows of the table of roles for gRPC methods, by full method name."""

FIRST_MESSAGE_S = 1.0
"""How long a refused stream may take to send its first message."""


def control_service(server: Server) -> SimpleNamespace:
    rows = {one.rpc: one for one in OPERATIONS if one.rpc}
    return SimpleNamespace(**{name: _method(row, server) for name, row in rows.items()})


def _method(row: Operation, server: Server) -> Callable[..., Any]:
    answer, (_, message, streams) = row.answer, CONTROL[row.rpc]
    assert answer is not None, f"{row.rpc} has a function that answers it"

    async def one(request: Any, context: Any) -> Any:
        found = await answer(server, request)
        return message() if found is None else write(message(), found)

    async def each(request: Any, context: Any) -> AsyncIterator[Any]:
        async with aclosing(answer(server, request)) as values:
            async for value in values:
                yield write(message(), value)

    return each if streams else one


class Interceptor(grpc.aio.ServerInterceptor):
    """Checks every gRPC call against the gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[AnyHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> AnyHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        if handler.request_streaming:
            kind, inner = grpc.stream_stream_rpc_method_handler, handler.stream_stream
        elif handler.response_streaming:
            kind, inner = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        else:
            kind, inner = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        assert inner is not None, f"{method} streams only what is asked, which nothing here does"
        deserializer = handler.request_deserializer
        if deserializer is not None and not handler.request_streaming:
            deserializer = _reading(deserializer)
        made: AnyHandler = kind(
            self._guarded(method, inner),
            request_deserializer=deserializer,
            response_serializer=handler.response_serializer,
        )
        return made

    def _guarded(self, method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        async def serve(request: Any, context: Any) -> Any:
            async with self._admitted(method, request, context):
                return await inner(request, context)

        async def serve_each(request: Any, context: Any) -> AsyncIterator[Any]:
            async with (
                self._admitted(method, request, context),
                aclosing(inner(request, context)) as replies,
            ):
                async for reply in replies:
                    yield reply

        return serve_each if inspect.isasyncgenfunction(inner) else serve

    @asynccontextmanager
    async def _admitted(self, method: str, request: Any, context: Any) -> AsyncIterator[None]:
        admitted = False
        call = Call(
            what=verb_of(method),
            row=CALLS.get(method),
            request=request,
            peer=_host_of(context.peer()),
            header=_authorization_header(context),
            certified=lambda: _certified_caller(context),
        )
        try:
            async with self._gate.admitted(call):
                if isinstance(request, _Unreadable):
                    raise _unreadable(method, request.why)
                admitted = True
                yield
        except errors.RendezvousError as error:
            if not admitted and isinstance(request, AsyncIterator):
                await end_stream_unheard(context, error)
            await _end_call(context, error)
        except DecodeError as error:
            # Only gRPC's own reflection service raises this error.
            await _end_call(context, _unreadable(method, str(error)))


@struct(frozen=True)
class _Unreadable:
    why: str


def _unreadable(method: str, why: str) -> errors.InvalidRequestError:
    return errors.InvalidRequestError(
        f"the request to {verb_of(method)} cannot be read: {why}; the sender speaks "
        "another protocol"
    )


def _reading(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a deserializer that returns `_Unreadable` for a malformed request.

    If it raised instead, gRPC would log a traceback, as for a bug in this server.
    """

    def read(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError as error:
            return _Unreadable(str(error))

    return read


async def end_stream_unheard(context: Any, error: errors.RendezvousError) -> None:
    """End a stream without handling any of its messages; never returns.

    The first message is awaited and dropped, because a gRPC client that is still sending it when
    the refusal arrives would report an INTERNAL error instead of the refusal.
    """
    with suppress(TimeoutError, DecodeError, grpc.aio.BaseError):
        async with asyncio.timeout(FIRST_MESSAGE_S):
            await context.read()
    await _end_call(context, error)


async def _end_call(context: Any, error: errors.RendezvousError) -> None:
    trailing = [(errors.ERROR_CODE_METADATA_KEY, error.code)]
    if isinstance(error, errors.NotLeaderError) and error.leader:
        trailing.append((errors.LEADER_METADATA_KEY, error.leader))
    await context.abort(
        grpc.StatusCode[error.grpc_status], str(error), trailing_metadata=tuple(trailing)
    )


def _authorization_header(context: Any) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            return value if isinstance(value, str) else value.decode(errors="replace")
    return None


def _certified_caller(context: Any) -> Caller | None:
    pems = list(context.auth_context().get("x509_pem_cert", ()))
    return callers.certified(pems[0]) if pems else None


def _host_of(peer: str) -> str:
    """Return the host from gRPC's name for a peer, such as `ipv4:10.0.0.5:4711`."""
    return peer.partition(":")[2].rpartition(":")[0] or peer
