"""The source files for tests of their structure: each is parsed once in a process."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "rendezvous", ROOT / "agent", ROOT / "worker")
MAP = ROOT / "ARCHITECTURE.md"


@functools.cache
def sources() -> tuple[tuple[Path, str], ...]:
    """Return every source file, and its path below `rdzv/`."""
    return tuple(
        (path, path.relative_to(root / "rdzv").as_posix())
        for root in SOURCES
        for path in sorted((root / "rdzv").rglob("*.py"))
    )


@functools.cache
def parsed(path: Path) -> ast.Module:
    return parsed_text(path.read_text(encoding="utf-8"))


@functools.cache
def parsed_text(text: str) -> ast.Module:
    """Parse a text with the collector paused, which would visit all nodes again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if collects:
            gc.enable()


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below a node, except for expressions: these are most of a tree."""
    left = [node]
    while left:
        for child in ast.iter_child_nodes(left.pop()):
            if not isinstance(child, ast.expr):
                yield child
                left.append(child)
