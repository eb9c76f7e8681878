"""Structs: immutable values that compare equal if all their fields do.

    @struct(frozen=True)
    class Seat:
        rank: int
        labels: Mapping[str, str] = field(default_factory=dict)

To a type checker, `struct` is `dataclasses.dataclass` and `replace` is `dataclasses.replace`, so it
checks their use. At run time, a struct is a `msgspec.Struct`. There are about 350 of them. A
dataclass takes 0.4 ms to create, because it compiles six functions, and together they took a third
of the time that rdzvrun needs to start its workers. A struct takes 0.01 ms, and its instances are
created, compared and replaced several times faster.

A field may have a default or a default factory, `repr=False` if it holds a secret, and
`compare=False` to be excluded from comparisons. A value that changes should be a dataclass.

Where operators set a field, `Annotated[Duration, setting(...)]` says how; see `rdzv.settings`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct, StructMeta

if TYPE_CHECKING:
    from dataclasses import dataclass as struct
    from dataclasses import replace
else:
    from msgspec.structs import replace

    def struct(
        *, frozen: bool = False, order: bool = False, kw_only: bool = False
    ) -> Callable[[type], type]:
        """Turn a class into a struct. Pass `frozen` explicitly, because type checkers read it."""
        if not frozen:
            raise TypeError("a struct never changes: say frozen=True, or make it a dataclass")
        return lambda cls: _struct(cls, order=order, kw_only=kw_only)


__all__ = ["Duration", "Size", "as_dict", "field_names", "replace", "setting", "struct"]

DURATION_UNITS = {"d": 86_400_000, "h": 3_600_000, "min": 60_000, "s": 1_000, "ms": 1}
SIZE_UNITS = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}

Duration = Annotated[int, Meta(extra={"unit": "seconds", "units": DURATION_UNITS})]
"""Whole milliseconds. In a file: a number of seconds, or a string such as "250 ms" or "5 min"."""

Size = Annotated[int, Meta(extra={"unit": "bytes", "units": SIZE_UNITS})]
"""Whole bytes. In a file: a number of bytes, or a string such as "64 MiB"."""


def setting(
    reason: str, *, ge: float | None = None, le: float | None = None, **more: object
) -> Meta:
    """Describe a field of a `Table`, for use in `Annotated`.

    `reason` tells operators, in one or two sentences, what the setting does and why they would
    change it. `ge` and `le` are bounds, in milliseconds for a duration and in bytes for a size.
    `more` contains other fields of `Setting`.
    """
    return Meta(ge=ge, le=le, description=" ".join(reason.split()), extra=more)


def field_names(kind: type) -> tuple[str, ...]:
    assert isinstance(kind, StructMeta), kind
    return kind.__struct_fields__


def as_dict(value: Any) -> Any:
    """Return a struct, and all structs in it, as dicts. Containers are copied, as by `asdict`."""
    if isinstance(value, Struct):
        return {name: as_dict(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return type(value)(as_dict(one) for one in value)
    if isinstance(value, dict):
        return {as_dict(key): as_dict(one) for key, one in value.items()}
    return value


def _struct(cls: type, *, order: bool, kw_only: bool) -> type:
    if isinstance(cls, StructMeta):  # Its base is a struct, so it is already a struct.
        if any(isinstance(default, Field) for default in cls.__struct_defaults__):
            raise TypeError(f"{cls.__qualname__} extends a struct: it may have plain defaults only")
        return cls
    named = {n: v for n, v in vars(cls).items() if n not in ("__dict__", "__weakref__")}
    fields = {n: v for n, v in named.items() if isinstance(v, Field)}
    named |= {name: _field(content) for name, content in fields.items()}
    if hidden := [name for name, content in fields.items() if not content.repr]:
        named["__repr__"] = _repr_without(hidden)
    if ignored := [name for name, content in fields.items() if not content.compare]:
        named["__eq__"], named["__hash__"] = _comparison_without(ignored)
    bases = (Struct, *(base for base in cls.__bases__ if base is not object))
    return StructMeta(cls.__name__, bases, named, frozen=True, order=order, kw_only=kw_only)


def _field(content: Field[Any]) -> Any:
    if not content.init or content.kw_only not in (MISSING, False):
        raise TypeError("a struct's fields are all given in the same way; make it a dataclass")
    if content.default_factory is not MISSING:
        return msgspec.field(default_factory=content.default_factory)
    return msgspec.field() if content.default is MISSING else msgspec.field(default=content.default)


def _repr_without(hidden: Sequence[str]) -> Callable[[Struct], str]:
    def shown(one: Struct) -> str:
        names = (name for name in one.__struct_fields__ if name not in hidden)
        fields = (f"{name}={getattr(one, name)!r}" for name in names)
        return f"{type(one).__qualname__}({', '.join(fields)})"

    return shown


def _comparison_without(ignored: Sequence[str]) -> tuple[Callable[..., Any], Callable[..., int]]:
    def compared(one: Struct) -> tuple[object, ...]:
        return tuple(getattr(one, name) for name in one.__struct_fields__ if name not in ignored)

    def equal(one: Struct, other: object) -> Any:
        if type(other) is not type(one):
            return NotImplemented
        return compared(one) == compared(other)

    return equal, lambda one: hash(compared(one))
