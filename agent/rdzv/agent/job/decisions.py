"""Feeds one job's events to the agent core, one at a time, and passes on its decisions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import ParamSpec

from rdzv.agent.core import Transition, events, step
from rdzv.agent.core.model import AgentState
from rdzv.runtime.clock import monotonic_ms

_P = ParamSpec("_P")


class Decisions:
    """The agent core for one job, with its clock and its event queue."""

    def __init__(
        self,
        state: AgentState,
        act: Callable[[events.Event, AgentState, Transition], None],
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
