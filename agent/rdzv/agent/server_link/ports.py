"""Interfaces through which the link to the server uses job drivers and placements."""

from __future__ import annotations

from typing import Protocol

from rdzv.agent.core import events
from rdzv.core.fleet.node_resources import FailingCheck, NodeResources
from rdzv.messages import Holding, Placed, TakeStacks, Withdrawn
from rdzv.v1 import rdzv_pb2 as pb


class JobPort(Protocol):
    """The part of a job driver's interface that the link uses."""

    rdzv_id: str
    fence_after_ms: int
    """How long workers may run without proof that the server receives this node's messages, before
    they are killed; 0 means no limit.
    """

    def renew_fence(self, heard_at_ms: int) -> None:
        """Renew the fence, as the server received a message from this node at `heard_at_ms`.

        The message may have been received later. The time is on the `boottime_ms` clock.
        """

    def belief(self) -> pb.Belief | None:
        """Return this node's belief, or None once the job has ended on this node."""

    def post(self, event: events.Event) -> None:
        """Process an event."""

    def waits_ms(self) -> int | None:
        """Return how much longer the job waits for an absent server; None if it never gives up."""

    def note(self, reason: str) -> None:
        """Log why no workers are running yet."""

    def take_stacks(self, asked: TakeStacks) -> None:
        """Start reporting the stacks of a round's workers."""


class PlacementPort(Protocol):
    """The part of the interface to this node's submitted jobs that the link uses."""

    @property
    def resources(self) -> NodeResources:
        """This node's capacity and GPUs for submitted jobs."""

    def holdings(self) -> tuple[Holding, ...]:
        """Return the jobs that may still have processes on this node."""

    def placed(self, placed: Placed) -> None:
        """Accept a job that the server has placed on this node. May be repeated."""

    def withdrawn(self, withdrawn: Withdrawn) -> None:
        """Leave a job that the server has withdrawn."""

    @property
    def failing(self) -> tuple[FailingCheck, ...]:
        """The health checks that are failing on this node."""

    def look_again(self) -> None:
        """Run the health checks now, at an operator's request."""

    def noticed(self, event: events.NoticeGiven | events.NoticeLifted) -> None:
        """Record that this node will leave all its jobs, or stays. Jobs are notified next."""
