"""Which tests run which line, in their own process and in the programs that they start."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path

from rdzv.structs import struct

QUICK_S = 0.5
"""Tests that take longer run after all that do not."""
SLOW_S = 60.0
"""Slow tests run, quickest first, until they add up to this time; at least one runs."""
NEAREST = 3
"""How many test files run first: those with the most tests that run the line."""
_FIRST = "from __future__ import annotations\n"


@struct(frozen=True)
class Record:
    """The recording for one state of the tree."""

    seconds: dict[str, float]
    """The duration of each test that passed, in the order of `lines`."""
    lines: dict[str, dict[str, list[int]]]
    """By file and line: the tests that run it, as numbers."""

    @classmethod
    def read(cls, file: Path) -> Record:
        """Read a file written by `write`."""
        return cls(**json.loads(file.read_text()))

    def write(self, file: Path) -> None:
        """Write the record to a file."""
        file.write_text(json.dumps({"seconds": self.seconds, "lines": self.lines}))

    @classmethod
    def collected(cls, root: Path) -> Record:
        """Assemble what `plugin.py` and `tracer.py` left in a copy."""
        seconds: dict[str, float] = {}
        failed: set[str] = set()
        ran: set[tuple[str, str, str]] = set()
        for each in root.glob("lines.*"):
            part = json.loads(each.read_text())
            seconds.update(part["seconds"])
            failed.update(part["failed"])
            ran.update(tuple(row) for row in part["ran"])
        for line in (root / "lines-of-programs").read_text().splitlines():
            ran.add(tuple(line.split("\t")))  # type: ignore[arg-type]
        numbers = {test: n for n, test in enumerate(t for t in seconds if t not in failed)}
        lines: dict[str, dict[str, list[int]]] = {}
        for test, file, line in sorted(ran):
            if test in numbers:
                lines.setdefault(file, {}).setdefault(line, []).append(numbers[test])
        return cls({test: seconds[test] for test in numbers}, lines)

    def tests(self, file: str, source: str, line: int) -> list[str]:
        """Return the tests that run the statement at a line.

        A statement that runs when its module is loaded affects every use of the module.
        """
        lines = self.lines.get(file, {})
        statement = _statement(source, line)
        numbers = {
            number
            for each in (lines if statement is None else map(str, statement))
            for number in lines.get(each, ())
        }
        names = list(self.seconds)
        return [names[number] for number in sorted(numbers)]

    def portions(self, tests: list[str]) -> list[list[str]]:
        """Divide tests into those that run first, next, and last."""
        quick = [test for test in tests if self.seconds[test] <= QUICK_S]
        nearest = {file for file, _ in Counter(map(file_of, quick)).most_common(NEAREST)}
        slow: list[str] = []
        for test in sorted(set(tests) - set(quick), key=self.seconds.__getitem__):
            if slow and sum(self.seconds[each] for each in (*slow, test)) > SLOW_S:
                break
            slow.append(test)
        first = [test for test in quick if file_of(test) in nearest]
        then = [test for test in quick if file_of(test) not in nearest]
        return [portion for portion in (first, then, slow) if portion]


def make_programs_write(root: Path, files: list[str]) -> None:
    """Make the sources of a copy execute `tracer.py`; their lines keep their numbers."""
    (root / "lines-of-programs").touch()
    (root / "lines-of-programs").chmod(0o666)  # Some programs run as other accounts.
    tracer = root / "tests/mutants/tracer.py"
    run = f"exec({tracer.read_text()!r}, {{'__file__': {str(tracer)!r}}})"
    for file in files:
        source = (root / file).read_text()
        (root / file).write_text(source.replace(_FIRST, f"{_FIRST[:-1]}; {run}\n", 1))


def file_of(test: str) -> str:
    """Return the file of a test."""
    return test.partition("::")[0]


def _statement(source: str, line: int) -> range | None:
    """Return the lines of the innermost statement at a line; None if outside all functions."""
    found, is_in_function = range(line, line + 1), False
    for node in ast.walk(ast.parse(source)):  # Inner statements come later.
        if not isinstance(node, ast.stmt | ast.ExceptHandler) or node.end_lineno is None:
            continue
        body = getattr(node, "body", None)
        if node.lineno <= line <= node.end_lineno:
            found = range(node.lineno, node.end_lineno + 1)
            if body and line >= body[0].lineno:
                is_in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            elif body:
                found = range(node.lineno, max(body[0].lineno, node.lineno + 1))
    return found if is_in_function else None
