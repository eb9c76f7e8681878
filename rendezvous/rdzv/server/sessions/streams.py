"""Nodes' open streams, each with a bounded outbox. All messages to nodes pass through here.

gRPC's work per message does not depend on its length, and makes up most of a node's cost to a
server. Messages that are not urgent therefore wait briefly, to be written together with others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rdzv import errors, messages
from rdzv.core.commands import Join
from rdzv.core.model import Assignment, Instance, State
from rdzv.runtime.counts import Counts
from rdzv.server.engine.jobs import Step
from rdzv.server.security.callers import ANYBODY, Caller
from rdzv.server.sessions import announcements

if TYPE_CHECKING:
    from rdzv.server.driver import Driver

LINGER_S = 0.05
"""The maximum time for which a message waits for others."""

OUTBOX = 1_024
"""The number of messages that wait for one slow reader before its stream is closed."""

AT_ONCE = 64
"""The maximum number of messages written at once."""

_PATIENT = (messages.Welcome, messages.Servers, messages.Joined, messages.Lease, messages.Waiting)
"""Messages that may wait, because a node does not act on them urgently."""


class StreamOutbox:
    """A bounded queue with a single reader. Messages keep their order."""

    def __init__(self, limit: int, *, lingers: bool) -> None:
        """Hold at most `limit` messages. Without `lingers`, every message is due at once."""
        self.limit = limit
        self._lingers = lingers
        self._waiting: list[messages.Announcement] = []
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def put(self, announcement: messages.Announcement) -> bool:
        if len(self._waiting) >= self.limit:
            return False
        self._waiting.append(announcement)
        if not self._lingers or not isinstance(announcement, _PATIENT):
            self._due.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._due.set)
        return True

    def close(self) -> None:
        """Close the outbox: `take` no longer waits, and returns no more messages."""
        self._closed = True
        self._due.set()

    async def take(self) -> list[messages.Announcement]:
        """Wait until a message is due, and return the waiting messages as `take_now` does.

        Returns an empty list once the outbox is closed.
        """
        await self._due.wait()
        return [] if self._closed else self.take_now()

    def take_now(self) -> list[messages.Announcement]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        announcements, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
        if not self._waiting:
            self._due.clear()
        return announcements


class Stream:
    """One node's stream and its outbox. Sending never blocks.

    If the node reads too slowly, its stream is closed and nothing else is affected: the node
    reconnects and is sent the messages that it has missed.
    """

    def __init__(
        self,
        number: int,
        incarnation: int,
        hello: messages.Hello,
        counts: Counts,
        caller: Caller = ANYBODY,
    ) -> None:
        self.number = number
        self.node_id = hello.node_id
        self.incarnation = incarnation
        self.instance = Instance(hello.instance, hello.fence_after_ms)
        self.caller = caller
        self._counts = counts
        self.greeted = False
        """Whether all beliefs in the node's hello have been handled."""
        self.takes_several = hello.takes_several
        self.outbox = StreamOutbox(OUTBOX, lingers=hello.takes_several)
        self.last_announced: dict[str, messages.Announcement] = {}
        self._ended: asyncio.Future[errors.RendezvousError | None] = (
            asyncio.get_running_loop().create_future()
        )

    @property
    def open(self) -> bool:
        return not self._ended.done()

    def send(self, announcement: messages.Announcement, *, again: bool = False) -> None:
        """Queue a message, or do nothing if the stream has ended.

        A message that only repeats the previous one about its job is skipped unless `again` is set.
        If the outbox is full, the stream is closed.
        """
        if not self.open or (self._repeats(announcement) and not again):
            return
        if self.outbox.put(announcement):
            self._counts.add("rdzv_messages_sent_total")
        else:
            self.close(
                errors.LimitExceededError(
                    f"{self.node_id} reads its stream too slowly: {self.outbox.limit} messages "
                    "wait; the stream is closed, and a new one begins with the present state"
                )
            )

    def _repeats(self, announcement: messages.Announcement) -> bool:
        if isinstance(announcement, messages.Joined | messages.Closed | messages.Refused):
            # The node drops messages about a round that arrive before it knows the run.
            self.forget(announcement.rdzv_id)
        if not isinstance(announcement, Assignment | messages.RoundOver | messages.Waiting):
            return False
        repeated = self.last_announced.get(announcement.rdzv_id) == announcement
        self.last_announced[announcement.rdzv_id] = announcement
        return repeated

    def forget(self, rdzv_id: str) -> None:
        self.last_announced.pop(rdzv_id, None)

    def close(self, error: errors.RendezvousError | None = None) -> None:
        if self.open:
            self._ended.set_result(error)
            self.outbox.close()

    @contextlib.contextmanager
    def calling_on_end(self, call: Callable[[], object]) -> Iterator[None]:
        """Call `call` soon after the stream ends, if it ends before the body does."""
        inside = True
        self._ended.add_done_callback(lambda _: inside and call())
        try:
            yield
        finally:
            inside = False

    async def ended(self) -> errors.RendezvousError | None:
        return await asyncio.shield(self._ended)


class Streams:
    """The open streams of one server, one for each connected node."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.open: dict[str, Stream] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self.closed = False

    def add(self, stream: Stream) -> None:
        self.open[stream.node_id] = stream
        self._empty.clear()

    def remove(self, stream: Stream) -> bool:
        current = self.is_current(stream)
        if current:
            del self.open[stream.node_id]
        if not self.open:
            self._empty.set()
        return current

    def of(self, node_id: str) -> Stream | None:
        return self.open.get(node_id)

    def is_current(self, stream: Stream) -> bool:
        """Return whether this stream speaks for its node; a stream that was replaced is ignored."""
        return self.open.get(stream.node_id) is stream

    async def wait_empty(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()

    # ---------------------------------------------------------------- sending to nodes

    def send(self, node_id: str, message: messages.Announcement) -> bool:
        stream = self.open.get(node_id)
        if stream is not None:
            stream.send(message)
        return stream is not None

    def announce(self, step: Step) -> None:
        now_ms = self._driver.clock.now_ms()
        if isinstance(step.command, Join):
            self._announce_join(step.before, step.after, step.command, now_ms)
        for node_id, message in announcements.after_step(
            step.before, step.after, step.events, now_ms
        ):
            stream = self.open.get(node_id)
            if stream is not None and announcements.concerns(
                step.after, node_id, stream.incarnation, message
            ):
                stream.send(message)

    def _announce_join(self, before: State, after: State, command: Join, now_ms: int) -> None:
        node_id = command.node_id
        self.send_joined(after, node_id)
        if node_id in after.waiting:
            self.send(node_id, announcements.waiting(after, node_id, now_ms))
        stream = self.open.get(node_id)
        missed = announcements.missed_assignment(before, command, now_ms)
        if stream is not None and stream.incarnation == command.incarnation and missed is not None:
            stream.send(missed, again=True)

    def send_joined(self, state: State, node_id: str) -> None:
        membership, rounds = state.membership, self._driver.rounds
        round_ = membership.live_round
        joined = messages.Joined(
            membership.rdzv_id,
            membership.run,
            membership.run_number,
            rounds.forks(state),
            rounds.script(state),
            0 if round_ is None else round_.renewed,
        )
        self.send(node_id, joined)

    # ---------------------------------------------------------------- closing

    def close(self, node_id: str, number: int | None, why: str) -> None:
        stream = self.open.get(node_id)
        if stream is not None and stream.number == number:
            stream.close(
                errors.RendezvousConnectionError(f"this stream of {node_id} is closed: {why}")
            )

    def close_opened_with(self, tokens: frozenset[str]) -> None:
        for stream in self.open.values():
            if stream.caller.token in tokens:
                stream.close(
                    errors.UnauthenticatedError("the token that opened this stream was revoked")
                )

    def close_all(self, error: errors.RendezvousError) -> None:
        self.closed = True
        for stream in self.open.values():
            stream.close(error)
