"""This node's offer for a job's rounds, and the job's messages to the server.

This node's snapshots are reported promptly, but at a limited rate. Each report is complete, so only
the latest one matters. The more nodes a job has, the lower the rate, because they all save at the
same time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeAlias

from rdzv.agent.core import commands
from rdzv.agent.core.model import EXIT_FAILED, AgentState, Leaving
from rdzv.agent.launch.launch import Launch, has_torch, reachable_host_name
from rdzv.agent.observers.collective_records import RecordReader
from rdzv.agent.observers.server_clock import Reading
from rdzv.agent.observers.stack_sampling import StackAnswers, Target
from rdzv.agent.server_link import encoding
from rdzv.agent.server_link.link import ServerLink
from rdzv.core.evidence.stacks import WorkerStack
from rdzv.core.model import LeaveCause, Offer
from rdzv.messages import TakeStacks
from rdzv.runtime.clock import monotonic_ms
from rdzv.transport.addresses import is_loopback, machine_id
from rdzv.v1 import rdzv_pb2 as pb

Belief: TypeAlias = pb.Belief
"""Everything that a node believes about a job, as sent in a Hello."""


class ReportsToServer:
    """Sends one job's messages from this node. Only messages with stacks wait for the server."""

    def __init__(self, launch: Launch, link: ServerLink) -> None:
        self._launch = launch
        self._rdzv_id = launch.job.rdzv_id
        self._link = link
        self.records = RecordReader(
            launch.job.rdzv_id, on=launch.collective_trace, identity=launch.identity
        )
        """The records of the workers' collectives."""
        self.preparing = False
        """Whether a zygote is importing for the node's first round."""
        self._snapshots = SnapshotReports(self.report)
        self._stacks = StackAnswers(self._say_stacks, self.records)

    def belief(self, state: AgentState, offer: Offer) -> Belief:
        """Return what this node believes about the job."""
        launch = self._launch
        return encoding.belief(
            state,
            offer,
            monotonic_ms(),
            refuse_reuse=launch.refuse_reuse,
            secret=launch.secret,
            preparing=self.preparing,
        )

    def join(self, say: commands.SayJoin, state: AgentState, offer: Offer) -> None:
        """Request a place in the next round."""
        launch = self._launch
        join = encoding.join(
            say,
            state,
            offer,
            monotonic_ms(),
            refuse_reuse=launch.refuse_reuse,
            secret=launch.secret,
            preparing=self.preparing,
        )
        self._link.say(pb.NodeMessage(join=join))

    def report(self, said: encoding.Statement) -> None:
        """Send what the core or a watch reports about the workers."""
        self._link.say(encoding.report(said, self._rdzv_id, monotonic_ms()))

    def start_failed(self, state: AgentState, reason: str) -> None:
        """Report that this node cannot continue and is leaving, and that it has no workers."""
        assignment = state.assignment
        leaving = Leaving(LeaveCause.START_FAILED, reason, EXIT_FAILED)
        self.report(
            commands.SayLeave(state.run, leaving, None if assignment is None else assignment.round)
        )

    def snapshots(self, say: commands.SaySnapshots, nodes: int) -> None:
        """Report the snapshots held on this node, at a rate limited by the number of `nodes`."""
        self._snapshots.report(say, nodes)

    def read_clock(self) -> Reading | None:
        """Return the current estimate of the server's clock, and request another reading."""
        self._link.ask_clock()
        return self._link.server_clock.read(time.monotonic_ns())

    def stacks(
        self,
        asked: TakeStacks,
        targets: tuple[Target, ...],
        why_none: str,
        world_size: int,
        finished: tuple[WorkerStack, ...],
    ) -> None:
        """Start sampling and sending workers' stacks, or send the reason why there are none."""
        self._stacks.answer(asked, targets, why_none, world_size, finished)

    async def _say_stacks(
        self, request: int, workers: tuple[WorkerStack, ...], last: bool, error: str
    ) -> None:
        await self._link.say_after_all(encoding.stacks(request, workers, last=last, error=error))

    async def close(self) -> None:
        """Stop sampling stacks, and drop reports that are waiting to be sent."""
        self._snapshots.close()
        await self._stacks.close()


EVERY_LEAST_S = 0.1
EVERY_PER_NODE_S = 0.001


class SnapshotReports:
    """Sends snapshot reports for one job on this node."""

    def __init__(self, send: Callable[[commands.SaySnapshots], None]) -> None:
        self._send = send
        self._next: commands.SaySnapshots | None = None
        """The report that is waiting to be sent, if any."""
        self._timer: asyncio.TimerHandle | None = None
        """Runs until the next report may be sent."""

    def report(self, say: commands.SaySnapshots, nodes: int) -> None:
        """Send a report at once, or as soon as the rate for a job of `nodes` nodes allows."""
        self._next = say
        if self._timer is None:
            self._send_next(max(EVERY_LEAST_S, nodes * EVERY_PER_NODE_S))

    def _send_next(self, every_s: float) -> None:
        self._timer = None
        if self._next is not None:
            say, self._next = self._next, None
            self._send(say)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(every_s, self._send_next, every_s)

    def close(self) -> None:
        self._next = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# ---------------------------------------------------------------------- the offer


async def make_offer(launch: Launch) -> Offer:
    """Return this node's offer without a port; without --local-addr, it has no address either."""
    address = launch.local_addr
    return Offer(
        address=address,
        local_world_size=launch.job.local_world_size,
        role=launch.role,
        topology=launch.topology,
        host_name=await reachable_host_name() if is_loopback(address) else "",
        machine=machine_id(),
        can_host_store=await has_torch(launch.python, launch.environ, launch.account),
        shutdown_timeout_ms=max(launch.job.shutdown_timeout_ms, launch.job.keep_timeout_ms),
    )


def on_loopback_only(offer: Offer) -> bool:
    """Return whether the offer's store can be reached from this machine only."""
    return is_loopback(offer.address) and not offer.host_name
