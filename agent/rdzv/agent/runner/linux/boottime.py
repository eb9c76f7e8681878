"""Time since boot, including time when the machine was suspended, and an alarm on that clock."""

from __future__ import annotations

import ctypes
import os
import time

from .libc import libc

_TFD_TIMER_ABSTIME = 1


def boottime_ms() -> int:
    """Return the time since this machine booted, including time when it was suspended.

    Fences use this clock, because other machines' clocks keep running during a suspension.
    """
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class _TimerSpec(ctypes.Structure):
    """The kernel's `struct itimerspec`."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """A descriptor that becomes readable at a given time of `boottime_ms`.

    `select` timeouts do not advance while the machine is suspended; this descriptor is readable as
    soon as the machine wakes up.
    """

    def __init__(self) -> None:
        """Create an alarm that is not set yet. May raise `OSError`."""
        self._fd: int = libc.timerfd_create(time.CLOCK_BOOTTIME, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")

    def fileno(self) -> int:
        return self._fd

    def set(self, at_ms: int | None) -> None:
        """Make the alarm readable from that time on; None unsets it."""
        seconds, ms = divmod(at_ms or 0, 1000)
        spec = _TimerSpec(0, 0, seconds, ms * 1_000_000)  # All zero: never.
        if libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        os.close(self._fd)
