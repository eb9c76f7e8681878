"""What operators ask, answered with the same values over gRPC and HTTP.

An *observed* job uses torchrun's own rendezvous, at `--c10d`. A job hides an observed job with the
same name, except in lists.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING

from rdzv import bounds
from rdzv.errors import InvalidRequestError, RendezvousError, UnknownJobError, UnknownNodeError
from rdzv.messages import LogsWanted
from rdzv.runtime.clock import Clock
from rdzv.server import wire
from rdzv.server.operations import answer_values
from rdzv.server.replication.replica import Replica
from rdzv.stores.base import HISTORY_ROWS, Record
from rdzv.view import answers
from rdzv.view.answers import JobStatus
from rdzv.view.ledger import Ledger, chosen, ledgers_of, run_numbers
from rdzv.view.reports import Report, Spent, ended_before, report, spent_by

if TYPE_CHECKING:
    from rdzv.c10d.facade import Facade

SLICE = 50
"""The number of jobs or nodes to convert before other tasks run, which takes a few milliseconds."""


class Queries:
    """Queries about a server's jobs and nodes, which raise `NotLeaderError` unless it leads."""

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

    @property
    def store_away(self) -> str | None:
        """The reason why this server cannot store anything at the moment, or None if it can."""
        return self.replica.driver.trouble or None

    async def status(self, asked: str) -> answers.JobStatus:
        """Return the status of a job; raises the same errors as `view`."""
        return self.status_of(await self.view(asked))

    async def jobs(self) -> list[answers.JobSummary]:
        async with aclosing(self.views()) as views:
            found = [self.summary_of(view) async for view in views]
        return sorted(found, key=lambda job: job.rdzv_id)

    async def events(self, asked: str, limit: int) -> list[answers.Event]:
        """Return a job's newest `limit` events, oldest first; 0 means the server's default."""
        rows = await self.history(asked, wire.history_limit(limit))
        return [answers.event_in(row) for row in rows]

    async def ledger(self, asked: str, number: int | None) -> tuple[list[int], Ledger]:
        """Return the numbers of a job's runs, and the ledger of run `number` or of the last run.

        Raises:
            UnknownJobError: no node has ever joined the job.
            InvalidRequestError: no history of this run is kept.

        """
        status = await self.status(asked)
        past = await self.events(asked, HISTORY_ROWS)
        now_ms = self.clock.now_ms()
        # A history may have ten thousand rows, and nodes must not wait for their conversion.
        runs = await asyncio.to_thread(ledgers_of, past, now_ms, status.state)
        return run_numbers(runs), chosen(status.rdzv_id, runs, number)

    async def report(self, since_ms: int) -> Report:
        """Return a summary of how all jobs have spent the last `since_ms`.

        Histories are read one at a time; jobs that are forgotten in the meantime are left out.
        """
        now_ms = self.clock.now_ms()
        from_ms, spent = now_ms - since_ms, list[Spent | None]()
        for job in await self.jobs():
            if ended_before(job.state, job.state_age_ms, since_ms):
                continue
            with contextlib.suppress(UnknownJobError):
                rows = await self.history(job.rdzv_id, HISTORY_ROWS)
                spent.append(await asyncio.to_thread(_spent, job, rows, from_ms, now_ms))
        return report(spent, from_ms, now_ms)

    async def kept_stacks(self, asked: str, number: int | None) -> answers.StackReport:
        """Return the stacks kept from round `number`, or from the last round that hung.

        Raises:
            UnknownJobError: no node has ever joined the job.
            InvalidRequestError: no such stacks are kept.

        """
        rdzv_id = bounds.rdzv_id_of(asked)
        report = await self.replica.driver.workers.kept_stacks(rdzv_id, number)
        now_ms = self.clock.now_ms()
        # The report may be as large as a megabyte, and nodes must not wait for its conversion.
        return await asyncio.to_thread(answer_values.stack_report, report, now_ms)

    async def new_stacks(self, asked: str) -> answers.StackReport:
        """Capture and return the current stacks of a job's workers.

        Raises the same errors as `WorkerViews.stacks`, and `InvalidRequestError` for an observed
        job.
        """
        rdzv_id = bounds.rdzv_id_of(asked)
        if self.watched(asked) is not None:
            raise InvalidRequestError(f"{asked} is only watched here: its nodes have no agent")
        workers = self.replica.driver.workers
        report = await workers.stacks(rdzv_id, "", None, "an operator asked for them")
        return await asyncio.to_thread(answer_values.stack_report, report, self.clock.now_ms())

    async def node_events(self, asked: str, limit: int) -> list[answers.NodeEvent]:
        """Return the newest `limit` events about a node from all jobs' histories, oldest first."""
        node_id = bounds.node_id_of(asked)
        found = list[answers.NodeEvent]()
        for job in await self.jobs():
            with contextlib.suppress(UnknownJobError):
                rows = await self.history(job.rdzv_id, HISTORY_ROWS)
                found += await asyncio.to_thread(_about, rows, node_id)
        return sorted(found, key=lambda event: event.unix_ms)[-limit:]

    def nodes(self) -> list[answers.Node]:
        return self.replica.driver.node_views.summaries()

    async def node(self, asked: str) -> answers.Node:
        """Return one node's view.

        Raises:
            UnknownNodeError: no such node is connected, away, cordoned or quarantined.
            InvalidRequestError: no node can have this name.

        """
        node_id = bounds.node_id_of(asked)
        for summary in self.nodes():
            if summary.node_id == node_id:
                return summary
        raise UnknownNodeError(
            f"no node {node_id} is known here; `rdzvctl nodes` shows those that are"
        )

    async def servers(self) -> list[answers.Server]:
        return list(await self.replica.servers())

    async def logs(self, asked: str, wanted: LogsWanted) -> AsyncGenerator[answers.LogLines, None]:
        """Yield the output of a job's workers, with the errors of `WorkerViews.read_logs`."""
        try:
            rdzv_id = bounds.rdzv_id_of(asked)
            async with aclosing(self.replica.driver.workers.read_logs(rdzv_id, wanted)) as found:
                async for lines in found:
                    yield lines
        except (UnknownJobError, InvalidRequestError) as error:
            raise self.why_no_logs(asked, error) from error


def _spent(
    job: answers.JobSummary, rows: Iterable[Record], from_ms: int, now_ms: int
) -> Spent | None:
    runs = ledgers_of(map(answers.event_in, rows), now_ms, job.state)
    return spent_by(job.rdzv_id, runs, from_ms)


def _about(rows: Iterable[Record], node_id: str) -> list[answers.NodeEvent]:
    found = (answers.node_event_in(row, node_id) for row in rows)
    return [event for event in found if event is not None]
