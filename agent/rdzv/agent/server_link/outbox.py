"""Messages waiting to be sent on the open stream, the heartbeats between them, and their proofs.

A Welcome answers the Hello, and a Heard a heartbeat. Each proves that the server has received a
message that was *sent* at a known time, so its lease starts then or later. Unsolicited messages
prove nothing, because they may have been in transit for a long time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TypeAlias

import grpc

from rdzv.agent.observers.server_clock import ServerClock
from rdzv.agent.runner.system import boottime_ms
from rdzv.agent.server_link.inbox import JobPort
from rdzv.v1 import rdzv_pb2 as pb

log = logging.getLogger("rdzv.agent")

OUTBOX_MESSAGES = 1_000
"""How many messages may wait to be sent. If there are more, the stream is reopened."""

Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.NodeMessage, pb.ServerMessage]"


HEARTBEATS_PER_FENCE = 4
"""With one unanswered when the next is due, there is time for another stream before the fence."""
UNANSWERED_MOST = 1_000
"""The maximum number of unanswered heartbeats that are remembered."""


class FenceProofs:
    """Remembers messages sent on the open stream. A response renews the fences of these jobs."""

    def __init__(self, jobs: Mapping[str, JobPort]) -> None:
        self._jobs = jobs
        self._hello_sent_ms = 0
        self._heartbeats = 0
        self._unanswered: deque[tuple[int, int, int]] = deque(maxlen=UNANSWERED_MOST)
        """The open stream's heartbeats: their numbers, and when they were sent, by two clocks."""
        self.server_clock = ServerClock()

    def begin_stream(self) -> None:
        self._unanswered.clear()
        self.server_clock.forget()

    @property
    def shortest_fence_s(self) -> float:
        """The shortest time from the last proof to the fence; 0 if no workers are fenced."""
        fences_ms = [job.fence_after_ms for job in self._jobs.values() if job.fence_after_ms]
        return min(fences_ms, default=0) / 1000

    def note_sent(self, message: pb.NodeMessage) -> bool:
        """Record when it is sent, and have it answered if needed. True: try another stream."""
        if message.HasField("hello"):
            self._hello_sent_ms = boottime_ms()
            return False
        fence_s = self.shortest_fence_s
        if message.HasField("heartbeat") and (fence_s or message.heartbeat.number):
            self._heartbeats += 1
            message.heartbeat.number = self._heartbeats
            self._unanswered.append((self._heartbeats, boottime_ms(), time.monotonic_ns()))
            silent_s = (boottime_ms() - self._unanswered[0][1]) / 1000
            if fence_s and silent_s > fence_s / (HEARTBEATS_PER_FENCE + 1):
                log.warning("the server has not responded for %.1f s; reconnecting", silent_s)
                return True
        return False

    def note_welcomed(self) -> None:
        self._renew_fences(self._hello_sent_ms)

    def note_heard(self, number: int, clock_us: int = 0) -> None:
        """Process a response to a heartbeat on this stream. An unknown number proves nothing."""
        while self._unanswered and self._unanswered[0][0] <= number:
            known, sent_ms, sent_ns = self._unanswered.popleft()
            if known == number:
                self._renew_fences(sent_ms)
                if clock_us:
                    self.server_clock.note(sent_ns, time.monotonic_ns(), clock_us)

    def _renew_fences(self, heard_at_ms: int) -> None:
        for job in list(self._jobs.values()):
            job.renew_fence(heard_at_ms)


class Outbox:
    """Messages from this node to the server. They are dropped if there is no stream."""

    def __init__(self, proofs: FenceProofs, heartbeat_interval_s: float) -> None:
        self.heartbeat_interval_s = heartbeat_interval_s
        self.hang_up: Callable[[], object] = lambda: None
        """Ends the last stream at once."""
        self._proofs = proofs
        self._waiting: asyncio.Queue[pb.NodeMessage | None] | None = None
        self._connected = asyncio.Event()
        self._opening: asyncio.Queue[pb.NodeMessage | None] | None = None
        """The queue of a stream whose Hello has not been written yet."""
        self._ends = False
        """Whether the stream that is being opened ends after its Hello."""
        self._idle = asyncio.Event()
        """Set whenever no messages are waiting to be sent."""

    @property
    def waiting(self) -> int | None:
        return None if self._waiting is None else self._waiting.qsize()

    def begin(self, attach: Callable[[AsyncIterator[pb.NodeMessage]], Call]) -> Call:
        """Open a stream using `attach`. Nothing is sent before `let_through` is called."""
        waiting: asyncio.Queue[pb.NodeMessage | None] = asyncio.Queue(OUTBOX_MESSAGES)
        self._connected, self._opening, self._ends = asyncio.Event(), waiting, False
        call = attach(self._outgoing(waiting, self._connected))
        self.hang_up = call.cancel
        return call

    def let_through(self, hello: pb.Hello) -> None:
        """Start sending, beginning with `hello`, now that there is a connection.

        gRPC would take the first message earlier. But the fence relies on the time at which a
        message is sent, which must not be earlier than the connection; and the node's address is
        its end of the connection.
        """
        assert self._opening is not None
        self._waiting, self._opening = self._opening, None
        self._waiting.put_nowait(pb.NodeMessage(hello=hello))
        if self._ends:
            self.finish()
        self._connected.set()

    def forget(self) -> None:
        """Stop accepting messages for this stream, which has ended or was never connected."""
        self._waiting = self._opening = None
        self._connected.set()

    def finish(self) -> bool:
        """End the stream once all is sent. Returns False if the queue is full."""
        self._ends = True
        if self._waiting is not None:
            try:
                self._waiting.put_nowait(None)
            except asyncio.QueueFull:
                return False
        return True

    def say(self, message: pb.NodeMessage) -> None:
        """Without a stream, the next Hello covers it."""
        if self._waiting is None:
            return
        try:
            self._waiting.put_nowait(message)
        except asyncio.QueueFull:
            log.warning("the server is accepting messages too slowly; reopening the stream")
            self._waiting = None
            self.hang_up()

    async def say_after_all(self, message: pb.NodeMessage) -> None:
        """Send a large message once no other messages are waiting to be sent."""
        while self._waiting is not None and not self._waiting.empty():
            self._idle.clear()
            await self._idle.wait()
        self.say(message)

    async def _outgoing(
        self, waiting: asyncio.Queue[pb.NodeMessage | None], connected: asyncio.Event
    ) -> AsyncIterator[pb.NodeMessage]:
        """With fenced workers, every interval has a heartbeat: only heartbeats are answered."""
        await connected.wait()
        if self._waiting is not waiting:
            return  # There was never a connection; gRPC does not cancel this generator by itself.
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        while True:
            due_s = since_s + self.heartbeat_interval_s
            if waiting.empty():
                self._idle.set()
            try:
                # This is checked even while there are messages, because pieces of a log may follow
                # each other without a pause.
                if loop.time() >= due_s:
                    raise TimeoutError
                async with asyncio.timeout_at(due_s):
                    message = await waiting.get()
            except TimeoutError:
                message = pb.NodeMessage(heartbeat=pb.Heartbeat())
            if message is None:
                return
            if message.HasField("heartbeat") or not self._proofs.shortest_fence_s:
                since_s = loop.time()
            if self._proofs.note_sent(message):
                self.hang_up()
            yield message
