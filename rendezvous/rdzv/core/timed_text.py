"""Text whose durations advance: remaining time shrinks and elapsed time grows.

A reason may read `n7 was lost 12 s ago; gives up in 9 min 48 s`. It carries its times separately,
so code that shows it later need not parse them from the text, which may quote anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rdzv.core.words import duration
from rdzv.structs import struct

LAST_CALL = "last call"
"""Short name for the wait for more nodes once a job's first round has enough of them."""


@struct(frozen=True)
class TimeInText:
    """A duration within a string: `length` characters starting at `at`."""

    at: int
    length: int
    ms: int
    grows: bool
    """Whether this is the time since something happened, rather than the time remaining."""
    waits_for: str | None = None
    """The short name of the wait, or None if nothing happens when it ends."""


class TimedText(str):
    """A string that carries its times.

    Concatenation keeps them; formatting yields a plain string.
    """

    __slots__ = ("times",)
    times: tuple[TimeInText, ...]

    def __new__(cls, text: str, times: tuple[TimeInText, ...] = ()) -> TimedText:
        made = super().__new__(cls, text)
        made.times = times
        return made

    def __add__(self, other: str) -> TimedText:
        return _joined(self, other)

    def __radd__(self, other: str) -> TimedText:
        return _joined(other, self)


def left(ms: int, waits_for: str | None = None) -> TimedText:
    """Format the time remaining.

    >>> ("gives up in " + left(588_000)).times
    (TimeInText(at=12, length=10, ms=588000, grows=False, waits_for=None),)
    """
    return _timed(max(ms, 0), grows=False, waits_for=waits_for)


def past(ms: int) -> TimedText:
    """Format the time elapsed."""
    return _timed(max(ms, 0), grows=True, waits_for=None)


def times_of(text: str) -> tuple[TimeInText, ...]:
    """Return the times carried by a string, or an empty tuple for a plain one."""
    return text.times if isinstance(text, TimedText) else ()


def later(text: str, times: Iterable[TimeInText], more_ms: int) -> TimedText:
    """Return text as it will read `more_ms` later.

    >>> text = "n7 was lost " + past(12_000) + " ago; gives up in " + left(588_000)
    >>> later(text, text.times, 5_000)
    'n7 was lost 17 s ago; gives up in 9 min 43 s'
    """
    read, end = TimedText(""), 0
    for time in _fitting(text, times):
        ms = time.ms + more_ms if time.grows else max(time.ms - more_ms, 0)
        read += text[end : time.at] + _timed(ms, grows=time.grows, waits_for=time.waits_for)
        end = time.at + time.length
    return read + text[end:]


def without_times(text: str, times: Iterable[TimeInText]) -> str:
    """Return text without its advancing durations, so that it changes only if other parts do.

    >>> text = "gives up in " + left(588_000) + ", 2 s after n7"
    >>> without_times(text, text.times)
    'gives up in , 2 s after n7'
    """
    read, end = "", 0
    for time in _fitting(text, times):
        read, end = read + text[end : time.at], time.at + time.length
    return read + text[end:]


def _fitting(text: str, times: Iterable[TimeInText]) -> Iterator[TimeInText]:
    """Yield, in order, the times that fit the text; times from another server may not fit."""
    end = 0
    for time in times:
        if end <= time.at <= time.at + time.length <= len(text):
            yield time
            end = time.at + time.length


def _timed(ms: int, *, grows: bool, waits_for: str | None) -> TimedText:
    text = duration(ms)
    return TimedText(text, (TimeInText(0, len(text), ms, grows, waits_for),))


def _joined(first: str, second: str) -> TimedText:
    times = times_of(first)
    if isinstance(second, TimedText):
        by = len(first)
        times += tuple(
            # `replace` would be too slow, because each of thousands of nodes gets such a text.
            TimeInText(time.at + by, time.length, time.ms, time.grows, time.waits_for)
            for time in second.times
        )
    return TimedText(str.__add__(first, second), times)
