"""One job in memory, and the steps that it takes."""

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
"""Refuses what must not be done to a job as it is, by raising what the caller is to hear."""

Judge = Callable[[State, Transition], Awaitable[tuple[Command | None, tuple[Record, ...]]]]
"""Hears of a step before it is stored. It may have a command come first, and adds to the history.

What it raises, the step raises, and is then taken again.
"""


@dataclass(slots=True, eq=False)
class Asked:
    """A command that waits to be decided, and the future of its outcome."""

    command: Command
    guard: Guard | None
    outcome: asyncio.Future[State | RendezvousError]

    def answer(self, outcome: State | RendezvousError) -> None:
        """Set the outcome; a caller that was cancelled does not hear it."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


@struct(frozen=True)
class Step:
    """A step that was decided, and is not stored yet."""

    command: Command
    transition: Transition
    asked: Asked | None = None


@struct(frozen=True)
class News:
    """A step that is stored, and of which everyone may now hear."""

    command: Command
    before: State
    after: State
    events: tuple[Event, ...]
    last: bool = True
    """Whether no later step was stored with it."""


@dataclass(slots=True, eq=False)
class Job:
    """One job in memory. `lock` guards all of it."""

    rdzv_id: str
    timer: Timer
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    claims: int = 0
    """The number of callers that hold the lock or wait for it."""
    loaded: State | None = None
    """None until it is loaded. Always one whose durable half is stored."""
    revision: int = 0
    doubt: tuple[Step, ...] = ()
    """Steps whose commit may or may not have happened."""
    pending: tuple[Record, ...] = ()
    """History that rides on the next commit."""
    noted: int = 0
    """How often something has happened that no step has led to."""
    node_ids: set[str] = field(default_factory=set)
    """At least the nodes that are present."""

    @property
    def state(self) -> State:
        """The state of a job that is claimed, and so is loaded."""
        assert self.loaded is not None, "only a claimed job is asked for its state"
        return self.loaded

    @property
    def idle(self) -> bool:
        """Whether it can leave memory: nobody is in it, and the store has all of it."""
        if self.claims or self.doubt or self.pending:
            return False
        if self.loaded is None:
            return not self.node_ids
        membership = self.loaded.membership
        return not membership.run or membership.ended is not None
