"""The node's one stream to the server: kept open, opened again, never given up by itself.

One `ServerLink` serves all jobs of an agent. It knows nothing of jobs but their names: what is
said comes from the drivers, what is heard goes to them. Each time a stream opens, a Hello says
all that the node believes, so a message that was lost with the stream before is not missed.

Where workers are fenced (`fence_after_ms`), the link proves again and again that the server hears
this node: a Welcome says that the Hello was heard, a Heard that its heartbeat was. What is proven
is the time when that was *sent*: the server counts the lease from then, or later. What the server
says of its own accord proves nothing: it may have been on its way for long.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

import grpc

from rdzv.agent import wire
from rdzv.agent.core import events
from rdzv.agent.log_reading import LogReading, Piece
from rdzv.agent.runner import boottime_ms
from rdzv.client import (
    FINAL_REFUSALS,
    PROTOCOL_VERSION,
    STREAM_OPTIONS,
    Endpoint,
    Rota,
    error_from_status,
)
from rdzv.core.nodes import check_fence
from rdzv.errors import (
    InvalidRequestError,
    NotLeaderError,
    RendezvousConnectionError,
    RendezvousError,
)
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc

log = logging.getLogger("rdzv.agent")

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
TAKEOVER_BACKOFF_S = 0.5
"""While servers stand by, and the one that they name does not answer: for a few seconds."""
STEADY_S = 5.0
"""A stream that stood for so long was a good one: the next attempt follows its end at once."""
WELCOME_TIMEOUT_S = 10.0
"""How long an open stream may stay without the server's Welcome."""
OUTBOX_MESSAGES = 1_000
"""Bound of what waits to be sent; a stream that is slower is opened anew."""
HEARTBEATS_PER_FENCE = 4
"""Heartbeats of a node whose workers are fenced, in the time after which they are: one that stays
without an answer until the next leaves time for a new stream before the fence."""


class JobPort(Protocol):
    """What the link needs of each job's driver."""

    rdzv_id: str
    fence_after_ms: int
    """After how long without proof that the server hears this node its workers are killed; 0: they
    are not."""

    def renew_fence(self, heard_at_ms: int) -> None:
        """Hear that the server has heard this node at that point of `boottime_ms`, or later."""

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
        self._rota = Rota(endpoints)
        self._identity = identity
        self._jobs: dict[str, JobPort] = {}
        self._outbox: asyncio.Queue[pb.NodeMessage | None] | None = None
        self._leadership = 0
        self._incarnation = 0
        self._failed_attempts = 0
        self._welcomed_at_s: float | None = None
        self._told_lost = False
        self._taking_over = False
        """A server that stands by has answered since the last good stream: another will lead."""
        self._closing = asyncio.Event()
        self._hang_up: Callable[[], object] = lambda: None
        self._heartbeat_interval_s = WELCOME_TIMEOUT_S
        self._hello_sent_ms = 0
        self._heartbeats = 0
        self._unanswered: deque[tuple[int, int]] = deque(maxlen=OUTBOX_MESSAGES)
        """Heartbeats of the open stream by number, and when they were sent."""
        self.log_reading = LogReading(self._say_piece)
        self._idle = asyncio.Event()
        """Set whenever nothing waits to be sent."""

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

    async def _say_piece(self, piece: Piece) -> None:
        """Send a piece of a log once nothing else waits: whatever else is said goes first."""
        while self._outbox is not None and not self._outbox.empty():
            self._idle.clear()
            await self._idle.wait()
        self.say(wire.log_piece(piece))

    async def run(self) -> None:
        """Keep a stream open until `close`; say so once when it is lost, and when it is back."""
        while not self._closing.is_set():
            endpoint = self._rota.present
            error = await self._converse(endpoint)
            if self._closing.is_set():
                return
            self._taking_over |= isinstance(error, NotLeaderError)
            if self._rota.failed(error):
                log.debug("%s", error)
                continue
            if self._was_steady():
                self._failed_attempts = 0
            self._announce_lost(endpoint, str(error))
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
            if self._taking_over:
                longest_s = min(longest_s, TAKEOVER_BACKOFF_S)
            if fence_s := self._shortest_fence_s():
                longest_s = min(longest_s, fence_s / HEARTBEATS_PER_FENCE)
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

    async def _converse(self, endpoint: Endpoint) -> RendezvousError:
        """Hold one stream from its Hello to its end; return why it ended."""
        self._welcomed_at_s = None
        self._unanswered.clear()
        timeout_s = min(WELCOME_TIMEOUT_S, self._shortest_fence_s() or WELCOME_TIMEOUT_S)
        async with grpc.aio.insecure_channel(endpoint.target, options=STREAM_OPTIONS) as channel:
            outbox: asyncio.Queue[pb.NodeMessage | None] = asyncio.Queue(OUTBOX_MESSAGES)
            stub = cast("rdzv_pb2_grpc.RendezvousAsyncStub", rdzv_pb2_grpc.RendezvousStub(channel))
            call = stub.Attach(self._outgoing(outbox))
            # What is said from here on follows this Hello; what came before is in it.
            outbox.put_nowait(pb.NodeMessage(hello=self._hello()))
            self._outbox, self._hang_up = outbox, call.cancel
            try:
                async with asyncio.timeout(timeout_s):
                    welcome = await _read(call)
                return RendezvousConnectionError(await self._listen(call, endpoint, welcome))
            except grpc.aio.AioRpcError as error:
                return self._judge(endpoint, error)
            except TimeoutError:
                return RendezvousConnectionError(
                    f"no answer from {endpoint} within {timeout_s:g} s"
                )
            except asyncio.CancelledError:
                if _this_task_is_cancelled():
                    raise
                return RendezvousConnectionError("the stream was closed from this side")
            finally:
                self._outbox = None
                self.log_reading.cancel_all()
                call.cancel()

    async def _outgoing(
        self, outbox: asyncio.Queue[pb.NodeMessage | None]
    ) -> AsyncIterator[pb.NodeMessage]:
        """Send what is said, and a heartbeat whenever nothing was for an interval.

        Where workers are fenced the heartbeats go out whatever else is said, for nothing else is
        answered.
        """
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        while True:
            due_s = since_s + self._heartbeat_interval_s
            if outbox.empty():
                self._idle.set()
            try:
                # Not only while nothing else is said: pieces of a log may come without a pause.
                if loop.time() >= due_s:
                    raise TimeoutError
                async with asyncio.timeout_at(due_s):
                    message = await outbox.get()
            except TimeoutError:
                message = pb.NodeMessage(heartbeat=pb.Heartbeat())
            if message is None:
                return
            if message.HasField("heartbeat") or not self._shortest_fence_s():
                since_s = loop.time()
            self._note_sent(message)
            yield message

    def _note_sent(self, message: pb.NodeMessage) -> None:
        """Remember when this was sent, should an answer come; ask for one where it matters."""
        if message.HasField("hello"):
            self._hello_sent_ms = boottime_ms()
        elif message.HasField("heartbeat") and (fence_s := self._shortest_fence_s()):
            self._heartbeats += 1
            message.heartbeat.number = self._heartbeats
            self._unanswered.append((self._heartbeats, boottime_ms()))
            silent_s = (boottime_ms() - self._unanswered[0][1]) / 1000
            if silent_s > fence_s / (HEARTBEATS_PER_FENCE + 1):
                log.warning("the server does not answer for %.1f s; trying anew", silent_s)
                self._hang_up()

    def _shortest_fence_s(self) -> float:
        """Return after how long the first workers of this node are fenced; 0 if none ever are."""
        fences_ms = [job.fence_after_ms for job in self._jobs.values() if job.fence_after_ms]
        return min(fences_ms, default=0) / 1000

    def _renew_fence(self, heard_at_ms: int) -> None:
        for job in list(self._jobs.values()):
            job.renew_fence(heard_at_ms)

    def _note_heard(self, number: int) -> None:
        """Take an answer to a heartbeat of this stream; one that was never sent proves nothing."""
        while self._unanswered and self._unanswered[0][0] <= number:
            known, sent_ms = self._unanswered.popleft()
            if known == number:
                self._renew_fence(sent_ms)

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
            elif message.HasField("heard"):
                self._note_heard(message.heard.number)
            elif message.HasField("read_log"):
                self.log_reading.read(wire.read_request(message.read_log))
            elif message.HasField("log_credit"):
                self._note_credit(message.log_credit)
            elif message.HasField("refused") and message.refused.code not in FINAL_REFUSALS:
                return f"the server can not do it now: {message.refused.message}"
            else:
                self._deliver(message)
            message = await _read(call)
        return "the server ended the stream"

    def _note_credit(self, credit: pb.LogCredit) -> None:
        if credit.cancel:
            self.log_reading.cancel(credit.request)
        else:
            self.log_reading.grant(credit.request, credit.bytes)

    def _greet(self, endpoint: Endpoint, welcome: pb.Welcome) -> None:
        self._incarnation = welcome.incarnation
        interval_s = max(welcome.heartbeat_interval_ms, 100) / 1000
        if fence_s := self._shortest_fence_s():
            interval_s = min(interval_s, fence_s / HEARTBEATS_PER_FENCE)
        self._heartbeat_interval_s = interval_s
        self._welcomed_at_s = asyncio.get_running_loop().time()
        self._taking_over = False
        if self._told_lost:
            self._told_lost = False
            log.info("connected to the server at %s again", endpoint)
        # The sender still waits for the interval that held before; this ends its wait.
        self.say(pb.NodeMessage(heartbeat=pb.Heartbeat()))
        self._renew_fence(self._hello_sent_ms)
        for job in list(self._jobs.values()):
            job.post(events.ServerConnected())
            self._check_fence(job, welcome.lease_ms)

    def _check_fence(self, job: JobPort, lease_ms: int) -> None:
        """Refuse a fence that comes too late for the lease, as a server does that knows of it."""
        try:
            check_fence(job.fence_after_ms, lease_ms)
        except InvalidRequestError as error:
            job.post(events.Refused(error.code, str(error)))

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

    def _judge(self, endpoint: Endpoint, error: grpc.aio.AioRpcError) -> RendezvousError:
        """Tell a refusal, which is final, from a failure, after which it tries again."""
        trailing = error.trailing_metadata()
        failure = error_from_status(
            error.code(), error.details(), trailing, endpoint, WELCOME_TIMEOUT_S
        )
        if failure.code in FINAL_REFUSALS:
            for job in list(self._jobs.values()):
                job.post(events.Refused(failure.code, str(failure)))
        return failure

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
            fence_after_ms=max((job.fence_after_ms for job in self._jobs.values()), default=0),
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
