"""Configuration files in TOML, described knob by knob: read, checked, shown and compared.

A program declares its `Knobs` once. From that one table come what `load` accepts and refuses, what
`render` prints for --print-config, what `compare` says of a reload, and `as_markdown`, which is the
program's documentation. Nothing here knows any program, or does more than read the one file.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from rdzv.errors import InvalidRequestError
from rdzv.structs import struct

FILE_BYTES = 1024 * 1024
"""A configuration is written by people; what is larger is something else."""

LISTED_PROBLEMS = 50
"""How many problems one refusal names; whoever has more corrects these first."""

MAX_NUMBER = 1e300
"""Numbers stay below it, so that none overflows when it is counted in another unit."""

SHOWN_CHARS = 80
"""How much of a refused value is shown."""

Value = (
    bool
    | int
    | float
    | str
    | Path
    | tuple[str, ...]
    | Mapping[str, str]
    | tuple["Values", ...]
    | None
)
"""What a knob is set to. None: it is not set."""

T = TypeVar("T")


class Kind(StrEnum):
    """What a value is, and so how it is written."""

    BOOL = "true or false"
    INT = "a whole number"
    FLOAT = "a number"
    STR = "a text"
    DURATION = "a duration"
    """A number of seconds, or a text such as "250 ms", "5 min", "30 d"; down to a millisecond."""
    SIZE = "a size"
    """A whole number of bytes, or a text such as "64 MiB"."""
    STRINGS = "a list of texts"
    TABLE = "a table of texts"
    PATH = "a path"
    """Absolute in a file, for a service has no folder of its own to begin from."""
    TABLES = "a list of tables"
    """[[name]], each described by `Knob.each`."""


@struct(frozen=True, kw_only=True)
class Knob:
    """One line that a configuration may have."""

    key: str
    """Its name, with its tables: `tls.cert`."""
    kind: Kind
    reason: str
    """What it is, and why one would change it, for operators. One sentence, or two."""
    default: Value = None
    default_words: str = ""
    """What holds while it is not set, or where the default comes from, if `default` can not say."""
    unit: str = ""
    """What the value counts, or its form, such as HOST:PORT; durations and sizes have their own."""
    least: float | None = None
    most: float | None = None
    """Bounds of a number, in seconds or bytes for a duration or size."""
    choices: tuple[str, ...] = ()
    """All that a text may be."""
    parse: Callable[[str], object] | None = None
    """Refuses, by an `InvalidRequestError`, a text that can not be used; also each of a list."""
    each: Knobs | None = None
    """Of TABLES: what each of them may hold."""
    required: bool = False
    reload: bool = False
    """Whether a reload applies it; else a change needs a restart."""
    secret: bool = False
    """Whether no one is to see its value."""

    @property
    def counts(self) -> str:
        """Its unit, for people; empty if it has none."""
        if self.kind is Kind.DURATION:
            return "seconds"
        if self.kind is Kind.SIZE:
            return "bytes"
        return self.unit

    @property
    def bounds(self) -> str:
        """What its value may be, for people; empty if its kind says all."""
        if self.choices:
            return ", ".join(map(_quoted, self.choices))
        if self.least is not None and self.most is not None:
            return f"{self._bound(self.least)} to {self._bound(self.most)}"
        if self.least is not None:
            return f"at least {self._bound(self.least)}"
        return f"at most {self._bound(self.most)}" if self.most is not None else ""

    def _bound(self, bound: float) -> str:
        if self.kind is Kind.DURATION:
            return _with_unit(bound, _DURATION_UNITS, "s")
        if self.kind is Kind.SIZE:
            return _with_unit(bound, _SIZE_UNITS, "B")
        return f"{bound:g}" if abs(bound) < 1e6 else str(int(bound))

    @property
    def default_text(self) -> str:
        """Its default, for people."""
        if self.default_words:
            return self.default_words
        if self.required:
            return "none: it must be set"
        return "not set" if self.default is None else spelled(self.default, self.kind)


@struct(frozen=True)
class Rule:
    """What several knobs have to agree on."""

    keys: tuple[str, ...]
    """The rule is asked only where each of these is in order by itself."""
    broken: Callable[[Values], str]
    """Says what is wrong and what to do, or nothing: the empty text."""


@struct(frozen=True)
class Knobs:
    """All that one configuration may hold."""

    program: str
    """Whose configuration it is."""
    knobs: tuple[Knob, ...]
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        keys = [knob.key for knob in self.knobs]
        assert len(set(keys)) == len(keys), "two knobs have one key"
        assert not self.sections & set(keys), "a table is no knob"
        assert all(key in keys for rule in self.rules for key in rule.keys), "a rule's key is wrong"

    @property
    def by_key(self) -> dict[str, Knob]:
        """Every knob by its dotted key."""
        return {knob.key: knob for knob in self.knobs}

    @property
    def sections(self) -> frozenset[str]:
        """The names of all tables that hold knobs."""
        return frozenset(
            ".".join(parts[:depth])
            for parts in (knob.key.split(".") for knob in self.knobs)
            for depth in range(1, len(parts))
        )


@struct(frozen=True)
class Values:
    """A configuration that was found to be in order: each knob with its value and its source."""

    knobs: Knobs = field(repr=False)
    by_key: Mapping[str, Value] = field(repr=False)
    """Every knob of `knobs`, also those that are not set."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """By key, who set it: a file, or "the command line"; a default has none."""

    def get(self, key: str, type_: type[T]) -> T:
        """Return a value that is set, as what it is.

        >>> knobs = Knobs("p", (Knob(key="port", kind=Kind.INT, default=1, reason="Where."),))
        >>> load(knobs).get("port", int)
        1
        """
        value = self.by_key[key]
        assert isinstance(value, type_), f"{key} is {value!r}, no {type_.__name__}"
        return value

    def maybe(self, key: str, type_: type[T]) -> T | None:
        """Return a value, or None if it is not set."""
        return None if self.by_key[key] is None else self.get(key, type_)

    def ms(self, key: str) -> int:
        """Return a duration in milliseconds."""
        value = self.by_key[key]
        assert isinstance(value, int | float), f"{key} is {value!r}, no duration"
        return round(value * 1000)

    def strings(self, key: str) -> tuple[str, ...]:
        """Return a list of texts; one that is not set is empty."""
        return tuple(item for item in self.get(key, tuple) if isinstance(item, str))

    def table(self, key: str) -> Mapping[str, str]:
        """Return a table of texts; one that is not set is empty."""
        value = self.by_key[key]
        return value if isinstance(value, Mapping) else MappingProxyType({})

    def tables(self, key: str) -> tuple[Values, ...]:
        """Return a list of tables; one that is not set is empty."""
        return tuple(item for item in self.get(key, tuple) if isinstance(item, Values))


@struct(frozen=True)
class Problem:
    """One thing that is wrong with a configuration."""

    source: str
    text: str
    """Key, value, reason and remedy."""


class ConfigurationError(InvalidRequestError):
    """A configuration can not be used; it names everything that is wrong with it."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(_listed(self.problems))


def _listed(problems: tuple[Problem, ...]) -> str:
    lines = [f"{problem.source}: {problem.text}" for problem in problems[:LISTED_PROBLEMS]]
    if len(problems) > LISTED_PROBLEMS:
        lines.append(f"and {len(problems) - LISTED_PROBLEMS} more")
    if len(lines) == 1:
        return lines[0]
    return "\n  ".join((f"the configuration has {len(problems)} problems:", *lines))


class _RefusedError(Exception):
    """A value can not be used: why, and what would do."""

    def __init__(self, why: str, remedy: str) -> None:
        self.why = why
        self.remedy = remedy
        super().__init__(why, remedy)


# ------------------------------------------------------------------------------------ reading


def load(
    knobs: Knobs,
    path: Path | None = None,
    given: Mapping[str, object] | None = None,
    given_by: str = "the command line",
) -> Values:
    """Read a file and what was `given` beside it, which wins, by key; None in `given` is no value.

    Whatever neither of them sets has its default; without `path` no file is read.

    Raises:
        ConfigurationError: the file can not be read, or something is wrong in it or in `given`:
            all of it is named, and there are no values.

    """
    reading = _Reading(knobs, [])
    if path is not None:
        reading.take_table(_document(path), str(path))
    for key, raw in (given or {}).items():
        if raw is not None:
            reading.take(knobs.by_key[key], raw, given_by, in_file=False)
    # Who writes the file is the one to add what is missing in it.
    values = reading.completed(given_by if path is None else str(path))
    if reading.problems:
        raise ConfigurationError(reading.problems)
    return values


def _document(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES + 1)
    except OSError as error:
        raise _unusable(
            path, f"it can not be read: {error.strerror or error}; write it, or name another"
        ) from error
    if len(content) > FILE_BYTES:
        raise _unusable(path, f"it is larger than {FILE_BYTES} bytes; name a configuration file")
    try:
        return tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _unusable(path, f"it is not TOML: {error}; correct it") from error
    except (RecursionError, ValueError) as error:
        # Nested too deeply, or a number of thousands of digits.
        raise _unusable(path, f"it can not be read: {error}; name a configuration file") from error


def _unusable(path: Path, text: str) -> ConfigurationError:
    return ConfigurationError([Problem(str(path), text)])


class _Reading:
    """What is known so far of one configuration, or of one table in a list of tables."""

    def __init__(self, knobs: Knobs, problems: list[Problem], where: str = "") -> None:
        self.problems = problems
        self._knobs = knobs
        self._by_key = knobs.by_key
        self._sections = knobs.sections
        self._where = where
        """What stands before its keys, for people: `job[2].`."""
        self._values: dict[str, Value] = {}
        self._sources: dict[str, str] = {}
        self._bad: set[str] = set()

    def take_table(self, table: Mapping[str, object], source: str, prefix: str = "") -> None:
        """Take what is known of a table, with the tables in it; what is not known is a problem."""
        for name, raw in table.items():
            key = f"{prefix}{name}"
            # A dot inside quotes is part of a name, and no name of ours has one.
            if "." in name or key not in {*self._by_key, *self._sections}:
                # Looking for the nearest is slow, and no more than these are listed.
                listed = len(self.problems) < LISTED_PROBLEMS
                nearest = _nearest(key, self._knobs) if listed else ""
                self._note(source, key[:SHOWN_CHARS], f"is unknown; {nearest}")
            elif key in self._by_key:
                self.take(self._by_key[key], raw, source, in_file=True)
            elif isinstance(raw, Mapping):
                self.take_table(raw, source, f"{key}.")
            else:
                self._note(source, key, f"= {_shown(raw)} is no table; begin with [{key}]")

    def take(self, knob: Knob, raw: object, source: str, *, in_file: bool) -> None:
        """Take one value, if it is in order."""
        known = len(self.problems)
        if knob.kind is Kind.TABLES:
            self._values[knob.key] = self._take_tables(knob, raw, source)
        else:
            try:
                self._values[knob.key] = _checked(knob, raw, in_file=in_file)
            except _RefusedError as refused:
                said = "" if knob.secret else f"= {_shown(raw)} "
                self._note(source, knob.key, f"{said}{refused.why}; {refused.remedy}")
        if len(self.problems) > known:
            self._bad.add(knob.key)
        self._sources[knob.key] = source

    def _take_tables(self, knob: Knob, raw: object, source: str) -> tuple[Values, ...]:
        assert knob.each is not None, f"{knob.key} does not say what each table holds"
        if not isinstance(raw, list) or not all(isinstance(item, Mapping) for item in raw):
            text = f"= {_shown(raw)} is no list of tables; begin with [[{knob.key}]]"
            self._note(source, knob.key, text)
            return ()
        found = []
        for number, item in enumerate(raw, start=1):
            where = f"{self._where}{knob.key}[{number}]."
            reading = _Reading(knob.each, self.problems, where)
            reading.take_table(item, source)
            found.append(reading.completed(source))
        return tuple(found)

    def completed(self, place: str) -> Values:
        """Add the defaults, and ask the rules; what is missing is missing in `place`."""
        values = {
            knob.key: self._values.get(knob.key, _default(knob)) for knob in self._knobs.knobs
        }
        effective = Values(self._knobs, MappingProxyType(values), MappingProxyType(self._sources))
        for knob in self._knobs.knobs:
            if knob.required and knob.key not in self._sources:
                self._bad.add(knob.key)
                self._note(place, knob.key, f"is missing; it says: {knob.reason}")
        self.problems += _broken_rules(effective, place, self._bad)
        return effective

    def _note(self, source: str, key: str, text: str) -> None:
        self.problems.append(Problem(source, f"`{self._where}{key}` {text}"))


def _broken_rules(
    values: Values, place: str, bad: frozenset[str] | set[str] = frozenset()
) -> Iterator[Problem]:
    for rule in values.knobs.rules:
        if bad.isdisjoint(rule.keys) and (text := rule.broken(values)):
            setters = [values.sources[key] for key in rule.keys if values.sources.get(key)]
            yield Problem(setters[-1] if setters else place, text)


def _default(knob: Knob) -> Value:
    if knob.default is None and knob.kind in {Kind.STRINGS, Kind.TABLES}:
        return ()
    return knob.default


def _nearest(key: str, knobs: Knobs) -> str:
    """Name the known key that is most like an unknown one, be it the same name in another table."""

    def likeness(known: str) -> float:
        whole = difflib.SequenceMatcher(None, key, known).ratio()
        last = difflib.SequenceMatcher(None, _last(key), _last(known)).ratio()
        return max(whole, 0.95 * last)

    key = key[:SHOWN_CHARS]
    known = sorted({*knobs.by_key, *knobs.sections})
    return f"the nearest known key is `{max(known, key=likeness)}`"


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _shown(raw: object) -> str:
    """Spell any value that TOML has, not at full length."""
    if isinstance(raw, Mapping):
        return "(a table)"
    if isinstance(raw, bool):
        text = str(raw).lower()
    else:
        text = _quoted(str(raw)) if isinstance(raw, str | Path) else str(raw)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."


# ------------------------------------------------------------------------------------ one value


def _checked(knob: Knob, raw: object, *, in_file: bool) -> Value:
    """Return a raw value as what the knob's kind says, within its bounds; else raise."""
    match knob.kind:
        case Kind.BOOL:
            if not isinstance(raw, bool):
                raise _RefusedError("is neither true nor false", "give one of them")
            return raw
        case Kind.INT | Kind.FLOAT | Kind.DURATION | Kind.SIZE:
            return _bounded(knob, _NUMBERS[knob.kind](raw))
        case Kind.STR:
            return _text(knob, raw)
        case Kind.PATH:
            return _path(raw, in_file=in_file)
        case Kind.STRINGS:
            if not isinstance(raw, list | tuple):
                raise _RefusedError("is no list of texts", 'give, for example, ["a", "b"]')
            return tuple(_text(knob, item) for item in raw)
        case Kind.TABLE:
            if not isinstance(raw, Mapping):
                raise _RefusedError("is no table of texts", f"begin with [{knob.key}]")
            return MappingProxyType({name: _text(knob, item) for name, item in raw.items()})
        case Kind.TABLES:
            raise AssertionError("a list of tables is checked table by table")


def _int(raw: object) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool):
        raise _RefusedError("is no whole number", "give one without quotes, for example 10")
    return raw


def _float(raw: object) -> float:
    if not isinstance(raw, int | float) or isinstance(raw, bool):
        raise _RefusedError("is no number", "give one without quotes, for example 0.5")
    if not abs(raw) < MAX_NUMBER:
        raise _RefusedError("is no number that can be used", "give a smaller one")
    return float(raw)


_MEASURED = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)", re.ASCII)

_DURATION_UNITS = {"d": 86_400, "h": 3_600, "min": 60, "s": 1, "ms": 0.001}
_SIZE_UNITS = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}


def _measured(raw: object, units: Mapping[str, float]) -> float | None:
    found = _MEASURED.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if found is None or found[2] not in units:
        return None
    return _float(float(found[1]) * units[found[2]])


def _no_duration() -> _RefusedError:
    known = ", ".join(_DURATION_UNITS)
    return _RefusedError(
        "is no duration", f'give seconds, or a text such as "5 s" with one of {known}'
    )


def _duration(raw: object) -> float:
    if not isinstance(raw, str | int | float) or isinstance(raw, bool):
        raise _no_duration()
    seconds = _measured(raw, _DURATION_UNITS) if isinstance(raw, str) else _float(raw)
    if seconds is None:
        raise _no_duration()
    if not math.isclose(round(seconds * 1000), seconds * 1000, rel_tol=1e-9, abs_tol=1e-6):
        raise _RefusedError("is finer than a millisecond", "give whole milliseconds")
    return _whole(round(seconds, 3))


def _whole(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def _size(raw: object) -> int:
    size = raw if isinstance(raw, int) and not isinstance(raw, bool) else None
    if size is None:
        measured = _measured(raw, _SIZE_UNITS)
        if measured is None or not measured.is_integer():
            known = ", ".join(_SIZE_UNITS)
            raise _RefusedError(
                "is no size", f'give whole bytes, or a text such as "64 MiB" with one of {known}'
            )
        size = int(measured)
    return size


_NUMBERS: Mapping[Kind, Callable[[object], float]] = {
    Kind.INT: _int,
    Kind.FLOAT: _float,
    Kind.DURATION: _duration,
    Kind.SIZE: _size,
}


def _bounded(knob: Knob, number: float) -> float:
    if knob.least is not None and number < knob.least:
        raise _RefusedError("is too small", f"give {knob.bounds}")
    if knob.most is not None and number > knob.most:
        raise _RefusedError("is too large", f"give {knob.bounds}")
    return number


def _text(knob: Knob, raw: object) -> str:
    if not isinstance(raw, str):
        raise _RefusedError(
            "is no text" if knob.kind is Kind.STR else "holds more than texts", "put it in quotes"
        )
    if not raw:
        raise _RefusedError("is empty", "give it a value, or leave it out")
    if knob.choices and raw not in knob.choices:
        raise _RefusedError("is none of its choices", f"give one of {knob.bounds}")
    if knob.parse is not None:
        try:
            knob.parse(raw)
        except InvalidRequestError as error:
            why, _, remedy = str(error).partition("; ")
            raise _RefusedError(f"can not be used: {why}", remedy or "correct it") from error
    return raw


def _path(raw: object, *, in_file: bool) -> Path:
    if not isinstance(raw, str | Path) or not str(raw):
        raise _RefusedError("is no path", 'give one in quotes, for example "/etc/rdzv/ca.pem"')
    if "\0" in str(raw):
        raise _RefusedError("holds a NUL, which no path has", "correct it")
    path = Path(raw)
    if in_file and not path.is_absolute():
        raise _RefusedError("is relative", "give the whole path, from / on")
    return path


# ------------------------------------------------------------------------------------ showing


def spelled(value: Value, kind: Kind) -> str:
    """Spell a value as TOML has it.

    >>> spelled(64 * 2**20, Kind.SIZE), spelled(300, Kind.DURATION), spelled(0.25, Kind.DURATION)
    ('"64 MiB"', '"5 min"', '0.25')
    """
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return _number_spelled(value, kind)
        case str() | Path():
            return _quoted(str(value))
        case tuple():
            return f"[{', '.join(_quoted(str(item)) for item in value)}]"
        case None:
            return "not set"
        case _:
            pairs = (f"{_bare(name)} = {_quoted(text)}" for name, text in value.items())
            return f"{{ {', '.join(pairs)} }}" if value else "{}"


def _number_spelled(number: float, kind: Kind) -> str:
    if kind is Kind.SIZE and number >= 2**10 and number % 2**10 == 0:
        return _quoted(_with_unit(number, _SIZE_UNITS, "B"))
    if kind is Kind.DURATION and number >= 120 and number % 60 == 0:
        return _quoted(_with_unit(number, _DURATION_UNITS, "s"))
    return str(_whole(number)) if kind is Kind.DURATION else str(number)


def _with_unit(number: float, units: Mapping[str, float], smallest: str) -> str:
    """Say a number in the largest unit in which it is whole."""
    for unit, worth in units.items():
        count = number / worth
        if number and math.isclose(count, round(count), abs_tol=1e-9) and round(count):
            return f"{round(count)} {unit}"
    return f"{number:g} {smallest}"


def _quoted(text: str) -> str:
    # JSON's strings are TOML's; what a terminal would obey, or can not show, is escaped in both.
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else _escaped(char) for char in quoted)


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def _bare(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name, re.ASCII) else _quoted(name)


def render(values: Values) -> str:
    """Write a configuration as TOML, with what each line means; secrets are left out.

    Read again, it is the same configuration, but for the secrets.
    """
    knobs = values.knobs
    lines = [*_comment(f"The configuration of {knobs.program}, as it is in effect."), ""]
    lines += _rendered(values, "")
    return "\n".join(lines).rstrip("\n") + "\n"


def _rendered(values: Values, place: str) -> Iterator[str]:
    """Yield the lines of one configuration; tables go last, for each begins where one ends."""
    last = ""
    # What is an inline value goes before the tables of the same level, or it would be theirs.
    ordered = sorted(values.knobs.knobs, key=lambda knob: _order(knob, values.knobs))
    for knob in ordered:
        table, _, name = knob.key.rpartition(".")
        value = values.by_key[knob.key]
        if table != last and knob.kind is not Kind.TABLES:
            last = table
            yield from (f"[{place}{table}]", "")
        yield from _comment(_about(knob, values.sources.get(knob.key, "")))
        if knob.kind is Kind.TABLES:
            yield from _rendered_tables(values, knob, f"{place}{knob.key}")
        elif knob.secret and value is not None:
            yield f"#{name} = (it is set; a secret is not shown)"
        elif value is None:
            yield f"#{name} = (not set)"
        else:
            yield f"{name} = {spelled(value, knob.kind)}"
        yield ""


def _rendered_tables(values: Values, knob: Knob, place: str) -> Iterator[str]:
    for each in values.tables(knob.key):
        yield f"[[{place}]]"
        yield from _rendered(each, f"{place}.")


def _order(knob: Knob, knobs: Knobs) -> tuple[bool, int, int]:
    """Sort by table, in the order in which tables are first named; lists of tables come last."""
    tables = list(dict.fromkeys(each.key.rpartition(".")[0] for each in knobs.knobs))
    tables.sort(key=bool)
    table = knob.key.rpartition(".")[0]
    return knob.kind is Kind.TABLES, tables.index(table), knobs.knobs.index(knob)


def _about(knob: Knob, source: str) -> str:
    parts = [knob.reason]
    if knob.counts:
        parts.append(f"Unit: {knob.counts}.")
    if knob.bounds:
        parts.append(f"Allowed: {knob.bounds}.")
    parts.append(f"Default: {knob.default_text}.")
    if source:
        parts.append(f"Set by {source}.")
    parts.append(_WHEN[knob.reload])
    return " ".join(parts)


_WHEN = {True: "A reload applies it.", False: "A change needs a restart."}


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        width=96,
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_markdown(knobs: Knobs, heading: str = "##") -> str:
    """Write the documentation of all knobs, a table for each table of the file."""
    lines: list[str] = []
    for section in dict.fromkeys(knob.key.rpartition(".")[0] for knob in knobs.knobs):
        of_section = [k for k in knobs.knobs if k.key.rpartition(".")[0] == section]
        plain = [knob for knob in of_section if knob.kind is not Kind.TABLES]
        if plain:
            title = f"`[{section}]`" if section else "Before any table"
            lines += [f"{heading} {title}", "", *_markdown_table(plain, section), ""]
        for knob in of_section:
            if knob.kind is Kind.TABLES and knob.each is not None:
                lines += [f"{heading} `[[{knob.key}]]`", "", knob.reason, ""]
                lines += [*_markdown_table(knob.each.knobs), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _markdown_table(knobs: Iterable[Knob], section: str = "") -> list[str]:
    lines = [
        "| key | unit | default | allowed | reload | what it is |",
        "|---|---|---|---|---|---|",
    ]
    for knob in knobs:
        cells = (
            f"`{knob.key.removeprefix(section).removeprefix('.')}`",
            knob.counts or str(knob.kind),
            _code(knob),
            knob.bounds,
            "yes" if knob.reload else "no",
            knob.reason,
        )
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return lines


def _code(knob: Knob) -> str:
    set_by_default = not knob.default_words and knob.default is not None
    return f"`{knob.default_text}`" if set_by_default else knob.default_text


# ------------------------------------------------------------------------------------ comparing


@struct(frozen=True)
class Reload:
    """What a configuration that was read anew changes in a running program."""

    values: Values
    """What is in effect from now on: what a reload applies is new, all else as it was."""
    applied: tuple[str, ...]
    """The keys that changed and are in effect at once."""
    waiting: tuple[str, ...]
    """The keys that changed, and wait for a restart."""
    lines: tuple[str, ...]
    """The same in words, a line for each key."""


def compare(running: Values, wanted: Values) -> Reload:
    """Say what becomes of a running configuration that is to be another one.

    >>> level = Knob(key="log_level", kind=Kind.STR, default="info", reason="Noise.", reload=True)
    >>> port = Knob(key="port", kind=Kind.INT, default=1, reason="Where.")
    >>> knobs = Knobs("p", (level, port))
    >>> reload = compare(load(knobs), load(knobs, given={"log_level": "debug", "port": 2}))
    >>> for line in reload.lines: print(line)
    log_level is now "debug" (it was "info")
    port is to be 2 (it is 1): that needs a restart

    Raises:
        ConfigurationError: what a reload applies does not go with what waits for a restart.

    """
    values = dict(running.by_key)
    sources = dict(running.sources)
    applied, waiting, lines = [], [], []
    for knob in running.knobs.knobs:
        before, after = running.by_key[knob.key], wanted.by_key[knob.key]
        if before == after:
            continue
        if knob.reload:
            applied.append(knob.key)
            values[knob.key] = after
            sources[knob.key] = wanted.sources.get(knob.key, "")
        else:
            waiting.append(knob.key)
        lines.append(_change(knob, before, after))
    effective = Values(running.knobs, MappingProxyType(values), MappingProxyType(sources))
    if broken := tuple(_broken_rules(effective, "a reload")):
        until = f"while {', '.join(waiting)} still is as it was: restart instead of reloading"
        raise ConfigurationError(Problem(each.source, f"{each.text}; {until}") for each in broken)
    return Reload(effective, tuple(applied), tuple(waiting), tuple(lines))


def _change(knob: Knob, before: Value, after: Value) -> str:
    if knob.secret or knob.kind is Kind.TABLES:
        return (
            f"{knob.key} {'has changed' if knob.reload else 'is to change: that needs a restart'}"
        )
    old, new = spelled(before, knob.kind), spelled(after, knob.kind)
    if knob.reload:
        return f"{knob.key} is now {new} (it was {old})"
    return f"{knob.key} is to be {new} (it is {old}): that needs a restart"
