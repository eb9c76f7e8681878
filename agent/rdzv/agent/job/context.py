"""What the parts of one job's driver share: its decisions, its state, and its services."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ParamSpec

from rdzv.agent.core import Decision, events, step
from rdzv.agent.core.model import AgentState
from rdzv.agent.job.store_offer import StoreOffer
from rdzv.agent.job.worker_observers import WorkerObservers
from rdzv.agent.launch.launch import Launch
from rdzv.agent.runner_link import RunnerLink
from rdzv.agent.system.owned_tasks import OwnedTasks
from rdzv.agent.system.side_thread import Aside
from rdzv.agent.workers.fates import FateRecorder, NodeOutcome
from rdzv.agent.workers.worker_group import LocalWorkerGroup
from rdzv.core.model import Offer
from rdzv.runtime.clock import monotonic_ms

if TYPE_CHECKING:
    from rdzv.agent.job.round import LocalRound


_P = ParamSpec("_P")


class Decisions:
    """The agent core for one job, with its clock and its event queue."""

    def __init__(
        self,
        state: AgentState,
        act: Callable[[events.Event, AgentState, Decision], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Start from `state`. `act` receives each event with its prior state and transition."""
        self.state = state
        self._act = act
        self._on_error = on_error
        self._inbox: deque[events.Event] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self.stopped = False
        """Whether decision-making has stopped for good."""

    def post(self, event: events.Event) -> None:
        """Process an event after all earlier ones."""
        if self.stopped:
            return
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox and not self.stopped:
                self.guard(self._decide, self._inbox.popleft())
        finally:
            self._busy = False

    def guard(self, do: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Call a function on the job's behalf. An exception ends the job on this node."""
        try:
            do(*args, **kwargs)
        except Exception as error:
            self._on_error(error)

    def _decide(self, event: events.Event) -> None:
        before = self.state
        transition = step(before, event, monotonic_ms())
        self.state = transition.state
        self._act(event, before, transition)
        self._arm(transition.wake_at_ms)

    def _arm(self, wake_at_ms: int | None) -> None:
        self.cancel_tick()
        if wake_at_ms is not None:
            delay_s = max(wake_at_ms - monotonic_ms(), 0) / 1000
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_s, self.post, events.Ticked())

    def cancel_tick(self) -> None:
        """Cancel the pending tick. The next event will schedule a new one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def stop(self) -> None:
        self.stopped = True
        self.cancel_tick()


ERROR_FILE_WITHIN_S = 2.0
"""How long a failed worker's exit waits for its error file to be read."""


@dataclass(eq=False)
class JobContext:
    """A job on this node, as shared by its driver, its rounds and its event router."""

    launch: Launch
    workers: LocalWorkerGroup
    observers: WorkerObservers
    fates: FateRecorder
    decisions: Decisions
    tasks: OwnedTasks
    keep: Callable[[], None]
    """Stores the current state in the runner for the next agent."""
    examine: Callable[[], Awaitable[str]] | None
    """Returns what is wrong with this node, or an empty string. None if there are no health checks.
    """
    offer: StoreOffer = field(default_factory=lambda: StoreOffer(Offer(address="")))
    linked: RunnerLink | None = None
    """The job's runner; None until the job is prepared."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is known whether workers can be started on this node."""
    unready: str = ""
    """Why workers cannot be started on this node; empty if they can."""
    error_files: Aside = field(default_factory=lambda: Aside(ERROR_FILE_WITHIN_S))
    ended: asyncio.Future[NodeOutcome] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The job's outcome on this node, or the unexpected error that ended it."""
    last_round: LocalRound | None = None
    """The last round in which this node took part; None before the first."""

    @property
    def runner(self) -> RunnerLink:
        """The job's runner. Available once the job has been prepared."""
        assert self.linked is not None
        return self.linked

    @property
    def round(self) -> LocalRound:
        """The last round. Available once there has been one."""
        assert self.last_round is not None
        return self.last_round

    def round_of(self, number: int) -> LocalRound | None:
        """Return the last round if it has this number, or None, because an older round is over."""
        last = self.last_round
        return last if last is not None and last.assignment.round == number else None
