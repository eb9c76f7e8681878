"""Handles nodes' reports other than commands: progress, hangs, health, holdings and drains.

Requested logs and stacks also arrive here. Reports on a stream that has been replaced by a newer
one are ignored.
"""

from __future__ import annotations

from functools import partial

from rdzv.core.commands import MarkLost, Withdraw
from rdzv.core.fleet.node_resources import FailingCheck
from rdzv.core.life.submitted_jobs import awaited
from rdzv.core.model import State
from rdzv.messages import (
    Arrivals,
    Draining,
    Holding,
    Hung,
    LogPiece,
    Progress,
    SnapshotsHeld,
    Stacks,
    WorkersStarted,
)
from rdzv.runtime.clock import Clock
from rdzv.server.diagnosis.diagnosis import Diagnosis
from rdzv.server.engine.jobs import Jobs
from rdzv.server.engine.watchers import Watchers
from rdzv.server.scheduling.scheduling import Scheduling
from rdzv.server.sessions.commands_from_nodes import NodeCommands
from rdzv.server.sessions.node_jobs import NodeJobs
from rdzv.server.sessions.streams import Stream, Streams


class Reports:
    """Handles reports from one server's nodes."""

    def __init__(
        self,
        jobs: Jobs,
        clock: Clock,
        *,
        streams: Streams,
        node_jobs: NodeJobs,
        commands: NodeCommands,
        scheduling: Scheduling,
        diagnosis: Diagnosis,
        watchers: Watchers,
    ) -> None:
        self._jobs = jobs
        self._clock = clock
        self._streams = streams
        self._node_jobs = node_jobs
        self._commands = commands
        self._scheduling = scheduling
        self._diagnosis = diagnosis
        self._watchers = watchers

    def _state_for(
        self, stream: Stream, said: Progress | WorkersStarted | SnapshotsHeld | Arrivals | Hung
    ) -> State | None:
        """Return the state of the job that a report is about.

        Return None if the report is to be ignored: it comes too early or too late for the job's
        live round, its node has no seat there, or a newer stream has come.
        """
        state = self._jobs.peek(said.rdzv_id) if self._streams.is_current(stream) else None
        round_ = state.membership.live_round if state is not None else None
        if state is None or round_ is None or said.run != state.membership.run:
            return None
        if not isinstance(said, SnapshotsHeld) and said.round != round_.number:
            return None
        seat = state.seats.get(stream.node_id)
        return state if seat is not None and seat.incarnation == stream.incarnation else None

    def note_progress(self, stream: Stream, said: Progress) -> None:
        """Record the progress of a node's workers if the report is about the current round.

        Raises:
            InvalidRequestError: the report names a worker that the node does not have.

        """
        state, now_ms = self._state_for(stream, said), self._clock.now_ms()
        if state is None:
            return
        self._diagnosis.progress.note(state, stream.node_id, said, now_ms)
        self._diagnosis.milestones.note(state, stream.node_id, said, now_ms)
        shown = partial(self._diagnosis.progress.shown, state, now_ms)
        self._diagnosis.stragglers.note(state, shown, now_ms)
        self._watchers.job_progressed(said.rdzv_id)

    def note_started(self, stream: Stream, said: WorkersStarted) -> None:
        """Record how a node's workers were started, if the report is about the current round.

        Raises:
            InvalidRequestError: the report does not name exactly the workers that the node has.

        """
        state = self._state_for(stream, said)
        if state is not None and self._diagnosis.starts.note(state, stream.node_id, said):
            self._watchers.job_progressed(said.rdzv_id)

    def note_snapshots(self, stream: Stream, said: SnapshotsHeld) -> None:
        """Record which snapshots a node holds if it takes part in the job's current round."""
        if (state := self._state_for(stream, said)) is not None:
            self._diagnosis.snapshots.note(state, stream.node_id, said, self._clock.now_ms())
            self._watchers.job_progressed(said.rdzv_id)

    def note_arrivals(self, stream: Stream, said: Arrivals) -> None:
        """Record when a node's workers entered collectives in the current round.

        Raises:
            InvalidRequestError: the report names a worker that the node does not have.

        """
        if (state := self._state_for(stream, said)) is None:
            return
        now_ms = self._clock.now_ms()
        changed = self._diagnosis.stragglers.note_arrivals(state, stream.node_id, said, now_ms)
        self._diagnosis.milestones.note_collectives(stream.node_id, said, now_ms)
        if changed:
            self._watchers.job_progressed(said.rdzv_id)

    def note_hung(self, stream: Stream, said: Hung) -> None:
        """Pass on a report that workers hang or no longer hang; see `ReportedHangs`."""
        if (state := self._state_for(stream, said)) is not None:
            self._diagnosis.hangs.take_report(state, stream.node_id, said)

    def note_health(self, stream: Stream, failing: tuple[FailingCheck, ...]) -> None:
        if self._streams.is_current(stream):
            self._scheduling.note_health(stream.node_id, failing)

    def note_draining(self, stream: Stream, draining: Draining) -> None:
        if self._streams.is_current(stream):
            self._scheduling.note_draining(stream.node_id, draining)
            for rdzv_id in self._node_jobs.jobs_of(stream.node_id):
                self._watchers.job_changed(rdzv_id)

    async def note_holdings(self, stream: Stream, holdings: tuple[Holding, ...]) -> None:
        """Record which submitted jobs may still have processes on a node.

        Await each call before the next, so that reports are recorded in order. A job that the node
        has released continues without it, even if the node's last command to the job was lost.
        """
        if not self._streams.is_current(stream):
            return
        held = {(holding.rdzv_id, holding.run) for holding in holdings}
        for rdzv_id, runs in self._scheduling.known_nodes.held(stream.node_id).items():
            for run in sorted(run for run in runs if (rdzv_id, run) not in held):
                await self._note_let_go(stream, rdzv_id, run)
        if self._streams.is_current(stream):
            self._scheduling.note_holdings(stream.node_id, holdings)
            self._watchers.nodes_changed()

    async def _note_let_go(self, stream: Stream, rdzv_id: str, run: str) -> None:
        node_id, reason = stream.node_id, "nothing of the job is left on it"
        state = self._jobs.peek(rdzv_id)
        if state is None or state.membership.run != run or state.membership.ended is not None:
            return
        if state.incarnation(node_id) == stream.incarnation:
            lost = MarkLost(node_id, stream.incarnation, reason, heard=True)
            await self._commands.insist_or_log(stream, rdzv_id, lost)
        elif node_id in awaited(state):
            withdrawn = Withdraw(run, (node_id,), reason)
            await self._commands.insist_or_log(stream, rdzv_id, withdrawn)

    def take_log(self, stream: Stream, piece: LogPiece) -> None:
        if self._streams.is_current(stream):
            self._diagnosis.logs.take(stream.node_id, piece)

    def take_stacks_in(self, stream: Stream, said: Stacks) -> None:
        """Pass workers' stacks on to the collection that is waiting for them."""
        if self._streams.is_current(stream):
            self._diagnosis.stacks.take_in(stream.node_id, said)
