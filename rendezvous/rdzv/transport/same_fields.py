"""Copies fields of the same name between structs and messages.

An optional field becomes None if the source's field is empty or 0 and cannot be None. In a message,
only a field declared `optional` can be unset.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from msgspec import Struct, StructMeta

from rdzv.structs import field_names

T = TypeVar("T")
M = TypeVar("M", bound=Message)
_Read = Callable[[Any], Any]

_READERS: dict[tuple[type, type], tuple[tuple[str, _Read], ...]] = {}
"""The functions that read each field, by target and source type. Computed only once, because lists
are long."""


class _Type(NamedTuple):
    """The type of a field."""

    optional: bool
    container: type | None
    """tuple, dict, or None for a single value."""
    kind: type
    """The type of the single value, or the container's first type argument."""

    @property
    def is_struct(self) -> bool:
        return isinstance(self.kind, StructMeta)


def from_value(kind: type[T], source: object, **given: Any) -> T:
    """Build a `kind` from another struct's fields of the same name; `given` overrides some."""
    key = (kind, type(source))
    if key not in _READERS:
        has = _types(type(source))
        _READERS[key] = tuple((n, _of_value(n, t, has.get(n))) for n, t in _types(kind).items())
    return _made(kind, source, given)


def from_message(kind: type[T], message: Message, **given: Any) -> T:
    """Build a `kind` from a message's fields of the same name; `given` overrides some."""
    key = (kind, type(message))
    if key not in _READERS:
        has = message.DESCRIPTOR.fields_by_name
        _READERS[key] = tuple((n, _of_message(n, t, has.get(n))) for n, t in _types(kind).items())
    return _made(kind, message, given)


def to_message(message: M, value: object, without: Collection[str] = ()) -> M:
    """Fill a message from a struct's fields, except those in `without`, and return it.

    Fields that are None stay unset. A dict or a tuple of pairs becomes messages with a `name` and a
    `value`.
    """
    for name in field_names(type(value)):
        content = None if name in without else getattr(value, name)
        if content is None:
            continue
        if isinstance(content, dict | tuple):
            _extend(getattr(message, name), content, without)
        elif isinstance(content, Struct):
            part = getattr(message, name)
            part.SetInParent()
            to_message(part, content, without)
        else:
            setattr(message, name, sendable(content) if isinstance(content, str) else content)
    return message


def _extend(
    repeated: Any, content: dict[str, str] | tuple[Any, ...], without: Collection[str]
) -> None:
    for one in content.items() if isinstance(content, dict) else content:
        if isinstance(one, Struct):
            to_message(repeated.add(), one, without)
        elif isinstance(one, tuple):
            repeated.add(name=one[0], value=one[1])
        else:
            repeated.append(one)


def sendable(text: str) -> str:
    """Escape characters that cannot be sent; for example, file names may contain non-text bytes."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _made(kind: type[T], source: object, given: dict[str, Any]) -> T:
    readers = _READERS[kind, type(source)]
    return kind(**given, **{name: read(source) for name, read in readers if name not in given})


def _of_value(name: str, wanted: _Type, has: _Type | None) -> _Read:
    if wanted.container is tuple and wanted.is_struct:
        return lambda source: tuple(from_value(wanted.kind, one) for one in getattr(source, name))
    if wanted.container is dict:
        return lambda source: dict(getattr(source, name))
    if wanted.is_struct:
        return lambda source: (
            None if (one := getattr(source, name)) is None else from_value(wanted.kind, one)
        )
    if has is not None and issubclass(has.kind, Enum):
        return attrgetter(f"{name}.value")
    if wanted.optional and has is not None and not has.optional:
        return lambda source: getattr(source, name) or None
    return attrgetter(name)


def _of_message(name: str, wanted: _Type, has: Any) -> _Read:
    if wanted.container is tuple and wanted.is_struct:
        return lambda source: tuple(from_message(wanted.kind, one) for one in getattr(source, name))
    if wanted.container is tuple and wanted.kind is tuple:
        return lambda source: tuple((one.name, one.value) for one in getattr(source, name))
    if wanted.container is tuple:
        return lambda source: tuple(getattr(source, name))
    if wanted.container is dict:
        return lambda source: {one.name: one.value for one in getattr(source, name)}
    if wanted.is_struct:
        return lambda source: (
            from_message(wanted.kind, getattr(source, name))
            if source.HasField(name) or not wanted.optional
            else None
        )
    if wanted.optional and has is not None and has.has_presence:
        return lambda source: getattr(source, name) if source.HasField(name) else None
    if wanted.optional:
        return lambda source: getattr(source, name) or None
    return attrgetter(name)


def _types(kind: type) -> dict[str, _Type]:
    hints = get_type_hints(kind)
    return {name: _type(hints[name]) for name in field_names(kind)}


def _type(hint: Any) -> _Type:
    optional = get_origin(hint) is UnionType and NoneType in get_args(hint)
    if optional:
        hint = next(one for one in get_args(hint) if one is not NoneType)
    container = get_origin(hint)
    kind = hint if container is None else get_args(hint)[0]
    kind = get_origin(kind) or kind
    return _Type(optional, container, kind if isinstance(kind, type) else object)
