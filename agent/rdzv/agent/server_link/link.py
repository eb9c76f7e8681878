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
import contextlib
import logging
import math
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from typing import Protocol, TypeAlias, cast

import grpc

from rdzv.agent.agent_metrics_hooks import Meter
from rdzv.agent.core import events
from rdzv.agent.observers.stack_sampling import StacksAsked
from rdzv.agent.output.log_reading import LogReading, Piece
from rdzv.agent.runner.linux.boottime import boottime_ms
from rdzv.agent.server_link import encoding
from rdzv.agent.server_link.draining import NodeDrain
from rdzv.agent.server_link.placed_jobs import Holding, Placed
from rdzv.core.nodes import NodesTuning, check_fence
from rdzv.core.placement import FailingCheck, Resources
from rdzv.errors import (
    InvalidRequestError,
    NodeSupersededError,
    RendezvousConnectionError,
    RendezvousError,
    UnauthenticatedError,
)
from rdzv.structs import struct
from rdzv.transport.channels import PLAIN, Credentials
from rdzv.transport.endpoints import Endpoint
from rdzv.transport.node_stream import (
    BACKOFF,
    FINAL_REFUSALS,
    PROTOCOL_VERSION,
    STREAM_OPTIONS,
    Attempts,
    Backoff,
    error_from_status,
)
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc

log = logging.getLogger("rdzv.agent")

WELCOME_TIMEOUT_S = 10.0
"""How long an open stream may stay without the server's Welcome."""
WELCOME_TIMEOUT_MOST_S = 80.0
"""It doubles up to this while servers do not answer in time: one that thousands come back to at
once would only serve those who have given up on it. Pings tell of one that is gone."""
SILENT_S = 5.0
"""After how long without a Welcome it is said that the server does not answer; it is waited for."""
RENEWAL_MS = 5_000
"""How long the server waits for the stream that follows one which this node has ended."""
DECLINED_KEPT = 64
OUTBOX_MESSAGES = 1_000
"""Bound of what waits to be sent; a stream that is slower is opened anew."""
HEARTBEATS_PER_FENCE = 4
"""Heartbeats of a node whose workers are fenced, in the time after which they are: one that stays
without an answer until the next leaves time for a new stream before the fence."""
CAUSES_MOST = 16
"""The log names at most this number of causes for a missing stream, until there is one again."""
_FIGURES = re.compile(r"\d+(\.\d+)?")


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

    def take_stacks(self, asked: StacksAsked) -> None:
        """Begin to say what the workers of a round are doing."""


class PlacementPort(Protocol):
    """What the link needs of who takes up submitted jobs on this node."""

    @property
    def resources(self) -> Resources:
        """What this node has for them."""

    def holdings(self) -> tuple[Holding, ...]:
        """Name those of which something may be left on this node."""

    def placed(self, placed: Placed) -> None:
        """Hear that the server has chosen this node for a job; perhaps not for the first time."""

    def withdrawn(self, rdzv_id: str, run: str, reason: str) -> None:
        """Hear that it takes that back."""

    @property
    def failing(self) -> tuple[FailingCheck, ...]:
        """What is wrong with this node."""

    def look_again(self) -> None:
        """Hear that an operator wants to have that looked at now."""

    def noticed(self, event: events.NoticeGiven | events.NoticeLifted) -> None:
        """Hear that this node is about to leave all its jobs, or stays; before its jobs do."""


Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.NodeMessage, pb.ServerMessage]"


@struct(frozen=True)
class Identity:
    """Who speaks on the stream."""

    node_id: str
    instance: str
    kind: pb.AgentKind.ValueType
    address: str
    pid: int
    version: str
    incarnation: int = 0
    """What this instance was given before, where an agent before this one has begun it."""
    leadership: int = 0
    """The highest that was heard of, likewise."""
    lease_ms: int | None = None
    """The lease that it had, likewise."""


class ServerLink:
    """Keeps one stream to one of the servers open until it is closed."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        identity: Identity,
        backoff: Backoff = BACKOFF,
        credentials: Credentials = PLAIN,
        options: Sequence[tuple[str, int]] = STREAM_OPTIONS,
    ) -> None:
        self._attempts = Attempts(endpoints, backoff)
        self._credentials = credentials
        self._options = options
        self._identity = identity
        self._jobs: dict[str, JobPort] = {}
        self.placements: PlacementPort | None = None
        """Who takes up submitted jobs; None: nobody."""
        self._lease_ms: int | None = None
        """The lease that the open stream gives; None: there is no such stream."""
        self._last_lease_ms = identity.lease_ms
        """The lease that the last stream gave, open or not; None: there was none."""
        self._declined: dict[tuple[str, str], str] = {}
        """By rdzv_id and run, the jobs that this node can not take up, and why. Said again when a
        stream opens, for nothing else says it."""
        self._renewing = False
        """Whether the stream was ended to say hello anew, and another follows at once."""
        self._outbox: asyncio.Queue[pb.NodeMessage | None] | None = None
        self._leadership = identity.leadership
        self._incarnation = identity.incarnation
        self.on_welcome: Callable[[int, int, int], None] = lambda *given: None
        """Called with incarnation, leadership and lease, before anybody relies on them."""
        self.superseded: NodeSupersededError | None = None
        """Why this instance speaks for its node no more, once `is_superseded`."""
        self.is_superseded = asyncio.Event()
        self._told_lost: set[str] = set()
        """Why there is no stream, as far as the log has it since the last one."""
        self._was_welcomed = False
        self._closing = asyncio.Event()
        self._hang_up: Callable[[], object] = lambda: None
        self._heartbeat_interval_s = WELCOME_TIMEOUT_S
        self._welcome_timeout_s = WELCOME_TIMEOUT_S
        self._hello_sent_ms = 0
        self._heartbeats = 0
        self._unanswered: deque[tuple[int, int]] = deque(maxlen=OUTBOX_MESSAGES)
        """Heartbeats of the open stream by number, and when they were sent."""
        self.log_reading = LogReading(self._say_piece)
        self.drain = NodeDrain(_now_ms, self._tell_notice)
        self._idle = asyncio.Event()
        """Set whenever nothing waits to be sent."""
        self.meter = Meter()
        self.metrics_address = ""
        """Where others read what it counts, as HOST:PORT; said in every Hello."""

    @property
    def identity(self) -> Identity:
        """Who speaks on the stream."""
        return self._identity

    def certificate_expires(self) -> datetime | None:
        """Say when the certificate expires that this node shows; None: it shows none."""
        return self._credentials.expires()

    @property
    def lease_ms(self) -> int | None:
        """The lease that the open stream gives; None while there is no such stream."""
        return self._lease_ms

    def add(self, job: JobPort) -> None:
        """Serve a job: its belief is in every Hello from now on; what it says now is its own."""
        if self._last_lease_ms is not None and not self._check_fence(job, self._last_lease_ms):
            # The server would refuse the whole node for it.
            return
        self._jobs[job.rdzv_id] = job
        if (notice := self.drain.event()) is not None:
            job.post(notice)
        if self._lease_ms is not None:
            job.post(events.ServerConnected())
        if job.fence_after_ms:
            # The server is to know of the fence, and this node when it was heard last.
            self.say_hello_again()

    def remove(self, job: JobPort) -> None:
        """Serve a job no more."""
        if self._jobs.get(job.rdzv_id) is job:
            del self._jobs[job.rdzv_id]

    def say_hello_again(self) -> None:
        """Have the server hear what only a Hello says: open another stream at once.

        No seat is lost by that: the server hears first that this node will be back.
        """
        if self._outbox is not None:
            self.say(pb.NodeMessage(away=pb.Away(deadline_ms=RENEWAL_MS)))
        if self._outbox is not None:
            self._renewing = True
            with contextlib.suppress(asyncio.QueueFull):
                self._outbox.put_nowait(None)
            self._outbox = None
            # A server that is held up does not end the stream.
            asyncio.get_running_loop().call_later(RENEWAL_MS / 2000, self._hang_up)

    def drain_node(self, left_ms: int, reason: str) -> None:
        """Have this node leave all its jobs within `left_ms`, and let the server know."""
        if self.drain.wish(left_ms, reason):
            self.say(pb.NodeMessage(draining=encoding.draining(self.drain)))

    def _tell_notice(self, event: events.NoticeGiven | events.NoticeLifted) -> None:
        if self.placements is not None:
            self.placements.noticed(event)
        for job in list(self._jobs.values()):
            job.post(event)

    @property
    def tolerated_ms(self) -> int:
        """How long the server tolerates this node's silence: by its last word, else as usual."""
        return self._last_lease_ms or NodesTuning().lease_ms

    def say_away(self, deadline_ms: int) -> None:
        """Say that this agent goes away on purpose, and another one is there by the deadline."""
        self.say(pb.NodeMessage(away=pb.Away(deadline_ms=deadline_ms)))

    def say_holdings(self) -> None:
        """Say of which submitted jobs something may be left on this node."""
        if self.placements is not None:
            self.say(pb.NodeMessage(holdings=encoding.holdings(self.placements.holdings())))

    def say_health(self) -> None:
        """Say what is wrong with this node, or that nothing is any more."""
        if self.placements is not None:
            self.say(pb.NodeMessage(health=encoding.health(self.placements.failing)))

    def decline_for_now(self, rdzv_id: str, run: str, reason: str) -> None:
        """Say that this node can not take up a job now; if that is lost, it is placed here again.

        Then there is another occasion.
        """
        self.say(encoding.declined(rdzv_id, run, reason, passing=True))

    def decline(self, rdzv_id: str, run: str, reason: str) -> None:
        """Say that this node can not take up a job."""
        self._declined.pop((rdzv_id, run), None)
        self._declined[rdzv_id, run] = reason
        if len(self._declined) > DECLINED_KEPT:
            del self._declined[next(iter(self._declined))]
        self.say(encoding.declined(rdzv_id, run, reason))

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
        await self.say_after_all(encoding.log_piece(piece))

    async def say_after_all(self, message: pb.NodeMessage) -> None:
        """Send something large once nothing else waits: whatever else is said goes first."""
        while self._outbox is not None and not self._outbox.empty():
            self._idle.clear()
            await self._idle.wait()
        self.say(message)

    async def run(self) -> None:
        """Keep a stream open until `close`; say so once when it is lost, and when it is back."""
        while not self._closing.is_set():
            endpoint = self._attempts.present
            error = await self._converse(endpoint)
            if self._closing.is_set():
                return
            most_s = self._shortest_fence_s() / HEARTBEATS_PER_FENCE or math.inf
            wait_s = self._attempts.failed(error, asyncio.get_running_loop().time(), most_s)
            if wait_s is None:
                log.debug("%s", error)
                continue
            self._announce_lost(endpoint, str(error), again=wait_s > 0)
            await self._wait(wait_s)

    def close(self) -> None:
        """End the stream once everything that was said has been sent."""
        self._closing.set()
        if self._outbox is None:
            return
        try:
            self._outbox.put_nowait(None)
        except asyncio.QueueFull:
            self._hang_up()

    async def _wait(self, wait_s: float) -> None:
        """Wait before the next attempt; `close` ends it."""
        try:
            async with asyncio.timeout(wait_s):
                await self._closing.wait()
        except TimeoutError:
            pass

    def _announce_lost(self, endpoint: Endpoint, reason: str, *, again: bool) -> None:
        """Say that there is no stream; `again`: the attempt made at once has failed too.

        Each cause is logged once, whatever its figures are: the next one may be another.
        """
        cause = _FIGURES.sub("", reason)
        if again and cause not in self._told_lost and len(self._told_lost) < CAUSES_MOST:
            self._told_lost.add(cause)
            log.warning("%s; trying again until a server answers", reason)
        else:
            log.debug("no stream to %s: %s", endpoint, reason)
        for job in list(self._jobs.values()):
            job.post(events.ServerLost(reason))

    # ------------------------------------------------------------------ one stream

    async def _converse(self, endpoint: Endpoint) -> RendezvousError:
        """Hold a stream, and those that follow it at once; return why the last one ended."""
        try:
            opened = self._credentials.aio_channel(endpoint, self._options)
        except InvalidRequestError as unusable:
            # It may just be about to be renewed.
            return RendezvousConnectionError(f"can not connect to {endpoint}: {unusable}")
        async with opened as channel:
            stub = cast("rdzv_pb2_grpc.RendezvousAsyncStub", rdzv_pb2_grpc.RendezvousStub(channel))
            while True:
                self._renewing = False
                error = await self._hold_stream(stub, endpoint)
                if not self._renewing or self._closing.is_set():
                    return error
                # On the same connection, so that the server misses this node for a moment only.

    async def _hold_stream(
        self, stub: rdzv_pb2_grpc.RendezvousAsyncStub, endpoint: Endpoint
    ) -> RendezvousError:
        """Hold one stream from its Hello to its end; return why it ended."""
        self._unanswered.clear()
        timeout_s = min(self._welcome_timeout_s, self._shortest_fence_s() or WELCOME_TIMEOUT_MOST_S)
        outbox: asyncio.Queue[pb.NodeMessage | None] = asyncio.Queue(OUTBOX_MESSAGES)
        try:
            metadata = self._credentials.metadata(endpoint)
        except InvalidRequestError as error:
            return RendezvousConnectionError(f"can not connect to {endpoint}: {error}")
        call = stub.Attach(self._outgoing(outbox), metadata=metadata)
        # What is said from here on follows this Hello; what came before is in it.
        outbox.put_nowait(pb.NodeMessage(hello=self._hello()))
        self._outbox, self._hang_up = outbox, call.cancel
        try:
            async with asyncio.timeout(timeout_s):
                welcome = await self._first_answer(call, endpoint)
            return RendezvousConnectionError(await self._listen(call, endpoint, welcome))
        except grpc.aio.AioRpcError as error:
            return self._judge(endpoint, error)
        except TimeoutError:
            self._welcome_timeout_s = min(2 * self._welcome_timeout_s, WELCOME_TIMEOUT_MOST_S)
            return RendezvousConnectionError(f"no answer from {endpoint} within {timeout_s:g} s")
        except asyncio.CancelledError:
            if _this_task_is_cancelled():
                raise
            return RendezvousConnectionError("the stream was closed from this side")
        finally:
            on_purpose = self._renewing or self._closing.is_set()
            self.meter.stream_ended(welcomed=self._lease_ms is not None, on_purpose=on_purpose)
            self._outbox, self._lease_ms = None, None
            self.log_reading.cancel_all()
            call.cancel()

    async def _first_answer(self, call: Call, endpoint: Endpoint) -> pb.ServerMessage | None:
        """Return the server's first message; say, while it is waited for, that none comes."""
        silent = asyncio.get_running_loop().call_later(SILENT_S, self._say_silent, endpoint)
        try:
            return await _read(call)
        finally:
            silent.cancel()

    def _say_silent(self, endpoint: Endpoint) -> None:
        reason = f"no answer from {endpoint} within {SILENT_S:g} s"
        # The same as when the attempt is given up later.
        if (cause := _FIGURES.sub("", reason)) not in self._told_lost:
            self._told_lost.add(cause)
            log.warning(
                "%s: it may be stopped or overloaded, or a firewall drops packets; trying until a "
                "server answers",
                reason,
            )

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
            elif message.HasField("lease"):
                self._take_lease(message.lease.lease_ms, message.lease.heartbeat_interval_ms)
                for job in list(self._jobs.values()):
                    job.post(events.Ticked())  # Whatever of it depends on the lease.
            elif message.HasField("heard"):
                self._note_heard(message.heard.number)
            elif message.HasField("read_log"):
                self.log_reading.read(encoding.read_request(message.read_log))
            elif message.HasField("log_credit"):
                self._note_credit(message.log_credit)
            elif message.HasField("take_stacks"):
                self._take_stacks(encoding.stacks_asked(message.take_stacks))
            elif message.HasField("look_again"):
                if self.placements is not None:
                    self.placements.look_again()
            elif message.HasField("drain"):
                drain = message.drain
                self.drain.hear(drain.number, drain.deadline_ms, drain.reason)
            elif message.HasField("undrain"):
                self.drain.lift()
            elif message.HasField("placed") or message.HasField("withdrawn"):
                self._deliver_placement(message)
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

    def _take_stacks(self, asked: StacksAsked) -> None:
        if (job := self._jobs.get(asked.rdzv_id)) is not None:
            job.take_stacks(asked)
        else:
            error = "it takes no part in this job any more"
            self.say(encoding.stacks(asked.request, (), last=True, error=error))

    def _greet(self, endpoint: Endpoint, welcome: pb.Welcome) -> None:
        self._incarnation = welcome.incarnation
        self.on_welcome(self._incarnation, self._leadership, welcome.lease_ms)
        self._take_lease(welcome.lease_ms, welcome.heartbeat_interval_ms)
        self.meter.stream_opened()
        self._attempts.welcomed(asyncio.get_running_loop().time())
        self._welcome_timeout_s = WELCOME_TIMEOUT_S
        if self._told_lost:
            self._told_lost.clear()
            again = " again" if self._was_welcomed else ""
            log.info("connected to the server at %s%s", endpoint, again)
        self._was_welcomed = True
        # The sender still waits for the interval that held before; this ends its wait.
        self.say(pb.NodeMessage(heartbeat=pb.Heartbeat()))
        self._renew_fence(self._hello_sent_ms)
        for job in list(self._jobs.values()):
            job.post(events.ServerConnected())
            self._check_fence(job, welcome.lease_ms)
        for (rdzv_id, run), reason in self._declined.items():
            self.say(encoding.declined(rdzv_id, run, reason))

    def _take_lease(self, lease_ms: int, heartbeat_interval_ms: int) -> None:
        self._lease_ms = self._last_lease_ms = lease_ms
        interval_s = max(heartbeat_interval_ms, 100) / 1000
        if fence_s := self._shortest_fence_s():
            interval_s = min(interval_s, fence_s / HEARTBEATS_PER_FENCE)
        self._heartbeat_interval_s = interval_s

    def _check_fence(self, job: JobPort, lease_ms: int) -> bool:
        """Refuse a fence that comes too late for the lease, as a server does that knows of it."""
        try:
            check_fence(job.fence_after_ms, lease_ms)
        except InvalidRequestError as error:
            job.post(events.Refused(error.code, str(error)))
            return False
        return True

    def _deliver_placement(self, message: pb.ServerMessage) -> None:
        if self.placements is None:
            job = encoding.rdzv_id_of(message)
            log.warning("the server places %s on a node that takes no submitted jobs", job)
        elif message.HasField("placed"):
            self.placements.placed(encoding.placed(message.placed))
        else:
            told = message.withdrawn
            self._declined.pop((told.rdzv_id, told.run), None)
            self.placements.withdrawn(told.rdzv_id, told.run, told.reason)

    def _deliver(self, message: pb.ServerMessage) -> None:
        job = self._jobs.get(encoding.rdzv_id_of(message))
        if job is None and message.HasField("round_completed"):
            # It was asked for a place by one that is gone from here, and nobody else gives it back.
            self.say(encoding.gone(message.round_completed))
        elif job is None:
            log.debug("heard of a job that is not here: %s", message)
        elif message.HasField("waiting"):
            job.note(message.waiting.reason)
        else:
            event = encoding.event(message, _now_ms())
            if event is not None:
                job.post(event)

    def _judge(self, endpoint: Endpoint, error: grpc.aio.AioRpcError) -> RendezvousError:
        """Tell a refusal, which is final, from a failure, after which it tries again."""
        trailing = error.trailing_metadata()
        failure = error_from_status(
            error.code(),
            error.details(),
            trailing,
            endpoint,
            WELCOME_TIMEOUT_S,
            self._credentials,
        )
        # Who was let in before may be again, with a token or certificate that is renewed.
        stranger = isinstance(failure, UnauthenticatedError) and not self._incarnation
        if stranger or failure.code in FINAL_REFUSALS:
            for job in list(self._jobs.values()):
                job.post(events.Refused(failure.code, str(failure)))
        # One that was never welcomed may only have come before the end of the one before it.
        if isinstance(failure, NodeSupersededError) and self._incarnation:
            self.superseded = failure
            self.is_superseded.set()
        return failure

    def _hello(self) -> pb.Hello:
        beliefs = [belief for job in self._jobs.values() if (belief := job.belief()) is not None]
        placements = self.placements
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
            resources=None if placements is None else encoding.resources(placements.resources),
            holdings=None if placements is None else encoding.holdings(placements.holdings()),
            health=encoding.health(placements.failing)
            if placements is not None and placements.failing
            else None,
            metrics=self.metrics_address,
            draining=encoding.draining(self.drain),
        )


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


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
