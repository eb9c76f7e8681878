"""What is asked of jobs, nodes and servers, whoever asks: the Control service, or by HTTP.

A job that is only watched (torchrun's own, at `--c10d`) gives way to one of its name, but in lists.

The values are those of `rdzv.client`, by way of the messages that rdzvctl gets: so what is answered
by HTTP can not differ from what rdzvctl shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING

from rdzv import client
from rdzv.core.explain import JobView
from rdzv.errors import (
    InvalidRequestError,
    RendezvousError,
    UnknownJobError,
    UnknownNodeError,
)
from rdzv.server import wire
from rdzv.server.clock import Clock
from rdzv.server.config import Limits
from rdzv.server.messages import LogsWanted, NodeSummary
from rdzv.server.replica import Replica
from rdzv.stores.base import Record

if TYPE_CHECKING:
    from rdzv.c10d.facade import Facade

SLICE = 50
"""Jobs or nodes that are shown before others get their turn: a few milliseconds."""


class Answers:
    """Answers for one server. Each call raises `NotLeaderError` while it does not lead."""

    def __init__(
        self, replica: Replica, clock: Clock, limits: Limits, facade: Facade | None = None
    ) -> None:
        self.replica = replica
        self.clock = clock
        self.limits = limits
        self._facade = facade

    # ---------------------------------------------------------------- in the server's own words

    async def view(self, asked: str) -> JobView:
        """Show one job.

        Raises:
            UnknownJobError: nobody has ever joined it.
            InvalidRequestError: no job can have this name.

        """
        try:
            return await self.replica.driver.status(wire.rdzv_id_of(asked, self.limits))
        except (UnknownJobError, InvalidRequestError):
            # Not before: a name that is none here may be one for torchrun's own rendezvous.
            if (watched := self.watched(asked)) is None:
                raise
            return watched

    def watched(self, asked: str) -> JobView | None:
        """Show a job that is only watched; None if there is none of this name."""
        return self._facade.view(asked) if self._facade is not None else None

    @property
    def watches(self) -> bool:
        """Whether jobs may be there that are only watched."""
        return self._facade is not None

    def all_watched(self) -> tuple[JobView, ...]:
        """Show every job that is only watched."""
        return self._facade.views() if self._facade is not None else ()

    async def views(self) -> AsyncGenerator[JobView, None]:
        """Show every job, one after the other; now and then others have their turn."""
        async with aclosing(self.replica.driver.each()) as found:
            number = 0
            async for view in found:
                yield view
                number += 1
                if number % SLICE == 0:
                    await asyncio.sleep(0)
        for watched in self.all_watched():
            yield watched

    async def history(self, asked: str, limit: int) -> tuple[Record, ...]:
        """Return a job's newest events, oldest first; of one that is only watched, none."""
        try:
            return await self.replica.driver.history(wire.rdzv_id_of(asked, self.limits), limit)
        except (UnknownJobError, InvalidRequestError):
            if self.watched(asked) is None:
                raise
            return ()

    def why_no_logs(self, asked: str, error: RendezvousError) -> RendezvousError:
        """Say why a job that is not known has no logs here: if it is only watched, that is why."""
        if self.watched(asked) is None:
            return error
        return InvalidRequestError(
            f"{asked} forms its group with torchrun's own c10d rendezvous, which is only watched "
            "here: its nodes have no agent that sends logs; read them on the nodes, in --log-dir"
        )

    # ---------------------------------------------------------------- as rdzvctl has it

    async def status(self, asked: str) -> client.JobStatus:
        """Show one job; raises as `view`."""
        return self.status_of(await self.view(asked))

    def status_of(self, view: JobView) -> client.JobStatus:
        """Show a job of which the server has this view."""
        progress = self.replica.driver.progress(view.rdzv_id)
        stragglers = self.replica.driver.stragglers(view.rdzv_id)
        status = wire.job_status(view, self.clock.now_ms(), progress, stragglers)
        return client.job_status_of(status)

    def summary_of(self, view: JobView) -> client.JobSummary:
        """Show a job as one line."""
        hangs = self.replica.driver.hangs(view.rdzv_id)
        return client.job_summary_of(wire.job_summary(view, hangs))

    async def jobs(self) -> list[client.JobSummary]:
        """Show every job as one line, by name."""
        async with aclosing(self.views()) as views:
            found = [self.summary_of(view) async for view in views]
        return sorted(found, key=lambda job: job.rdzv_id)

    async def events(self, asked: str, limit: int) -> list[client.Event]:
        """Show a job's newest events, oldest first; 0: as many as the server sees fit."""
        rows = await self.history(asked, wire.history_limit(limit, self.limits))
        return [client.event_of(wire.event_row(row)) for row in rows]

    async def kept_stacks(self, asked: str, number: int | None) -> client.StackReport:
        """Show what a job's workers did when a round of it hung, the last one or this one.

        Raises:
            UnknownJobError: nobody has ever joined it.
            InvalidRequestError: none are kept.

        """
        rdzv_id = wire.rdzv_id_of(asked, self.limits)
        report = await self.replica.driver.kept_stacks(rdzv_id, number)
        now_ms = self.clock.now_ms()
        # It may be a megabyte, for which no node is to wait.
        return await asyncio.to_thread(
            lambda: client.stack_report_of(wire.stack_report(report, now_ms))
        )

    def summaries(self) -> list[NodeSummary]:
        """Show every node, in the server's own words."""
        return list(self.replica.driver.nodes())

    @staticmethod
    def node_of(summary: NodeSummary) -> client.Node:
        """Show a node of which the server has this summary."""
        return client.node_of(wire.node_summary(summary))

    async def nodes(self) -> list[client.Node]:
        """Show every node."""
        found = []
        for number, summary in enumerate(self.summaries(), 1):
            found.append(self.node_of(summary))
            if number % SLICE == 0:
                await asyncio.sleep(0)
        return found

    async def node(self, asked: str) -> client.Node:
        """Show one node.

        Raises:
            UnknownNodeError: it is not connected, away or cordoned.
            InvalidRequestError: no node can have this name.

        """
        node_id = wire.node_id_of(asked, self.limits)
        for summary in self.summaries():
            if summary.node_id == node_id:
                return self.node_of(summary)
        raise UnknownNodeError(
            f"no node {node_id} is known here; `rdzvctl nodes` shows those that are"
        )

    async def servers(self) -> list[client.Server]:
        """Show every rdzvd that shares this one's store; also one that stands by answers."""
        return [client.server_of(wire.server(view)) for view in await self.replica.servers()]

    async def logs(self, asked: str, wanted: LogsWanted) -> AsyncIterator[client.LogLines]:
        """Yield what a job's workers have written; raises as `Driver.read_logs`."""
        try:
            rdzv_id = wire.rdzv_id_of(asked, self.limits)
            async with aclosing(self.replica.driver.read_logs(rdzv_id, wanted)) as found:
                async for lines in found:
                    yield client.log_lines_of(wire.log_lines(lines))
        except (UnknownJobError, InvalidRequestError) as error:
            raise self.why_no_logs(asked, error) from error
