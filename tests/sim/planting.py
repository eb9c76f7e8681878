"""Plants a bug: finds the code to change by its symbol, wherever that is, and by tokens.

A symbol is a function, class, method or constant of the packages, given by the end of its dotted
name: `_settle`, `Placer.submit`, or `machine._close` if the last name alone is not unique. Inside
it the old code is found token by token, so indentation, line breaks, comments and trailing commas
do not matter: code may move to another file without a change to the list of planted bugs.
"""

from __future__ import annotations

import ast
import difflib
import functools
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

from rdzv.structs import struct

SOURCES = ("proto", "rendezvous", "agent")
_LAYOUT = {
    *(tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.COMMENT, tokenize.ENCODING, tokenize.ENDMARKER),
}


class StaleError(ValueError):
    """A planted bug does not fit the code: its symbol or text does not occur exactly once."""


@struct(frozen=True)
class Symbol:
    """Where a symbol is defined: the lines of a file, including decorators, counted from 1."""

    name: str
    """Dotted, with the module: `rdzv.core.rendezvous._settle`."""
    file: str
    """Its path below the searched folder."""
    first: int
    last: int


@struct(frozen=True)
class Token:
    """One token of a source text, and its position."""

    text: str
    line: int
    column: int
    end_line: int
    end_column: int


def planted(folder: Path, where: str, old: str, new: str) -> tuple[Path, str]:
    """Return the file that a bug changes below `folder`, and its text with the bug.

    Raises:
        StaleError: the symbol or the old code does not occur exactly once; names the nearest match.
    """
    symbol = find(folder, where)
    path = folder / symbol.file
    text = path.read_text()
    inside = [t for t in tokens(text) if symbol.first <= t.line <= symbol.last]
    wanted = tokens(_unindented(old))
    places = [found for start in range(len(inside)) if (found := _match(inside, start, wanted))]
    if len(places) != 1:
        lines = text.splitlines()[symbol.first - 1 : symbol.last]
        near = difflib.get_close_matches(old.strip().splitlines()[0].strip(), lines, 1, 0.3)
        nearest = f"; nearest: {near[0].strip()!r}" if near and not places else ""
        raise StaleError(f"{where} has {old.strip()!r} {len(places)} times{nearest}")
    pairs = places[0]
    first, last = pairs[0][1], pairs[-1][1]
    begin = _offset(text, first.line, first.column)
    end = _offset(text, last.end_line, last.end_column)
    return path, text[:begin] + _shifted(new, _shift(old, pairs)) + text[end:]


def _match(inside: list[Token], start: int, wanted: list[Token]) -> list[tuple[Token, Token]]:
    """Pair the wanted tokens with those from `start` on; empty if they differ."""
    pairs: list[tuple[Token, Token]] = []
    at = start
    for number, token in enumerate(wanted):
        if at < len(inside) and token.text != inside[at].text:
            if _is_trailing_comma(inside, at):
                at += 1
            elif _is_trailing_comma(wanted, number):
                continue
        if at >= len(inside) or token.text != inside[at].text:
            return []
        pairs.append((token, inside[at]))
        at += 1
    return pairs


def _is_trailing_comma(row: list[Token], at: int) -> bool:
    return row[at].text == "," and at + 1 < len(row) and row[at + 1].text in (")", "]", "}")


def find(folder: Path, where: str) -> Symbol:
    """Return the one symbol whose dotted name ends with `where`.

    Raises:
        StaleError: there is none, or there are several.

    """
    known = symbols(folder)
    last = where.rpartition(".")[2]
    found = [one for one in known.get(last, ()) if f".{one.name}".endswith(f".{where}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise StaleError(f"{where} is {' and '.join(one.name for one in found)}; name the module")
    near = difflib.get_close_matches(last, known, 3)
    others = [one.name for name in near for one in known[name]]
    raise StaleError(f"nothing is called {where}; nearest: {', '.join(others) or 'nothing'}")


@functools.lru_cache(maxsize=2)
def symbols(folder: Path) -> dict[str, list[Symbol]]:
    """Return all definitions below a folder, by their last name."""
    found: dict[str, list[Symbol]] = {}
    for source in SOURCES:
        for path in sorted((folder / source).rglob("*.py")):
            if "_pb2" in path.name:
                continue
            file = path.relative_to(folder).as_posix()
            module = ".".join(Path(file).with_suffix("").parts[1:]).removesuffix(".__init__")
            for symbol in _defined(ast.parse(path.read_text()).body, module, file):
                found.setdefault(symbol.name.rpartition(".")[2], []).append(symbol)
    return found


def _defined(body: list[ast.stmt], prefix: str, file: str) -> Iterator[Symbol]:
    for node in body:
        last = node.end_lineno or node.lineno
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                yield Symbol(f"{prefix}.{node.name}", file, first, last)
                if isinstance(node, ast.ClassDef):
                    yield from _defined(node.body, f"{prefix}.{node.name}", file)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield Symbol(f"{prefix}.{name}", file, node.lineno, last)
            case ast.If() | ast.Try() | ast.With():
                yield from _defined(node.body, prefix, file)


@functools.lru_cache(maxsize=64)
def tokens(text: str) -> list[Token]:
    """Return the tokens of a source text or a part of one, without layout and comments."""
    found: list[Token] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in _LAYOUT:
                continue
            found.append(Token(token.string, *token.start, *token.end))
    except tokenize.TokenError:
        pass  # A part of a source may open brackets that it does not close.
    return found


def _unindented(old: str) -> str:
    return "\n".join(line.lstrip() for line in old.splitlines())


def _shift(old: str, pairs: list[tuple[Token, Token]]) -> int:
    """Return how much further to the right the code is now than `old`."""
    lines = old.splitlines()
    line_before = 0
    for number, (before, now) in enumerate(pairs):
        begins_line = before.column == 0 and (before.line > 1 or lines[0] != lines[0].lstrip())
        if begins_line and (number == 0 or line_before < now.line):
            line = lines[before.line - 1]
            return now.column - (len(line) - len(line.lstrip()))
        line_before = now.end_line
    return 0


def _shifted(new: str, columns: int) -> str:
    first, *rest = new.strip().splitlines() or [""]
    moved = (" " * max(len(x) - len(x.lstrip()) + columns, 0) + x.lstrip() for x in rest)
    return "\n".join([first, *moved])


def _offset(text: str, line: int, column: int) -> int:
    return sum(len(one) for one in text.splitlines(keepends=True)[: line - 1]) + column
