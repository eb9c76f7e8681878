"""The types with which a program declares its settings, as a tree of `Table` classes.

    class Logs(Table, frozen=True):
        keep_ms: Annotated[Duration, setting(ge=0, le=YEAR, reason="How long ...")] = 14 * DAY

Each field is a setting, another table, or a list of tables (`tuple[Table, ...]`). Its annotation
contains the type and bounds, for msgspec, and the other fields of the `Setting` that `settings_of`
returns. The tree of these structs is the configuration with which the program runs; the checks of a
file, --print-config, the outcome of a reload and the documentation are all derived from it. After a
change, run tests/unit/server/test_configuration_docs.py with --rewrite.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from msgspec import NODEFAULT, Meta, Struct
from msgspec.structs import FieldInfo, fields, force_setattr

from rdzv.structs import DURATION_UNITS

_UNIT_IN_NAME = re.compile("_(ms|bytes)$")
"""What the name of a field ends with, and its key does not, since users give a unit themselves."""


class Rule(Struct, frozen=True):
    """A condition that involves several settings."""

    keys: tuple[str, ...]
    """The settings that the rule concerns. It is checked only if each of them is valid on its own.
    """
    broken: Callable[[Any], str]
    """A function that takes the table and returns the problem with its remedy, or an empty string.
    It may raise an `InvalidRequestError` instead.
    """


class Table(Struct, frozen=True, kw_only=True):
    """A table in a configuration, or an entire configuration."""

    program: ClassVar[str] = ""
    rules: ClassVar[tuple[Rule, ...]] = ()
    """The rules of an entire configuration, or of a table in a list."""


class Setting(Struct, frozen=True, kw_only=True):
    """The declaration of one setting."""

    key: str
    """The setting's name in files, prefixed with the names of its tables, such as `tls.cert`."""
    path: str
    """The name of the field, prefixed in the same way, such as `lease.duration_ms`."""
    annotation: Any
    metas: tuple[Meta, ...]
    kind: Any
    """The class of the values: `int`, `tuple`, a class with a classmethod `parse`, ..."""
    reason: str
    default: Any
    default_words: str = ""
    unit: str = ""
    """The unit of a number, or the format of a string, such as HOST:PORT."""
    units: Mapping[str, float] = MappingProxyType({})
    """The units allowed in a string, largest first."""
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    check: Callable[[str], object] | None = None
    """Refuses an invalid string, including one in a list or table, with an `InvalidRequestError`.
    """
    each: type[Table] | None = None
    required: bool = False
    reload: bool = False

    @property
    def type(self) -> Any:
        return Annotated[self.annotation, *self.metas]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def kind_words(self) -> str:
        return "a list of tables" if self.each else _KINDS.get(self.kind, "a text")

    @property
    def bounds(self) -> str:
        if self.choices:
            return ", ".join(map(quoted, self.choices))
        if self.least is not None and self.most is not None:
            return f"{self._bound(self.least)} to {self._bound(self.most)}"
        if self.least is not None:
            return f"at least {self._bound(self.least)}"
        return f"at most {self._bound(self.most)}" if self.most is not None else ""

    def _bound(self, bound: float) -> str:
        if self.units:
            return _with_unit(bound, self.units)
        return f"{bound:g}" if abs(bound) < 1e6 else str(int(bound))

    @property
    def default_text(self) -> str:
        if self.required:
            return "none: it must be set"
        return self.default_words or (self.spelled(self.default) if self.has_default else "not set")

    @property
    def has_default(self) -> bool:
        return self.default is not None and self.default not in ((), {})

    @property
    def valid(self) -> str:
        if self.choices:
            return f"one of {self.bounds}"
        words = f"{self.unit or 'a text'} in quotes"
        if self.units:
            example = "5 s" if self.units is DURATION_UNITS else "64 MiB"
            units = ", ".join(self.units)
            words = f'a number of {self.unit}, or a text such as "{example}" with one of {units}'
        elif self.each:
            words = f"{self.kind_words}; begin with [[{self.key}]]"
        elif self.kind is Mapping:
            words = f"{self.kind_words}; begin with [{self.key}]"
        elif self.kind in _KINDS:
            words = f"{self.kind_words}{_EXAMPLES.get(self.kind, '')}"
        return f"{words}, {self.bounds}" if self.bounds else words

    def of(self, settings: Struct) -> Any:
        return attrgetter(self.path)(settings)

    def alter(self, settings: Struct, value: Any) -> None:
        """Change the value for all who hold these settings, which are frozen otherwise."""
        table, _, name = self.path.rpartition(".")
        force_setattr(attrgetter(table)(settings) if table else settings, name, value)

    def spelled(self, value: Any) -> str:
        match value:
            case None:
                return "not set"
            case bool():
                return str(value).lower()
            case int() | float():
                return self._number_spelled(value)
            case tuple():
                return f"[{', '.join(quoted(str(item)) for item in value)}]"
            case Mapping():
                pairs = (f"{_bare(name)} = {quoted(text)}" for name, text in value.items())
                return f"{{ {', '.join(pairs)} }}" if value else "{}"
            case _:
                return quoted(str(value))

    def _number_spelled(self, number: float) -> str:
        step, least = (60_000, 120_000) if self.units is DURATION_UNITS else (2**10, 2**10)
        if self.units and number >= least and number % step == 0:
            return quoted(_with_unit(number, self.units))
        if self.units is DURATION_UNITS:
            number /= 1_000
        return str(int(number) if float(number).is_integer() else number)


_KINDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    Path: "a path",
    tuple: "a list of texts",
    Mapping: "a table of texts",
}
_EXAMPLES: Mapping[Any, str] = {
    bool: " without quotes",
    int: " without quotes",
    float: " without quotes",
    Path: ' from / on, such as "/etc/rdzv/ca.pem"',
    tuple: ', such as ["a", "b"]',
}


@cache
def settings_of(table: type[Struct], prefix: str = "", path: str = "") -> Mapping[str, Setting]:
    found: dict[str, Setting] = {}
    for name, field in fields_of(table).items():
        key, place = f"{prefix}{name}", f"{path}{field.name}"
        if is_table(field.type):
            found |= settings_of(field.type, f"{key}.", f"{place}.")
        else:
            found[key] = _setting(key, place, field)
    rules: tuple[Rule, ...] = getattr(table, "rules", ())
    assert all(key in found for rule in rules for key in rule.keys), "a rule's key is wrong"
    return MappingProxyType(found)


@cache
def fields_of(table: type[Struct]) -> Mapping[str, FieldInfo]:
    return MappingProxyType(
        {
            _UNIT_IN_NAME.sub("", field.name) if _has_units(field.type) else field.name: field
            for field in fields(table)
        }
    )


def _has_units(annotation: Any) -> bool:
    return any("units" in (meta.extra or {}) for meta in _unwrapped(annotation)[1])


def is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct) and not hasattr(kind, "parse")


def _setting(key: str, path: str, field: FieldInfo) -> Setting:
    kind, metas = _unwrapped(field.type)
    more: dict[str, Any] = {"annotation": kind, "metas": tuple(metas)}
    for meta in metas:
        more |= meta.extra or {}
    about = metas[-1]
    more |= {"reason": about.description, "least": about.ge, "most": about.le}
    more["required"] = field.default is NODEFAULT
    more["default"] = None if field.default is NODEFAULT else field.default
    items = get_args(kind)
    if get_origin(kind) is Literal:
        kind, more["choices"] = str, items
    elif items:
        kind, more["each"] = get_origin(kind), items[0] if is_table(items[0]) else None
    return Setting(key=key, path=path, kind=kind, **more)


def _unwrapped(annotation: Any) -> tuple[Any, list[Meta]]:
    """Split an annotation into its type, excluding None, and its `Meta`s."""
    if get_origin(annotation) is Annotated:
        inner, *metas = get_args(annotation)
        kind, others = _unwrapped(inner)
        return kind, [*others, *metas]
    if get_origin(annotation) in (Union, UnionType):
        return _unwrapped(next(each for each in get_args(annotation) if each is not NoneType))
    return annotation, []


@cache
def sections_of(table: type[Struct]) -> frozenset[str]:
    parts = [key.split(".") for key in settings_of(table)]
    return frozenset(".".join(p[:depth]) for p in parts for depth in range(1, len(p)))


def _with_unit(number: float, units: Mapping[str, float]) -> str:
    for unit, worth in units.items():
        count = number / worth
        if number and math.isclose(count, round(count), abs_tol=1e-9) and round(count):
            return f"{round(count)} {unit}"
    return f"{number:g} {'s' if 's' in units else 'B'}"


def quoted(text: str) -> str:
    """Quote a string as TOML, escaping control characters and unprintable characters."""
    # JSON strings are TOML strings.
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else _escaped(char) for char in quoted)


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def _bare(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name, re.ASCII) else quoted(name)
