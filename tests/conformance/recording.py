"""What torchrun has shown for each case of the table, as recorded with each torch and one Python.

The same torch shows the same, so `make test` compares rdzvrun with the recording, and
`make campaigns` compares the recording with torchrun. `make conformance-record` writes it anew.
With another torch or Python, beside GPUs, and for a case that has changed since, torchrun is run
each time.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers import Case, Seen

TORCH = importlib.metadata.version("torch").partition("+")[0]
FILE = Path(__file__).with_name(f"torchrun_{TORCH}.jsonl")


@dataclass(frozen=True)
class Shown:
    """What one launcher has shown for a case, and its stderr."""

    seen: Seen
    stderr: str


def of_torchrun(case: Case) -> Shown | None:
    """Return what is recorded of torchrun; None if torchrun has to be run."""
    row = _rows().get(case.name, {})
    return Shown(row["seen"], row["says"]) if row.get("input") == _input(case) else None


def part_of(case: Case, shown: Shown) -> Shown:
    """Return the part of what was shown that is recorded: of stderr, only what the case names."""
    says = case.says[0] if case.says and case.says[0] in shown.stderr else ""
    return Shown(json.loads(json.dumps(shown.seen)), says)


def write(shown: Sequence[tuple[Case, Shown]]) -> None:
    """Write a line about what runs here, and one for each case, of parts that are recorded."""
    rows = [
        {"name": case.name, "input": _input(case), "seen": one.seen, "says": one.stderr}
        for case, one in shown
    ]
    FILE.write_text("".join(f"{json.dumps(row, sort_keys=True)}\n" for row in [_here(), *rows]))
    _rows.cache_clear()


def _input(case: Case) -> list[Any]:
    send = case.send and [case.send.signum, case.send.workers]
    return [case.launchers[0], case.line, case.nodes, case.stdin, send]


def _here() -> dict[str, Any]:
    python = ".".join(platform.python_version_tuple()[:2])
    return {"torch": TORCH, "python": python, "gpus": len([*Path("/dev").glob("nvidia[0-9]*")])}


@functools.cache
def _rows() -> Mapping[str, dict[str, Any]]:
    """Return what is recorded, by the name of the case; nothing, if not with what runs here."""
    if not FILE.exists():
        return {}
    made_with, *rows = map(json.loads, FILE.read_text().splitlines())
    return {row["name"]: row for row in rows} if made_with == _here() else {}
