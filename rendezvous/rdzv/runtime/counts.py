"""Counters and histograms by name. Whoever sees something happen adds to them, page or no page.

`rdzv.runtime.exposition` shows them to Prometheus.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Counted:
    """A counter or, with `buckets`, a histogram."""

    name: str
    help: str
    labels: Labels = ()
    begins: Sequence[Labels] = ((),)
    """The series that start at zero, because Prometheus misses the first increase of a new one."""
    buckets: Sequence[float] = ()


@dataclass(slots=True)
class Observed:
    """The observations of one series of a histogram."""

    counts: list[int]
    """How many fell into each bucket; the last has no bound."""
    sum: float = 0.0


@dataclass(slots=True)
class Series:
    """All that was counted of one metric, by the values of its labels."""

    counted: Counted
    values: dict[Labels, float] = field(default_factory=dict)
    observed: dict[Labels, Observed] = field(default_factory=dict)


class Counts:
    """Counters and histograms, which start at zero."""

    def __init__(self, rows: Iterable[Counted]) -> None:
        self.series = {row.name: Series(row) for row in rows}
        for name, series in self.series.items():
            for labels in series.counted.begins:
                if series.counted.buckets:
                    self._observed(name, labels)
                else:
                    series.values[labels] = 0

    def add(self, name: str, *labels: str, by: float = 1) -> None:
        values = self.series[name].values
        values[labels] = values.get(labels, 0) + by

    def observe(self, name: str, value: float, *labels: str) -> None:
        found = self._observed(name, labels)
        found.counts[bisect_left(self.series[name].counted.buckets, value)] += 1
        found.sum += value

    def _observed(self, name: str, labels: Labels) -> Observed:
        series = self.series[name]
        if labels not in series.observed:
            series.observed[labels] = Observed([0] * (len(series.counted.buckets) + 1))
        return series.observed[labels]


def each(values: Iterable[str]) -> list[Labels]:
    return [(value,) for value in values]
