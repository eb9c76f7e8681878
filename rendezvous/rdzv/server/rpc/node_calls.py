"""The two kinds of calls that carry a node's stream: the node's own call and a relay's call."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import grpc.aio
from google.protobuf.message import DecodeError

from rdzv.errors import InvalidRequestError, LimitExceededError, RendezvousConnectionError
from rdzv.transport.batches import Batches
from rdzv.v1 import rdzv_pb2 as pb

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[pb.NodeMessage, pb.ServerMessage]


class NodeCall(Protocol):
    """The source of a node's messages, and the destination of the server's messages to the node."""

    by_relay: bool
    """Whether a relay carries the stream."""

    @property
    def cut(self) -> bool:
        """Whether the connection was cut on the way, which says nothing about the node itself."""

    async def receive(self) -> pb.NodeMessage | None:
        """Wait for the node's next message; return None if its stream has ended for any reason.

        Raises:
            InvalidRequestError: the bytes are not a message.

        """

    async def send(self, message: pb.ServerMessage) -> bool:
        """Write a message to the node, and return whether its stream is still open."""


class DirectCall:
    """A stream carried by the node's own call."""

    cut = False
    by_relay = False

    def __init__(self, context: Context) -> None:
        self._context = context

    async def receive(self) -> pb.NodeMessage | None:
        """Wait for the node's next message; return None if its stream has ended."""
        try:
            message = await self._context.read()
        except DecodeError as error:
            raise _unreadable(error) from error
        except grpc.aio.BaseError:
            return None
        return message if isinstance(message, pb.NodeMessage) else None

    async def send(self, message: pb.ServerMessage) -> bool:
        """Write a message to the node, and return whether its stream is still open."""
        try:
            await self._context.write(message)
        except grpc.aio.BaseError:
            return False
        return True


class RelayedCall:
    """A node's stream carried by a relay's call."""

    by_relay = True

    def __init__(self, number: int, outgoing: Batches[pb.ToNode], limit: int) -> None:
        self.cut = False
        """Whether the relay's call has ended."""
        self.node_id = ""
        """The node_id in the node's Hello; empty until the Hello has been read."""
        self._number = number
        self._outgoing = outgoing
        self._incoming: asyncio.Queue[bytes | None] = asyncio.Queue(limit + 1)

    def put(self, data: bytes) -> None:
        """Queue a message from the node as sent by the relay.

        Raises:
            LimitExceededError: too many messages are queued.

        """
        if self._incoming.qsize() >= self._incoming.maxsize - 1:
            raise LimitExceededError(
                f"{self._incoming.maxsize - 1} messages of the node wait to be read; the stream is "
                "closed: send Hello again with the node's beliefs"
            )
        self._incoming.put_nowait(data)

    def finish(self) -> None:
        """Record that the node will send no more messages."""
        if not self._incoming.full():
            self._incoming.put_nowait(None)

    async def receive(self) -> pb.NodeMessage | None:
        """Wait for the node's next message, or return None if the node sends no more."""
        data = await self._incoming.get()
        if data is None:
            return None
        try:
            message = pb.NodeMessage.FromString(data)
        except DecodeError as error:
            raise _unreadable(error) from error
        if message.HasField("hello"):
            self.node_id = message.hello.node_id
        return message

    async def send(self, message: pb.ServerMessage) -> bool:
        """Write a message to the node, or return False once the relay's call has ended."""
        data = message.SerializeToString()
        await self._outgoing.put(pb.ToNode(stream=self._number, message=data), len(data))
        return not self.cut


def no_hello(timeout_s: float) -> RendezvousConnectionError:
    """Return the error for a stream without a hello; a node that was merely busy will retry."""
    return RendezvousConnectionError(
        f"no hello within {timeout_s:g} s; send it as the first message of the stream"
    )


def _unreadable(error: DecodeError) -> InvalidRequestError:
    return InvalidRequestError(
        f"a message cannot be read: {error}; the sender speaks another protocol"
    )
