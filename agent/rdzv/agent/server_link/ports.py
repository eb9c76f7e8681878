"""What the link to the server needs of the drivers of jobs, and of the placements."""

from __future__ import annotations

from typing import Protocol

from rdzv.agent.core import events
from rdzv.agent.observers.stack_sampling import StacksAsked
from rdzv.agent.server_link.placed_jobs import Holding, Placed
from rdzv.core.placement import FailingCheck, Resources
from rdzv.v1 import rdzv_pb2 as pb


class JobPort(Protocol):
    """What the link needs of each job's driver."""

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
    """What the link needs of who takes up submitted jobs on this node."""

    @property
    def resources(self) -> Resources:
        """What this node has for them."""

    def holdings(self) -> tuple[Holding, ...]:
        """Name those of which something may be left on this node."""

    def placed(self, placed: Placed) -> None:
        """Hear that the server has chosen this node for a job; perhaps not for the first time."""

    def withdrawn(self, rdzv_id: str, run: str, reason: str) -> None:
        """Hear that it takes that back."""

    @property
    def failing(self) -> tuple[FailingCheck, ...]:
        """What is wrong with this node."""

    def look_again(self) -> None:
        """Hear that an operator wants to have that looked at now."""

    def noticed(self, event: events.NoticeGiven | events.NoticeLifted) -> None:
        """Hear that this node is about to leave all its jobs, or stays; before its jobs do."""
