"""Corrects a job's times if they were stored by a clock that was ahead of the current one."""

from __future__ import annotations

from typing import Any, TypeVar

from rdzv.core.model import Departure, Failure, Membership, Round, RoundEnd, Submission
from rdzv.structs import replace

_Dated = TypeVar("_Dated", Departure, Failure, RoundEnd, Submission, Round)


def not_after(membership: Membership, now_ms: int) -> Membership:
    """Return the membership with all future times set to now, unless its run has ended.

    A time can be in the future if the clock was set back, or was ahead when the time was stored.
    Ages would then stand still, and no restart would be forgotten, until the clock caught up. A
    membership without future times is returned unchanged.
    """
    if membership.ended is not None:
        return membership
    bounded: dict[str, Any] = {
        "restarts": _all_bounded_ms(membership.restarts, now_ms),
        "departures": _all_bounded(membership.departures, now_ms),
        "last_failures": _all_bounded(membership.last_failures, now_ms),
    }
    if membership.began_at_ms > now_ms:
        bounded["began_at_ms"] = now_ms
    if membership.resumed_at_ms is not None and membership.resumed_at_ms > now_ms:
        bounded["resumed_at_ms"] = now_ms
    if membership.round is not None:
        bounded["round"] = _round_bounded(membership.round, now_ms)
    if membership.submission is not None:
        bounded["submission"] = _bounded(membership.submission, now_ms)
    changed = {
        name: value for name, value in bounded.items() if value is not getattr(membership, name)
    }
    return replace(membership, **changed) if changed else membership


def _round_bounded(round_: Round, now_ms: int) -> Round:
    end = round_.end
    if end is not None:
        failures = _all_bounded(end.failures, now_ms)
        if failures is not end.failures:
            end = replace(end, failures=failures)
        end = _bounded(end, now_ms)
        if end is not round_.end:
            round_ = replace(round_, end=end)
    return _bounded(round_, now_ms)


def _bounded(one: _Dated, now_ms: int) -> _Dated:
    return one if one.at_ms <= now_ms else replace(one, at_ms=now_ms)


def _all_bounded(ones: tuple[_Dated, ...], now_ms: int) -> tuple[_Dated, ...]:
    if all(one.at_ms <= now_ms for one in ones):
        return ones
    return tuple(_bounded(one, now_ms) for one in ones)


def _all_bounded_ms(times_ms: tuple[int, ...], now_ms: int) -> tuple[int, ...]:
    if all(at_ms <= now_ms for at_ms in times_ms):
        return times_ms
    return tuple(min(at_ms, now_ms) for at_ms in times_ms)
