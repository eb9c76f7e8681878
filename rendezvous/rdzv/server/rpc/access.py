"""Holds every caller to the table of roles: one gate, before gRPC's calls and before HTTP's paths.

It finds out who calls, refuses what `roles` does not open to the caller, and writes down who has
changed what: to the log, and to a history under a name that no job can have.
"""

from __future__ import annotations

import inspect
import logging
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
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
from rdzv.runtime.clock import Clock
from rdzv.server.replication.replica import Replica
from rdzv.server.security import callers, roles
from rdzv.server.security.callers import ANYBODY, Caller
from rdzv.server.security.roles import Row, Whose
from rdzv.server.settings import bounds
from rdzv.server.settings.config import Config
from rdzv.server.telemetry.metrics_hooks import Meter
from rdzv.stores.base import Record
from rdzv.structs import struct

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.typedefs import Handler, Middleware

    AnyHandler = grpc.RpcMethodHandler[Any, Any]

log = logging.getLogger("rdzv.access")

AUDIT = "@rdzvd"
"""The name under which it is remembered who has changed what. No job's name begins like it."""

LOG_EVERY_MS = 1_000
"""Refused calls are logged this often at most, so that nobody can fill a disk with them."""

_REFUSED = {
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError.code,
    grpc.StatusCode.PERMISSION_DENIED: DeniedError.code,
}

_IN_DOUBT = (None, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""How a call ends of which nobody knows whether it has changed anything."""


@dataclass(slots=True)
class _Change:
    """What a call has changed, from what to what; empty while it has changed nothing."""

    text: str = ""


_change: ContextVar[_Change] = ContextVar("change")


def note_change(before: str, after: str) -> None:
    """Have the audit of the present call say what it has changed."""
    text = f"from {before} to {after}" if before != after else f"{after} as before"
    _change.get(_Change()).text = text


_VERBS = {"Attach": "open a stream", "ServerReflectionInfo": "ask which calls there are"}
"""What calls do whose name is no verb with an object."""


def verb_of(method: str) -> str:
    """Return a call's name as people say it.

    >>> verb_of("/rdzv.v1.Control/DrainNode")
    'drain node'
    """
    name = method.rpartition("/")[2]
    return _VERBS.get(name) or re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()


class Gate:
    """The gate of one server."""

    def __init__(
        self, replica: Replica, clock: Clock, config: Config, meter: Meter | None = None
    ) -> None:
        self._replica = replica
        self._clock = clock
        self._config = config
        self._meter = meter or Meter()
        self._logged_ms: int | None = None
        self._unlogged = 0

    async def caller(self, header: str | None, certified: Callable[[], Caller | None]) -> Caller:
        """Return who calls, by its `authorization` header or else by its certificate.

        Raises:
            UnauthenticatedError: it has shown neither, or nothing that is good here.
            NotLeaderError: it has shown a token, and this server stands by, which knows none.

        """
        if not self._config.auth:
            return ANYBODY
        if header is not None:
            text = callers.bearer(header)
            hold_s = self._config.timings.leaderless_hold_ms / 1000
            return (await self._replica.settled_driver(hold_s)).tokens.caller(text)
        if (caller := certified()) is not None:
            return caller
        raise UnauthenticatedError(
            "this server wants to know who calls, and nothing was shown; give a client "
            "certificate, or a token with --token-file (or RDZV_TOKEN_FILE)"
        )

    async def admit(self, caller: Caller, row: Row, what: str, rdzv_id: str | None) -> None:
        """Refuse what the table does not open to a caller; `rdzv_id` is the job that is meant.

        Raises:
            DeniedError: it may not do that, or not to this job.

        """
        roles.refuse_without_role(caller, row, what)
        if row.whose is not Whose.OWN_JOB or caller.admin or rdzv_id is None:
            return
        try:
            named = bounds.rdzv_id_of(rdzv_id, self._config.limits)
        except InvalidRequestError:
            # No job has this name: whoever serves the call says so.
            return
        roles.refuse_others_job(caller, await self._replica.driver.look(named), what)

    def note_refusal(self, who: str, code: str, reason: str) -> None:
        """Count a refused call, and log it, unless one was just logged."""
        self._meter.call_refused(code)
        now_ms = self._clock.now_ms()
        if self._logged_ms is not None and now_ms - self._logged_ms < LOG_EVERY_MS:
            self._unlogged += 1
            return
        also = f" ({self._unlogged} more were refused since the last such line)"
        log.warning("refused, from %s: %s%s", who, reason, also if self._unlogged else "")
        self._logged_ms, self._unlogged = now_ms, 0

    async def audit(
        self, caller: Caller, verb: str, request: object, peer: str, change: str, end: str
    ) -> None:
        """Write down who has changed what, from what to what."""
        named = (getattr(request, key, "") for key in ("rdzv_id", "node_id", "name", "id_or_name"))
        target = next(filter(None, named), "")
        submitter = getattr(request, "submitted_by", "")
        said = getattr(request, "reason", "") or (submitter and f"by {submitter}")
        reason = bounds.sentence(said, self._config.limits)
        why = f": {signed(reason, caller)}" if reason else f", by {caller}"
        text = f"{verb} {target}{change and f' {change}'}{why}, from address {peer}{end}"
        log.info("%s", text, extra={"audit": True})
        row = Record(self._clock.now_ms(), AUDIT, getattr(request, "run", ""), verb, text)
        try:
            await self._replica.driver.append((row,))
        except RendezvousError as error:
            # It leads no more; the log has it.
            log.warning("not in the history, for %s: %s", error, text)


def signed(reason: str, caller: Caller) -> str:
    """Return a reason that people read, with the name of who gave it, as far as it is proven."""
    return f"{reason} [{caller}]" if caller.name else reason


# ------------------------------------------------------------------------------------ gRPC


class Interceptor(grpc.aio.ServerInterceptor):
    """The gate before every call of gRPC."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[AnyHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> AnyHandler | None:
        """Return a handler that serves only those who may call it."""
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
                except DecodeError as error:
                    # Of a service that is not ours: gRPC's own, which tells what there is.
                    await end_call(context, _unreadable(method, str(error)))

        return serve

    def _guarded(self, method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        row = roles.CALLS.get(method)
        verb = verb_of(method)

        async def serve(request: Any, context: Any) -> Any:
            caller = await self._enter(method, request, context)
            end, change = "", _Change()
            _change.set(change)
            try:
                return await inner(request, context)
            except BaseException:
                code = context.code()
                if code in _REFUSED:
                    self._gate.note_refusal(str(caller), _REFUSED[code], context.details())
                end = "; whether it was done is not known" if code in _IN_DOUBT else "refused"
                raise
            finally:
                if row is not None and row.changes and end != "refused":
                    peer = _host(context.peer())
                    await self._gate.audit(caller, verb, request, peer, change.text, end)

        return serve

    async def _enter(self, method: str, request: Any, context: Any) -> Caller:
        """Let a caller in, or end the call."""
        caller, verb = callers.NOBODY, verb_of(method)
        try:
            if method not in roles.CALLS:
                raise DeniedError(
                    f"{method} is open to nobody: no row of the table of roles has it"
                )
            if (row := roles.CALLS[method]) is not None:
                caller = await self._gate.caller(_header(context), lambda: _certified(context))
                await self._gate.admit(caller, row, verb, getattr(request, "rdzv_id", None))
            if isinstance(request, _Unreadable):
                raise _unreadable(method, request.why)
        except RendezvousError as error:
            if isinstance(error, UnauthenticatedError | DeniedError):
                who = f"{caller} at {_host(context.peer())}"
                self._gate.note_refusal(who, error.code, f"{verb}: {error}")
            await end_call(context, error)
        callers.present.set(caller)
        return caller


@struct(frozen=True)
class _Unreadable:
    """What stands for a request that is no message."""

    why: str


def _unreadable(method: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the request to {verb_of(method)} can not be read: {why}; the sender speaks "
        "another protocol"
    )


def _reading(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Have what is no message refused; gRPC would log a traceback for each, as a bug of ours."""

    def read(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError as error:
            return _Unreadable(str(error))

    return read


async def end_call(context: Any, error: RendezvousError) -> None:
    """End a call with an error of the table; does not return."""
    trailing = [(ERROR_CODE_METADATA_KEY, error.code)]
    if isinstance(error, NotLeaderError) and error.leader:
        trailing.append((LEADER_METADATA_KEY, error.leader))
    await context.abort(
        grpc.StatusCode[error.grpc_status], str(error), trailing_metadata=tuple(trailing)
    )


def _header(context: Any) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            return value if isinstance(value, str) else value.decode(errors="replace")
    return None


def _certified(context: Any) -> Caller | None:
    pems = list(context.auth_context().get("x509_pem_cert", ()))
    return callers.certified(pems[0]) if pems else None


def _host(peer: str) -> str:
    """Return the address in gRPC's name of a peer, `ipv4:10.0.0.5:4711`, without the port."""
    return peer.partition(":")[2].rpartition(":")[0] or peer


# ------------------------------------------------------------------------------------ HTTP


def checking_roles(gate: Gate) -> Middleware:
    """Return the gate before every path of HTTP."""
    from aiohttp import web

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None:
            # There is nothing at that path, which the handler says.
            return await handler(request)
        path = resource.canonical
        what = f"{request.method} {path}"
        row_path = "/web/" if path.startswith("/web/") else path
        if row_path not in roles.PATHS:
            raise DeniedError(f"{path} is open to nobody: no row of the table of roles has it")
        if (row := roles.PATHS[row_path]) is None:
            return await handler(request)
        caller = callers.NOBODY
        try:
            header = request.headers.get("Authorization")
            caller = await gate.caller(header, lambda: _certified_by_tls(request))
            await gate.admit(caller, row, what, request.match_info.get("rdzv_id"))
        except (UnauthenticatedError, DeniedError) as error:
            gate.note_refusal(f"{caller} at {request.remote}", error.code, f"{what}: {error}")
            raise
        callers.present.set(caller)
        return await handler(request)

    return check


def _certified_by_tls(request: web.Request) -> Caller | None:
    connection = request.get_extra_info("ssl_object")
    der = connection.getpeercert(binary_form=True) if connection is not None else None
    return callers.certified(ssl.DER_cert_to_PEM_cert(der).encode()) if der else None
