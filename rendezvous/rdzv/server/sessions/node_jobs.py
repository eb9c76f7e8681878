"""Tracks which nodes are in which jobs, and updates the jobs when a node is away, back or lost.

The command for an update is recomputed under the job's lock (`NodeJobs._mark_command`), so late or
repeated updates do no harm.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Mapping, Set
from functools import partial
from typing import TYPE_CHECKING

from rdzv.core.commands import Command, Join, MarkAway, MarkBack, MarkLost, Resume, Withdraw
from rdzv.core.events import NodesPlaced, RunEnded
from rdzv.core.fleet import nodes
from rdzv.core.life.leaving import unheard
from rdzv.core.model import State
from rdzv.core.words import listed
from rdzv.errors import RendezvousConnectionError, RendezvousError
from rdzv.runtime.clock import sleep_ms
from rdzv.server.engine.jobs import Job, Step
from rdzv.server.engine.store_access import STORE_RETRY_MS

if TYPE_CHECKING:
    from rdzv.server.driver import Driver

log = logging.getLogger("rdzv.driver")

MARKED_AT_ONCE = 128
"""The maximum number of a job's nodes that are marked together in one commit. In a job of ten
thousand nodes, each loss takes 0.12 ms."""


class NodeJobs:
    """The nodes of each job on one server, and the jobs of each node."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._jobs_of: dict[str, set[str]] = {}
        """A superset of the jobs in which each node is present, by node_id."""
        self._to_mark: dict[str, dict[str, nodes.NodeGivenUp | None]] = {}
        """The nodes still to be marked in each job being updated, by rdzv_id; a lost node is listed
        with its loss."""

    @property
    def node_ids(self) -> Set[str]:
        return self._jobs_of.keys()

    def jobs_of(self, node_id: str) -> Set[str]:
        return self._jobs_of.get(node_id, frozenset())

    def add(self, job: Job, node_id: str) -> None:
        job.node_ids.add(node_id)
        self._jobs_of.setdefault(node_id, set()).add(job.rdzv_id)

    def _remove(self, job: Job, node_id: str) -> None:
        job.node_ids.discard(node_id)
        if stream := self._driver.streams.of(node_id):
            stream.forget(job.rdzv_id)
        if rdzv_ids := self._jobs_of.get(node_id):
            rdzv_ids.discard(job.rdzv_id)
            if not rdzv_ids:
                del self._jobs_of[node_id]

    def note_step(self, job: Job, step: Step) -> None:
        if isinstance(step.command, Join | Resume):
            self._note_present(job, step.command)
        for event in step.events:
            if isinstance(event, NodesPlaced):
                for node_id in event.node_ids:
                    self.add(job, node_id)

    def note_end(self, job: Job, step: Step) -> None:
        if any(isinstance(event, RunEnded) for event in step.events):
            for node_id in tuple(job.node_ids):
                if not (step.after.present(node_id) or node_id in unheard(step.after)):
                    self._remove(job, node_id)

    def _note_present(self, job: Job, command: Join | Resume) -> None:
        self.add(job, command.node_id)
        stream = self._driver.streams.of(command.node_id)
        if stream is None or stream.incarnation != command.incarnation:
            # The node's stream ended while the command was being decided, and nothing else reports
            # that to the job.
            self.mark_soon(command.node_id, [job.rdzv_id])

    # ---------------------------------------------------------------- updating jobs

    def mark_soon(
        self,
        node_id: str,
        rdzv_ids: Iterable[str] | None = None,
        lost: nodes.NodeGivenUp | None = None,
    ) -> None:
        if rdzv_ids is None:
            rdzv_ids = tuple(self.jobs_of(node_id))
        for rdzv_id in rdzv_ids:
            to_mark = self._to_mark.get(rdzv_id)
            if to_mark is None:
                self._to_mark[rdzv_id] = {node_id: lost}
                self._driver.tasks.start(self._mark_all(rdzv_id))
            else:
                # The node's state is read when the node is marked, so one entry is enough.
                to_mark[node_id] = lost or to_mark.get(node_id)

    async def _mark_all(self, rdzv_id: str) -> None:
        to_mark = self._to_mark[rdzv_id]
        try:
            while to_mark and not self._driver.streams.closed:
                # Let other tasks run in between, no matter how many nodes there are.
                await asyncio.sleep(0)
                marked = {
                    n: to_mark.pop(n) for n in tuple(itertools.islice(to_mark, MARKED_AT_ONCE))
                }
                if not await self._mark(rdzv_id, marked):
                    for node_id, lost in marked.items():
                        to_mark.setdefault(node_id, lost)
                    await sleep_ms(self._driver.clock, STORE_RETRY_MS)
        finally:
            del self._to_mark[rdzv_id]

    async def _mark(self, rdzv_id: str, marked: Mapping[str, nodes.NodeGivenUp | None]) -> bool:
        names = listed(marked)
        try:
            async with self._driver.jobs.claim(rdzv_id) as job:
                choices = [
                    partial(self._mark_command, job, node_id, lost)
                    for node_id, lost in marked.items()
                ]
                for refused in await self._driver.engine.steps(job, choices):
                    log.error(
                        "job %s: could not record the state of %s: %s", rdzv_id, names, refused
                    )
        except RendezvousConnectionError:
            return False
        except RendezvousError as error:
            log.error("job %s: could not record the state of %s: %s", rdzv_id, names, error)
        return True

    def _mark_command(
        self, job: Job, node_id: str, lost: nodes.NodeGivenUp | None, state: State
    ) -> Command | None:
        held = state.incarnation(node_id)
        record = self._driver.leases.records.get(node_id)
        if held is None and node_id in state.placed:
            if record is not None or lost is None:
                return None
            return Withdraw(state.membership.run, (node_id,), lost.reason)
        if held is None:
            if node_id not in unheard(state):
                self._remove(job, node_id)
            return None
        if record is None:
            if lost is None:
                return MarkLost(node_id, held, "it was given up")
            return MarkLost(node_id, held, lost.reason, silent_ms=lost.silent_ms)
        if record.incarnation != held:
            return self._mark_former(record, held)
        away = state.away.get(node_id)
        if record.stream is not None:
            return MarkBack(node_id, held) if away is not None else None
        if away is not None and away.firm and record.firm:
            # Only the nodes core decides how much longer to wait for the node.
            return None
        outlives = record.kind is nodes.AgentKind.DAEMON and not record.fence_after_ms
        return MarkAway(node_id, held, record.until_ms, record.firm, may_run=outlives)

    def _mark_former(self, record: nodes.NodeRecord, held: int) -> Command | None:
        """Return the command that gives up a former instance once its successor was greeted."""
        stream = self._driver.streams.of(record.node_id)
        if stream is not None and stream.greeted and stream.number == record.stream:
            reason = "a new instance of the node took its place"
            return MarkLost(record.node_id, held, reason, heard=True)
        return None
