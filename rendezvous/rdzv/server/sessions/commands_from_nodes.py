"""Handles the commands that nodes send to their jobs, such as joins, failures and leaves.

While the store is unavailable, each node's commands wait here in order: streams stay open, nothing
new is decided, and workers keep running.
"""

from __future__ import annotations

import logging

from rdzv import bounds
from rdzv.core.commands import Command, Join, Resume, Tick
from rdzv.core.life.runs import ended_run
from rdzv.core.model import State
from rdzv.errors import (
    InvariantError,
    LimitExceededError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RunStoppingError,
    UnknownNodeError,
)
from rdzv.messages import Belief, Closed, Refused, Waiting
from rdzv.runtime.clock import Clock, sleep_ms
from rdzv.server.engine.decide_persist_publish import Engine
from rdzv.server.engine.store_availability import STORE_RETRY_MS
from rdzv.server.security import roles
from rdzv.server.sessions.node_jobs import NodeJobs
from rdzv.server.sessions.streams import Stream
from rdzv.structs import replace

log = logging.getLogger("rdzv.driver")


class NodeCommands:
    """Submits nodes' commands and sends refusals to the nodes."""

    def __init__(self, engine: Engine, node_jobs: NodeJobs, clock: Clock) -> None:
        self._engine = engine
        self._jobs = engine.jobs
        self._node_jobs = node_jobs
        self._clock = clock

    async def hear(self, stream: Stream, rdzv_id: str, command: Command) -> None:
        """Submit a node's command; a refusal is sent to the node and never raised."""
        try:
            self._check_room_for(stream.node_id, rdzv_id, command)
            await self.insist(stream, rdzv_id, command)
        except RendezvousError as error:
            belief = Belief(rdzv_id, getattr(command, "run", ""), None, has_workers=False)
            await self.refuse(stream, belief, error)

    def _check_room_for(self, node_id: str, rdzv_id: str, command: Command) -> None:
        """Refuse a join by a node that is in too many jobs: a single hello must name them all.

        Raises:
            LimitExceededError: the node is in as many jobs as the limit allows.

        """
        held, most = self._node_jobs.jobs_of(node_id), bounds.JOBS_PER_NODE
        if isinstance(command, Join) and rdzv_id not in held and len(held) >= most:
            raise LimitExceededError(
                f"{node_id} is already in {len(held)} jobs, and the limit is {most}; leave one"
            )

    async def latest(self, stream: Stream, rdzv_id: str) -> State:
        """Return a job's current state after a tick; it may include other callers' later steps.

        Waits and raises as `insist` does.
        """
        state = await self.insist(stream, rdzv_id, Tick())
        return self._jobs.peek(rdzv_id) or state

    async def insist(self, stream: Stream, rdzv_id: str, command: Command) -> State:
        """Submit a command until it is decided, and return the job's resulting state.

        While the store is unavailable or the previous run is stopping, this retries, and the node
        is sent the reason.

        Raises:
            RendezvousError: the command was refused.

        """
        guard = None
        if isinstance(command, Join | Resume):
            owner = roles.owner_by(stream.caller)
            command = replace(command, owner=owner, instance=stream.instance)

            def guard(state: State) -> None:
                roles.refuse_stranger(stream.caller, state, stream.node_id)

        said = ""
        while True:
            try:
                return await self._engine.submit(rdzv_id, command, guard)
            except RunStoppingError as error:
                reason = str(error)
            except RendezvousConnectionError as error:
                reason = f"the server cannot store this node's report, and retries: {error}"
            if reason != said:
                stream.send(Waiting(rdzv_id, reason))
                said = reason
            await sleep_ms(self._clock, STORE_RETRY_MS)

    async def insist_or_log(self, stream: Stream, rdzv_id: str, command: Command) -> None:
        """Submit a command that results from a report; log a refusal instead of raising it."""
        try:
            await self.insist(stream, rdzv_id, command)
        except RendezvousError as error:
            log.error(
                "job %s: could not record the state of %s: %s", rdzv_id, stream.node_id, error
            )

    async def refuse(self, stream: Stream, belief: Belief, error: RendezvousError) -> None:
        """Send a node a refusal or, if its run is over, the way the run ended.

        A refusal caused by an error in this server makes a node reconnect. If the node has other
        jobs, it is therefore sent the error as a reason to wait, and its stream stays open.
        """
        try:
            await self._refuse_as_it_is(stream, belief, error)
        except (InvariantError, RendezvousStateError) as own:
            log.error("job %s: lost a report from %s: %s", belief.rdzv_id, stream.node_id, own)
            if self._node_jobs.jobs_of(stream.node_id) - {belief.rdzv_id}:
                reason = f"the server can decide nothing about this job: {own}"
                stream.send(Waiting(belief.rdzv_id, reason))
            else:
                stream.send(Refused(belief.rdzv_id, own.code, str(own)))

    async def _refuse_as_it_is(
        self, stream: Stream, belief: Belief, error: RendezvousError
    ) -> None:
        if isinstance(error, InvariantError | RendezvousStateError):
            raise error
        if isinstance(error, UnknownNodeError):
            log_unknown(stream, belief)
            return
        if isinstance(error, RendezvousClosedError) and belief.run:
            state = await self.latest(stream, belief.rdzv_id)
            if ended := ended_run(state, belief.run):
                stream.send(Closed(belief.rdzv_id, belief.run, ended))
                return
            # The run has been adopted since the refusal, or its end was not stored.
            text = (
                f"run {belief.run} is not over after all; send Hello again with the node's beliefs"
            )
            error = UnknownNodeError(text)
        stream.send(Refused(belief.rdzv_id, error.code, str(error)))


def log_unknown(stream: Stream, belief: Belief) -> None:
    """Log that a node runs a job unknown to this server; the node is not told to stop."""
    log.warning(
        "%s is running round %s of job %s, run %s, which is unknown here; leaving it alone",
        stream.node_id,
        belief.round,
        belief.rdzv_id,
        belief.run or "(none)",
    )
