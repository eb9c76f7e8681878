"""Whether this node is about to leave all its jobs: as it was told by the server, or by itself.

A *drain* is an operator's: the server tells of it, repeats it after a reconnect, and may lift it.
A *wish* is the node's own (a preemption, the end of its agent), is never taken back, and is told to
the server, so that nothing more is placed here. Of both, the earlier deadline counts.
"""

from __future__ import annotations

from collections.abc import Callable

from rdzv.agent.core import events
from rdzv.structs import struct

FORMER = 1
"""The number of a drain that a former agent was told of: no server's is as low."""


@struct(frozen=True)
class Notice:
    """That the node is to be empty at `due_ms` of the agent's clock."""

    due_ms: int
    reason: str
    number: int = 0
    """Which drain of the server it is; 0: a wish."""


Event = events.NoticeGiven | events.NoticeLifted


class NodeDrain:
    """The state of this node's own leaving. `tell` gets each change of it, for every job."""

    def __init__(self, now_ms: Callable[[], int], tell: Callable[[Event], None]) -> None:
        self._now_ms = now_ms
        self._tell = tell
        self.wished: Notice | None = None
        self.told: Notice | None = None

    def wish(self, left_ms: int, reason: str) -> bool:
        """Leave within `left_ms`; a later deadline than that of an earlier wish changes nothing.

        Returns whether there is anything new to tell the server.
        """
        wished = Notice(self._now_ms() + left_ms, reason)
        if self.wished is not None and self.wished.due_ms <= wished.due_ms:
            return False
        self._change(wished, self.told)
        return True

    def hear(self, number: int, left_ms: int, reason: str) -> None:
        """Take a drain from the server; of one that is known already the deadline stays."""
        if self.told is None or self.told.number != number:
            self._change(self.wished, Notice(self._now_ms() + left_ms, reason, number))

    def remember(self, due_ms: int, reason: str) -> None:
        """Know what the agent before this one was told, which its jobs have not forgotten.

        The server tells of it anew, or that it was lifted meanwhile.
        """
        if self.present is None:
            self.told = Notice(due_ms, reason, FORMER)

    def lift(self) -> None:
        """Take back what the server has told."""
        self._change(self.wished, None)

    @property
    def present(self) -> Notice | None:
        """The notice that counts; None: the node stays."""
        both = [notice for notice in (self.wished, self.told) if notice is not None]
        return min(both, key=lambda notice: notice.due_ms, default=None)

    def event(self) -> events.NoticeGiven | None:
        """Return what a job is to hear that begins now; None: nothing."""
        notice = self.present
        if notice is None:
            return None
        return events.NoticeGiven(self.left_ms(notice), notice.reason)

    def left_ms(self, notice: Notice) -> int:
        """Return how much time a notice leaves."""
        return max(notice.due_ms - self._now_ms(), 0)

    def _change(self, wished: Notice | None, told: Notice | None) -> None:
        before = self.present
        self.wished, self.told = wished, told
        if self.present != before:
            self._tell(self.event() or events.NoticeLifted())
