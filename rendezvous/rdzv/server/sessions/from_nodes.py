"""What nodes say: their commands to jobs, their beliefs when they connect, and their reports.

While the store is unavailable, each node's commands wait here in order: streams stay open, nothing
new is decided, and workers keep running.

A job that is loaded waits for the nodes that hold its seats (`Recovery.on_load`). In its hello, a
node sends its belief about each of its jobs. The belief updates the job, and the node is sent the
messages that it has missed (`Recovery.greet`).

Reports on a stream that has been replaced by a newer one are ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from rdzv import bounds, errors, messages
from rdzv.core.commands import Command, Join, MarkHeard, MarkLost, Resume, Tick, Withdraw
from rdzv.core.fleet import nodes
from rdzv.core.life.joining import joined_replaced_run
from rdzv.core.life.leaving import unheard
from rdzv.core.life.runs import ended_run
from rdzv.core.life.submitted_jobs import awaited
from rdzv.core.model import State, is_placeholder
from rdzv.runtime.clock import sleep_ms
from rdzv.server.engine.jobs import Job
from rdzv.server.engine.store_access import STORE_RETRY_MS
from rdzv.server.security import roles
from rdzv.server.sessions import announcements
from rdzv.server.sessions.streams import Stream
from rdzv.structs import replace

if TYPE_CHECKING:
    from rdzv.server.driver import Driver

log = logging.getLogger("rdzv.driver")


class NodeCommands:
    """Submits nodes' commands and sends refusals to the nodes."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def hear(self, stream: Stream, rdzv_id: str, command: Command) -> None:
        try:
            self._check_room_for(stream.node_id, rdzv_id, command)
            await self.insist(stream, rdzv_id, command)
        except errors.RendezvousError as error:
            belief = messages.Belief(rdzv_id, getattr(command, "run", ""), None, has_workers=False)
            await self.refuse(stream, belief, error)

    def _check_room_for(self, node_id: str, rdzv_id: str, command: Command) -> None:
        """Refuse a join by a node that is in too many jobs: a single hello must name them all."""
        held, most = self._driver.node_jobs.jobs_of(node_id), bounds.JOBS_PER_NODE
        if isinstance(command, Join) and rdzv_id not in held and len(held) >= most:
            raise errors.LimitExceededError(
                f"{node_id} is already in {len(held)} jobs, and the limit is {most}; leave one"
            )

    async def latest(self, stream: Stream, rdzv_id: str) -> State:
        """Return a job's current state after a tick; it may include other callers' later steps.

        Waits and raises as `insist` does.
        """
        state = await self.insist(stream, rdzv_id, Tick())
        return self._driver.jobs.peek(rdzv_id) or state

    async def insist(self, stream: Stream, rdzv_id: str, command: Command) -> State:
        """Submit a command until it is decided, and return the job's resulting state.

        While the store is unavailable or the previous run is stopping, this retries, and the node
        is sent the reason.
        """
        guard = None
        if isinstance(command, Join | Resume):
            owner = roles.owner_by(stream.caller)
            command = replace(command, owner=owner, instance=stream.instance)

            def guard(state: State) -> None:
                roles.refuse_stranger(stream.caller, state, stream.node_id)

        announced = ""
        while True:
            try:
                return await self._driver.engine.submit(rdzv_id, command, guard)
            except errors.RunStoppingError as error:
                reason = str(error)
            except errors.RendezvousConnectionError as error:
                reason = f"the server cannot store this node's report, and retries: {error}"
            if reason != announced:
                stream.send(messages.Waiting(rdzv_id, reason))
                announced = reason
            await sleep_ms(self._driver.clock, STORE_RETRY_MS)

    async def insist_or_log(self, stream: Stream, rdzv_id: str, command: Command) -> None:
        try:
            await self.insist(stream, rdzv_id, command)
        except errors.RendezvousError as error:
            log.error(
                "job %s: could not record the state of %s: %s", rdzv_id, stream.node_id, error
            )

    async def refuse(
        self, stream: Stream, belief: messages.Belief, error: errors.RendezvousError
    ) -> None:
        """Send a node a refusal or, if its run is over, the way the run ended.

        A refusal caused by an error in this server makes a node reconnect. If the node has other
        jobs, it is therefore sent the error as a reason to wait, and its stream stays open.
        """
        try:
            await self._refuse_as_it_is(stream, belief, error)
        except (errors.InvariantError, errors.RendezvousStateError) as own:
            log.error("job %s: lost a report from %s: %s", belief.rdzv_id, stream.node_id, own)
            if self._driver.node_jobs.jobs_of(stream.node_id) - {belief.rdzv_id}:
                reason = f"the server can decide nothing about this job: {own}"
                stream.send(messages.Waiting(belief.rdzv_id, reason))
            else:
                stream.send(messages.Refused(belief.rdzv_id, own.code, str(own)))

    async def _refuse_as_it_is(
        self, stream: Stream, belief: messages.Belief, error: errors.RendezvousError
    ) -> None:
        if isinstance(error, errors.InvariantError | errors.RendezvousStateError):
            raise error
        if isinstance(error, errors.UnknownNodeError):
            log_unknown(stream, belief)
            return
        if isinstance(error, errors.RendezvousClosedError) and belief.run:
            state = await self.latest(stream, belief.rdzv_id)
            if ended := ended_run(state, belief.run):
                stream.send(messages.Closed(belief.rdzv_id, belief.run, ended))
                return
            # The run has been adopted since the refusal, or its end was not stored.
            text = (
                f"run {belief.run} is not over after all; send Hello again with the node's beliefs"
            )
            error = errors.UnknownNodeError(text)
        stream.send(messages.Refused(belief.rdzv_id, error.code, str(error)))


class Recovery:
    """Reconciles one server's jobs and nodes."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    # ---------------------------------------------------------------- loading a job

    def on_load(self, job: Job) -> None:
        """Expect the nodes that have seats in a loaded job to return.

        After a reload, also send the job's state to its connected nodes.
        """
        former, now_ms = tuple(job.node_ids), self._driver.clock.now_ms()
        round_ = job.state.membership.round
        for participant in round_.participants if round_ else ():
            node_id, instance = participant.node_id, participant.instance
            seat = job.state.seats.get(node_id)
            if seat is None or is_placeholder(node_id):
                continue
            self._driver.node_jobs.add(job, node_id)
            fence_ms = instance.fence_after_ms
            expected = nodes.Expect(
                node_id, seat.incarnation, instance.id, fence_ms, nodes=len(job.state.seats)
            )
            self._driver.leases.step(expected)
            self._driver.node_jobs.mark_soon(node_id, [job.rdzv_id])
        for node_id in (*job.state.placed, *unheard(job.state)):
            self._driver.node_jobs.add(job, node_id)
        # A job's barred nodes are not stored with it, so use the current ones.
        job.loaded = replace(job.state, barred=dict(self._driver.quarantine.bar.barred))
        for node_id in former:
            if stream := self._driver.streams.of(node_id):
                self._tell_anew(job.state, stream, now_ms)

    def _tell_anew(self, state: State, stream: Stream, now_ms: int) -> None:
        """Send a connected node its part in a reloaded job, or ask for the node's beliefs again."""
        membership = state.membership
        if membership.ended is None and state.incarnation(stream.node_id) != stream.incarnation:
            # Waiting nodes and takeovers of seats are not stored, so the node must report again.
            stream.greeted = False
            text = "the server has loaded this job again; send Hello again with the node's beliefs"
            stream.send(messages.Refused(membership.rdzv_id, errors.UnknownNodeError.code, text))
            return
        belief = messages.Belief(membership.rdzv_id, membership.run, None, has_workers=False)
        for message in announcements.missed(state, stream.node_id, belief, now_ms):
            stream.send(message)

    # ---------------------------------------------------------------- hello of a node

    async def greet(
        self, stream: Stream, beliefs: Iterable[messages.Belief], unread: Collection[str] = ()
    ) -> None:
        """Handle a node's beliefs about its jobs, and send the node the messages it has missed.

        The node leaves the jobs that it does not name, except for those in `unread`, whose beliefs
        could not be read. Former instances of the node are then given up.
        """
        believed = set(unread)
        for said in beliefs:
            belief = await self._hear_belief(stream, said)
            if not self._is_of_another_run(belief):
                believed.add(belief.rdzv_id)
        await self._note_left(stream, believed)
        await self._tell_placements(stream)
        stream.greeted = True
        self._driver.node_jobs.mark_soon(stream.node_id)

    async def _hear_belief(self, stream: Stream, belief: messages.Belief) -> messages.Belief:
        """Handle a node's belief about one job.

        Returns the belief; if its commands included a join, it names the run that the node joined.
        """
        node_id, incarnation = stream.node_id, stream.incarnation
        joined = False
        try:
            state = await self._driver.commands.latest(stream, belief.rdzv_id)
            if not belief.has_workers and node_id in unheard(state):
                # Do this before the join, because the next run may be waiting only for this.
                state = await self._driver.commands.insist(
                    stream, belief.rdzv_id, MarkHeard(node_id)
                )
            if (
                ended_run(state, belief.run) is None
                or announcements.may_be_adopted(state, belief)
                or joined_replaced_run(state, node_id, incarnation, belief.run)
            ):
                for command in belief.commands:
                    state = await self._driver.commands.insist(stream, belief.rdzv_id, command)
                    joined |= isinstance(command, Join)
        except errors.RendezvousError as error:
            await self._driver.commands.refuse(stream, belief, error)
            return belief
        # Another caller's step may have been published in the meantime.
        state = self._driver.jobs.peek(belief.rdzv_id) or state
        if joined and state.incarnation(node_id) == incarnation:
            # Another run may have been adopted in place of the node's run, and announced to the
            # node.
            belief = replace(belief, run=state.membership.run)
        if announcements.unknown(state, belief):
            log_unknown(stream, belief)
        for message in announcements.missed(state, node_id, belief, self._driver.clock.now_ms()):
            if announcements.concerns(state, node_id, incarnation, message):
                stream.send(message)
        return belief

    def _is_of_another_run(self, belief: messages.Belief) -> bool:
        """Return whether a belief is about a run other than the job's current one.

        This happens if a restored store brings back a run that the node left long ago.
        """
        state = self._driver.jobs.peek(belief.rdzv_id)
        present = state.membership.run if state is not None else ""
        return bool(present and belief.run) and belief.run != present

    async def _note_left(self, stream: Stream, believed: Collection[str]) -> None:
        """Remove a node from the jobs that its hello no longer names.

        The node left them while it had no stream, so it could not report that it had left.
        """
        node_id = stream.node_id
        for rdzv_id in sorted(self._driver.node_jobs.jobs_of(node_id) - set(believed)):
            state = self._driver.jobs.peek(rdzv_id)
            if state is None or node_id in unheard(state):
                await self._driver.commands.insist_or_log(stream, rdzv_id, MarkHeard(node_id))
            elif state.incarnation(node_id) == stream.incarnation:
                reason = "it has returned, and no longer takes part"
                lost = MarkLost(node_id, stream.incarnation, reason, heard=True)
                await self._driver.commands.insist_or_log(stream, rdzv_id, lost)

    async def _tell_placements(self, stream: Stream) -> None:
        node_id, held = stream.node_id, self._driver.fleet.held(stream.node_id)
        # Visit only jobs with placements: beliefs cover all others, and thousands of nodes may
        # return at once.
        placed = [
            rdzv_id
            for rdzv_id in self._driver.node_jobs.jobs_of(node_id)
            if (known := self._driver.jobs.peek(rdzv_id)) is None or node_id in known.placed
        ]
        for rdzv_id in {*placed, *held}:
            try:
                state = await self._driver.commands.latest(stream, rdzv_id)
            except errors.RendezvousError as error:
                log.warning(
                    "cannot announce to %s its placement in %s: %s", node_id, rdzv_id, error
                )
                continue
            if state.incarnation(node_id) not in (None, stream.incarnation):
                # A former instance is in the job; it is about to be lost along with its placement.
                continue
            for message in announcements.missed_placement(state, node_id, held.get(rdzv_id, ())):
                stream.send(message)


class Reports:
    """Handles reports from one server's nodes."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def take(self, stream: Stream, report: messages.Report) -> None:
        """Handle a report, unless it is about another round than the job's live one."""
        if not self._driver.streams.is_current(stream):
            return
        node_id, driver = stream.node_id, self._driver
        match report:
            case messages.LogPiece() | messages.NodeMetrics():
                driver.requests.take(node_id, report)
            case messages.Stacks():
                driver.stacks.take_in(node_id, report)
            case messages.Health():
                self._driver.fleet.note_health(node_id, report.failing)
            case messages.Draining():
                self._driver.fleet.note_draining(node_id, report)
            case messages.Hung():
                if (state := self._state_for(stream, report)) is not None:
                    driver.hangs.take_report(state, node_id, report)
            case (
                messages.Progress()
                | messages.WorkersStarted()
                | messages.SnapshotsHeld()
                | messages.Arrivals()
            ):
                state = self._state_for(stream, report)
                if state is None:
                    return
                if isinstance(report, messages.SnapshotsHeld):
                    driver.snapshots.note(state, node_id, report, driver.clock.now_ms())
                else:
                    known = driver.rounds.script(state)
                    changed = driver.rounds.note(state, node_id, report)
                    if driver.rounds.script(state) != known:
                        for waiting in state.waiting:
                            driver.streams.send_joined(state, waiting)
                    if not changed:
                        return
                self._driver.watchers.job_progressed(report.rdzv_id)

    def _state_for(
        self,
        stream: Stream,
        report: messages.Progress
        | messages.WorkersStarted
        | messages.SnapshotsHeld
        | messages.Arrivals
        | messages.Hung,
    ) -> State | None:
        """Return the state of the job that a report is about.

        Return None if the report is to be ignored: it comes too early or too late for the job's
        live round, or its node has no seat there.
        """
        state = self._driver.jobs.peek(report.rdzv_id)
        round_ = state.membership.live_round if state is not None else None
        if state is None or round_ is None or report.run != state.membership.run:
            return None
        if not isinstance(report, messages.SnapshotsHeld) and report.round != round_.number:
            return None
        seat = state.seats.get(stream.node_id)
        return state if seat is not None and seat.incarnation == stream.incarnation else None

    async def note_holdings(self, stream: Stream, holdings: tuple[messages.Holding, ...]) -> None:
        """Record which submitted jobs may still have processes on a node.

        Await each call before the next, so that reports are recorded in order. A job that the node
        has released continues without it, even if the node's last command to the job was lost.
        """
        if not self._driver.streams.is_current(stream):
            return
        held = {(holding.rdzv_id, holding.run) for holding in holdings}
        for rdzv_id, runs in self._driver.fleet.held(stream.node_id).items():
            for run in sorted(run for run in runs if (rdzv_id, run) not in held):
                await self._note_let_go(stream, rdzv_id, run)
        if self._driver.streams.is_current(stream):
            self._driver.fleet.note_holdings(stream.node_id, holdings)
            self._driver.watchers.nodes_changed()

    async def _note_let_go(self, stream: Stream, rdzv_id: str, run: str) -> None:
        node_id, reason = stream.node_id, "nothing of the job is left on it"
        state = self._driver.jobs.peek(rdzv_id)
        if state is None or state.membership.run != run or state.membership.ended is not None:
            return
        if state.incarnation(node_id) == stream.incarnation:
            lost = MarkLost(node_id, stream.incarnation, reason, heard=True)
            await self._driver.commands.insist_or_log(stream, rdzv_id, lost)
        elif node_id in awaited(state):
            withdrawn = Withdraw(run, (node_id,), reason)
            await self._driver.commands.insist_or_log(stream, rdzv_id, withdrawn)


def log_unknown(stream: Stream, belief: messages.Belief) -> None:
    """Log that a node runs a job unknown to this server; the node is not told to stop."""
    log.warning(
        "%s is running round %s of job %s, run %s, which is unknown here; leaving it alone",
        stream.node_id,
        belief.round,
        belief.rdzv_id,
        belief.run or "(none)",
    )
