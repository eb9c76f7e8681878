"""Finds stragglers: workers that have been much slower than others of their role for a while.

Pure. Where workers do not wait for each other, their step rates show it; where they do, all rates
are the same, and `lateness` shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from statistics import median_low

from rdzv.core.gpu_state import GpuState
from rdzv.structs import struct

SLOW = 2.0
"""A worker is slow if its steps take more than this many times the median of its group, ..."""
CAUGHT_UP = 1.5
"""... and a straggler has caught up once they take less than this many times the median, so that a
steady pace does not make it flap."""


@struct(frozen=True)
class Sample:
    """The current speed of one worker."""

    rank: int
    role: str
    """Workers of one role are compared with each other."""
    step_s: float
    """How long the worker takes for a step, in seconds."""


@struct(frozen=True)
class Straggler:
    """A worker that has been slow for a while, by its rate or by when it enters collectives."""

    rank: int
    since_ms: int
    """The time since which it has been slow."""
    step_s: float | None = None
    median_s: float | None = None
    """Step time of the median worker of its role; of two in the middle, that of the faster one."""
    late_ms: float | None = None
    """How much later than the others it enters collectives: the median, ..."""
    late_p95_ms: float | None = None
    """... and the 95th percentile."""
    clock_error_ms: float | None = None
    """How far off these may be, because the clocks of nodes differ."""
    wait_share: float | None = None
    """A lower bound on the share of time that the others spend waiting for it."""
    gpu: GpuState | None = None
    """The worker's GPU, if NVML on its node shows it."""


@struct(frozen=True)
class Pace:
    """The known paces of one round's workers."""

    slow_since_ms: Mapping[int, int] = field(default_factory=dict)
    """Since when each slow worker has been slow, by RANK, whether it straggles yet or not."""
    stragglers: Mapping[int, Straggler] = field(default_factory=dict)
    """By RANK."""


def follow(pace: Pace, samples: Iterable[Sample], now_ms: int, after_ms: int) -> Pace:
    """Return the pace after these samples; a worker without one no longer counts as slow.

    A worker straggles once it has been slow at every look for `after_ms`.
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
            if now_ms - since_ms >= after_ms:
                found[sample.rank] = Straggler(sample.rank, since_ms, sample.step_s, median_s)
    return Pace(since, found)
