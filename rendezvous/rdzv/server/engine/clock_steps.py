"""Records when a store's servers ran, so that a clock step does not cause jobs to be deleted.

A job's age can only be read from the clock, which may be a month ahead when a server starts.
Servers therefore store the time regularly. If no time was stored for a long period, either no
server ran or the clock was stepped. The two cannot be told apart, so such a *gap* does not count.
"""

from __future__ import annotations

import logging

from rdzv.core.words import duration
from rdzv.runtime.clock import DAY_MS
from rdzv.structs import struct

log = logging.getLogger("rdzv.jobs")

GAP_MS = DAY_MS
"""Stored times further apart than this have a gap between them. The usual interval is far
shorter."""

STEP_MS = 60_000
"""A clock that is behind by more than this is logged."""

MOST_GAPS = 16


@struct(frozen=True)
class TimeSeen:
    """The stored value: the latest time and the preceding gaps, oldest first."""

    seen_ms: int = 0
    gaps: tuple[tuple[int, int], ...] = ()

    def noted(self, now_ms: int, *, at_start: bool = True) -> TimeSeen:
        """Return the value updated to `now_ms`; with `at_start`, also record and log any gap.

        A clock that was stepped back is only logged. While a server runs, its clock is monotonic
        and therefore never stepped.

        >>> TimeSeen(1_000).noted(2_000), TimeSeen(1_000).noted(1_000 + 3 * DAY_MS).gaps
        (TimeSeen(seen_ms=2000, gaps=()), ((1000, 259201000),))
        """
        ahead_ms = now_ms - self.seen_ms
        if not at_start or not self.seen_ms or -STEP_MS <= ahead_ms <= GAP_MS:
            return TimeSeen(now_ms, self.gaps)
        if ahead_ms < 0:
            log.warning(
                "the clock is %s behind the last time recorded in this store, so it was stepped "
                "back; times in the future are treated as now",
                duration(-ahead_ms),
            )
            return TimeSeen(now_ms, self.gaps)
        log.warning(
            "the clock is %s ahead of the last time recorded in this store: either no server ran "
            "in between or the clock was stepped; that period does not count toward the age of "
            "ended jobs",
            duration(ahead_ms),
        )
        return TimeSeen(now_ms, (*self.gaps, (self.seen_ms, now_ms))[-MOST_GAPS:])

    def counted_since(self, at_ms: int, now_ms: int) -> int:
        """Return how long ago a time was, not counting gaps; a time in the future counts as now.

        >>> TimeSeen(90, ((20, 50), (40, 60))).counted_since(10, now_ms=90)
        40
        """
        counted_ms, reached_ms = 0, at_ms
        # Gaps overlap if the clock was set back and then stepped forward again.
        for begin_ms, end_ms in sorted(self.gaps):
            counted_ms += max(min(begin_ms, now_ms) - reached_ms, 0)
            reached_ms = max(reached_ms, end_ms)
        return counted_ms + max(now_ms - reached_ms, 0)
