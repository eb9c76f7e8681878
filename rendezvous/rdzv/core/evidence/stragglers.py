"""Finds stragglers: workers that have been much slower than others of their role for a while.

This module is pure. If workers do not wait for each other, their step rates show stragglers. If
they do, all rates are the same, and `lateness` shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from statistics import median_low

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


def follow(pace: Pace, samples: Iterable[Sample], now_ms: int, after_ms: int) -> Pace:
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
