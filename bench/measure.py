"""Shared by the benchmarks: conditions, spreads of samples, how a case is printed.

Each case is one line for people, which can be compared with the same line of another run, and one
JSON line for programs. Seconds are those of a machine that others use too; ratios to a peer
measured in the same run are reliable.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import TextIO, TypeAlias

from rdzv.stores.sqlite_file import filesystem_of

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / room) for room in ("integration", "support"))]
"""Real etcd members, servers and nodes are started as the tests start them."""

Json: TypeAlias = "str | int | float | bool | Sequence[Json] | dict[str, Json] | None"


@dataclass(frozen=True, slots=True)
class Spread:
    """A summary of samples, without the mean, which one stall of the machine would move."""

    count: int
    median: float
    low: float
    high: float
    p90: float
    p99: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        """Summarize samples; at least one is needed.

        Of fewer than 100, the p99 is the highest, and of fewer than 10 the p90.

        >>> Spread.of([3, 1, 2])
        Spread(count=3, median=2, low=1, high=3, p90=3, p99=3)
        """
        in_order = sorted(samples)
        return cls(
            count=len(in_order),
            median=statistics.median(in_order),
            low=in_order[0],
            high=in_order[-1],
            p90=in_order[math.ceil(0.9 * len(in_order)) - 1],
            p99=in_order[math.ceil(0.99 * len(in_order)) - 1],
        )

    def as_json(self) -> dict[str, Json]:
        """Return it as values of a JSON line, four digits of each."""
        return {
            "count": self.count,
            "median": float(f"{self.median:.4g}"),
            "low": float(f"{self.low:.4g}"),
            "high": float(f"{self.high:.4g}"),
            "p90": float(f"{self.p90:.4g}"),
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
    """Print where and under which conditions this runs, for a comparison of seconds."""
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
        date=date.today().isoformat(),
        command=" ".join(Path(word).name for word in sys.argv),
        torch=metadata.version("torch"),
        grpc=metadata.version("grpcio"),
        cpus=cpus,
        load=load(),
        python=python,
        kernel=platform.release(),
        filesystem=filesystem,
    )


_copies: list[TextIO] = []


def emit(line: str, **values: Json) -> None:
    """Print one case: its line, and the JSON line of the same."""
    if line:
        print(line)
    told = json.dumps(values)
    print(told, flush=True)
    for copy in _copies:
        print(told, file=copy, flush=True)


@contextmanager
def emitting_to(path: Path | None) -> Iterator[None]:
    """Write the JSON lines to a file as well, if one is given, until the body ends."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as copy:
        _copies.append(copy)
        try:
            yield
        finally:
            _copies.remove(copy)


def say_progress(line: str) -> None:
    """Report progress to the user; this is not a result."""
    print(f"  {line}", file=sys.stderr, flush=True)


def figure(value: object) -> str:
    """Show a number with three digits; a dash if there is none.

    >>> figure(0.01234), figure(12.345), figure(1234.5), figure(None)
    ('0.0123', '12.3', '1,234', '-')
    """
    if not isinstance(value, int | float):
        return "-"
    return f"{value:.3g}" if abs(value) < 1_000 else f"{value:,.0f}"


def names_of(
    parser: argparse.ArgumentParser, option: str, given: str, known: Sequence[str]
) -> list[str]:
    """Return the names that an option gives, with commas; end the program if one is not known."""
    wanted = [part for part in given.split(",") if part]
    if unknown := set(wanted) - set(known):
        parser.error(f"{option}: no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return wanted
