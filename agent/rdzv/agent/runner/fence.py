"""The fence: a time on the `boottime_ms` clock after which no worker survives, whatever happens.

The agent may be stopped or hang. It renews the fence as long as there is proof that the server is
receiving this node's messages. A round requested after the fence starts no workers. Until the first
`renew_fence`, there is no fence.
"""

from __future__ import annotations

import time

from .linux.boottime import Alarm, boottime_ms
from .requests import read_fence_at_ms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .agent_link import AgentLink
    from .held_round import Round
    from .parked_workers import ParkedWorkers


class Fence:
    """The time of the fence, and an alarm that goes off at that time."""

    def __init__(self, agent: AgentLink) -> None:
        self._agent = agent
        self._at_ms = 0
        # Created in advance, so that a fence never fails for lack of a descriptor.
        self._alarm = Alarm()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when `check` needs to be called."""
        return self._alarm.fileno()

    def renew(self, request: Mapping[str, object]) -> None:
        """Handle `renew_fence`: move the fence forward, but never back."""
        self._at_ms = max(read_fence_at_ms(request), self._at_ms)

    def check(self, held: Round | None, parked: ParkedWorkers) -> None:
        """Start killing the round or the parked workers at the fence; until then, set the alarm."""
        is_over = held.fenced if held is not None else not parked
        if is_over or not self._at_ms:
            self._alarm.set(None)
        elif boottime_ms() < self._at_ms:
            self._alarm.set(self._at_ms)
        elif held is None:
            self._alarm.set(None)
            parked.end_all(0)
        else:
            self._alarm.set(None)
            held.fenced = True
            held.keep_none()
            held.kill_at = time.monotonic()
            # Reported before any worker's exit, so that no exit is mistaken for a failure.
            self._agent.emit("fenced", round=held.number, at_ms=boottime_ms())

    def close(self) -> None:
        """Close the alarm."""
        self._alarm.close()
