"""History: what has happened to jobs, in the log at once and in the store with the next commit."""

from __future__ import annotations

import logging

from rdzv.core.events import Event
from rdzv.core.rendezvous import Transition
from rdzv.errors import RendezvousError
from rdzv.runtime.clock import Clock
from rdzv.runtime.tasks import Tasks
from rdzv.server.engine.job import Job
from rdzv.server.engine.jobs import Jobs
from rdzv.server.engine.store_access import StoreAccess
from rdzv.server.telemetry import event_lines
from rdzv.server.telemetry.metrics_hooks import Meter
from rdzv.stores.base import Record

log = logging.getLogger("rdzv.jobs")


class History:
    """Writes and reads the history of one server's jobs."""

    def __init__(
        self,
        jobs: Jobs,
        store: StoreAccess,
        clock: Clock,
        tasks: Tasks,
        meter: Meter,
        pending_rows: int,
    ) -> None:
        """More than `pending_rows` of one job get a commit of their own."""
        self._jobs = jobs
        self._store = store
        self._clock = clock
        self._tasks = tasks
        self._meter = meter
        self._pending_rows = pending_rows

    def rows(self, transition: Transition) -> tuple[Record, ...]:
        """Return the rows that a step adds."""
        membership = transition.state.membership
        now_ms = self._clock.now_ms()
        return event_lines.records(membership.rdzv_id, membership.run, transition.events, now_ms)

    def publish(self, rows: tuple[Record, ...], events: tuple[Event, ...]) -> None:
        """Pass on to log and metrics what the history tells."""
        event_lines.publish(rows, events)
        self._meter.recorded(rows)

    def postpone(self, job: Job, rows: tuple[Record, ...]) -> None:
        """Keep rows for the next commit; too many of them get one of their own."""
        job.pending += rows
        if len(job.pending) > self._pending_rows:
            rows, job.pending = job.pending, ()
            self._tasks.start(self.append(rows))

    def note(self, rdzv_id: str, events: tuple[Event, ...]) -> None:
        """Write events that no step has led to: to the log, and with the next commit to history."""
        job = self._jobs.get(rdzv_id)
        if job is not None and job.loaded is not None:
            run = job.loaded.membership.run
            rows = event_lines.records(rdzv_id, run, events, self._clock.now_ms())
            self.postpone(job, rows)
            self.publish(rows, events)
            job.noted += 1

    def noted(self, rdzv_id: str) -> int:
        """Return a number that grows when something happens to a job that no step has led to."""
        job = self._jobs.get(rdzv_id)
        return job.noted if job else 0

    async def append(self, rows: tuple[Record, ...]) -> None:
        """Write rows by themselves; if they cannot be stored, the log has them alone."""
        try:
            if rows:
                await self._store.append(rows)
        except RendezvousError as error:
            # The log has them all the same; a job never waits for its history.
            log.warning("%d rows of history are lost: %s", len(rows), error)

    async def flush(self) -> None:
        """Write the rows that still wait for a commit."""
        jobs = self._jobs.in_memory.values()
        await self.append(tuple(row for job in jobs for row in job.pending))

    async def of(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        """Return the newest rows of a job, oldest first, with those that wait for a commit.

        The name may be one that no job can have, under which rows were appended.
        """
        job = self._jobs.get(rdzv_id)
        pending = job.pending if job else ()
        rows = await self._store.history(rdzv_id, limit)
        return (*rows, *pending)[-limit:]
