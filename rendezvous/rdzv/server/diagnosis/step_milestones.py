"""Records a round's milestones for the ledger: first collective, and first, last and redone steps.

Milestones are kept in memory and for live rounds only. A server that takes over records the first
collective and the first step again; the ledger counts only the first record of each in a round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rdzv.core.events import (
    Event,
    FirstCollectiveMade,
    FirstStepMade,
    LastStepMade,
    LostStepsRedone,
)
from rdzv.core.model import State
from rdzv.messages import Arrivals, Progress

OLDEST_COLLECTIVE_MS = 60_000
"""A collective entered longer ago than this is not the round's first, or its time is wrong."""


@dataclass(slots=True)
class _Round:
    """The furthest step in one live round, and when it was made."""

    run: str
    round: int
    step: int
    at_ms: int
    redone: bool
    """Whether all lost steps have been redone."""


class StepMilestones:
    """The milestones of one server's jobs."""

    def __init__(self, tell: Callable[[str, tuple[Event, ...]], None]) -> None:
        """Use `tell` to record events that were not caused by a command."""
        self._tell = tell
        self._rounds: dict[str, _Round] = {}
        self._collectives: dict[str, tuple[str, int]] = {}
        """The run and round whose first collective was recorded, by rdzv_id."""

    def note(self, state: State, node_id: str, said: Progress, now_ms: int) -> None:
        """Record a node's progress in the live round specified in its report."""
        if not said.ranks:
            return
        best = max(said.ranks, key=lambda one: one.step)
        at_ms, furthest = now_ms - best.age_ms, state.membership.spent.furthest_step
        events: tuple[Event, ...] = ()
        known = self._rounds.get(said.rdzv_id)
        if known is None or (known.run, known.round) != (said.run, said.round):
            known = _Round(said.run, said.round, best.step, at_ms, redone=furthest is None)
            self._rounds[said.rdzv_id] = known
            events = (FirstStepMade(said.round, node_id, best.rank, best.step, best.age_ms),)
        if not known.redone and furthest is not None and best.step >= furthest:
            known.redone = True
            reached_ms = _reached_ms(known, best.step, at_ms, furthest)
            events = (*events, LostStepsRedone(said.round, furthest, max(now_ms - reached_ms, 0)))
        if best.step > known.step:
            known.step, known.at_ms = best.step, at_ms
        if events:
            self._tell(said.rdzv_id, events)

    def note_collectives(self, node_id: str, said: Arrivals, now_ms: int) -> None:
        """Record that a node's workers have entered collectives in the live round."""
        key = said.run, said.round
        if self._collectives.get(said.rdzv_id) == key:
            return
        self._collectives[said.rdzv_id] = key
        event = FirstCollectiveMade(said.round, node_id, _entered_ago_ms(said, now_ms))
        self._tell(said.rdzv_id, (event,))

    def note_state(self, state: State, now_ms: int) -> None:
        """React to a job's new state by recording the last step of a round that is over."""
        membership = state.membership
        noted = self._collectives.get(membership.rdzv_id)
        if noted is not None and not membership.is_live(*noted):
            del self._collectives[membership.rdzv_id]
        known = self._rounds.get(membership.rdzv_id)
        if known is None or membership.is_live(known.run, known.round):
            return
        del self._rounds[membership.rdzv_id]
        if membership.run == known.run and membership.ended is None:
            last = LastStepMade(known.round, known.step, max(now_ms - known.at_ms, 0))
            self._tell(membership.rdzv_id, (last,))


def _entered_ago_ms(said: Arrivals, now_ms: int) -> int:
    """Return how long ago the first of these collectives was entered, or 0 if unknown."""
    ages_ms = [
        now_ms - entered_us // 1_000
        for group in said.groups
        if group.error_us is not None
        for entered in group.entered_us.values()
        for entered_us in entered.values()
    ]
    return max((age for age in ages_ms if 0 <= age <= OLDEST_COLLECTIVE_MS), default=0)


def _reached_ms(known: _Round, step: int, at_ms: int, furthest: int) -> int:
    """Return when `furthest` was reached, assuming a steady pace between two reports."""
    if step <= known.step or furthest <= known.step:
        return at_ms
    share = (furthest - known.step) / (step - known.step)
    return round(known.at_ms + (at_ms - known.at_ms) * share)
