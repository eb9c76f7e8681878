"""An estimate of the server's clock, based on the responses to heartbeats.

The server received a heartbeat at some moment between its sending and the arrival of the response,
so the error is half of that time. The best of the latest responses is used; its error grows with
age, as clocks drift apart.
"""

from __future__ import annotations

from collections import deque

from rdzv.structs import struct

KEPT = 32
DRIFT = 50e-6
"""How fast two clocks may drift apart; quartz is better than this."""
ROUNDING_US = 500
"""Half a millisecond. The server's clock counts milliseconds, so the middle of one is used."""


@struct(frozen=True)
class Reading:
    """How to convert this node's monotonic clock to the server's."""

    offset_us: int
    """The number to add to a time on this node's clock."""
    error_us: int


class ServerClock:
    """An estimate of the server's clock, from the open stream."""

    def __init__(self) -> None:
        self._answers: deque[tuple[int, int, int]] = deque(maxlen=KEPT)
        """For each response, its time of arrival, offset and error."""

    def forget(self) -> None:
        """Drop the estimate, because the next stream may lead to another server."""
        self._answers.clear()

    def note(self, sent_ns: int, heard_ns: int, server_us: int) -> None:
        middle_us = (sent_ns + heard_ns) // 2_000
        error_us = (heard_ns - sent_ns) // 2_000 + ROUNDING_US
        self._answers.append((heard_ns, server_us + ROUNDING_US - middle_us, error_us))

    def read(self, now_ns: int) -> Reading | None:
        """Return the best reading, or None before the first response.

        >>> clock = ServerClock()
        >>> clock.note(1_000_000, 3_000_000, 9_000)
        >>> clock.note(5_000_000, 5_200_000, 12_000)
        >>> clock.read(5_200_000)
        Reading(offset_us=7400, error_us=600)
        """
        readings = (
            (error_us + int((now_ns - at_ns) / 1_000 * DRIFT), offset_us)
            for at_ns, offset_us, error_us in self._answers
        )
        error_us, offset_us = min(readings, default=(0, None))
        return None if offset_us is None else Reading(offset_us, error_us)
