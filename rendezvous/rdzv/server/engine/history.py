"""Keeps the history of jobs. Events are logged at once and stored with the next commit."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rdzv.core.events import (
    Event,
    FirstCollectiveMade,
    NodeDeclined,
    NodeLeaving,
    NodeLost,
    NodeStopped,
    NodeStuck,
    RankStraggles,
    RoundEnded,
    RoundSettled,
    RunEnded,
    WorkerFailed,
    WorkersHang,
)
from rdzv.core.model import Cause, Result
from rdzv.core.rendezvous import Transition
from rdzv.errors import RendezvousError
from rdzv.server.engine.jobs import Job
from rdzv.stores.base import Record
from rdzv.view.history import Kept, kept, written
from rdzv.view.sentences import headline, sentence

if TYPE_CHECKING:
    from rdzv.server.driver import Driver

log = logging.getLogger("rdzv.jobs")
_lines = logging.getLogger("rdzv.events")


PENDING_ROWS = 256
"""The number of rows that may wait for their job's next commit. With more, they get their own."""


class History:
    """Writes and reads the history of one server's jobs."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def rows(self, transition: Transition) -> tuple[Record, ...]:
        membership = transition.state.membership
        now_ms = self._driver.clock.now_ms()
        return records(membership.rdzv_id, membership.run, transition.events, now_ms)

    def publish(self, job: Job, rows: tuple[Record, ...], events: tuple[Event, ...]) -> None:
        job.published += len(rows)
        keeps = [kept(event) for event in events]
        log_events(job, rows, events, keeps)
        self._driver.metrics.recorded(rows, keeps)

    def postpone(self, job: Job, rows: tuple[Record, ...]) -> None:
        job.pending += rows
        if len(job.pending) > PENDING_ROWS:
            rows, job.pending = job.pending, ()
            self._driver.tasks.start(self.append(rows))

    def note(self, rdzv_id: str, events: tuple[Event, ...]) -> None:
        """Log events that were not caused by a step, and store them with the next commit.

        Does nothing if the job is not loaded.
        """
        job = self._driver.jobs.in_memory.get(rdzv_id)
        if job is not None and job.loaded is not None:
            run = job.loaded.membership.run
            rows = records(rdzv_id, run, events, self._driver.clock.now_ms())
            self.postpone(job, rows)
            self.publish(job, rows, events)

    def published_of(self, rdzv_id: str) -> int:
        """Return how many rows a job in memory has had; its history is the same while this is."""
        job = self._driver.jobs.in_memory.get(rdzv_id)
        return job.published if job else 0

    async def append(self, rows: tuple[Record, ...]) -> None:
        """Store rows in a separate commit; if that fails, they remain only in the log."""
        try:
            if rows:
                await self._driver.store.append(rows)
        except RendezvousError as error:
            # The log has the rows anyway, and a job never waits for its history.
            log.warning("lost %d rows of history: %s", len(rows), error)

    async def flush(self) -> None:
        jobs = self._driver.jobs.in_memory.values()
        await self.append(tuple(row for job in jobs for row in job.pending))

    async def of(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        """Return a job's newest rows, oldest first, including rows that are waiting for a commit.

        `rdzv_id` may also be a name that no job can have, under which rows were appended.
        """
        job = self._driver.jobs.in_memory.get(rdzv_id)
        pending = job.pending if job else ()
        rows = await self._driver.store.history(rdzv_id, limit)
        return (*rows, *pending)[-limit:]


def records(rdzv_id: str, run: str, events: Iterable[Event], now_ms: int) -> tuple[Record, ...]:
    """Convert events to history rows; an event that names no run is assigned to `run`."""
    return tuple(
        Record(
            unix_ms=now_ms,
            rdzv_id=rdzv_id,
            run=getattr(event, "run", run),
            name=type(event).__name__,
            data=written(event),
        )
        for event in events
    )


def log_events(
    job: Job, rows: Sequence[Record], events: Sequence[Event], keeps: Sequence[Kept]
) -> None:
    """Log one line per event, without the reason if another line of the round has it."""
    lost = any(isinstance(event, NodeLost) for event in events)
    for row, event, kept_event in zip(rows, events, keeps, strict=True):
        text = sentence(kept_event)
        match event:
            case RoundEnded(end=end):
                job.end_reason = end.reason
                text = headline(kept_event) if lost else text
            case RoundSettled() if event.reason == job.end_reason:
                text = headline(kept_event)
        extra = {"rdzv_id": row.rdzv_id, "run": row.run, "event": row.name}
        _lines.log(_level(event), "%s: %s", row.rdzv_id, text, extra=extra)


def _level(event: Event) -> int:
    match event:
        # All workers of a large job may fail after one; the round's end and charge say which.
        case WorkerFailed() | NodeStopped() | NodeLeaving() | FirstCollectiveMade():
            return logging.DEBUG
        case RoundEnded(end=end) if end.cause is Cause.WORKER_FAILURE:
            return logging.WARNING
        case NodeLost() | NodeStuck() | NodeDeclined() | WorkersHang() | RankStraggles():
            return logging.WARNING
        case RunEnded(ended=ended) if ended.result is Result.FAILED:
            return logging.ERROR
        case _:
            return logging.INFO
