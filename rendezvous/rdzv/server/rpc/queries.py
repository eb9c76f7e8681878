"""Queries about jobs, shared by gRPC and HTTP.

An *observed* job uses torchrun's own rendezvous, at `--c10d`. A job hides an observed job with the
same name, except in lists.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from rdzv import bounds
from rdzv.errors import (
    InvalidRequestError,
    RendezvousError,
    UnknownJobError,
)
from rdzv.runtime.clock import Clock
from rdzv.server.operations import answer_values
from rdzv.server.replication.replica import Replica
from rdzv.stores.base import Record
from rdzv.view import answers
from rdzv.view.answers import JobStatus

if TYPE_CHECKING:
    from rdzv.c10d.facade import Facade

SLICE = 50
"""The number of jobs or nodes to convert before other tasks run, which takes a few milliseconds."""


class Queries:
    """Queries about one server's jobs. They raise `NotLeaderError` while it does not lead."""

    def __init__(self, replica: Replica, clock: Clock, facade: Facade | None = None) -> None:
        self.replica = replica
        self.clock = clock
        self._facade = facade

    async def view(self, asked: str) -> JobStatus:
        """Return the view of a job, or else of the observed job with this name.

        Raises:
            UnknownJobError: no node has ever joined the job.
            InvalidRequestError: no job can have this name.

        """
        try:
            return await self.replica.driver.views.status(bounds.rdzv_id_of(asked))
        except (UnknownJobError, InvalidRequestError):
            # Even a name that no job can have may be valid in torchrun's own rendezvous.
            if (watched := self.watched(asked)) is None:
                raise
            return watched

    def watched(self, asked: str) -> JobStatus | None:
        """Return the view of the observed job with this name, or None if there is none."""
        return self._facade.view(asked) if self._facade is not None else None

    @property
    def watches(self) -> bool:
        """Whether this server can have observed jobs."""
        return self._facade is not None

    def all_watched(self) -> tuple[JobStatus, ...]:
        return self._facade.views() if self._facade is not None else ()

    async def check_known(self, asked: str) -> None:
        """Raise the errors that `view` raises, without computing the view."""
        try:
            await self.replica.driver.views.state(bounds.rdzv_id_of(asked))
        except (UnknownJobError, InvalidRequestError):
            if self.watched(asked) is None:
                raise

    def status_of(self, view: JobStatus) -> answers.JobStatus:
        views = self.replica.driver.views
        rdzv_id, now_ms = view.rdzv_id, self.clock.now_ms()
        found = (views.progress(rdzv_id), views.stragglers(rdzv_id), views.starts(rdzv_id))
        return answer_values.with_workers(view, now_ms, *found, snapshots=views.snapshots(rdzv_id))

    def summary_of(self, view: JobStatus) -> answers.JobSummary:
        """Return a job's line for lists, computed from its view."""
        return answer_values.job_summary(view, self.replica.driver.views.hangs(view.rdzv_id))

    async def views(self) -> AsyncGenerator[JobStatus, None]:
        """Yield the view of every job, observed jobs last; other tasks run in between."""
        async with aclosing(self.replica.driver.views.each()) as found:
            number = 0
            async for view in found:
                yield view
                number += 1
                if number % SLICE == 0:
                    await asyncio.sleep(0)
        for watched in self.all_watched():
            yield watched

    async def history(self, asked: str, limit: int) -> tuple[Record, ...]:
        """Return a job's newest `limit` events, oldest first; an observed job has none.

        Raises the same errors as `view`.
        """
        try:
            return await self.replica.driver.views.history(bounds.rdzv_id_of(asked), limit)
        except (UnknownJobError, InvalidRequestError):
            if self.watched(asked) is None:
                raise
            return ()

    def why_no_logs(self, asked: str, error: RendezvousError) -> RendezvousError:
        """Return `error` or, if the job is only observed, an error that explains this."""
        if self.watched(asked) is None:
            return error
        return InvalidRequestError(
            f"{asked} forms its group with torchrun's own c10d rendezvous, which is only watched "
            "here: its nodes have no agent that sends logs; read them on the nodes, in --log-dir"
        )
