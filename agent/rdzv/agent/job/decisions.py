"""The agent core for one job, with its clock and its queue, and the log lines about its events."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import ParamSpec

from rdzv.agent.core import Decision, events, step
from rdzv.agent.core.model import AgentState, Phase
from rdzv.agent.core.stopping import joins_anew
from rdzv.core.model import MAX_RESTART_AGES, Assignment
from rdzv.core.root_cause import describe_failure, referring
from rdzv.core.words import counted, duration
from rdzv.messages import Closed, Joined, RoundOver, Withdrawn
from rdzv.runtime.clock import monotonic_ms
from rdzv.structs import replace

log = logging.getLogger("rdzv.agent")

_P = ParamSpec("_P")


class Decisions:
    """The agent core for one job, with its clock and its event queue."""

    def __init__(
        self,
        state: AgentState,
        act: Callable[[events.Event, AgentState, Decision], None],
        on_error: Callable[[Exception], None],
    ) -> None:
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
        decision = step(before, event, monotonic_ms())
        self.state = decision.state
        self._act(event, before, decision)
        self.cancel_tick()
        if decision.wake_at_ms is not None:
            delay_s = max(decision.wake_at_ms - monotonic_ms(), 0) / 1000
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_s, self.post, events.Ticked())

    def cancel_tick(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def stop(self) -> None:
        self.stopped = True
        self.cancel_tick()


def log_event(event: events.Event, state: AgentState, *, joined: bool) -> None:
    """Log one line about an event if it matters to a user. `state` is the state before it."""
    rdzv_id, node_id = state.job.rdzv_id, state.job.node_id
    match event:
        case Joined() if not joined or event.run != state.run:
            log.info("joined %s (run %s)", rdzv_id, event.run)
        case Assignment() if event != state.assignment:
            _log_round(event, state)
        case RoundOver():
            reason = event.end.reason
            if state.failures and not state.failures[0].suspect:  # Its own line has the error.
                reason = referring(reason, replace(state.failures[0], node_id=node_id))
            text = "%s: round %d ended (%s): %s"
            log.warning(text, rdzv_id, event.round, event.end.cause, reason)
        case Closed() if event.run == state.run and joins_anew(state, event.ended):
            how = "joining anew" if state.workers_gone else "stopping the workers and joining again"
            log.warning("%s: %s: %s", rdzv_id, how, event.ended.reason)
        case events.WorkerExited() if event.exit_code != 0 and state.phase is Phase.RUNNING:
            failure = replace(events.ended_worker(event, state.assignment, 0), node_id=node_id)
            log.warning("%s: worker failed: %s", rdzv_id, describe_failure(failure))
        case events.WorkersStuck():
            pids = ", ".join(str(pid) for pid in event.pids)
            log.error("%s: processes have survived SIGKILL: pid %s", rdzv_id, pids)
        case events.Fenced():
            text = (
                "%s: fenced: the server was unreachable for %g s (--fence-after); killing the "
                "workers of round %d before others can replace them; this node will rejoin "
                "once the server responds"
            )
            log.error(text, rdzv_id, state.job.fence_after_ms / 1000, event.round)
        case events.StoreHostExited() if _serves(state, event.round):
            text = "%s: the store host of round %d exited: %s"
            log.warning(text, rdzv_id, event.round, event.reason)
        case events.Signalled():
            log.warning("%s: received %s; %s", rdzv_id, event.name, _what_follows(event, state))
        case events.Unhealthy():
            text = "%s: leaving the job because this node is unhealthy: %s"
            log.warning(text, rdzv_id, event.reason)
        case Withdrawn():
            text = "%s: the server withdrew this job from this node: %s"
            log.warning(text, rdzv_id, event.reason)
        case events.NoticeGiven() if state.notice is None:
            _log_notice(event, state)
        case events.NoticeLifted() if state.notice is not None:
            text = "%s: this node can stay after all; workers that were notified may still exit"
            log.warning(text, rdzv_id)
        case _:
            log.debug("%s", event)


def _what_follows(event: events.Signalled, state: AgentState) -> str:
    if state.is_ending:
        return "killing the workers at once" if state.has_workers else "the job is ending"
    if state.workers_gone:
        return "leaving the job"
    again = "Ctrl-C" if event.name == "SIGINT" else event.name
    workers, left = counted(len(state.alive), "worker"), duration(state.job.shutdown_timeout_ms)
    return (
        f"leaving the job; waiting up to {left} for {workers} to exit; a second {again} kills "
        "them at once"
    )


def _log_notice(event: events.NoticeGiven, state: AgentState) -> None:
    if state.workers_gone:
        log.warning("%s: leaving the job: %s", state.job.rdzv_id, event.reason)
        return
    text = "%s: notified the workers that this node is leaving; they have %s to exit: %s"
    log.warning(text, state.job.rdzv_id, duration(event.left_ms), event.reason)


def _serves(state: AgentState, round_: int) -> bool:
    assignment, phase = state.assignment, state.phase
    return assignment is not None and assignment.round == round_ and phase is Phase.RUNNING


def _log_round(assignment: Assignment, state: AgentState) -> None:
    last = assignment.rank_first + state.job.local_world_size - 1
    log.info(
        "%s: round %d: GROUP_RANK %d of %d, RANK %d..%d of %d, MASTER %s:%d, restarts %s",
        state.job.rdzv_id,
        assignment.round,
        assignment.group_rank,
        assignment.group_world_size,
        assignment.rank_first,
        last,
        assignment.world_size,
        assignment.master_addr,
        assignment.master_port,
        _restarts(assignment, state.job.settings.restart_window_ms),
    )


def _restarts(assignment: Assignment, window_ms: int) -> str:
    """In the same words as the server's."""
    most = assignment.max_restarts or 0  # It is unset where it is 0.
    if not window_ms:
        return f"{assignment.restarts} of {most}"
    # The server reports at most this many ages.
    counted = 0 if assignment.tally is None else len(assignment.tally.restarts_ms)
    more = " or more" if counted == MAX_RESTART_AGES else ""
    within = f"in the last {duration(window_ms)}"
    return f"{counted}{more} of {most} {within}, {assignment.restarts} in all"
