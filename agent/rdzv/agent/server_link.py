"""The node's one stream to the server: kept open, opened again, never given up by itself.

One `ServerLink` serves all jobs of an agent. It knows nothing of jobs but their names: what is
said comes from the drivers, what is heard goes to them. Each time a stream opens, a Hello says
all that the node believes, so a message that was lost with the stream before is not missed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

import grpc

from rdzv.agent import wire
from rdzv.agent.core import events
from rdzv.client import (
    FINAL_REFUSALS,
    PROTOCOL_VERSION,
    STREAM_OPTIONS,
    Endpoint,
    error_from_status,
)
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc

log = logging.getLogger("rdzv.agent")

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
STEADY_S = 5.0
"""A stream that stood for so long was a good one: the next attempt follows its end at once."""
WELCOME_TIMEOUT_S = 10.0
"""How long an open stream may stay without the server's Welcome."""
OUTBOX_MESSAGES = 1_000
"""Bound of what waits to be sent; a stream that is slower is opened anew."""


class JobPort(Protocol):
    """What the link needs of each job's driver."""

    rdzv_id: str

    def belief(self) -> pb.Belief | None:
        """Say all that is believed; None once the job has ended for this node."""

    def post(self, event: events.Event) -> None:
        """Take note of an event."""

    def note(self, reason: str) -> None:
        """Hear, in words, why there are no workers to run."""


Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.NodeMessage, pb.ServerMessage]"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who speaks on the stream."""

    node_id: str
    instance: str
    kind: pb.AgentKind.ValueType
    address: str
    pid: int
    version: str


class ServerLink:
    """Keeps one stream to one of the servers open until it is closed."""

    def __init__(self, endpoints: Sequence[Endpoint], identity: Identity) -> None:
        self._endpoints = list(endpoints)
        self._identity = identity
        self._jobs: dict[str, JobPort] = {}
        self._outbox: asyncio.Queue[pb.NodeMessage | None] | None = None
        self._leadership = 0
        self._incarnation = 0
        self._failed_attempts = 0
        self._welcomed_at_s: float | None = None
        self._told_lost = False
        self._closing = asyncio.Event()
        self._hang_up: Callable[[], object] = lambda: None
        self._heartbeat_interval_s = WELCOME_TIMEOUT_S

    def add(self, job: JobPort) -> None:
        """Serve a job: its belief is in every Hello from now on."""
        self._jobs[job.rdzv_id] = job

    def say(self, message: pb.NodeMessage) -> None:
        """Send a message if a stream is open; otherwise the next Hello says it."""
        if self._outbox is None:
            return
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            log.warning("the server takes messages too slowly; opening the stream anew")
            self._outbox = None
            self._hang_up()

    async def run(self) -> None:
        """Keep a stream open until `close`; say so once when it is lost, and when it is back."""
        while not self._closing.is_set():
            endpoint = self._endpoints[self._failed_attempts % len(self._endpoints)]
            reason = await self._converse(endpoint)
            if self._closing.is_set():
                return
            if self._was_steady():
                self._failed_attempts = 0
            self._announce_lost(endpoint, reason)
            await self._back_off()

    def close(self) -> None:
        """End the stream once everything that was said has been sent."""
        self._closing.set()
        if self._outbox is None:
            return
        try:
            self._outbox.put_nowait(None)
        except asyncio.QueueFull:
            self._hang_up()

    def _was_steady(self) -> bool:
        """Whether the stream that has ended was a good one.

        A server that welcomes this node and then ends the stream each time must not be asked
        without a pause.
        """
        since_s = self._welcomed_at_s
        return since_s is not None and asyncio.get_running_loop().time() - since_s >= STEADY_S

    async def _back_off(self) -> None:
        """Wait before the next attempt; the first follows at once, with some jitter after that."""
        delay_s = 0.0
        if self._failed_attempts > 0:
            longest_s = min(BACKOFF_FIRST_S * 2 ** min(self._failed_attempts, 10), BACKOFF_MAX_S)
            delay_s = random.uniform(longest_s / 2, longest_s)
        self._failed_attempts += 1
        try:
            async with asyncio.timeout(delay_s):
                await self._closing.wait()
        except TimeoutError:
            pass

    def _announce_lost(self, endpoint: Endpoint, reason: str) -> None:
        if self._failed_attempts > 0 and not self._told_lost:
            self._told_lost = True
            log.warning("%s; trying again until a server answers", reason)
        else:
            log.debug("no stream to %s: %s", endpoint, reason)
        for job in list(self._jobs.values()):
            job.post(events.ServerLost(reason))

    # ------------------------------------------------------------------ one stream

    async def _converse(self, endpoint: Endpoint) -> str:
        """Hold one stream from its Hello to its end; return why it ended."""
        self._welcomed_at_s = None
        async with grpc.aio.insecure_channel(endpoint.target, options=STREAM_OPTIONS) as channel:
            outbox: asyncio.Queue[pb.NodeMessage | None] = asyncio.Queue(OUTBOX_MESSAGES)
            stub = cast("rdzv_pb2_grpc.RendezvousAsyncStub", rdzv_pb2_grpc.RendezvousStub(channel))
            call = stub.Attach(self._outgoing(outbox))
            # What is said from here on follows this Hello; what came before is in it.
            outbox.put_nowait(pb.NodeMessage(hello=self._hello()))
            self._outbox, self._hang_up = outbox, call.cancel
            try:
                async with asyncio.timeout(WELCOME_TIMEOUT_S):
                    welcome = await _read(call)
                return await self._listen(call, endpoint, welcome)
            except grpc.aio.AioRpcError as error:
                return self._judge(endpoint, error)
            except TimeoutError:
                return f"no answer from {endpoint} within {WELCOME_TIMEOUT_S:g} s"
            except asyncio.CancelledError:
                if _this_task_is_cancelled():
                    raise
                return "the stream was closed from this side"
            finally:
                self._outbox = None
                call.cancel()

    async def _outgoing(
        self, outbox: asyncio.Queue[pb.NodeMessage | None]
    ) -> AsyncIterator[pb.NodeMessage]:
        """Send what is said, and a heartbeat whenever nothing was for an interval."""
        while True:
            try:
                async with asyncio.timeout(self._heartbeat_interval_s):
                    message = await outbox.get()
            except TimeoutError:
                message = pb.NodeMessage(heartbeat=pb.Heartbeat())
            if message is None:
                return
            yield message

    async def _listen(
        self, call: Call, endpoint: Endpoint, welcome: pb.ServerMessage | None
    ) -> str:
        """Hear everything that the server says; return why it stopped."""
        message = welcome
        while message is not None:
            if message.leadership < self._leadership:
                return f"a server was deposed (leadership {message.leadership})"
            self._leadership = message.leadership
            if message.HasField("welcome"):
                self._greet(endpoint, message.welcome)
            elif message.HasField("refused") and message.refused.code not in FINAL_REFUSALS:
                return f"the server can not do it now: {message.refused.message}"
            else:
                self._deliver(message)
            message = await _read(call)
        return "the server ended the stream"

    def _greet(self, endpoint: Endpoint, welcome: pb.Welcome) -> None:
        self._incarnation = welcome.incarnation
        self._heartbeat_interval_s = max(welcome.heartbeat_interval_ms, 100) / 1000
        self._welcomed_at_s = asyncio.get_running_loop().time()
        if self._told_lost:
            self._told_lost = False
            log.info("connected to the server at %s again", endpoint)
        # The sender still waits for the interval that held before; this ends its wait.
        self.say(pb.NodeMessage(heartbeat=pb.Heartbeat()))
        for job in list(self._jobs.values()):
            job.post(events.ServerConnected())

    def _deliver(self, message: pb.ServerMessage) -> None:
        job = self._jobs.get(wire.rdzv_id_of(message))
        if job is None:
            log.debug("heard of a job that is not here: %s", message)
        elif message.HasField("waiting"):
            job.note(message.waiting.reason)
        else:
            event = wire.event(message)
            if event is not None:
                job.post(event)

    def _judge(self, endpoint: Endpoint, error: grpc.aio.AioRpcError) -> str:
        """Tell a refusal, which is final, from a failure, after which it tries again."""
        trailing = error.trailing_metadata()
        failure = error_from_status(
            error.code(), error.details(), trailing, endpoint, WELCOME_TIMEOUT_S
        )
        if failure.code in FINAL_REFUSALS:
            for job in list(self._jobs.values()):
                job.post(events.Refused(failure.code, str(failure)))
        return str(failure)

    def _hello(self) -> pb.Hello:
        beliefs = [belief for job in self._jobs.values() if (belief := job.belief()) is not None]
        return pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            node_id=self._identity.node_id,
            instance=self._identity.instance,
            kind=self._identity.kind,
            address=self._identity.address,
            pid=self._identity.pid,
            leadership=self._leadership,
            incarnation=self._incarnation,
            agent_version=self._identity.version,
            beliefs=beliefs,
        )


async def _read(call: Call) -> pb.ServerMessage | None:
    """Return the next message; None at a proper end of the stream.

    Raises:
        grpc.aio.AioRpcError: the stream ended in an error.
    """
    message = await call.read()
    if isinstance(message, pb.ServerMessage):
        return message
    status = await call.code()
    if status is grpc.StatusCode.OK:
        return None
    details, trailing = await call.details(), await call.trailing_metadata()
    raise grpc.aio.AioRpcError(status, await call.initial_metadata(), trailing, details)


def _this_task_is_cancelled() -> bool:
    """Tell a cancelled task from a cancelled call, which look alike to a reader."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
