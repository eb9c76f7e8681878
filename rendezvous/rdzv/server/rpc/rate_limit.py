"""A rate limit that allows a burst and then a fixed number of units per second."""

from __future__ import annotations


class RateLimit:
    """One caller's rate limit.

    >>> allowed = RateLimit(burst=2, per_second=10)
    >>> [allowed.take(now_ms) for now_ms in (0, 0, 0, 99, 100, 100)]
    [True, True, False, False, True, False]
    """

    def __init__(self, burst: int, per_second: int) -> None:
        self._most_ms = burst * 1000 / per_second
        self._each_ms = 1000 / per_second
        self._left_ms = self._most_ms
        self._at_ms: int | None = None

    def take(self, now_ms: int) -> bool:
        """Take one unit, and return whether one was available."""
        if self._at_ms is not None:
            self._left_ms = min(self._left_ms + now_ms - self._at_ms, self._most_ms)
        self._at_ms = now_ms
        if self._left_ms < self._each_ms:
            return False
        self._left_ms -= self._each_ms
        return True
