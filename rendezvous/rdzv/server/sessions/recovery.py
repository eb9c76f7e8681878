"""Reconciles the stored state with nodes' beliefs after a start and after each reconnect.

A job that is loaded waits for the nodes that hold its seats (`on_load`). In its hello, a node sends
its belief about each of its jobs. The belief updates the job, and the node is sent the messages
that it has missed (`greet`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from rdzv.core.commands import Join, MarkHeard, MarkLost
from rdzv.core.fleet import nodes
from rdzv.core.life.joining import joined_replaced_run
from rdzv.core.life.leaving import unheard
from rdzv.core.life.runs import ended_run
from rdzv.core.model import State, is_placeholder
from rdzv.errors import RendezvousError, UnknownNodeError
from rdzv.messages import Belief, Refused
from rdzv.runtime.clock import Clock
from rdzv.server.engine import announcements_to_nodes
from rdzv.server.engine.job import Job
from rdzv.server.engine.jobs import Jobs
from rdzv.server.scheduling.scheduling import Scheduling
from rdzv.server.sessions.commands_from_nodes import NodeCommands, log_unknown
from rdzv.server.sessions.node_jobs import NodeJobs
from rdzv.server.sessions.node_leases import Leases
from rdzv.server.sessions.streams import Stream, Streams
from rdzv.structs import replace

log = logging.getLogger("rdzv.driver")


class Recovery:
    """Reconciles one server's jobs and nodes."""

    def __init__(
        self,
        jobs: Jobs,
        clock: Clock,
        *,
        streams: Streams,
        leases: Leases,
        node_jobs: NodeJobs,
        commands: NodeCommands,
        scheduling: Scheduling,
    ) -> None:
        self._jobs = jobs
        self._clock = clock
        self._streams = streams
        self._leases = leases
        self._node_jobs = node_jobs
        self._commands = commands
        self._scheduling = scheduling

    # ---------------------------------------------------------------- loading a job

    def on_load(self, job: Job) -> None:
        """Expect the nodes that have seats in a loaded job to return.

        After a reload, also send the job's state to its connected nodes.
        """
        former, now_ms = tuple(job.node_ids), self._clock.now_ms()
        round_ = job.state.membership.round
        for participant in round_.participants if round_ else ():
            node_id, instance = participant.node_id, participant.instance
            seat = job.state.seats.get(node_id)
            if seat is None or is_placeholder(node_id):
                continue
            self._node_jobs.add(job, node_id)
            fence_ms = instance.fence_after_ms
            expected = nodes.Expect(
                node_id, seat.incarnation, instance.id, fence_ms, nodes=len(job.state.seats)
            )
            self._leases.step(expected)
            self._node_jobs.mark_soon(node_id, [job.rdzv_id])
        for node_id in (*job.state.placed, *unheard(job.state)):
            self._node_jobs.add(job, node_id)
        # A job's barred nodes are not stored with it, so use the current ones.
        job.loaded = replace(job.state, barred=dict(self._scheduling.quarantine.bar.barred))
        for node_id in former:
            if stream := self._streams.of(node_id):
                self._tell_anew(job.state, stream, now_ms)

    def _tell_anew(self, state: State, stream: Stream, now_ms: int) -> None:
        """Send a connected node its part in a reloaded job, or ask for the node's beliefs again."""
        membership = state.membership
        if membership.ended is None and state.incarnation(stream.node_id) != stream.incarnation:
            # Waiting nodes and takeovers of seats are not stored, so the node must report again.
            stream.greeted = False
            text = "the server has loaded this job again; send Hello again with the node's beliefs"
            stream.send(Refused(membership.rdzv_id, UnknownNodeError.code, text))
            return
        belief = Belief(membership.rdzv_id, membership.run, None, has_workers=False)
        for message in announcements_to_nodes.missed(state, stream.node_id, belief, now_ms):
            stream.send(message)

    # ---------------------------------------------------------------- hello of a node

    async def greet(
        self, stream: Stream, beliefs: Iterable[Belief], unread: Collection[str] = ()
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
        self._node_jobs.mark_soon(stream.node_id)

    async def _hear_belief(self, stream: Stream, belief: Belief) -> Belief:
        """Handle a node's belief about one job.

        Returns the belief; if its commands included a join, it names the run that the node joined.
        """
        node_id, incarnation = stream.node_id, stream.incarnation
        joined = False
        try:
            state = await self._commands.latest(stream, belief.rdzv_id)
            if not belief.has_workers and node_id in unheard(state):
                # Do this before the join, because the next run may be waiting only for this.
                state = await self._commands.insist(stream, belief.rdzv_id, MarkHeard(node_id))
            if (
                ended_run(state, belief.run) is None
                or announcements_to_nodes.may_be_adopted(state, belief)
                or joined_replaced_run(state, node_id, incarnation, belief.run)
            ):
                for command in belief.commands:
                    state = await self._commands.insist(stream, belief.rdzv_id, command)
                    joined |= isinstance(command, Join)
        except RendezvousError as error:
            await self._commands.refuse(stream, belief, error)
            return belief
        # Another caller's step may have been published in the meantime.
        state = self._jobs.peek(belief.rdzv_id) or state
        if joined and state.incarnation(node_id) == incarnation:
            # Another run may have been adopted in place of the node's run, and announced to the
            # node.
            belief = replace(belief, run=state.membership.run)
        if announcements_to_nodes.unknown(state, belief):
            log_unknown(stream, belief)
        for message in announcements_to_nodes.missed(state, node_id, belief, self._clock.now_ms()):
            if announcements_to_nodes.concerns(state, node_id, incarnation, message):
                stream.send(message)
        return belief

    def _is_of_another_run(self, belief: Belief) -> bool:
        """Return whether a belief is about a run other than the job's current one.

        This happens if a restored store brings back a run that the node left long ago.
        """
        state = self._jobs.peek(belief.rdzv_id)
        present = state.membership.run if state is not None else ""
        return bool(present and belief.run) and belief.run != present

    async def _note_left(self, stream: Stream, believed: Collection[str]) -> None:
        """Remove a node from the jobs that its hello no longer names.

        The node left them while it had no stream, so it could not report that it had left.
        """
        node_id = stream.node_id
        for rdzv_id in sorted(self._node_jobs.jobs_of(node_id) - set(believed)):
            state = self._jobs.peek(rdzv_id)
            if state is None or node_id in unheard(state):
                await self._commands.insist_or_log(stream, rdzv_id, MarkHeard(node_id))
            elif state.incarnation(node_id) == stream.incarnation:
                reason = "it has returned, and no longer takes part"
                lost = MarkLost(node_id, stream.incarnation, reason, heard=True)
                await self._commands.insist_or_log(stream, rdzv_id, lost)

    async def _tell_placements(self, stream: Stream) -> None:
        """Send a returning node the submitted jobs that it must run or release."""
        node_id, held = stream.node_id, self._scheduling.known_nodes.held(stream.node_id)
        # Visit only jobs with placements: beliefs cover all others, and thousands of nodes may
        # return at once.
        placed = [
            rdzv_id
            for rdzv_id in self._node_jobs.jobs_of(node_id)
            if (known := self._jobs.peek(rdzv_id)) is None or node_id in known.placed
        ]
        for rdzv_id in {*placed, *held}:
            try:
                state = await self._commands.latest(stream, rdzv_id)
            except RendezvousError as error:
                log.warning(
                    "cannot announce to %s its placement in %s: %s", node_id, rdzv_id, error
                )
                continue
            if state.incarnation(node_id) not in (None, stream.incarnation):
                # A former instance is in the job; it is about to be lost along with its placement.
                continue
            for message in announcements_to_nodes.missed_placement(
                state, node_id, held.get(rdzv_id, ())
            ):
                stream.send(message)
