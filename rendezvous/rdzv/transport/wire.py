"""Converts structs to protobuf messages and back, by the names of their fields.

    write(pb.Offer(), offer)                    # a struct to a message
    read(Offer, message.offer, checked=True)    # a message to a struct, within the struct's bounds
    convert(answers.Budgets, view)              # a struct to another

For each pair of types, a function is written when it is first used, from the struct's annotations
and the message's descriptor. The marks of `rdzv.bounds` on a struct's fields say what they may hold
and how they are sent.

A field that is None stays unset. An optional field becomes None if the source's field is empty or 0
and cannot be None; in a message, only a field declared `optional` can be unset. Enums convert by
name, pairs and dicts as messages with a `name` and a `value`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from msgspec import StructMeta
from msgspec.structs import fields

from rdzv import bounds
from rdzv.bounds import Age, AtMost, Check, Coded, Cut, Else, First, Flat, Unsent, UpTo, Within
from rdzv.structs import field_names
from rdzv.v1 import rdzv_pb2 as pb

T = TypeVar("T")
M = TypeVar("M", bound=Message)
_Function = Callable[..., Any]


def read(
    kind: type[T], message: Message, *, checked: bool = False, now_ms: int = 0, **given: Any
) -> T:
    """Build a `kind` from a message's fields of the same name; `given` replaces some of them.

    Raises:
        InvalidRequestError: the message is `checked`, and a field is out of its bounds.

    """
    reader = _reader(kind, message.DESCRIPTOR, checked, "", tuple(given))
    result: T = reader(message, now_ms, **given)
    return result


def write(message: M, value: object, now_ms: int = 0) -> M:
    """Fill a message from a struct's fields, and return it. Its ages are those at `now_ms`."""
    _writer(type(value), message.DESCRIPTOR)(message, value, now_ms)
    return message


def convert(kind: type[T], source: object, **given: Any) -> T:
    """Build a `kind` from another struct's fields of the same name; `given` replaces some."""
    result: T = _converter(kind, type(source), tuple(given))(source, **given)
    return result


def sendable(text: str) -> str:
    """Escape characters that cannot be sent; for example, file names may contain non-text bytes."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def bodies(container: type[Message], union: Any) -> dict[type, str]:
    """Return the field of a message's oneof for each struct of a union, by the type's name."""
    descriptor: Any = container.DESCRIPTOR
    (oneof,) = descriptor.oneofs
    names = {field.message_type.name: field.name for field in oneof.fields}
    return {kind: names[kind.__name__] for kind in get_args(union)}


CONTROL: Mapping[str, tuple[type[Message], type[Message], bool]] = {
    one.name: (
        getattr(pb, one.input_type.name),
        getattr(pb, one.output_type.name),
        one.server_streaming,
    )
    for one in pb.DESCRIPTOR.services_by_name["Control"].methods
}
"""The request and the answer of each method of Control, and whether it answers with several."""


# ------------------------------------------------------------------------------------ the types


class FieldType(NamedTuple):
    """The type of a field, or of a container's items."""

    kind: Any
    optional: bool
    marks: Mapping[type, Any]
    item: FieldType | None
    """What a container's first type argument says; None for a single value."""

    @property
    def is_struct(self) -> bool:
        return isinstance(self.kind, StructMeta)

    @property
    def is_enum(self) -> bool:
        return isinstance(self.kind, type) and issubclass(self.kind, Enum)

    @property
    def unset(self) -> Any:
        """What the field reads as where it is unset, or None if that is what the wire says."""
        return self.marks[Else].value if Else in self.marks else None


F = TypeVar("F", bound=_Function)


def _cached(function: F) -> F:
    """Remember what a function returns. To mypy, `cache` takes no types as arguments."""
    return cache(function)  # type: ignore[return-value]


def _shape(hint: Any) -> FieldType:
    marks: dict[type, Any] = {}
    optional = False
    while (origin := get_origin(hint)) in (Annotated, UnionType, Union):
        if origin is Annotated:
            hint, inner = hint.__origin__, hint.__metadata__
            marks = {one if isinstance(one, type) else type(one): one for one in inner} | marks
        else:
            optional = True
            (hint,) = (one for one in get_args(hint) if one is not NoneType)
    item = None if origin is None else _shape(get_args(hint)[0])
    return FieldType(origin or hint, optional, marks, item)


@_cached
def shapes_of(kind: type) -> dict[str, FieldType]:
    """Return the types of a struct's fields, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: _shape(hints[name]) for name in field_names(kind)}


def _numbers(kind: type[Enum], enum: Any) -> dict[Enum, int]:
    """Return the number of each member. Its name on the wire may begin with that of the enum."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    numbers = {value.name.removeprefix(prefix): value.number for value in enum.values}
    return {member: numbers[member.name] for member in kind}


# ------------------------------------------------------------------------------------ the source


class _Source:
    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}

    def name(self, value: object) -> str:
        if type(value) in (bool, int, str, NoneType):
            return repr(value)
        name = f"_{len(self._objects)}"
        self._objects[name] = value
        return name

    def function(self, of: type, arguments: str, lines: Iterable[str]) -> _Function:
        text = f"def convert({arguments}):\n" + "".join(f"    {line}\n" for line in lines)
        exec(compile(text, f"<wire form of {of.__qualname__}>", "exec"), self._objects)
        function: _Function = self._objects["convert"]
        return function

    def builder(
        self,
        kind: type,
        arguments: str,
        given: Iterable[str],
        expression: Callable[[str, FieldType], str | None],
    ) -> _Function:
        """Return a function that builds a `kind` from these expressions for its fields."""
        values, required = [], {one.name for one in fields(kind) if one.required}
        for name, shape in shapes_of(kind).items():
            value = name if name in given else expression(name, shape)
            if value is not None:
                values.append(f"{name}={value}")
            elif name in required:
                raise TypeError(f"{kind.__qualname__}.{name} is in no field: give it")
        arguments = ", ".join((arguments, "*", *given) if given else (arguments,))
        built = f"return {self.name(kind)}({', '.join(values)})"
        return self.function(kind, arguments, [built])


def _field_of(descriptor: Any, name: str, kind: type) -> Any:
    field = descriptor.fields_by_name.get(name)
    if field is None:
        what = f"{kind.__qualname__}.{name} is no field of {descriptor.name}"
        raise TypeError(f"{what}: give both one name, or mark it as Unsent")
    return field


# ------------------------------------------------------------------------------------ reading


@_cached
def _reader(
    kind: type, descriptor: Any, checked: bool, path: str, given: tuple[str, ...] = ()
) -> _Function:
    source = _Source()

    def expression(name: str, shape: FieldType) -> str | None:
        if Unsent in shape.marks:
            return None
        if Flat in shape.marks:
            return f"{source.name(_reader(shape.kind, descriptor, checked, path))}(m, now_ms)"
        if Age in shape.marks:
            age, most = (
                f"m.{_field_of(descriptor, shape.marks[Age].field, kind).name}",
                AtMost(bounds.TIMEOUT_MS),
            )
            if shape.item is None:
                return "now_ms - " + _bounded(source, age, [most], path)
            times = f"tuple([now_ms - {_bounded(source, 'i', [most], path)} for i in {age}])"
            return _bounded(source, times, shape.marks.values() if checked else (), path)
        field = _field_of(descriptor, name, kind)
        return _read_field(source, field, shape, checked, path + name)

    return source.builder(kind, "m, now_ms", given, expression)


def _read_field(source: _Source, field: Any, shape: FieldType, checked: bool, path: str) -> str:
    marks, value = shape.marks if checked else {}, f"m.{field.name}"
    if Coded in shape.marks:
        return f"{source.name(shape.marks[Coded].read)}({value})"
    if shape.item is None:
        unset = source.name(shape.unset)
        if shape.kind is int and shape.unset is not None and not field.has_presence:
            return _read_value(source, f"({value} or {unset})", field, shape, checked, path)
        value = _read_value(source, value, field, shape, checked, path)
        if field.has_presence and (shape.optional or shape.unset is not None):
            return f"({value} if m.HasField({field.name!r}) else {unset})"
        if shape.optional or (shape.unset is not None and not shape.is_enum):
            return f"({value} or {unset})"
        return value
    if UpTo in marks:
        value = f"{source.name(bounds.up_to)}({path!r}, {value}, {marks[UpTo].count})"
    if First in marks:
        value = f"{value}[:{marks[First].count}]"
    if shape.kind is not tuple:
        value = f"{{i.name: i.value for i in {value}}}"
    elif shape.item.kind is tuple:
        value = f"tuple([(i.name, i.value) for i in {value}])"
    else:
        one = _read_value(source, "i", field, shape.item, checked, path)
        value = f"tuple({value})" if one == "i" else f"tuple([{one} for i in {value}])"
    return _bounded(source, value, marks.values(), path)


def _read_value(
    source: _Source, value: str, field: Any, shape: FieldType, checked: bool, path: str
) -> str:
    if shape.is_struct:
        inner = _reader(shape.kind, field.message_type, checked, f"{path}.")
        return f"{source.name(inner)}({value}, now_ms)"
    if shape.is_enum:
        known = {0: shape.unset} if shape.unset is not None else {}
        known |= {n: member for member, n in _numbers(shape.kind, field.enum_type).items()}
        if shape.unset is not None and not checked:
            return f"{source.name(known)}.get({value}, {source.name(shape.unset)})"
        return f"{source.name(bounds.one_of)}({path!r}, {value}, {source.name(known)})"
    return _bounded(source, value, shape.marks.values() if checked else (), path)


def _bounded(source: _Source, value: str, marks: Iterable[object], path: str) -> str:
    for mark in marks:
        match mark:
            case Within(low, high, flag):
                what = f"{flag}: {path.rpartition('.')[2]}" if flag else path
                refuse = f"{source.name(bounds.within)}({what!r}, v, {low}, {high})"
                value = f"(v if {low} <= (v := {value}) <= {high} else {refuse})"
            case AtMost(high):
                value = f"(v if (v := {value}) <= {high} else {high})"
            case Check(call, empty=False):
                value = f"{source.name(call)}({path!r}, {value})"
            case Check(call):
                value = f"({source.name(call)}({path!r}, v) if (v := {value}) else v)"
            case Cut(call):
                value = f"{source.name(call)}({value})"
    return value


# ------------------------------------------------------------------------------------ writing


@_cached
def _writer(kind: type, descriptor: Any) -> _Function:
    source, lines = _Source(), ["pass"]
    for name, shape in shapes_of(kind).items():
        if Unsent in shape.marks:
            continue
        if Flat in shape.marks:
            lines.append(f"{source.name(_writer(shape.kind, descriptor))}(m, v.{name}, now_ms)")
        elif Age in shape.marks:
            age = f"m.{_field_of(descriptor, shape.marks[Age].field, kind).name}"
            if shape.item is None:
                lines.append(f"{age} = max(now_ms - v.{name}, 0)")
            else:
                lines.append(f"{age}.extend([max(now_ms - i, 0) for i in v.{name}])")
        else:
            lines += _write_field(source, _field_of(descriptor, name, kind), shape)
    return source.function(kind, "m, v, now_ms", lines)


def _write_field(source: _Source, field: Any, shape: FieldType) -> list[str]:
    value, target = f"v.{field.name}", f"m.{field.name}"
    if Coded in shape.marks:
        return [f"{target} = {source.name(shape.marks[Coded].write)}({value})"]
    if shape.item is not None:
        items = value if shape.kind is tuple else f"{value}.items()"
        if shape.kind is not tuple or shape.item.kind is tuple:
            return [f"for name, value in {items}: {target}.add(name=name, value=value)"]
        if shape.item.is_struct:
            inner = source.name(_writer(shape.item.kind, field.message_type))
            return [f"for i in {items}: {inner}({target}.add(), i, now_ms)"]
        one = _sent(source, "i", field, shape.item)
        return [f"{target}.extend({items if one == 'i' else f'[{one} for i in {items}]'})"]
    lines = []
    unless = shape.unset if field.has_presence and not shape.is_struct else None
    if shape.optional or unless is not None:
        lines.append(f"if (x := {value}) != {source.name(unless)}:")
        value = "x"
    if shape.is_struct:
        inner = source.name(_writer(shape.kind, field.message_type))
        statement = f"{target}.SetInParent(); {inner}({target}, {value}, now_ms)"
    else:
        statement = f"{target} = {_sent(source, value, field, shape)}"
    return [*lines, f"    {statement}" if lines else statement]


def _sent(source: _Source, value: str, field: Any, shape: FieldType) -> str:
    if shape.is_enum:
        return f"{source.name(_numbers(shape.kind, field.enum_type))}[{value}]"
    if shape.kind is str:
        return f"(s if (s := {value}).isascii() else {source.name(sendable)}(s))"
    return value


# ------------------------------------------------------------------------------------ converting


@_cached
def _converter(kind: type, of: type, given: tuple[str, ...] = ()) -> _Function:
    source, shapes = _Source(), shapes_of(of)

    def expression(name: str, shape: FieldType) -> str | None:
        if name in shapes:
            return _converted(source, f"v.{name}", shape, shapes[name])
        return f"v.{name}" if hasattr(of, name) else None  # A property, perhaps.

    return source.builder(kind, "v", given, expression)


def _converted(source: _Source, value: str, shape: FieldType, has: FieldType) -> str:
    if shape.item is not None and has.item is not None:
        if shape.kind is not tuple:
            return f"dict({value})"
        one = _converted(source, "i", shape.item, has.item)
        return value if one == "i" else f"tuple([{one} for i in {value}])"
    if shape.is_struct:
        if shape.kind is has.kind:
            return value
        inner = f"{source.name(_converter(shape.kind, has.kind))}({value})"
        return f"(None if {value} is None else {inner})" if has.optional else inner
    if has.is_enum and not shape.is_enum:
        return f"{value}.value"
    return f"({value} or None)" if shape.optional and not has.optional else value
