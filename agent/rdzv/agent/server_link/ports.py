"""The interfaces through which the link to the server uses job drivers and placements."""

from __future__ import annotations

from typing import Protocol

from rdzv.agent.core import events
from rdzv.agent.observers.stack_sampling import StacksAsked
from rdzv.agent.server_link.placed_jobs import Holding, Placed
from rdzv.core.fleet.placement import FailingCheck, Resources
from rdzv.v1 import rdzv_pb2 as pb


class JobPort(Protocol):
    """The interface of a job's driver that the link uses."""

    rdzv_id: str
    fence_after_ms: int
    """How long workers may run without proof that the server receives this node's messages before
    they are killed; 0: there is no limit.
    """

    def renew_fence(self, heard_at_ms: int) -> None:
        """Renew the fence: the server received a message of this node at `heard_at_ms` or later.

        The time is by `boottime_ms`.
        """

    def belief(self) -> pb.Belief | None:
        """Return this node's belief; None once the job has ended for this node."""

    def post(self, event: events.Event) -> None:
        """Process an event."""

    def note(self, reason: str) -> None:
        """Log why no worker runs yet."""

    def take_stacks(self, asked: StacksAsked) -> None:
        """Start reporting the stacks of a round's workers."""


class PlacementPort(Protocol):
    """The interface of this node's submitted jobs that the link uses."""

    @property
    def resources(self) -> Resources:
        """The places and GPUs of this node for submitted jobs."""

    def holdings(self) -> tuple[Holding, ...]:
        """Return the jobs that may still have processes on this node."""

    def placed(self, placed: Placed) -> None:
        """Accept a job that the server has placed on this node; may be repeated."""

    def withdrawn(self, rdzv_id: str, run: str, reason: str) -> None:
        """Leave a job that the server has withdrawn."""

    @property
    def failing(self) -> tuple[FailingCheck, ...]:
        """The health checks that fail on this node."""

    def look_again(self) -> None:
        """Run the health checks now, at an operator's request."""

    def noticed(self, event: events.NoticeGiven | events.NoticeLifted) -> None:
        """Note that this node is about to leave all its jobs, or stays; jobs are notified next."""
