"""Detects hung workers, which have reported progress and then stopped for too long.

A worker that never reports is judged by its completed collectives, if they are counted. This code
is pure: `WorkerActivity` accumulates the observations of a worker and decides whether it is hung.
Only time under observation counts, so a pause of the agent or the machine does not make a worker
look silent.
"""

from __future__ import annotations

from rdzv.core.evidence.hang_culprit import HangTimeout
from rdzv.structs import replace, struct

AUTO_LEAST_MS = 60_000
"""The least learned timeout: a worker may pause for longer than it has so far."""
AUTO_INTERVALS = 50
"""The number of a worker's latest intervals between reports that are remembered."""
AUTO_FACTOR = 20
"""The learned timeout is at least this many times the longest of these intervals."""
AUTO_LONGEST_FACTOR = 2
"""It is also at least this many times the longest pause ever seen on this node."""
AUTO_LONGEST_MS = 30 * 60_000
"""The most that the longest pause counts: one long silence must not hide later ones."""

START_COLLECTIVES = 16
"""A worker that completed fewer is starting: it may be importing, wrapping or compiling."""
START_LEAST_MS = 60_000
"""The least time that a starting worker gets for each collective: it is slow, not hung."""

EXIT_LEAST_MS = 60_000
"""The least time to exit once the script is over: it may be releasing memory or devices."""

UNINTERRUPTIBLE, TRACED = "D", "t"


@struct(frozen=True)
class Observation:
    """An observation of a worker at a given moment."""

    report: tuple[int, ...] | None
    """Changes with each of the worker's reports, even of one step; None before the first."""
    state: str
    switches: int | None = None
    """The number of context switches so far, which does not change while the process sleeps."""
    completed: int | None = None
    """The number of completed collectives, or None if unknown. Used if there are no reports."""
    counted_every_ms: int = 0
    """How often collectives are counted. A pause may be that much shorter than it looks."""
    known: bool = True
    """Whether new activity would have been visible."""
    exits: bool = False


@struct(frozen=True)
class WorkerActivity:
    """A worker's activity in one round, accumulated from observations."""

    report: tuple[int, ...] | None = None
    silent_ms: int = 0
    """The time since the worker's last report, or since its start."""
    intervals_ms: tuple[int, ...] = ()
    """Those between the latest reports, oldest first; the first begins at its start."""
    blocked_ms: int = 0
    """How long the worker has been in the same uninterruptible sleep."""
    switches: int | None = None
    completed: int | None = None
    """The number of completed collectives when they were last counted."""
    exits: bool = False
    """Whether its script is over; then `silent_ms` is the time since that was first seen."""

    def after(self, look: Observation, passed_ms: int) -> WorkerActivity:
        blocked = look.state == UNINTERRUPTIBLE and look.switches == self.switches is not None
        seen = replace(
            self,
            report=look.report if look.report is not None else self.report,
            silent_ms=self.silent_ms + passed_ms if look.known else self.silent_ms,
            blocked_ms=self.blocked_ms + passed_ms if blocked else 0,
            switches=look.switches if look.state == UNINTERRUPTIBLE else None,
            completed=look.completed if look.completed is not None else self.completed,
        )
        if look.exits:
            return replace(seen, exits=True, silent_ms=seen.silent_ms if self.exits else 0)
        if seen.report != self.report:
            return seen._heard(seen.silent_ms)
        if seen.counts and seen.completed != self.completed:
            more = (seen.completed or 0) - (self.completed or 0)
            pause_ms = max(seen.silent_ms - look.counted_every_ms, seen.silent_ms // max(more, 1))
            return seen._heard(seen.silent_ms if self.completed is None else pause_ms)
        # A worker that is stopped in a debugger is not expected to run.
        return replace(seen, silent_ms=self.silent_ms) if look.state == TRACED else seen

    def _heard(self, pause_ms: int) -> WorkerActivity:
        """Return the activity after new progress, which followed a pause of at most `pause_ms`."""
        intervals = (*self.intervals_ms, pause_ms)[-AUTO_INTERVALS:]
        return replace(self, silent_ms=0, intervals_ms=intervals)

    @property
    def counts(self) -> bool:
        """Whether the worker's collectives count as progress, because it reports none itself."""
        return self.report is None and self.completed is not None

    def why_hung(self, timeout_ms: int) -> str:
        """Return why the worker is hung, or an empty string if it is not.

        >>> WorkerActivity(report=(1,), silent_ms=61_500).why_hung(60_000)
        'no progress reported for 62 s, limit 60 s'
        """
        if self.blocked_ms >= timeout_ms:
            return f"in D state for {self.blocked_ms / 1000:.0f} s without interruption"
        if self.exits:
            timeout_ms = max(timeout_ms, EXIT_LEAST_MS)
        elif self.counts and (self.completed or 0) < START_COLLECTIVES:
            timeout_ms = max(timeout_ms, START_LEAST_MS)
        if (self.report is None and not self.counts) or self.silent_ms < timeout_ms:
            return ""
        silent_s, limit_s = self.silent_ms / 1000, timeout_ms / 1000
        what = "no collective completed" if self.counts else "no progress reported"
        what = "its script has ended, but it has not exited" if self.exits else what
        return f"{what} for {silent_s:.0f} s, limit {limit_s:g} s"


def timeout_ms(timeout: HangTimeout, activity: WorkerActivity, longest_ms: int) -> int:
    """Return how long this worker may go without reporting progress.

    `longest_ms`, the longest pause ever seen here, includes silences mistaken for hangs, so that a
    false alarm does not soon recur.
    """
    if timeout.ms is not None:
        return timeout.ms
    return max(
        AUTO_LEAST_MS,
        AUTO_FACTOR * max(activity.intervals_ms, default=0),
        min(AUTO_LONGEST_FACTOR * longest_ms, AUTO_LONGEST_MS),
    )
