"""ARCHITECTURE.md is true: its answers are functions that exist, and large files are listed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.source_tree import MAP, ROOT, SOURCES, parsed, sources, statements

FUNCTION_LINES = 60
CLASS_METHODS = 25
FILE_LINES = 600
_DEF = ast.FunctionDef | ast.AsyncFunctionDef


def section(title: str) -> str:
    text = MAP.read_text(encoding="utf-8")
    return text[text.index(f"## {title}\n") :].split("\n## ", 1)[0]


def definition(path: Path, name: str) -> ast.AST | None:
    """Find a function, class or constant of a file by its dotted name."""
    body: list[ast.stmt] = parsed(path).body
    node: ast.AST | None = None
    for part in name.split("."):
        node = next((one for one in body if part in _names(one)), None)
        if node is None:
            return None
        body = getattr(node, "body", [])
    return node


def _names(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


@pytest.mark.slow
def test_every_answer_is_a_function_that_exists() -> None:
    answers = re.findall(r"`([\w/]+\.(?:py|js)):([\w.]+)`(.*)", section("Where is it?"))
    assert len(answers) >= 22
    wrong = []
    for file, name, rest in answers:
        path = ROOT / file
        if path.suffix == ".js":
            if not path.exists() or f"function {name}(" not in path.read_text():
                wrong.append(f"{file} has no {name}")
            continue
        found = definition(path, name) if path.exists() else None
        if found is None:
            wrong.append(f"{file} has no {name}")
        elif isinstance(found, _DEF):
            lines = _lines(found)
            if lines > FUNCTION_LINES and "long:" not in rest:
                wrong.append(
                    f"{file}:{name} has {lines} lines; shorten it, or say why after `long:`"
                )
    assert not wrong


@pytest.mark.slow
def test_what_is_large_is_listed_with_its_reason() -> None:
    listed = set(re.findall(r"^\* `([\w/.]+(?::\w+)?)`: \S", section("Large on purpose"), re.M))
    large = set()
    for path, _ in sources():
        name = path.relative_to(ROOT).as_posix()
        if path.read_text(encoding="utf-8").count("\n") > FILE_LINES:
            large.add(name)
        for node in statements(parsed(path)):
            if isinstance(node, _DEF) and _lines(node) > FUNCTION_LINES:
                large.add(f"{name}:{node.name}")
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(one, _DEF) for one in node.body)
                if methods > CLASS_METHODS:
                    large.add(f"{name}:{node.name}")
    assert listed == large


@pytest.mark.slow
def test_every_file_that_is_named_exists() -> None:
    text = MAP.read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)(?=[`:])", text)) - {"rdzv/__init__.py"}
    folders = (*SOURCES, ROOT / "tests", ROOT / "deploy", ROOT / "bench", ROOT / "examples")
    files = [f"/{path.relative_to(ROOT).as_posix()}" for f in folders for path in f.rglob("*.py")]
    assert [
        name for name in sorted(named) if not any(file.endswith(f"/{name}") for file in files)
    ] == []
