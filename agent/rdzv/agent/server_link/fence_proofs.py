"""Proofs that the server is receiving this node's messages, for nodes whose workers are fenced.

A Welcome is the response to the Hello, and a Heard is the response to a heartbeat. Each proves that
the server has received a message that was *sent* at a known time, so the server's lease starts then
or later. Unsolicited messages from the server prove nothing, because they may have been in transit
for a long time.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping

from rdzv.agent.observers.server_clock import ServerClock
from rdzv.agent.runner.system import boottime_ms
from rdzv.agent.server_link.inbox import JobPort
from rdzv.v1 import rdzv_pb2 as pb

log = logging.getLogger("rdzv.agent")

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
