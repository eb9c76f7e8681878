"""Handles the messages on a node's stream. It knows nothing of gRPC; the simulator uses it too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from rdzv import bounds
from rdzv.core.commands import Command
from rdzv.errors import InvalidRequestError, LimitExceededError
from rdzv.messages import (
    Arrivals,
    Belief,
    Heard,
    Holdings,
    Hung,
    Progress,
    Refused,
    Report,
    SnapshotsHeld,
    WorkersStarted,
)
from rdzv.runtime.clock import Clock
from rdzv.server import wire
from rdzv.server.driver import Driver
from rdzv.server.sessions.streams import Stream
from rdzv.v1 import rdzv_pb2 as pb

Said = tuple[str, Command] | Holdings
Refuse = Callable[[InvalidRequestError | LimitExceededError], None]

_SHOWN = frozenset(("progress", "workers_started", "snapshots_held", "arrivals"))
"""The reports that are only shown to people, which are logged, not refused, if they are invalid."""

_OF_WORKERS = (Progress, WorkersStarted, SnapshotsHeld, Arrivals, Hung)
"""The reports that count only for those who have a seat in the live round."""

_EARLY = 4
"""The number of kinds of reports that are kept for a job until the node's beliefs have been
handled."""

log = logging.getLogger("rdzv.service")


COMMANDS_PER_SECOND = 100
"""The commands that one node may send for its jobs, such as joins, after a first burst."""

COMMANDS_AT_ONCE = 2_048
"""The size of that burst, far more than a hello contains."""

INBOX = 1_024
"""The number of messages of one node that wait while the store is away, before its stream is
closed."""


class NodeMessages:
    """The messages that one node sends after its hello.

    Commands and holdings wait in an inbox and are handled in order; all other messages are handled
    as they arrive. An invalid message is refused, or just logged if it is only shown to people; the
    stream stays open.
    """

    def __init__(self, driver: Driver, stream: Stream, clock: Clock) -> None:
        self._driver = driver
        self._stream = stream
        self._clock = clock
        self._speaker = wire.Speaker(stream.node_id, stream.incarnation)
        self._allowance = RateLimit(COMMANDS_AT_ONCE, COMMANDS_PER_SECOND)
        # One place more than the limit, for the end marker.
        self._inbox: asyncio.Queue[Said | None] = asyncio.Queue(INBOX + 1)
        self._early: dict[tuple[type, str], Callable[[], None]] = {}
        """The reports that arrived before the node's beliefs were handled, by kind and rdzv_id.
        They are recorded after the beliefs."""
        self._warned = False

    # -------------------------------------------------------------- as they arrive

    def take(self, message: pb.NodeMessage) -> None:
        """Take a message, which renews the lease at once, even while the store is unavailable."""
        self._driver.connections.heard(self._stream)
        body = str(message.WhichOneof("body"))
        refuse = self._warn if body in _SHOWN else partial(self._refuse, wire.job_named_in(message))
        try:
            self._dispatch(body, message, refuse)
        except (InvalidRequestError, LimitExceededError) as error:
            refuse(error)

    def finish(self) -> None:
        """Record that the node sends no more. Call it once; `obey` ends after the last command."""
        self._inbox.put_nowait(None)

    def _dispatch(self, body: str, message: pb.NodeMessage, refuse: Refuse) -> None:
        stream, driver, now_ms = self._stream, self._driver, self._clock.now_ms()
        if body == "heartbeat":
            if message.heartbeat.number:
                stream.send(Heard(message.heartbeat.number, now_ms * 1_000))
            return
        if body == "away":
            driver.connections.plan_away(stream, wire.away_ms_of(message.away))
            return
        match wire.report_of(message):
            case None:
                self._queue(wire.command_of(message, self._speaker, now_ms))
            case Holdings() as holdings:
                self._queue(holdings)
            case report:
                self._take(report, refuse)

    def _take(self, report: Report, refuse: Refuse) -> None:
        """Handle a report at once, so that it does not wait while the store is unavailable.

        A report about workers that arrives before the node's beliefs have been handled is handled
        after them. Early arrivals in collectives are dropped: more follow soon.
        """

        def record() -> None:
            try:
                self._driver.reports.take(self._stream, report)
            except InvalidRequestError as error:
                refuse(error)

        if self._stream.greeted or not isinstance(report, _OF_WORKERS):
            record()
        elif not isinstance(report, Arrivals):
            key = type(report), report.rdzv_id
            if key in self._early or len(self._early) < _EARLY * bounds.JOBS_PER_NODE:
                self._early[key] = record

    def _queue(self, message: Said) -> None:
        if not isinstance(message, Holdings) and not self._allowance.take(self._clock.now_ms()):
            raise LimitExceededError(
                f"{self._stream.node_id} sends more than {COMMANDS_PER_SECOND} "
                "commands a second; send fewer"
            )
        if self._inbox.qsize() < INBOX:
            self._inbox.put_nowait(message)
            return
        self._stream.close(
            LimitExceededError(
                f"{INBOX} messages of {self._stream.node_id} wait to be decided; the "
                "stream is closed: send Hello again with the node's beliefs"
            )
        )

    def _refuse(self, rdzv_id: str, error: InvalidRequestError | LimitExceededError) -> None:
        self._stream.send(Refused(rdzv_id, error.code, str(error)))

    def _warn(self, error: InvalidRequestError | LimitExceededError) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s: ignoring an invalid report: %s", self._stream.node_id, error)

    # -------------------------------------------------------------- in order

    async def obey(self, beliefs: Sequence[pb.Belief]) -> None:
        """Handle the node's beliefs, then its queued messages in order until `finish` is called."""
        stream = self._stream
        named = [wire.job_named_in(message) for message in beliefs]
        await self._driver.recovery.greet(stream, self._beliefs(beliefs), named)
        early, self._early = self._early, {}
        for record in early.values():
            record()
        while (queued := await self._inbox.get()) is not None:
            if isinstance(queued, Holdings):
                await self._driver.reports.note_holdings(stream, queued.holdings)
            else:
                await self._driver.commands.hear(stream, *queued)
        stream.close()

    def _beliefs(self, messages: Sequence[pb.Belief]) -> Iterable[Belief]:
        for message in messages:
            try:
                yield wire.belief_of(message, self._speaker, self._clock.now_ms())
            except InvalidRequestError as error:
                # An error about one job must not block the node's other jobs.
                self._refuse(wire.job_named_in(message), error)


class RateLimit:
    """A rate limit that allows a burst and then a fixed number of units per second.

    >>> allowed = RateLimit(burst=2, per_second=10)
    >>> [allowed.take(now_ms) for now_ms in (0, 0, 0, 99, 100, 100)]
    [True, True, False, False, True, False]
    """

    def __init__(self, burst: int, per_second: int) -> None:
        self._most_ms = burst * 1000 / per_second
        self._each_ms = 1000 / per_second
        self._left_ms = self._most_ms
        self._at_ms: int | None = None

    def take(self, now_ms: int) -> bool:
        if self._at_ms is not None:
            self._left_ms = min(self._left_ms + now_ms - self._at_ms, self._most_ms)
        self._at_ms = now_ms
        if self._left_ms < self._each_ms:
            return False
        self._left_ms -= self._each_ms
        return True
