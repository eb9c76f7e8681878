"""What the benchmarks have in common: conditions, spreads of samples, how a case is printed.

Each case is one line for people, which can be laid beside the same line of another run, and one
JSON line for programs. Seconds are those of a machine that others use too; ratios to a peer that
was measured in the same run hold.
"""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rdzv.stores.sqlite import filesystem_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "integration"))
"""Real etcd members and real nodes are started as the tests start them."""

Json: TypeAlias = "str | int | float | bool | Sequence[Json] | dict[str, Json] | None"


@dataclass(frozen=True, slots=True)
class Spread:
    """What is said of samples: never a mean, which one stall of the machine moves."""

    count: int
    median: float
    low: float
    high: float
    p99: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        """Summarize samples; at least one is needed. Of fewer than 100, the p99 is the highest.

        >>> Spread.of([3, 1, 2])
        Spread(count=3, median=2, low=1, high=3, p99=3)
        """
        in_order = sorted(samples)
        return cls(
            count=len(in_order),
            median=statistics.median(in_order),
            low=in_order[0],
            high=in_order[-1],
            p99=in_order[math.ceil(0.99 * len(in_order)) - 1],
        )

    def as_json(self) -> dict[str, Json]:
        """Return it as values of a JSON line, four digits of each."""
        return {
            "count": self.count,
            "median": float(f"{self.median:.4g}"),
            "low": float(f"{self.low:.4g}"),
            "high": float(f"{self.high:.4g}"),
            "p99": float(f"{self.p99:.4g}"),
        }


def span(samples: Sequence[float]) -> str:
    """Show seconds as `median (low..high)`; a dash if there are none.

    >>> span([1.0, 3.0, 2.0]), span([])
    ('2.00 s (1.00..3.00)', '-')
    """
    if not samples:
        return "-"
    spread = Spread.of(samples)
    return f"{spread.median:.2f} s ({spread.low:.2f}..{spread.high:.2f})"


def end_on_sigterm() -> None:
    """Let SIGTERM end this program as Ctrl-C does: with everything that it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def load() -> float:
    """Return how many processes wanted a CPU over the last minute."""
    return round(os.getloadavg()[0], 1)


def say_conditions(bench: str, directory: Path) -> None:
    """Print where and under what this runs: what a comparison of seconds would need."""
    cpus = os.cpu_count() or 1
    filesystem = filesystem_of(directory.resolve()) or "unknown"
    python = platform.python_version()
    print(
        f"# {bench}: {cpus} CPUs, load {load():.1f}, python {python}, linux {platform.release()}, "
        f"data on {filesystem} ({directory})"
    )
    if filesystem in ("tmpfs", "ramfs"):
        print(f"# {directory} is in memory, where no commit waits for a disk: give --directory")
    emit(
        "",
        bench=bench,
        case="conditions",
        cpus=cpus,
        load=load(),
        python=python,
        kernel=platform.release(),
        filesystem=filesystem,
    )


def emit(line: str, **values: Json) -> None:
    """Print one case: its line, and the JSON line of the same."""
    if line:
        print(line)
    print(json.dumps(values), flush=True)
