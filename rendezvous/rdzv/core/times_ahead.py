"""Times of a job that was stored by a clock which was ahead of the present one."""

from __future__ import annotations

from collections.abc import Iterator

from rdzv.core.model import Failure, Membership, Round
from rdzv.structs import replace


def not_after(membership: Membership, now_ms: int) -> Membership:
    """Have nothing of a run that has not ended lie in the future: it counts as of now.

    The clock was stepped back, or was ahead when this was stored. Otherwise ages would stand still,
    and no restart be forgotten, until the clock has caught up.
    """
    if membership.ended is not None or all(at_ms <= now_ms for at_ms in _times(membership)):
        return membership
    submission, resumed_at_ms = membership.submission, membership.resumed_at_ms
    return replace(
        membership,
        began_at_ms=min(membership.began_at_ms, now_ms),
        round=_round(membership.round, now_ms),
        restarts=tuple(min(at_ms, now_ms) for at_ms in membership.restarts),
        last_failures=_failures(membership.last_failures, now_ms),
        departures=tuple(
            replace(one, at_ms=min(one.at_ms, now_ms)) for one in membership.departures
        ),
        resumed_at_ms=None if resumed_at_ms is None else min(resumed_at_ms, now_ms),
        submission=submission and replace(submission, at_ms=min(submission.at_ms, now_ms)),
    )


def _times(membership: Membership) -> Iterator[int]:
    yield membership.began_at_ms
    yield from membership.restarts
    yield from (one.at_ms for one in membership.departures)
    failures = membership.last_failures
    if membership.round is not None:
        yield membership.round.at_ms
        if membership.round.end is not None:
            yield membership.round.end.at_ms
            failures += membership.round.end.failures
    yield from (one.at_ms for one in failures)
    if membership.resumed_at_ms is not None:
        yield membership.resumed_at_ms
    if membership.submission is not None:
        yield membership.submission.at_ms


def _round(round_: Round | None, now_ms: int) -> Round | None:
    if round_ is None:
        return None
    end = round_.end
    if end is not None:
        failures = _failures(end.failures, now_ms)
        end = replace(end, at_ms=min(end.at_ms, now_ms), failures=failures)
    return replace(round_, at_ms=min(round_.at_ms, now_ms), end=end)


def _failures(failures: tuple[Failure, ...], now_ms: int) -> tuple[Failure, ...]:
    return tuple(replace(one, at_ms=min(one.at_ms, now_ms)) for one in failures)
