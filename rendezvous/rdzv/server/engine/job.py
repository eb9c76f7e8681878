"""Defines a job in memory and the steps that change it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rdzv.core.commands import Command
from rdzv.core.events import Event
from rdzv.core.model import State
from rdzv.core.rendezvous import Transition
from rdzv.errors import RendezvousError
from rdzv.runtime.clock import Timer
from rdzv.stores.base import Record
from rdzv.structs import struct

Guard = Callable[[State], None]
"""Checks a job's state before a command; refuses the command by raising the caller's error."""

Judge = Callable[[State, Transition], Awaitable[tuple[Command | None, tuple[Record, ...]]]]
"""Checks a transition from the given state before it is stored.

Returns a command that must run first, if any, and rows to add to the history. If it raises, all
commands decided in the same batch fail with that error.
"""


@dataclass(slots=True, eq=False)
class Asked:
    """A command waiting to be decided, with the future that receives its outcome."""

    command: Command
    guard: Guard | None
    outcome: asyncio.Future[State | RendezvousError]

    def answer(self, outcome: State | RendezvousError) -> None:
        """Set the outcome, unless it has already been set or the caller was cancelled."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


@struct(frozen=True)
class Step:
    """A command that has been decided but not yet stored, with its transition."""

    command: Command
    transition: Transition
    asked: Asked | None = None


@struct(frozen=True)
class News:
    """A step whose durable half is stored, so that it can be announced."""

    command: Command
    before: State
    after: State
    events: tuple[Event, ...]
    last: bool = True
    """Whether this is the last of the steps that were stored together."""


@dataclass(slots=True, eq=False)
class Job:
    """A job in memory, guarded as a whole by `lock`."""

    rdzv_id: str
    timer: Timer
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    claims: int = 0
    """The number of callers that hold the lock or are waiting for it."""
    loaded: State | None = None
    """The job's state, or None until it is loaded. Its durable half is always stored."""
    revision: int = 0
    doubt: tuple[Step, ...] = ()
    """The steps whose commit may or may not have happened."""
    pending: tuple[Record, ...] = ()
    """The history rows waiting for the next commit."""
    noted: int = 0
    """The number of times that `History.note` has recorded events for this job."""
    node_ids: set[str] = field(default_factory=set)
    """A superset of the nodes that are present in the job."""

    @property
    def state(self) -> State:
        """The job's state. The caller must hold a claim, which ensures that the job is loaded."""
        assert self.loaded is not None, "the state of a job is read only under a claim"
        return self.loaded

    @property
    def idle(self) -> bool:
        """Whether the job can be dropped from memory.

        This requires that the job is unclaimed and fully stored, and has no run in progress.
        """
        if self.claims or self.doubt or self.pending:
            return False
        if self.loaded is None:
            return not self.node_ids
        membership = self.loaded.membership
        return not membership.run or membership.ended is not None
