"""The weight of each room, and the table of ARCHITECTURE.md that limits it.

`make weight` lowers the table to what is there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.source_tree import MAP, ROOT, SOURCES, parsed

SMALL_FILE = 80
PUBLIC_METHODS, PARAMETERS = 3, 5
# A room that has lost this part of its row has its row lowered.
SLACK = 0.1
_ROW = re.compile(
    r"^\| `(?P<room>[\w/]+)`(?P<of>[^|]*)\| (?P<files>\d+) \| (?P<lines>[\d,]+) \|", re.M
)


@dataclass(frozen=True)
class Weight:
    files: int = 0
    lines: int = 0

    def exceeds(self, row: Weight) -> bool:
        return self.files > row.files or self.lines > row.lines

    def is_far_below(self, row: Weight) -> bool:
        return self.lines < row.lines * (1 - SLACK)


def rows() -> dict[str, Weight]:
    """Return what each room may weigh, by its folder."""
    return {
        row["room"]: Weight(int(row["files"]), int(row["lines"].replace(",", "")))
        for row in _ROW.finditer(MAP.read_text(encoding="utf-8"))
    }


def weights(rooms: list[str]) -> dict[str, Weight]:
    """Weigh all Python of the source folders and tests/, each file for the room nearest to it."""
    found = dict.fromkeys(rooms, Weight())
    for path in _files():
        name = path.relative_to(ROOT).as_posix()
        room = max((one for one in rooms if name.startswith(f"{one}/")), key=len, default=None)
        room = room or name.split("/", 1)[0]
        before = found.get(room, Weight())
        lines = path.read_text(encoding="utf-8").count("\n")
        found[room] = Weight(before.files + 1, before.lines + lines)
    return found


def small() -> Iterator[str]:
    """Yield files of few lines, and `FILE:CLASS` where a class is mostly its constructor."""
    for path in _files(tests=False):
        name = path.relative_to(ROOT).as_posix()
        if path.name != "__init__.py" and path.read_text(encoding="utf-8").count("\n") < SMALL_FILE:
            yield name
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and _is_mostly_constructed(node):
                yield f"{name}:{node.name}"


def _is_mostly_constructed(node: ast.ClassDef) -> bool:
    methods = {
        one.name: one
        for one in node.body
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    if "__init__" not in methods:
        return False
    given = methods["__init__"].args
    parameters = len(given.args) + len(given.kwonlyargs) - 1
    public = sum(not name.startswith("_") for name in methods)
    return parameters > PARAMETERS and public < PUBLIC_METHODS


def _files(*, tests: bool = True) -> Iterator[Path]:
    for folder in (*SOURCES, *((ROOT / "tests",) if tests else ())):
        yield from folder.rglob("*.py")


def lower() -> None:
    """Write the table anew where a room weighs less than its row; print what weighs more."""
    limits = rows()
    weighed = weights(list(limits))

    def row(found: re.Match[str]) -> str:
        limit, now = limits[found["room"]], weighed[found["room"]]
        if now.exceeds(limit):
            print(f"{found['room']}: {now}, its row: {limit}")
        least = Weight(min(limit.files, now.files), min(limit.lines, now.lines))
        return f"| `{found['room']}`{found['of']}| {least.files} | {least.lines:,} |"

    MAP.write_text(_ROW.sub(row, MAP.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    lower()
