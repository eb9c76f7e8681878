"""The counters for each job. `Metrics` increments them, and `JobPage` writes them to the page."""

from __future__ import annotations

from collections import Counter as Tally
from dataclasses import dataclass, field

from rdzv.core.model import Cause, JobState, State, job_state

CHANGES = ("joined", "left", "lost", "replaced")
"""The kinds of change in a job's membership."""

STOP, FORM = "stop", "form"
"""The phases of a recovery: until the last node has stopped, and from then until the next round."""


@dataclass(slots=True)
class Sum:
    """The number of events of one kind and their total duration."""

    count: int = 0
    ms: int = 0

    def add(self, ms: int) -> None:
        """Count one event that took `ms`."""
        self.count += 1
        self.ms += ms


@dataclass(slots=True)
class JobTally:
    """The counters for one run of a job, from the moment this server learned of it."""

    since_ms: int
    ended_ms: int | None = None
    final: JobState | None = None
    """The state in which the run ended, or None if it has not ended."""
    running_ms: int = 0
    """The total time for which earlier rounds were live."""
    running_since_ms: int | None = None
    round_ended_ms: int | None = None
    settled_ms: int | None = None
    """When all nodes in the last round had stopped; None if they have not, or if this is
    unknown."""
    failures: int = 0
    restarts: int = 0
    completed: int = 0
    ended: Tally[Cause] = field(default_factory=Tally)
    changes: Tally[str] = field(default_factory=Tally)
    formation: Sum = field(default_factory=Sum)
    recovery: dict[str, Sum] = field(default_factory=lambda: {STOP: Sum(), FORM: Sum()})

    @classmethod
    def of(cls, state: State, now_ms: int) -> JobTally:
        """Return counters that start at zero, for a run that may have begun long ago."""
        tally = cls(now_ms)
        round_ = state.membership.round
        if round_ is not None and round_.end is not None:
            tally.round_ended_ms = round_.end.at_ms
        tally.follow(state, now_ms)
        return tally

    def follow(self, state: State, now_ms: int) -> None:
        """Start or stop counting running time, depending on whether a round is live."""
        live = job_state(state) is JobState.RUNNING
        if live and self.running_since_ms is None:
            self.running_since_ms = now_ms
        elif not live and self.running_since_ms is not None:
            self.running_ms += max(now_ms - self.running_since_ms, 0)
            self.running_since_ms = None

    def running_until(self, now_ms: int) -> int:
        """Return the number of milliseconds for which rounds were live, up to `now_ms`."""
        since_ms = now_ms if self.running_since_ms is None else self.running_since_ms
        return self.running_ms + max(now_ms - since_ms, 0)

    def elapsed_until(self, now_ms: int) -> int:
        """Return how many milliseconds of the run were counted, up to `now_ms` or its end."""
        return max((now_ms if self.ended_ms is None else self.ended_ms) - self.since_ms, 0)
