"""A value of any struct: with all of its fields, each another, or with as few as it may have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

from rdzv.bounds import Coded, Else, Unsent
from rdzv.transport.wire import FieldType, shapes_of

T = TypeVar("T")


def full(kind: type[T]) -> T:
    return _struct(kind, itertools.count(1))


def bare(kind: type[T]) -> T:
    return _struct(kind, None)


def _struct(kind: type[T], numbers: Iterator[int] | None) -> T:
    sent = {name: shape for name, shape in shapes_of(kind).items() if Unsent not in shape.marks}
    return kind(**{name: _value(shape, numbers) for name, shape in sent.items()})


def _value(shape: FieldType, numbers: Iterator[int] | None) -> Any:
    kind = shape.kind
    if numbers is None and (shape.optional or Else in shape.marks):
        return shape.unset
    if shape.is_struct:
        return _struct(kind, numbers)
    if shape.is_enum:
        return [*kind][0 if numbers is None else -1]
    if numbers is None:
        return kind()
    if Coded in shape.marks:
        return {"node_id": "n1", "rounds": [next(numbers)]}
    if kind is dict:
        return {f"name {next(numbers)}": f"caf\u00e9 {next(numbers)}"}
    if shape.item is not None:
        return tuple(_value(shape.item, numbers) for _ in range(2))
    if kind is str:
        return f"text {next(numbers)}"
    if kind is bytes:
        return b"\xff%d" % next(numbers)
    return next(numbers) + 0.5 if kind is float else kind(next(numbers))
