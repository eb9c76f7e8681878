"""Records when a store's servers ran, so that no job is deleted because the clock was stepped.

A job's age is known only by the clock, which may be a month ahead when a server starts. Servers
therefore store the time regularly. If no time was stored for long, either no server ran or the
clock was stepped. The two cannot be told apart, so such a *gap* does not count.
"""

from __future__ import annotations

import logging

from rdzv.core.words import duration
from rdzv.server.settings.config import DAY_MS
from rdzv.structs import struct

log = logging.getLogger("rdzv.jobs")

GAP_MS = DAY_MS
"""Two stored times that are further apart than this enclose a gap. The usual interval is far
shorter."""

STEP_MS = 60_000
"""If the clock is behind by more than this, it is logged."""

MOST_GAPS = 16


@struct(frozen=True)
class TimeSeen:
    """The stored value: the latest time, and the gaps before it, oldest first."""

    seen_ms: int = 0
    gaps: tuple[tuple[int, int], ...] = ()

    def noted(self, now_ms: int, *, at_start: bool = True) -> TimeSeen:
        """Return the value with `now_ms` noted; with `at_start`, record and log a gap before it.

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
                "the clock is %s behind the last time recorded in this store: it was stepped back; "
                "times that lie ahead count as now",
                duration(-ahead_ms),
            )
            return TimeSeen(now_ms, self.gaps)
        log.warning(
            "the clock is %s ahead of the last time recorded in this store: no server ran since, "
            "or the clock was stepped; that time does not count for forgetting ended jobs",
            duration(ahead_ms),
        )
        return TimeSeen(now_ms, (*self.gaps, (self.seen_ms, now_ms))[-MOST_GAPS:])

    def counted_since(self, at_ms: int, now_ms: int) -> int:
        """Return how long ago a time was, not counting the gaps; times in the future count as now.

        >>> TimeSeen(90, ((20, 50), (40, 60))).counted_since(10, now_ms=90)
        40
        """
        counted_ms, reached_ms = 0, at_ms
        # Gaps overlap if the clock was set back and then stepped ahead again.
        for begin_ms, end_ms in sorted(self.gaps):
            counted_ms += max(min(begin_ms, now_ms) - reached_ms, 0)
            reached_ms = max(reached_ms, end_ms)
        return counted_ms + max(now_ms - reached_ms, 0)
