"""How often to poll for a condition that sends no event."""

from __future__ import annotations


def pause_s(waited_s: float) -> float:
    """Return the time until the next look: the longer it takes, the less often.

    So what comes at once is seen at once, and what takes long is not delayed by those who wait.

    >>> [pause_s(waited_s) for waited_s in (0.0, 1.0, 60.0)]
    [0.01, 0.05, 0.1]
    """
    return min(max(waited_s / 20, 0.01), 0.1)
