"""Finds stragglers: workers that have been slower than the others for a while.

This module is pure. If workers do not wait for each other, their step rates show stragglers. In
lockstep training, all make the same number of steps per second, and the slow worker is the one that
enters collectives last. Torch numbers the collectives of a group in the same way on every rank, and
nodes report when their ranks entered some of them, which are the same ones everywhere. The clocks
of nodes differ, so a delay between nodes is ignored if it is less than twice the error of the
clocks. Within a node there is no such error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from math import ceil, log2, sqrt
from statistics import fmean, median, median_low, stdev

from rdzv.structs import struct

SLOW = 2.0
"""A worker is slow if its steps take more than this many times the median of its group, ..."""
CAUGHT_UP = 1.5
"""... and a straggler has caught up once its steps take less than this many times the median. The
gap between the two prevents flapping at a steady pace."""


@struct(frozen=True)
class Sample:
    """The current speed of one worker."""

    rank: int
    role: str
    step_s: float


@struct(frozen=True)
class Straggler:
    """A worker that is slow, judged by its rate (`step_s`) or lateness (`late_ms`)."""

    rank: int
    age_ms: int
    step_s: float | None = None
    median_s: float | None = None
    """The time in seconds that the median worker of its role takes for a step."""
    late_ms: float | None = None
    """The median delay with which it enters collectives after the other workers."""
    late_p95_ms: float | None = None
    """The 95th percentile of the same delay."""
    clock_error_ms: float | None = None
    """The possible error of these two values, because the nodes' clocks differ."""
    wait_share: float | None = None
    """A lower bound on the share of time that the others spend waiting for it."""


@struct(frozen=True)
class Pace:
    """The known paces of the workers in one round."""

    slow_since_ms: Mapping[int, int] = field(default_factory=dict)
    """The time since which each slow worker has been slow, by RANK, including workers that do not
    straggle yet."""
    stragglers: Mapping[int, Straggler] = field(default_factory=dict)


def follow_rates(pace: Pace, samples: Iterable[Sample], now_ms: int, after_ms: int) -> Pace:
    """Return the pace after these samples. A worker without a sample no longer counts as slow.

    A worker straggles once it has been slow in every look for `after_ms`.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.role, []).append(sample)
    since: dict[int, int] = {}
    found: dict[int, Straggler] = {}
    for group in groups.values():
        median_s = median_low(sample.step_s for sample in group)
        for sample in group:
            limit = CAUGHT_UP if sample.rank in pace.stragglers else SLOW
            if sample.step_s <= limit * median_s:
                continue
            since_ms = since[sample.rank] = pace.slow_since_ms.get(sample.rank, now_ms)
            if (age_ms := now_ms - since_ms) >= after_ms:
                found[sample.rank] = Straggler(sample.rank, age_ms, sample.step_s, median_s)
    return Pace(since, found)


# ------------------------------------------------------------------ by when they enter collectives

LOOKS = 6
"""The number of comparisons by which a worker is judged."""
LEAST_PAIRS = 8
"""The minimum number of collectives required for a comparison."""
LATE, LATE_EACH = 0.06, 0.04
"""A worker straggles if the others spend this share of the time waiting for it: on average without
the best and the worst look, and in all looks but one. A single pause or slow moment does not count.
"""
CERTAINTY = 5.0
"""The worker's mean delay must also exceed the others' by this number of standard errors."""
IN_TIME = 0.03
"""A worker straggles until the median share of its looks falls below this, to prevent flapping."""
SCATTER = 2_654_435_761
"""Knuth's multiplier, whose products modulo 2^32 are evenly distributed."""


@struct(frozen=True)
class GroupLook:
    """The times at which the ranks of one process group entered some of its collectives."""

    entered_us: Mapping[int, Mapping[int, int]]
    """The entry time of each rank, by sequence number and then by RANK."""
    per_second: float
    """The number of collectives that the group completes per second, including those not in this
    look."""
    error_us: int | None
    """The error between the clocks of different nodes, or None if unknown."""


@struct(frozen=True)
class Arrival:
    """The times at which one rank entered the collectives of one look."""

    share: float
    """The share of time that the others waited for the rank, minus the share that it waited itself.
    """
    late_us: tuple[int, ...]
    """The delay after the median rank of the group with which it entered each collective."""
    error_us: int = 0


@struct(frozen=True)
class RecentArrivals:
    """The most recent observations of one round's workers, oldest first."""

    looks: tuple[Mapping[int, Arrival], ...] = ()
    stragglers: Mapping[int, Straggler] = field(default_factory=dict)
    slow_since_ms: Mapping[int, int] = field(default_factory=dict)


def chosen(first: int, last: int, most: int) -> list[int]:
    """Return about `most` numbers from a range, or all of them if the range is no larger than that.

    If the range doubles, about half of these numbers remain, so nodes that look at different
    moments still choose the same numbers. The numbers are spread out so that every position within
    a repeating training step is covered.

    >>> chosen(1, 4, 8), chosen(1, 32, 8)
    ([1, 2, 3, 4], [2, 5, 10, 13, 18, 23, 26, 31])
    """
    level = ceil(log2(max((last - first + 1) / most, 1)))
    return [n for n in range(first, last + 1) if (n * SCATTER & 0xFFFFFFFF) >> (32 - level) == 0]


def pairs(entered_us: Mapping[int, Mapping[int, int]]) -> list[int]:
    """Return the comparable collectives, for which all ranks are known, as for the next one.

    Nodes look at different moments. At the edges of a look, and where one node had to choose fewer
    than another, a collective is therefore known for only some of the ranks.

    >>> pairs({1: {0: 5}, 2: {0: 6, 1: 6}, 3: {0: 7, 1: 7}, 4: {0: 8, 1: 8}, 6: {0: 9, 1: 9}})
    [2, 3]
    """
    all_ranks = max((entered.keys() for entered in entered_us.values()), key=len, default=())
    whole = {n for n, entered in entered_us.items() if entered.keys() == all_ranks}
    return sorted(n for n in whole if n + 1 in whole)


def arrivals(groups: Iterable[GroupLook], node_of: Mapping[int, str]) -> dict[int, Arrival]:
    """Compare when the ranks entered the same collectives; `node_of` maps each RANK to its node.

    Only the collectives returned by `pairs` are compared. A rank that falls behind over several
    collectives without waiting in any of them counts as late once, in the last of them. For a rank
    in several groups, the group in which it is latest counts.
    """
    late: dict[int, list[tuple[float, tuple[int, ...], int]]] = {}
    waits: dict[int, float] = {}
    for group in groups:
        compared = pairs(group.entered_us)
        if not compared or len(group.entered_us[compared[0]]) < 2:
            continue
        behind = {
            n: _behind(group.entered_us[n], group, node_of)
            for n in {*compared, *(n + 1 for n in compared)}
        }
        for rank in group.entered_us[compared[0]]:
            own = [behind[n][rank] for n in compared]
            counted = [
                one[0] if one[0] >= behind[n + 1][rank][0] else 0
                for n, one in zip(compared, own, strict=True)
            ]
            share = fmean(counted) * group.per_second / 1e6
            waited = fmean(one[1] for one in own) * group.per_second / 1e6
            waits[rank] = waits.get(rank, 0.0) + waited
            offsets = tuple(one[0] for one in own)
            late.setdefault(rank, []).append((share, offsets, group.error_us or 0))
    found = {}
    for rank, of in late.items():
        share, offsets, error_us = max(of)
        found[rank] = Arrival(share - waits[rank], offsets, error_us)
    return found


def _behind(
    entered_us: Mapping[int, int], group: GroupLook, node_of: Mapping[int, str]
) -> dict[int, tuple[int, int]]:
    """Return, for each rank, how much later than the others it is and how long it waits."""
    everywhere = sorted(entered_us.values())
    by_node: dict[str, list[int]] = {}
    for rank, at_us in entered_us.items():
        by_node.setdefault(node_of.get(rank, ""), []).append(at_us)
    for times in by_node.values():
        times.sort()
    found = {}
    for rank, at_us in entered_us.items():
        here = by_node[node_of.get(rank, "")]
        late, waits = [], [here[-1] - at_us]
        if len(here) > 1:
            late.append(at_us - _median_of_others(here, at_us))
        if len(by_node) > 1 and group.error_us is not None:
            late.append(_beyond(at_us - _median_of_others(everywhere, at_us), 2 * group.error_us))
            waits.append(everywhere[-1] - at_us - 2 * group.error_us)
        found[rank] = max(late, default=0), max(waits)
    return found


def _median_of_others(times: Sequence[int], own: int) -> int:
    """Return the median of sorted times without one of them, or the lower of two middle times.

    >>> _median_of_others([1, 4], 4), _median_of_others([1, 4, 9], 1)
    (1, 4)
    """
    middle = (len(times) - 2) // 2
    return times[middle] if own > times[middle] else times[middle + 1]


def _beyond(difference_us: int, error_us: int) -> int:
    """Move a difference toward zero by its possible error; return 0 if the error covers it."""
    if difference_us < 0:
        return min(difference_us + error_us, 0)
    return max(difference_us - error_us, 0)


def follow_arrivals(
    before: RecentArrivals, seen: Mapping[int, Arrival], now_ms: int
) -> RecentArrivals:
    """Return the stragglers after another look, as judged by the latest `LOOKS` looks."""
    looks = (*before.looks, seen)[-LOOKS:]
    since: dict[int, int] = {}
    found: dict[int, Straggler] = {}
    for rank in {*seen, *before.stragglers}:
        of = [look[rank] for look in looks if rank in look]
        if _is_late_yet(of) if rank in before.stragglers else _is_late(of):
            since[rank] = before.slow_since_ms.get(rank, now_ms)
            found[rank] = _straggler(rank, now_ms - since[rank], of)
    return RecentArrivals(looks, found, since)


def _is_late(of: Sequence[Arrival]) -> bool:
    shares = sorted(one.share for one in of)
    if len(shares) < LOOKS or shares[1] < LATE_EACH or fmean(shares[1:-1]) < LATE:
        return False
    times = [late_us for one in of for late_us in one.late_us]
    return fmean(times) >= CERTAINTY * stdev(times) / sqrt(len(times))


def _is_late_yet(of: Sequence[Arrival]) -> bool:
    return bool(of) and median(one.share for one in of) >= IN_TIME


def _straggler(rank: int, age_ms: int, of: Sequence[Arrival]) -> Straggler:
    times = sorted(late_us for one in of for late_us in one.late_us)
    return Straggler(
        rank,
        age_ms,
        late_ms=times[len(times) // 2] / 1000,
        late_p95_ms=times[len(times) * 95 // 100] / 1000,
        clock_error_ms=max(one.error_us for one in of) / 1000,
        wait_share=median(one.share for one in of),
    )
