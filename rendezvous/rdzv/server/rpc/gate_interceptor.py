"""Applies the gate to every gRPC call, and maps errors to statuses."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from rdzv.errors import (
    ERROR_CODE_METADATA_KEY,
    LEADER_METADATA_KEY,
    DeniedError,
    InvalidRequestError,
    NotLeaderError,
    RendezvousError,
    UnauthenticatedError,
)
from rdzv.server.security import callers, roles
from rdzv.server.security.callers import Caller
from rdzv.server.security.role_gate import Gate, begin_change, verb_of
from rdzv.structs import struct

if TYPE_CHECKING:
    AnyHandler = grpc.RpcMethodHandler[Any, Any]

_REFUSED = {
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError.code,
    grpc.StatusCode.PERMISSION_DENIED: DeniedError.code,
}

FIRST_MESSAGE_S = 1.0
"""How long a refused stream may take to send its first message."""

_IN_DOUBT = (None, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""The statuses of calls whose outcome is unknown; None means that the call was cancelled or hit a
bug."""


class Interceptor(grpc.aio.ServerInterceptor):
    """Checks every gRPC call against the gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[AnyHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> AnyHandler | None:
        """Return a handler that serves only callers with a role for the call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        if handler.request_streaming:
            kind = grpc.stream_stream_rpc_method_handler
            inner, guarded = handler.stream_stream, self._guarded_stream
        elif handler.response_streaming:
            kind = grpc.unary_stream_rpc_method_handler
            inner, guarded = handler.unary_stream, self._guarded_stream
        else:
            kind = grpc.unary_unary_rpc_method_handler
            inner, guarded = handler.unary_unary, self._guarded
        assert inner is not None, f"{method} streams only what is asked, which nothing here does"
        deserializer = handler.request_deserializer
        if deserializer is not None and not handler.request_streaming:
            deserializer = _reading(deserializer)
        made: AnyHandler = kind(
            guarded(method, inner),
            request_deserializer=deserializer,
            response_serializer=handler.response_serializer,
        )
        return made

    def _guarded_stream(self, method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        if not inspect.isasyncgenfunction(inner):
            return self._guarded(method, inner)

        async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._enter(method, request, context)
            async with aclosing(inner(request, context)) as replies:
                try:
                    async for reply in replies:
                        yield reply
                except RendezvousError as error:
                    await _end_call(context, error)
                except DecodeError as error:
                    # Only gRPC's own reflection service raises this error.
                    await _end_call(context, _unreadable(method, str(error)))

        return serve

    def _guarded(self, method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        row = roles.CALLS.get(method)
        verb = verb_of(method)

        async def serve(request: Any, context: Any) -> Any:
            caller = await self._enter(method, request, context)
            end, change = "", begin_change()
            try:
                return await self._answer(inner, request, context)
            except BaseException:
                code = context.code()
                if code in _REFUSED:
                    self._gate.note_refusal(str(caller), _REFUSED[code], context.details())
                end = "; the outcome is unknown" if code in _IN_DOUBT else "refused"
                raise
            finally:
                if row is not None and row.changes and end != "refused":
                    peer = _host_of(context.peer())
                    await self._gate.audit(caller, verb, request, peer, change.text, end)

        return serve

    async def _answer(self, inner: Callable[..., Any], request: Any, context: Any) -> Any:
        try:
            return await inner(request, context)
        except RendezvousError as error:
            await _end_call(context, error)

    async def _enter(self, method: str, request: Any, context: Any) -> Caller:
        caller, verb = callers.NOBODY, verb_of(method)
        try:
            if method not in roles.CALLS:
                raise DeniedError(
                    f"{method} is not open to anyone: no row of the table of roles has it"
                )
            if (row := roles.CALLS[method]) is not None:
                caller = await self._gate.caller(
                    _authorization_header(context), lambda: _certified_caller(context)
                )
                await self._gate.admit(caller, row, verb, getattr(request, "rdzv_id", None))
            if isinstance(request, _Unreadable):
                raise _unreadable(method, request.why)
        except RendezvousError as error:
            if isinstance(error, UnauthenticatedError | DeniedError):
                who = f"{caller} at {_host_of(context.peer())}"
                self._gate.note_refusal(who, error.code, f"{verb}: {error}")
            if isinstance(request, AsyncIterator):
                await end_stream_unheard(context, error)
            await _end_call(context, error)
        callers.present.set(caller)
        return caller


@struct(frozen=True)
class _Unreadable:
    """Stands in for a request that could not be decoded."""

    why: str


def _unreadable(method: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(
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


async def end_stream_unheard(context: Any, error: RendezvousError) -> None:
    """End a stream without handling any of its messages; never returns.

    The first message is awaited and dropped, because a gRPC client that is still sending it when
    the refusal arrives would report an INTERNAL error instead of the refusal.
    """
    with suppress(TimeoutError, DecodeError, grpc.aio.BaseError):
        async with asyncio.timeout(FIRST_MESSAGE_S):
            await context.read()
    await _end_call(context, error)


async def _end_call(context: Any, error: RendezvousError) -> None:
    """End a call with the status of an error from the table; never returns."""
    trailing = [(ERROR_CODE_METADATA_KEY, error.code)]
    if isinstance(error, NotLeaderError) and error.leader:
        trailing.append((LEADER_METADATA_KEY, error.leader))
    await context.abort(
        grpc.StatusCode[error.grpc_status], str(error), trailing_metadata=tuple(trailing)
    )


def _authorization_header(context: Any) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            return value if isinstance(value, str) else value.decode(errors="replace")
    return None


def _certified_caller(context: Any) -> Caller | None:
    """Return the caller that TLS has verified, or None if the caller presented no certificate."""
    pems = list(context.auth_context().get("x509_pem_cert", ()))
    return callers.certified(pems[0]) if pems else None


def _host_of(peer: str) -> str:
    """Return the host from gRPC's name for a peer, such as `ipv4:10.0.0.5:4711`."""
    return peer.partition(":")[2].rpartition(":")[0] or peer
