"""Computes how far workers lag behind the leading worker at the same moment.

This module is pure. Workers last reported at different moments. For example, a worker that reported
step 87 a second ago is now at step 100 if it makes 13 steps per second. The leading worker's
position is therefore moved back, using its rate, to the time of the earlier report. How far the
other worker has come since then is unknown. The result is a lower bound on a worker's lag.
"""

from __future__ import annotations

from collections.abc import Sequence

from rdzv.bounds import Elapsed, Rate
from rdzv.structs import struct

SILENT_MS = 10_000
"""A worker that has been silent this much longer than another, ..."""
SILENT_STEPS = 3
"""... and for longer than this many of its steps, is assumed to have stopped."""
ROUNDING_STEPS = 1
"""Workers in lockstep may be reported up to this many steps apart."""
UNSTEADY = 0.25
"""Rates are averages over a minute; the current rate may be lower or higher by this fraction."""


@struct(frozen=True)
class RankProgress:
    """The progress that one worker reported `age_ms` ago. `rate` is in steps per second.

    `behind` is the minimum number of steps by which it trails the leading worker at the same
    moment. The reported steps themselves are from different moments.
    """

    rank: int
    step: int
    age_ms: Elapsed
    rate: Rate | None
    behind: int = 0


def lags(words: Sequence[RankProgress]) -> tuple[int, ...]:
    """Return the minimum number of steps by which each worker trails the leading one.

    The result is 0 for a worker that may be level with it.

    >>> said = (100, 0), (87, 1_000), (60, 500)
    >>> lags([RankProgress(rank, *one, 13.0) for rank, one in enumerate(said)])
    (0, 0, 34)
    """
    newest_ms = min((word.age_ms for word in words), default=0)
    moving = [word for word in words if not _silent(word, newest_ms)]
    if not moving:
        return ()
    foremost = max(moving, key=lambda word: (_present_step(word, newest_ms), -word.age_ms))
    most = max(word.step for word in words)
    return tuple(
        max(most - word.step, 0) if _silent(word, newest_ms) else _lag(word, foremost)
        for word in words
    )


def _silent(word: RankProgress, newest_ms: int) -> bool:
    silent_ms = word.age_ms - newest_ms
    if silent_ms < SILENT_MS:
        return False
    return word.rate is None or word.rate * silent_ms / 1000 > SILENT_STEPS


def _present_step(word: RankProgress, newest_ms: int) -> float:
    return word.step + _steps(word, word.age_ms - newest_ms)


def _steps(word: RankProgress, for_ms: int) -> float:
    return (word.rate or 0.0) * for_ms / 1000


def _lag(word: RankProgress, foremost: RankProgress) -> int:
    """Compare two workers at the time of the earlier of their reports.

    If the earlier report is the leading worker's, the other worker was then no further than it
    reports now.
    """
    before_ms = max(word.age_ms - foremost.age_ms, 0)
    if before_ms and foremost.rate is None:
        # The leading worker's step at that time is unknown.
        return 0
    taken_back = _steps(foremost, before_ms)
    lag = foremost.step - taken_back - word.step
    return round(lag) if lag > ROUNDING_STEPS + UNSTEADY * taken_back else 0
