"""Why a job is in its state: a headline of one line, and an item for each thing behind it.

An age or a deadline is a number of its own, never part of the text, so that it can be shown as it
advances.
"""

from __future__ import annotations

from rdzv.core.words import LISTED, duration
from rdzv.structs import replace, struct

LAST_CALL = "last call ends in"
"""What ends the wait for more nodes once a job's first round has enough of them."""


@struct(frozen=True)
class ReasonItem:
    """One thing behind a headline: as a rule a node, its state, the cause, and what helps."""

    cause: str
    who: str = ""
    """The node that it is about, or several, as text; empty if it is about none."""
    state: str = ""
    then: str = ""
    """What helps, or what ends it by itself; `left_ms` later, if that is set."""
    left_ms: int | None = None

    @property
    def why(self) -> str:
        """The item without its subject, for a table that has a row for the node.

        >>> ReasonItem("its stream ended", "n3", "away", "its seat is kept for", 12_000).why
        'its stream ended; its seat is kept for 12 s'
        """
        return _line(self.cause, self.then, self.left_ms)

    def __str__(self) -> str:
        """Return the item as a line: `n3 (away): its stream ended; its seat is kept for 12 s`."""
        subject = f"{self.who} ({self.state})" if self.who and self.state else self.who + self.state
        return f"{subject}: {self.why}" if subject else self.why


@struct(frozen=True)
class Reason:
    """Why a job is in its state, and what it waits for."""

    headline: str = ""
    then: str = ""
    """What happens if nothing else does, `left_ms` from now; empty if nothing would."""
    left_ms: int | None = None
    items: tuple[ReasonItem, ...] = ()

    @property
    def line(self) -> str:
        """The headline and its deadline.

        >>> Reason("waiting for 1 more node (have 1 of 2)", "gives up in", 588_000).line
        'waiting for 1 more node (have 1 of 2); gives up in 9 min 48 s'
        """
        return _line(self.headline, self.then, self.left_ms)

    def __str__(self) -> str:
        more = len(self.items) - LISTED
        shown = [self.line, *map(str, self.items[:LISTED]), *([f"and {more} more"] * (more > 0))]
        return "; ".join(shown)

    @property
    def by_node(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for item in self.items:
            found[item.who] = f"{found[item.who]}; {item.why}" if item.who in found else item.why
        return found

    def without_times(self) -> Reason:
        """Return the reason without its deadlines, so that it changes only if other parts do."""
        items = tuple(replace(item, left_ms=None) for item in self.items)
        return replace(self, left_ms=None, items=items)


def _line(text: str, then: str, left_ms: int | None) -> str:
    if not then:
        return text
    return f"{text}; {then}" + ("" if left_ms is None else f" {duration(left_ms)}")
