"""Nodes that are about to leave all their jobs: what is known of it, and how it is told."""

from __future__ import annotations

from rdzv.core.timed_text import left
from rdzv.structs import struct


@struct(frozen=True)
class Drain:
    """That a node leaves all its jobs, and takes no other."""

    reason: str
    """Why; empty if nobody has said it."""
    due_ms: int
    """When the workers are ended that are still there."""
    number: int = 0
    """Which drain an operator has asked for; 0: it is the node's own wish."""

    @property
    def by_operator(self) -> bool:
        """Whether an operator has asked for it, and can lift it."""
        return self.number != 0

    @property
    def told(self) -> str:
        """What the node is told, and tells its jobs as it leaves them."""
        return told(self.reason)

    def left_ms(self, now_ms: int) -> int:
        """Return how much longer its workers have."""
        return max(self.due_ms - now_ms, 0)

    def describe(self, now_ms: int) -> str:
        """Say that it leaves, why, and when at the latest.

        >>> Drain("kernel upgrade", due_ms=50_000, number=1).describe(now_ms=10_000)
        'drained (kernel upgrade), leaves in 40 s'
        """
        what = "drained" if self.by_operator else "about to leave"
        why = f" ({self.reason})" if self.reason else ""
        left_ms = self.left_ms(now_ms)
        return f"{what}{why}, " + ("leaves in " + left(left_ms) if left_ms else "its time is over")


def told(reason: str) -> str:
    """Say why a node leaves that an operator drains.

    >>> told("by ada: new kernel"), told("new kernel")
    ('drained by ada: new kernel', 'drained: new kernel')
    """
    return f"drained{'' if reason.startswith('by ') else ':'} {reason}"
