"""The process's only clock, which is the source of all its times and timers.

It is monotonic, so that jumps of the wall clock do not move deadlines, and anchored to Unix time
when the process starts, so that stored times can be shown to users.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

MINUTE_MS = 60_000
DAY_MS = 86_400_000


def monotonic_ms() -> int:
    """Return the monotonic time in milliseconds, from an arbitrary start."""
    return time.monotonic_ns() // 1_000_000


class Clock:
    """The real clock. Tests have one that they advance."""

    def __init__(self) -> None:
        self._anchor_ns = time.time_ns() - time.monotonic_ns()

    def now_ms(self) -> int:
        """Return the Unix time in milliseconds, which never decreases."""
        return (self._anchor_ns + time.monotonic_ns()) // 1_000_000

    def call_at(self, at_ms: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call `callback` from the event loop at `at_ms`, or soon if that time has passed."""
        # now_ms() rounds down, so without the added 1, a timer could fire early.
        delay_s = max(at_ms - self.now_ms() + 1, 0) / 1000
        return asyncio.get_running_loop().call_later(delay_s, callback)


class Timer:
    """A timer that can be rearmed. It passes the callback the time from which it counts as late.

    This is its due time or, if that had passed when the timer was set, the time of the setting.
    """

    def __init__(self, clock: Clock, callback: Callable[[int], None]) -> None:
        self._clock = clock
        self._callback = callback
        self._pending: asyncio.TimerHandle | None = None
        self._due_ms: int | None = None
        self._set_ms = 0

    @property
    def due_ms(self) -> int | None:
        return self._due_ms

    def arm(self, at_ms: int | None) -> None:
        """Fire at `at_ms` instead of any time set before. With None, disarm the timer."""
        if at_ms == self._due_ms:
            return
        self.cancel()
        if at_ms is not None:
            self._due_ms, self._set_ms = at_ms, self._clock.now_ms()
            self._pending = self._clock.call_at(at_ms, self._fire)

    def arm_by(self, at_ms: int) -> None:
        self.arm(at_ms if self._due_ms is None else min(self._due_ms, at_ms))

    def cancel(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
        self._pending = self._due_ms = None

    def _fire(self) -> None:
        due_ms = self._due_ms
        self._pending = self._due_ms = None
        if due_ms is not None:
            self._callback(max(due_ms, self._set_ms))


DEAF_AFTER_MS = 500
"""How long a pause of the event loop may be before the silence of others in it proves nothing."""

SETTLE_MS = 1_000
"""How long pending messages are read after such a pause before any deadline counts."""


class LoopWatch:
    """Detects pauses of the event loop, so that input that arrived during a pause is read first.

    Each timer calls `late` before it acts. Timers fire in order, so a pause is detected before any
    deadline that passed during it takes effect.
    """

    def __init__(
        self,
        clock: Clock,
        on_pause: Callable[[int], None],
        *,
        every_ms: int,
        on_look: Callable[[int], None] = lambda late_ms: None,
    ) -> None:
        """Call `on_pause` with each pause's length, and `on_look` with each check's delay."""
        self._clock = clock
        self._on_pause = on_pause
        self._on_look = on_look
        self.every_ms = every_ms
        self.timer = Timer(clock, self.look)
        """Calls `look`, which sets it again."""
        self._listened_ms = 0
        self.settled_ms = 0
        """The time by which input that arrived during the last pause has been read."""

    def start(self) -> None:
        self.timer.arm(self._clock.now_ms() + self.every_ms)

    def stop(self) -> None:
        self.timer.cancel()

    def late(self, due_ms: int) -> bool:
        """Return whether a timer that was due at `due_ms` must wait until `settled_ms`."""
        now_ms = self._clock.now_ms()
        if now_ms - due_ms > DEAF_AFTER_MS and now_ms >= self.settled_ms:
            self.settled_ms = now_ms + SETTLE_MS
            self._listened_ms = max(self._listened_ms, due_ms)
            self._on_pause(now_ms - due_ms)
        return now_ms < self.settled_ms

    def listened_until_ms(self) -> int:
        """Return the time up to which all input has been read, which is now except after a pause.

        After a pause, this time stands still until the input that arrived in the meantime has been
        read. A caller that uses it therefore does not act on a deadline that passed during a pause.
        """
        due_ms = self.timer.due_ms
        if due_ms is None or not self.late(due_ms):
            self._listened_ms = self._clock.now_ms()
        return self._listened_ms

    def look(self, due_ms: int) -> None:
        """Check for a pause since `due_ms`, and set the timer for the next check."""
        self._on_look(self._clock.now_ms() - due_ms)
        self.late(due_ms)
        self.start()


async def sleep_ms(clock: Clock, for_ms: int) -> None:
    woken = asyncio.Event()
    call = clock.call_at(clock.now_ms() + for_ms, woken.set)
    try:
        await woken.wait()
    finally:
        call.cancel()
