"""The drivers of jobs and the placements, as the link to the server uses them."""

from __future__ import annotations

from typing import Protocol

from rdzv.agent.core import events
from rdzv.agent.observers.stack_sampling import StacksAsked
from rdzv.agent.server_link.placed_jobs import Holding, Placed
from rdzv.core.placement import FailingCheck, Resources
from rdzv.v1 import rdzv_pb2 as pb


class JobPort(Protocol):
    """The driver of a job, as the link uses it."""

    rdzv_id: str
    fence_after_ms: int
    """After how long without proof that the server hears this node its workers are killed; 0: they
    are not."""

    def renew_fence(self, heard_at_ms: int) -> None:
        """Hear that the server has heard this node at that point of `boottime_ms`, or later."""

    def belief(self) -> pb.Belief | None:
        """Say all that is believed; None once the job has ended for this node."""

    def post(self, event: events.Event) -> None:
        """Take note of an event."""

    def note(self, reason: str) -> None:
        """Hear, in words, why there are no workers to run."""

    def take_stacks(self, asked: StacksAsked) -> None:
        """Begin to say what the workers of a round are doing."""


class PlacementPort(Protocol):
    """The submitted jobs of this node, as the link uses them."""

    @property
    def resources(self) -> Resources:
        """The places and GPUs of this node for them."""

    def holdings(self) -> tuple[Holding, ...]:
        """Name those of which something may be left on this node."""

    def placed(self, placed: Placed) -> None:
        """Hear that the server has chosen this node for a job; perhaps not for the first time."""

    def withdrawn(self, rdzv_id: str, run: str, reason: str) -> None:
        """Hear that it takes that back."""

    @property
    def failing(self) -> tuple[FailingCheck, ...]:
        """The health checks that fail on this node."""

    def look_again(self) -> None:
        """Hear that an operator wants to have that looked at now."""

    def noticed(self, event: events.NoticeGiven | events.NoticeLifted) -> None:
        """Hear that this node is about to leave all its jobs, or stays; before its jobs do."""
