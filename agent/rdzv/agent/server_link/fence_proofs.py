"""Proofs that the server hears this node, for nodes whose workers are fenced.

A Welcome says that the Hello was heard, a Heard that its heartbeat was. What is proven is the time
when that was *sent*: the server counts the lease from then, or later. What the server says of its
own accord proves nothing: it may have been on its way for long.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

from rdzv.agent.runner.linux.boottime import boottime_ms
from rdzv.agent.server_link.ports import JobPort
from rdzv.v1 import rdzv_pb2 as pb

log = logging.getLogger("rdzv.agent")

HEARTBEATS_PER_FENCE = 4
"""Heartbeats of a node whose workers are fenced, in the time after which they are: one that stays
without an answer until the next leaves time for a new stream before the fence."""
UNANSWERED_MOST = 1_000
"""The most heartbeats whose answer is waited for."""


class FenceProofs:
    """Remembers what the open stream has sent; an answer renews the fences of these jobs."""

    def __init__(self, jobs: Mapping[str, JobPort]) -> None:
        self._jobs = jobs
        self._hello_sent_ms = 0
        self._heartbeats = 0
        self._unanswered: deque[tuple[int, int]] = deque(maxlen=UNANSWERED_MOST)
        """Heartbeats of the open stream by number, and when they were sent."""

    def begin_stream(self) -> None:
        """Wait for no answer of an earlier stream."""
        self._unanswered.clear()

    @property
    def shortest_fence_s(self) -> float:
        """After how long the first workers of this node are fenced; 0 if none ever are."""
        fences_ms = [job.fence_after_ms for job in self._jobs.values() if job.fence_after_ms]
        return min(fences_ms, default=0) / 1000

    def note_sent(self, message: pb.NodeMessage) -> bool:
        """Remember when this was sent, should an answer come; ask for one where it matters.

        Returns whether the server has left so much unanswered that another stream must be tried.
        """
        if message.HasField("hello"):
            self._hello_sent_ms = boottime_ms()
        elif message.HasField("heartbeat") and (fence_s := self.shortest_fence_s):
            self._heartbeats += 1
            message.heartbeat.number = self._heartbeats
            self._unanswered.append((self._heartbeats, boottime_ms()))
            silent_s = (boottime_ms() - self._unanswered[0][1]) / 1000
            if silent_s > fence_s / (HEARTBEATS_PER_FENCE + 1):
                log.warning("the server does not answer for %.1f s; trying anew", silent_s)
                return True
        return False

    def note_welcomed(self) -> None:
        """Take the answer to the Hello of this stream."""
        self._renew_fences(self._hello_sent_ms)

    def note_heard(self, number: int) -> None:
        """Take an answer to a heartbeat of this stream; one that was never sent proves nothing."""
        while self._unanswered and self._unanswered[0][0] <= number:
            known, sent_ms = self._unanswered.popleft()
            if known == number:
                self._renew_fences(sent_ms)

    def _renew_fences(self, heard_at_ms: int) -> None:
        for job in list(self._jobs.values()):
            job.renew_fence(heard_at_ms)
