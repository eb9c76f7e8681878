"""The Rendezvous service: one stream per node for all its jobs.

An error about one job is sent to the node on its stream, which stays open. An error that ends the
stream is raised and becomes the status of the call (see `calls`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc.aio
from google.protobuf.message import DecodeError

from rdzv.errors import InvalidRequestError, RendezvousConnectionError, RendezvousError
from rdzv.messages import Announcement
from rdzv.runtime.clock import Clock
from rdzv.server import wire
from rdzv.server.driver import Driver
from rdzv.server.replication.replica import Replica
from rdzv.server.rpc.calls import end_stream_unheard
from rdzv.server.rpc.node_messages import NodeMessages
from rdzv.server.security import callers
from rdzv.server.sessions.streams import Stream
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc as pb_grpc
from rdzv.version import VERSION

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[pb.NodeMessage, pb.ServerMessage]

LAST_WRITE_S = 1.0
"""How long a write in progress may take after its stream has ended."""

log = logging.getLogger("rdzv.service")


HELLO_TIMEOUT_S = 60.0
"""A stream that sends no hello is closed after this time. With thousands of nodes, reading their
hellos may take most of it."""


class RendezvousService(pb_grpc.RendezvousServicer):
    """Serves one stream per node, for all of the node's jobs."""

    def __init__(self, replica: Replica, clock: Clock) -> None:
        self._replica = replica
        self._clock = clock

    # The generated base class expects handlers that yield, but these read and write concurrently.
    async def Attach(  # type: ignore[override]  # noqa: N802
        self, request_iterator: object, context: Context
    ) -> None:
        try:
            driver = await self._replica.settled_driver()
        except RendezvousError as error:
            await end_stream_unheard(context, error)
            raise
        message = await _first_message(context)
        stream = driver.connections.attach(wire.hello_of(message), callers.present.get())
        messages = NodeMessages(driver, stream, self._clock)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(_read(context, messages, stream)),
                    tasks.create_task(messages.obey(message.beliefs)),
                ]
                await self._write(context, driver, stream)
                for task in running:
                    task.cancel()
            end = await stream.ended()
        except grpc.aio.BaseError:
            end = None
        finally:
            # This also runs if the node has died, because gRPC then cancels the call.
            driver.connections.detach(stream)
        if end is not None:
            log.info("closed the stream of %s: %s", stream.node_id, end)
            raise end

    async def _write(self, context: Context, driver: Driver, stream: Stream) -> None:
        """Write messages to a node until its stream ends.

        A write in progress at the end is given `LAST_WRITE_S` to finish. If the first write were
        cut short, the node would not learn why the stream ended: gRPC would not know whether that
        write had sent the initial metadata, and would fail to send it again before the final
        status.
        """
        loop = asyncio.get_running_loop()
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                with stream.calling_on_end(lambda: limit.reschedule(loop.time() + LAST_WRITE_S)):
                    while announcements := await stream.outbox.take():
                        await self._write_all(announcements, context, driver, stream)

    async def _write_all(
        self,
        announcements: Sequence[Announcement],
        context: Context,
        driver: Driver,
        stream: Stream,
    ) -> None:
        if not await self._replica.regain_word():
            # Another server may be leading by now, and may have sent a different state.
            unproven = "this server cannot prove that it leads"
            stream.close(RendezvousConnectionError(unproven))
        for together in (
            [announcements] if stream.takes_several else [[one] for one in announcements]
        ):
            if stream.open:
                now_ms = self._clock.now_ms()
                message = wire.server_message(together, driver.leadership, VERSION, now_ms)
                try:
                    await context.write(message)
                except grpc.aio.BaseError:
                    stream.close()


async def _first_message(context: Context) -> pb.Hello:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            message = await _receive(context)
    except TimeoutError:
        # A node that was merely busy will retry.
        raise RendezvousConnectionError(
            f"no hello within {HELLO_TIMEOUT_S:g} s; send it as the first message of the stream"
        ) from None
    if message is None or message.WhichOneof("body") != "hello":
        raise InvalidRequestError("the first message of a stream must be a hello")
    return message.hello


async def _read(context: Context, messages: NodeMessages, stream: Stream) -> None:
    try:
        while (message := await _receive(context)) is not None:
            messages.take(message)
    except InvalidRequestError as error:
        stream.close(error)
    # The end of a stream is not a leave: the messages before it are still handled.
    messages.finish()


async def _receive(context: Context) -> pb.NodeMessage | None:
    try:
        message = await context.read()
    except DecodeError as error:
        raise InvalidRequestError(
            f"a message cannot be read: {error}; the sender speaks another protocol"
        ) from error
    except grpc.aio.BaseError:
        return None
    return message if isinstance(message, pb.NodeMessage) else None
