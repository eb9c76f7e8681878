"""Frames as values: a dataclass from what an agent, or a job's process, has sent as JSON.

A field's annotation says what it may hold. It is one of these, or another dataclass:

    int, bool, str, Number, Small, Text
    float                                             a number that is not negative
    tuple[X, ...], tuple[X, Y], Mapping[str, str]
    X | None
"""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, TypeVar

    T = TypeVar("T")

Number = int
"""A number from 0 to 2**53."""
Small = int
"""A number from 0 to what the wire's 32 bits can carry: a round, a rank, a time in milliseconds."""
Text = str
"""A text that UTF-8 can carry. JSON may escape what it cannot, which is replaced."""

MAX_NUMBER = 1 << 53
_LEAST_MOST = {
    "int": (-MAX_NUMBER, MAX_NUMBER),
    "Number": (0, MAX_NUMBER),
    "Small": (0, (1 << 31) - 1),
}


class RequestError(ValueError):
    """Raised for a frame that lacks a field or has one of another kind, or is refused otherwise.

    Nothing has been changed.
    """


def decode(kind: type[T], frame: object) -> T:
    """Return the value of a frame. A field with a default may be missing; others are ignored.

    Raises `RequestError` if a field is missing or has no such value.
    """
    if not isinstance(frame, dict):
        raise RequestError(f"expected an object, got {frame!r:.80}")
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in frame:
            try:
                values[field.name] = _decoded(kind, str(field.type), frame[field.name])
            except RequestError as error:
                raise RequestError(f"{field.name}: {error}") from error
    try:
        return kind(**values)
    except TypeError as error:
        raise RequestError(str(error)) from error


def _decoded(of: type, kind: str, value: Any) -> object:
    optional = kind.removesuffix(" | None")
    if optional != kind:
        return None if value is None else _decoded(of, optional, value)
    if kind in _LEAST_MOST:
        least, most = _LEAST_MOST[kind]
        if type(value) is int and least <= value <= most:
            return value
    elif kind == "float":
        # Written so that NaN, which compares as False, is refused.
        if type(value) in (int, float) and 0 <= value <= MAX_NUMBER:
            return value
    elif kind == "Text":
        if isinstance(value, str):
            return value.encode(errors="replace").decode()
    elif kind == "Mapping[str, str]":
        if isinstance(value, dict):
            return {name: _decoded(of, "str", text) for name, text in value.items()}
    elif kind.startswith("tuple["):
        kinds = kind[len("tuple[") : -1]
        each = kinds.removesuffix(", ...")
        if isinstance(value, list):
            if each != kinds:
                return tuple(_decoded(of, each, one) for one in value)
            every = kinds.split(", ")
            if len(value) == len(every):
                return tuple(_decoded(of, *one) for one in zip(every, value, strict=True))
    elif is_dataclass(nested := vars(sys.modules[of.__module__]).get(kind)):
        return decode(nested, value)  # type: ignore[arg-type]
    elif type(value).__name__ == kind:  # bool, str
        return value
    raise RequestError(f"expected {kind}, got {value!r:.80}")


def read_field(request: Mapping[str, object], name: str, kind: type[T]) -> T:
    value = request.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RequestError(f"{name}: expected {kind.__name__}, got {value!r:.80}")
    return value
