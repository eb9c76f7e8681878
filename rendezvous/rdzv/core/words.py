"""Formats numbers, durations, sizes and lists of names for people."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice

LISTED = 8


def listed(names: Iterable[object]) -> str:
    """List at most `LISTED` names in a sentence.

    >>> listed(["n1", "n2"]), listed(f"n{i}" for i in range(10))
    ('n1, n2', 'n0, n1, n2, n3, n4, n5, n6, n7 and 2 more')
    """
    # Each of ten thousand nodes may get such a sentence, so read only the names that are listed.
    held = names if isinstance(names, Collection) else tuple(names)
    more = f" and {len(held) - LISTED} more" if len(held) > LISTED else ""
    return ", ".join(str(name) for name in islice(held, LISTED)) + more


def counted(number: int, noun: str) -> str:
    """Format a number with its noun.

    >>> counted(0, "node"), counted(1, "node"), counted(2, "more node"), counted(2, "process")
    ('0 nodes', '1 node', '2 more nodes', '2 processes')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def duration(ms: int) -> str:
    """Format a duration; negative durations count as zero.

    >>> [duration(ms) for ms in (-5, 240, 1_500, 59_000, 125_000, 7_260_000, 180_000_000)]
    ['0.0 s', '0.2 s', '1.5 s', '59 s', '2 min 5 s', '2 h 1 min', '2 d 2 h']
    """
    ms = max(ms, 0)
    if ms < 10_000:
        return f"{ms / 1000:.1f} s"
    seconds = round(ms / 1000)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3_600:
        return f"{seconds // 60} min {seconds % 60} s"
    if seconds < 86_400:
        return f"{seconds // 3_600} h {seconds % 3_600 // 60} min"
    return f"{seconds // 86_400} d {seconds % 86_400 // 3_600} h"


def size_text(size: int) -> str:
    """Format a size given in bytes.

    >>> size_text(135 << 30), size_text(1536 << 10), size_text(200)
    ('135 GiB', '1.5 MiB', '200 B')
    """
    number, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1024 and len(units) > 1:
        number /= 1024
        units.pop(0)
    digits = ".0f" if number >= 10 or units[0] == "B" else ".2g"
    return f"{number:{digits}} {units[0]}"


def ranks_text(ranks: Iterable[int], most: int = 16) -> str:
    """Format RANKs as at most `most` ranges, followed by the number of RANKs left out.

    >>> ranks_text([3, 0, 2, 4, 8]), ranks_text(range(0, 80, 2), most=3)
    ('0,2-4,8', '0,2,4 and 37 more')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:most]]
    more = sum(map(len, runs[most:]))
    return ",".join(parts) + (f" and {more} more" if more else "")
