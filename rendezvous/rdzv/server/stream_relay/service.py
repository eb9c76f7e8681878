"""The relay's gRPC services, which pass on nodes' streams and refer operators to the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from rdzv.errors import (
    InvalidRequestError,
    NotLeaderError,
    RendezvousError,
    UnauthenticatedError,
)
from rdzv.server.rpc.gate_interceptor import (
    authorization_header,
    certified_caller,
    end_call,
    host_of,
)
from rdzv.server.rpc.node_calls import no_hello
from rdzv.server.settings.config import Config
from rdzv.server.stream_relay.node_end import NodeEnd
from rdzv.server.stream_relay.upstream import Link, Upstream
from rdzv.v1 import rdzv_pb2 as pb

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

LAST_WRITE_S = 1.0
"""How long a node may take to read each remaining message after its stream has ended."""


class RelayService:
    """Passes on nodes' streams as raw bytes."""

    def __init__(
        self, upstream: Upstream, config: Config, may_pass_tokens: Callable[[], bool]
    ) -> None:
        """Pass tokens on only if `may_pass_tokens` says that the connection keeps them secret."""
        self._upstream = upstream
        self._limits = config.limits
        self._timings = config.timings
        self._may_pass_tokens = may_pass_tokens

    async def attach(self, request_iterator: object, context: Any) -> None:
        """Carry one node's stream until either side ends it."""
        try:
            first = await self._first_message(context)
            caller = self._caller(context)
            link = await self._upstream.link(self._timings.leaderless_hold_ms / 1000)
        except RendezvousError as error:
            await end_call(context, error)
            raise
        node = NodeEnd(self._limits.outbox)
        number = link.open(node, caller)
        try:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(_read(first, context, link, number))
                await _write(context, node)
                reading.cancel()
        finally:
            # This also runs if the node has died, because gRPC then cancels the call.
            link.close(number)
        if node.error is not None:
            await end_call(context, node.error)

    async def _first_message(self, context: Any) -> bytes:
        timeout_s = self._timings.hello_timeout_ms / 1000
        try:
            async with asyncio.timeout(timeout_s):
                first = await context.read()
        except TimeoutError:
            raise no_hello(timeout_s) from None
        if not isinstance(first, bytes):
            raise InvalidRequestError("the first message of a stream must be a hello")
        return first

    def _caller(self, context: Any) -> pb.RelayedCaller:
        """Return the node's credentials for the server to check.

        Raises:
            UnauthenticatedError: the node has sent a token that must not be passed on.

        """
        header = authorization_header(context)
        if header and not self._may_pass_tokens():
            raise UnauthenticatedError(
                "this relay passes no tokens on, because its connection to the server is not "
                "encrypted; give the relay upstream.ca, or this node a certificate"
            )
        certified = certified_caller(context)
        return pb.RelayedCaller(
            authorization=header or "",
            name=certified.name if certified else "",
            roles=sorted(certified.roles) if certified else (),
            address=host_of(context.peer()),
        )

    async def send_to_server(self, request: object, context: Any) -> NoReturn:
        """Refuse any other call, naming the server so that the client calls it instead."""
        server = str(self._upstream.server)
        await end_call(
            context,
            NotLeaderError(
                f"this is a relay, which carries only the streams of nodes; ask the server at "
                f"{server}",
                server,
            ),
        )
        raise AssertionError("the call has ended")

    def register_with(self, server: grpc.aio.Server) -> None:
        """Register handlers for `Attach` and for all of the operators' calls."""
        attach: Handler = grpc.stream_stream_rpc_method_handler(self.attach)
        _register(server, "Rendezvous", {"Attach": attach})
        control = pb.DESCRIPTOR.services_by_name["Control"]
        _register(
            server,
            "Control",
            {
                method.name: grpc.unary_stream_rpc_method_handler(self.send_to_server)
                if method.server_streaming
                else grpc.unary_unary_rpc_method_handler(self.send_to_server)
                for method in control.methods
            },
        )


def _register(server: grpc.aio.Server, service: str, handlers: dict[str, Handler]) -> None:
    # Without serializers, messages remain bytes.
    server.add_registered_method_handlers(f"rdzv.v1.{service}", handlers)


async def _read(first: bytes, context: Any, link: Link, number: int) -> None:
    """Pass on the node's messages one at a time until it sends no more."""
    message: Any = first
    while isinstance(message, bytes):
        await link.pass_on(number, message)
        try:
            message = await context.read()
        except grpc.aio.BaseError:
            return
    link.finish(number)


async def _write(context: Any, node: NodeEnd) -> None:
    """Pass on the server's messages until the stream ends."""
    while (message := await node.take()) is not None:
        limit_s = LAST_WRITE_S if node.ended else None
        try:
            async with asyncio.timeout(limit_s):
                await context.write(message)
        except (TimeoutError, grpc.aio.BaseError):
            return
