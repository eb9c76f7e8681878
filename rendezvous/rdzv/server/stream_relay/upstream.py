"""The relay's single call to the leading server, which is reopened whenever it ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from rdzv.errors import (
    ERRORS,
    InvalidRequestError,
    LimitExceededError,
    RendezvousConnectionError,
    RendezvousError,
)
from rdzv.runtime.concurrency import beside
from rdzv.server.stream_relay.node_end import NodeEnd
from rdzv.transport.batches import Batches
from rdzv.transport.channels import Credentials
from rdzv.transport.endpoints import Endpoint
from rdzv.transport.node_stream import (
    PROTOCOL_VERSION,
    STREAM_OPTIONS,
    Attempts,
    Backoff,
    error_from_status,
)
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc
from rdzv.version import VERSION

ANSWER_S = 10.0
"""How long a server may take to answer. Must exceed the time for which a server holds calls while
there is no leader."""

OPTIONS = (*STREAM_OPTIONS, ("grpc.http2.bdp_probe", 1))
"""Channel options for the messages to thousands of nodes, which all arrive here and travel further
than the messages to a single node."""

BACKOFF = Backoff(max_s=1.0)
"""Kept short, because relays are few and thousands of nodes wait for each of them."""

log = logging.getLogger("rdzv.relay")


class Link:
    """One call to one server. When the call ends, so do the nodes' streams that it carries."""

    def __init__(self) -> None:
        self._nodes: dict[int, NodeEnd] = {}
        self._numbers = itertools.count(1)
        self._outgoing = Batches[pb.FromNode]()
        self._over = False

    @property
    def nodes(self) -> int:
        """The number of nodes that have a stream in the call."""
        return len(self._nodes)

    # ---------------------------------------------------------------- for a node

    def open(self, node: NodeEnd, caller: pb.RelayedCaller) -> int:
        number = next(self._numbers)
        self._nodes[number] = node
        self._outgoing.put_now(pb.FromNode(stream=number, opened=caller), caller.ByteSize())
        return number

    async def pass_on(self, number: int, message: bytes) -> None:
        """Send a node's message, and wait until it is written."""
        if number in self._nodes:
            await self._outgoing.put(pb.FromNode(stream=number, message=message), len(message))

    def finish(self, number: int) -> None:
        """Report that a node will send no more messages; the server may still send to the node."""
        if number in self._nodes:
            self._outgoing.put_now(pb.FromNode(stream=number, finished=pb.RelayedFinish()))

    def close(self, number: int) -> None:
        """Remove a node's stream, and report it as broken unless the server has ended it."""
        # Report nothing once the call has ended: the node did not end its stream.
        if self._nodes.pop(number, None) is not None and not self._over:
            self._outgoing.put_now(pb.FromNode(stream=number, broken=pb.RelayedBreak()))

    # ---------------------------------------------------------------- for the call

    def take(self, frame: pb.ToNode) -> None:
        node = self._nodes.get(frame.stream)
        if node is None:
            return  # The node is gone, but the server does not know yet.
        if frame.HasField("ended"):
            del self._nodes[frame.stream]
            code = frame.ended.code
            node.end(ERRORS.get(code, RendezvousError)(frame.ended.message) if code else None)
            return
        try:
            node.put(frame.message)
        except LimitExceededError as error:
            self.close(frame.stream)
            node.end(error)

    async def write_all(self, call: Any, beat_s: float) -> None:
        """Write nodes' messages until the call ends, with a heartbeat per `beat_s` of silence."""

        async def write(frames: list[pb.FromNode]) -> None:
            await call.write(pb.FromRelay(frames=frames))

        try:
            await self._outgoing.write_all(write, beat_s)
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            return  # The task that reads from the call finds out why the call ended.

    def end(self, error: RendezvousError) -> None:
        self._over = True
        for node in self._nodes.values():
            node.end(error)


class Upstream:
    """Keeps a call to the leading server open."""

    def __init__(self, endpoints: Sequence[Endpoint], credentials: Credentials) -> None:
        self._attempts = Attempts(endpoints, BACKOFF)
        self._credentials = credentials
        self._link: Link | None = None
        self._linked = asyncio.Event()
        self._said_lost = False

    @property
    def server(self) -> Endpoint:
        """The server that the relay is calling now or will try next."""
        return self._attempts.present

    async def link(self, timeout_s: float) -> Link:
        """Return the current call, or wait up to `timeout_s` for one.

        Raises:
            RendezvousConnectionError: no call was opened in that time.

        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._link is None:
                    await self._linked.wait()
        except TimeoutError:
            raise RendezvousConnectionError(
                f"this relay cannot reach its server, last tried at {self.server}; try again, or "
                "try another relay"
            ) from None
        return self._link

    async def run(self) -> None:
        """Keep a call open until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                endpoint = self._attempts.present
                error = await self._hold_unless_cancelled(endpoint)
                wait_s = self._attempts.failed(error, loop.time())
                if wait_s is None:
                    continue  # The error named the leader, so call it at once.
                if not self._said_lost:
                    self._said_lost = True
                    log.warning("the call to the server at %s failed: %s", endpoint, error)
                await asyncio.sleep(wait_s)
        finally:
            self._set(None, RendezvousConnectionError("this relay is stopping; connect again"))

    def _set(self, link: Link | None, error: RendezvousError) -> None:
        before, self._link = self._link, link
        if before is not None:
            before.end(error)
        if link is not None:
            self._linked.set()
        else:
            self._linked.clear()

    async def _hold_unless_cancelled(self, endpoint: Endpoint) -> RendezvousError:
        """Hold one call until it ends, and return why it ended.

        gRPC may report a cancelled task as a failed call, and a failed call as a cancelled task.
        """
        error: RendezvousError = RendezvousConnectionError("the call was cancelled")
        with suppress(asyncio.CancelledError):
            error = await self._hold(endpoint)
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        return error

    async def _hold(self, endpoint: Endpoint) -> RendezvousError:
        """Hold one call until it ends, and return why it ended."""
        try:
            metadata = self._credentials.metadata(endpoint)
            channel = self._credentials.aio_channel(endpoint, OPTIONS)
        except InvalidRequestError as error:
            return RendezvousConnectionError(f"cannot connect to {endpoint}: {error}")
        async with channel:
            stub: Any = rdzv_pb2_grpc.RendezvousStub(channel)
            call = stub.Relay(metadata=metadata)
            try:
                async with asyncio.timeout(ANSWER_S):
                    welcome = await self._greet(call)
                return await self._serve(call, welcome, endpoint)
            except grpc.aio.AioRpcError as error:
                return error_from_status(
                    *(error.code(), error.details(), error.trailing_metadata()),
                    *(endpoint, ANSWER_S, self._credentials),
                )
            except TimeoutError:
                return RendezvousConnectionError(f"no answer from {endpoint} in {ANSWER_S:g} s")
            finally:
                call.cancel()

    async def _greet(self, call: Any) -> pb.RelayWelcome:
        await call.wait_for_connection()
        hello = pb.RelayHello(protocol_version=PROTOCOL_VERSION, version=VERSION)
        await call.write(pb.FromRelay(hello=hello))
        return (await _read(call)).welcome

    async def _serve(
        self, call: Any, welcome: pb.RelayWelcome, endpoint: Endpoint
    ) -> RendezvousError:
        link = Link()
        self._attempts.welcomed(asyncio.get_running_loop().time())
        log.info("relaying to the server at %s (leadership %d)", endpoint, welcome.leadership)
        self._said_lost = False
        lost = RendezvousConnectionError("the relay has lost its server; connect again")
        self._set(link, lost)
        try:
            async with beside(link.write_all(call, max(welcome.beat_ms, 10) / 1000)):
                while True:
                    for frame in (await _read(call)).frames:
                        link.take(frame)
        finally:
            log.info(
                "the call to %s has ended, along with the streams of %d nodes", endpoint, link.nodes
            )
            self._set(None, lost)


async def _read(call: Any) -> pb.ToRelay:
    """Return the next message from the server.

    Raises:
        grpc.aio.AioRpcError: the call has ended.

    """
    message = await call.read()
    if isinstance(message, pb.ToRelay):
        return message
    raise grpc.aio.AioRpcError(
        await call.code(),
        await call.initial_metadata(),
        await call.trailing_metadata(),
        await call.details(),
    )
