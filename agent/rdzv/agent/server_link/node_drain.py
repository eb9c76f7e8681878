"""Whether this node is about to leave all its jobs, at the server's request or its own.

A *drain* comes from an operator. The server sends it, repeats it after a reconnect, and may lift
it. A *wish* comes from the node itself, because of a preemption or the end of its agent. It is
never withdrawn, and the server stops placing jobs here once it has received it. If there are both,
the earlier deadline counts.
"""

from __future__ import annotations

from collections.abc import Callable

from rdzv.agent.core import events
from rdzv.messages import Draining
from rdzv.structs import struct

FORMER = 1
"""The number given to a drain received by the previous agent; servers use only higher numbers."""


@struct(frozen=True)
class NodeNotice:
    """A notice that the node must be empty at `due_ms` on the agent's clock."""

    due_ms: int
    reason: str
    number: int = 0
    """The number of the server's drain, or 0 for a wish."""


Event = events.NoticeGiven | events.NoticeLifted


class NodeDrain:
    """This node's drain state. Each change is passed to `tell`, for all jobs."""

    def __init__(self, now_ms: Callable[[], int], tell: Callable[[Event], None]) -> None:
        self._now_ms = now_ms
        self._tell = tell
        self.wished: NodeNotice | None = None
        self.told: NodeNotice | None = None

    def note_wish(self, left_ms: int, reason: str) -> bool:
        """Return whether the server must be told: not if an earlier wish is due sooner."""
        wished = NodeNotice(self._now_ms() + left_ms, reason)
        if self.wished is not None and self.wished.due_ms <= wished.due_ms:
            return False
        self._change(wished, self.told)
        return True

    def take_from_server(self, number: int, left_ms: int, reason: str) -> None:
        """Accept a drain from the server. A drain that is already known keeps its deadline."""
        if self.told is None or self.told.number != number:
            self._change(self.wished, NodeNotice(self._now_ms() + left_ms, reason, number))

    def remember(self, due_ms: int, reason: str) -> None:
        """The server will send it again, or report that it has been lifted."""
        if self.present is None:
            self.told = NodeNotice(due_ms, reason, FORMER)

    def lift(self) -> None:
        self._change(self.wished, None)

    @property
    def present(self) -> NodeNotice | None:
        both = [notice for notice in (self.wished, self.told) if notice is not None]
        return min(both, key=lambda notice: notice.due_ms, default=None)

    def said(self) -> Draining | None:
        """Return what the server is told: the drain that is known here, and this node's wish."""
        if self.present is None:
            return None
        number = self.told.number if self.told is not None else 0
        if self.wished is None:
            return Draining(0, "", number, own=False)
        return Draining(self.left_ms(self.wished), self.wished.reason, number, own=True)

    def event(self) -> events.NoticeGiven | None:
        notice = self.present
        if notice is None:
            return None
        return events.NoticeGiven(self.left_ms(notice), notice.reason)

    def left_ms(self, notice: NodeNotice) -> int:
        return max(notice.due_ms - self._now_ms(), 0)

    def _change(self, wished: NodeNotice | None, told: NodeNotice | None) -> None:
        before = self.present
        self.wished, self.told = wished, told
        if self.present != before:
            self._tell(self.event() or events.NoticeLifted())
