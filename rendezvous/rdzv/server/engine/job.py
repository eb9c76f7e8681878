"""One job in memory, and its steps."""

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
"""Refuses a command that the job's state does not allow, by raising the caller's error."""

Judge = Callable[[State, Transition], Awaitable[tuple[Command | None, tuple[Record, ...]]]]
"""Checks a step before it is stored. It may require another command first, and may add history.

If it raises, the step fails with the same error, and is then retried.
"""


@dataclass(slots=True, eq=False)
class Asked:
    """A command that waits to be decided, with the future for its outcome."""

    command: Command
    guard: Guard | None
    outcome: asyncio.Future[State | RendezvousError]

    def answer(self, outcome: State | RendezvousError) -> None:
        """Set the outcome; this has no effect if the caller was cancelled."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


@struct(frozen=True)
class Step:
    """A step that is decided but not yet stored."""

    command: Command
    transition: Transition
    asked: Asked | None = None


@struct(frozen=True)
class News:
    """A step that is stored, and may now be announced."""

    command: Command
    before: State
    after: State
    events: tuple[Event, ...]
    last: bool = True
    """Whether this is the last of the steps that were stored together."""


@dataclass(slots=True, eq=False)
class Job:
    """One job in memory. `lock` guards all of it."""

    rdzv_id: str
    timer: Timer
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    claims: int = 0
    """The number of callers that hold the lock or wait for it."""
    loaded: State | None = None
    """None until the job is loaded. Its durable half is always stored."""
    revision: int = 0
    doubt: tuple[Step, ...] = ()
    """Steps whose commit may or may not have happened."""
    pending: tuple[Record, ...] = ()
    """History that waits for the next commit."""
    noted: int = 0
    """The number of events noted that no step has caused."""
    node_ids: set[str] = field(default_factory=set)
    """A superset of the nodes that are present."""

    @property
    def state(self) -> State:
        """The job's state; the job must be claimed, and is therefore loaded."""
        assert self.loaded is not None, "the state of a job is read only under a claim"
        return self.loaded

    @property
    def idle(self) -> bool:
        """Whether the job can be dropped from memory: it has no nodes, and is completely stored."""
        if self.claims or self.doubt or self.pending:
            return False
        if self.loaded is None:
            return not self.node_ids
        membership = self.loaded.membership
        return not membership.run or membership.ended is not None
