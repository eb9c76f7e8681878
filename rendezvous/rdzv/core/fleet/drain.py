"""Drains: nodes that are about to leave all their jobs, and how this is reported."""

from __future__ import annotations

from rdzv.core.timed_text import left
from rdzv.structs import struct


@struct(frozen=True)
class Drain:
    """The drain of a node, which leaves all its jobs and takes no others."""

    reason: str
    """The reason, or empty if none was given."""
    due_ms: int
    """The time at which the remaining workers are killed."""
    at_ms: int
    """The time since which the node is leaving."""
    number: int = 0
    """The number of the drain if an operator requested it, or 0 if the node drains itself."""

    @property
    def by_operator(self) -> bool:
        """Whether an operator requested the drain and can lift it."""
        return self.number != 0

    @property
    def told(self) -> str:
        """The reason sent to the node, which passes it on to its jobs when it leaves them."""
        return told(self.reason)

    def left_ms(self, now_ms: int) -> int:
        """Return the time remaining for the node's workers."""
        return max(self.due_ms - now_ms, 0)

    def describe(self, now_ms: int) -> str:
        """Describe the drain: its reason, and how soon the node leaves.

        >>> Drain("kernel upgrade", due_ms=50_000, at_ms=0, number=1).describe(now_ms=10_000)
        'drained (kernel upgrade), leaves in 40 s'
        """
        what = "drained" if self.by_operator else "about to leave"
        why = f" ({self.reason})" if self.reason else ""
        left_ms = self.left_ms(now_ms)
        return f"{what}{why}, " + ("leaves in " + left(left_ms) if left_ms else "its time is over")


def told(reason: str) -> str:
    """Return the reason given when a node drained by an operator leaves.

    >>> told("by ada: new kernel"), told("new kernel")
    ('drained by ada: new kernel', 'drained: new kernel')
    """
    return f"drained{'' if reason.startswith('by ') else ':'} {reason}"
