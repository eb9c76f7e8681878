"""Small changes to Python source, each of which a test should notice.

`mutations` reads one file and returns every change that it knows, as replacements of text, so that
the rest of the file keeps its lines. Log lines, docstrings, annotations and assertions are left
alone: changed text only concerns readers, and an assertion is itself a check.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from itertools import pairwise

from rdzv.structs import struct

COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
}
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}
UNITS = (60, 1000, 1024, 1_000_000, 1_000_000_000)
"""A factor that turns one unit into another."""
SIMPLE = (ast.Name, ast.Attribute)
LOGGERS = ("log", "_log", "logger", "logging", "warnings")


@struct(frozen=True, order=True)
class Mutation:
    """One change: the text from `start` to `end` becomes `new`."""

    file: str
    line: int
    start: int
    end: int
    new: str
    what: str
    """A short description of the change."""

    def apply(self, source: str) -> str:
        """Return the source with the change."""
        return source[: self.start] + self.new + source[self.end :]

    def diff(self, source: str) -> list[str]:
        """Return the lines that differ, with a sign before each."""
        lines = difflib.ndiff(source.splitlines(), self.apply(source).splitlines())
        return [line for line in lines if line[0] in "+-"]


def mutations(file: str, source: str) -> list[Mutation]:
    """Return every change to a file, in the order of its text."""
    found = {(m.start, m.end, m.new): m for m in _Finder(file, source).all()}
    return sorted(found.values())


class _Finder:
    def __init__(self, file: str, source: str) -> None:
        self._file = file
        self._source = source
        self._tree = ast.parse(source)
        # Columns of `ast` count bytes.
        self._encoded = source.encode()
        self._offsets = [0]
        for line in self._encoded.splitlines(keepends=True):
            self._offsets.append(self._offsets[-1] + len(line))

    def all(self) -> Iterator[Mutation]:
        yield from self._visit(self._tree)

    def _visit(self, node: ast.AST) -> Iterator[Mutation]:
        if _is_left_alone(node):
            return
        if isinstance(node, ast.stmt):
            yield from self._statement(node)
        if isinstance(node, ast.expr):
            yield from self._expression(node)
        if isinstance(node, ast.ExceptHandler):
            yield from self._handler(node)
        for child in _children(node):
            yield from self._visit(child)

    # ------------------------------------------------------------ statements

    def _statement(self, node: ast.stmt) -> Iterator[Mutation]:
        match node:
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
                yield self._change(node, "pass", "statement dropped")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield self._change(node, "pass", "assignment dropped")
            case ast.Raise() | ast.Break() | ast.Continue():
                yield self._change(node, "pass", f"{type(node).__name__.lower()} dropped")
            case ast.Return(value=None):
                yield self._change(node, "pass", "return dropped")
            case ast.If() | ast.While():
                yield self._change(node.test, f"not ({self._text(node.test)})", "condition negated")
                if isinstance(node, ast.If):
                    yield self._change(node.test, "False", "branch never taken")
                    if not node.orelse:
                        yield self._change(node.test, "True", "branch always taken")

    def _handler(self, node: ast.ExceptHandler) -> Iterator[Mutation]:
        if not isinstance(node.body[0], ast.Raise):
            first, last = node.body[0], node.body[-1]
            start, end = self._at(first)[0], self._at(last)[1]
            yield self._replace(node.lineno, start, end, "raise", "exception raised again")

    # ------------------------------------------------------------ expressions

    def _expression(self, node: ast.expr) -> Iterator[Mutation]:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                for new in COMPARISONS[type(op)]:
                    text = f"{self._text(left)} {new} {self._text(right)}"
                    yield self._change(node, text, f"comparison is {new}")
            case ast.Compare(ops=ops):
                operands = [node.left, *node.comparators]
                for index, op in enumerate(ops):
                    words = [self._word(each) for each in ops]
                    words[index] = COMPARISONS[type(op)][0]
                    text = self._text(operands[0])
                    for word, operand in zip(words, operands[1:], strict=True):
                        text += f" {word} {self._text(operand)}"
                    yield self._change(node, text, f"comparison is {words[index]}")
            case ast.BoolOp(op=op, values=values):
                texts = [self._text(value) for value in values]
                word, other = (" and ", " or ") if isinstance(op, ast.And) else (" or ", " and ")
                yield self._change(node, f"({other.join(texts)})", f"{other.strip()} instead")
                for index in range(len(texts)):
                    rest = word.join(texts[:index] + texts[index + 1 :])
                    yield self._change(node, f"({rest})", f"operand {index + 1} dropped")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._change(node, self._text(operand), "not dropped")
            case ast.IfExp(test=test):
                yield self._change(test, f"not ({self._text(test)})", "condition negated")
            case ast.BinOp(left=left, op=op, right=right):
                yield from self._arithmetic(node, left, op, right)
            case ast.Constant(value=bool() as value):
                yield self._change(node, str(not value), "constant flipped")
            case ast.Constant(value=int() | float() as value):
                yield self._change(node, repr(value + 1), "constant + 1")
                yield self._change(node, f"({value - 1!r})", "constant - 1")
            case ast.Call():
                yield from self._call(node)

    def _arithmetic(
        self, node: ast.expr, left: ast.expr, op: ast.operator, right: ast.expr
    ) -> Iterator[Mutation]:
        for side, other in ((left, right), (right, left)):
            if isinstance(side, ast.Constant) and side.value in UNITS:
                yield self._change(node, f"({self._text(other)})", "unit not converted")
        new = ARITHMETIC.get(type(op))
        if new is not None and not _is_text(left) and not _is_text(right):
            text = f"({self._text(left)} {new} {self._text(right)})"
            yield self._change(node, text, f"{new} instead")

    def _call(self, node: ast.Call) -> Iterator[Mutation]:
        if isinstance(node.func, ast.Name) and node.func.id in TWINS:
            twin = TWINS[node.func.id]
            yield self._change(node.func, twin, f"{twin} instead")
            return  # Of two values in another order it returns the same.
        for values in (node.args, [word.value for word in node.keywords if word.arg]):
            for one, two in pairwise(values):
                # Values that could be confused with each other; anything else would fail at once.
                if isinstance(one, SIMPLE) and isinstance(two, SIMPLE):
                    yield self._swapped(one, two)

    def _swapped(self, one: ast.expr, two: ast.expr) -> Mutation:
        start, end = self._at(one)[0], self._at(two)[1]
        between = self._slice(self._at(one)[1], self._at(two)[0])
        text = self._text(two) + between + self._text(one)
        return self._replace(one.lineno, start, end, text, "arguments swapped")

    # ------------------------------------------------------------ text

    def _change(self, node: ast.expr | ast.stmt, new: str, what: str) -> Mutation:
        return self._replace(node.lineno, *self._at(node), new, what)

    def _replace(self, line: int, start: int, end: int, new: str, what: str) -> Mutation:
        if not self._source.isascii():
            start, end = (len(self._encoded[:each].decode()) for each in (start, end))
        return Mutation(self._file, line, start, end, new, what)

    def _at(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._offsets[node.lineno - 1] + node.col_offset,
            self._offsets[node.end_lineno - 1] + node.end_col_offset,
        )

    def _slice(self, start: int, end: int) -> str:
        return self._encoded[start:end].decode()

    def _text(self, node: ast.expr) -> str:
        """Return the text of an expression, in brackets if it needs them in a larger one."""
        text = self._slice(*self._at(node))
        if isinstance(node, ast.BoolOp | ast.Compare | ast.IfExp | ast.Lambda | ast.NamedExpr):
            return f"({text})"
        return text

    def _word(self, op: ast.cmpop) -> str:
        return {
            ast.Lt: "<",
            ast.LtE: "<=",
            ast.Gt: ">",
            ast.GtE: ">=",
            ast.Eq: "==",
            ast.NotEq: "!=",
            ast.Is: "is",
            ast.IsNot: "is not",
            ast.In: "in",
            ast.NotIn: "not in",
        }[type(op)]


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node's children, except annotations, decorators, and the text of strings."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params", "format_spec"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=func)) if _is_logging(func):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
    return False


def _is_logging(func: ast.expr) -> bool:
    while isinstance(func, ast.Attribute):
        if isinstance(func.value, ast.Name) and func.value.id in LOGGERS:
            return True
        if func.attr in LOGGERS:
            return True
        func = func.value
    return False


def _is_text(node: ast.expr) -> bool:
    """Return whether this is text or a type in arithmetic, as in "a" + b and int | None."""
    if isinstance(node, ast.Constant):
        return node.value is None or isinstance(node.value, str | bytes)
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple)
