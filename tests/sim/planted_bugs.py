"""Reads the planted bugs, which `planted_bugs.txt` lists."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from rdzv.structs import struct

SIMULATOR = "sim"
LIST = Path(__file__).with_suffix(".txt")

_GROUP = re.compile(r"^\[(\w+)\]((?:\s+\S+\.py|\s+tests/\S+)+)", re.MULTILINE)


@struct(frozen=True)
class Mutant:
    """A planted bug."""

    name: str
    where: str
    """The symbol that is changed; see `tests.sim.planting`."""
    old: str
    new: str
    by: str = SIMULATOR
    """The simulator, or the tests that catch it (paths, for pytest)."""


def _read(text: str) -> tuple[Mutant, ...]:
    groups = {name: paths.split() for name, paths in _GROUP.findall(text)}
    blocks = [block.splitlines() for block in text.split("\n\n")]
    return tuple(_mutant(lines, groups) for lines in blocks if lines[1:] and lines[1][:2] == "@ ")


def _mutant(lines: list[str], groups: dict[str, list[str]]) -> Mutant:
    where, _, by = lines[1][2:].partition(" by ")
    code = {"-": "", "+": ""}
    for sign, changed in groupby(lines[2:], key=lambda line: line[0]):
        code[sign] = "\n".join(line[2:] for line in changed)
    words = [path for word in by.split() for path in groups.get(word, [word])]
    paths = [word if word.startswith("tests/") else f"tests/unit/{word}" for word in words]
    return Mutant(lines[0], where, code["-"], code["+"], " ".join(paths) or SIMULATOR)


MUTANTS = _read(LIST.read_text())
