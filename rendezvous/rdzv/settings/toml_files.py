"""Reads settings from a TOML file, checks them as a whole, and compares them for a reload.

msgspec converts each value to its type. This module adds units, a list of all problems, and a
suggestion for each unknown key. It reads a single file.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from msgspec import Struct, ValidationError, convert

from rdzv.errors import SHOWN_CHARS, InvalidRequestError, did_you_mean
from rdzv.settings.setting_types import (
    Rule,
    Setting,
    Table,
    fields_of,
    is_table,
    quoted,
    sections_of,
    settings_of,
)
from rdzv.structs import DURATION_UNITS

FILE_BYTES = 1024 * 1024

LISTED_PROBLEMS = 50

MAX_NUMBER = 1e300
"""The exclusive upper bound of numbers, so that none overflows in another unit."""

S = TypeVar("S", bound=Struct)
T = TypeVar("T", bound=Table)


class Problem(Struct, frozen=True):
    """One error in a configuration."""

    source: str
    text: str
    """The key, its value, and a valid value or the remedy."""


class ConfigurationError(InvalidRequestError):
    """A configuration cannot be used. The message lists all its problems."""

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


# ------------------------------------------------------------------------------------ reading


class Loaded(Struct, Generic[T], frozen=True):
    """A valid configuration and the sources of its values."""

    settings: T
    sources: Mapping[str, str]
    """The source of each value by its key: a file, or "the command line". Defaults have no source.
    """


def load(
    table: type[T],
    path: Path | None = None,
    given: Mapping[str, object] | None = None,
    given_by: str = "the command line",
) -> Loaded[T]:
    """Load a configuration. Values in `given`, by key, override the file unless they are None.

    All other settings have their defaults. Without `path`, no file is read.
    """
    reading = _Reading(table, [], {})
    if path is not None:
        reading.take_table(read_document(path, str(path)), str(path))
    for key, raw in (given or {}).items():
        if raw is not None:
            reading.take(settings_of(table)[key], raw, given_by, in_file=False)
    # A missing value is reported for the file, which is where the user will add it.
    settings = reading.completed(given_by if path is None else str(path))
    if reading.problems:
        raise ConfigurationError(reading.problems)
    return Loaded(settings, MappingProxyType(reading.sources))


def read_document(path: Path, source: str) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES + 1)
    except OSError as error:
        why = f"it cannot be read: {error.strerror or error}"
        raise _unusable(source, f"{why}; write it, or name another") from error
    if len(content) > FILE_BYTES:
        raise _unusable(source, f"it is larger than {FILE_BYTES} bytes; name another file")
    try:
        return tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _unusable(source, f"it is not TOML: {error}; correct it") from error
    except (RecursionError, ValueError) as error:
        # The file is nested too deeply, or contains a number with thousands of digits.
        raise _unusable(source, f"it cannot be read: {error}; name another file") from error


def _unusable(source: str, text: str) -> ConfigurationError:
    return ConfigurationError([Problem(source, text)])


class _Reading(Generic[T]):
    """The values read so far for a configuration, or for one table in a list of tables."""

    def __init__(
        self, table: type[T], problems: list[Problem], sources: dict[str, str], where: str = ""
    ) -> None:
        self.problems = problems
        self.sources = sources
        self._table = table
        self._known = settings_of(table)
        self._where = where
        """The prefix of keys in messages, such as `job[2].`."""
        self._values: dict[str, Any] = {}
        self._bad: set[str] = set()

    def take_table(self, table: Mapping[str, object], source: str, prefix: str = "") -> None:
        """Read the settings of a table and of its nested tables; an unknown key is a problem."""
        sections = sections_of(self._table)
        for name, raw in table.items():
            key = f"{prefix}{name}"
            # A dot in a quoted key is part of the name, and no known name contains a dot.
            if "." not in name and key in self._known:
                self.take(self._known[key], raw, source, in_file=True)
            elif "." in name or key not in sections | CONSTANTS.keys():
                # The search for the nearest key is slow, and needed only for problems that are
                # listed.
                listed = len(self.problems) < LISTED_PROBLEMS
                why = _why_unknown(key, {*self._known, *sections}) if listed else "is unknown"
                self._note(source, key[:SHOWN_CHARS], why)
            elif isinstance(raw, Mapping):
                self.take_table(raw, source, f"{key}.")
            else:
                self._note(source, key, f"= {_shown(raw)} must be a table; begin with [{key}]")

    def take(self, setting: Setting, raw: object, source: str, *, in_file: bool) -> None:
        known = len(self.problems)
        self.sources[f"{self._where}{setting.key}"] = source
        try:
            if setting.each is not None:
                self._values[setting.key] = self._tables(setting, setting.each, raw, source)
            else:
                self._values[setting.key] = _converted(setting, raw, in_file=in_file)
        except _RefusedError as refused:
            self._note(source, setting.key, f"= {_shown(raw)} {refused}")
        if len(self.problems) > known:
            self._bad.add(setting.key)

    def _tables(
        self, setting: Setting, each: type[Table], raw: object, source: str
    ) -> tuple[Table, ...]:
        if not isinstance(raw, list) or not all(isinstance(item, Mapping) for item in raw):
            raise _RefusedError(f"must be {setting.valid}")
        found = []
        for number, item in enumerate(raw, start=1):
            where = f"{self._where}{setting.key}[{number}]."
            reading = _Reading(each, self.problems, self.sources, where)
            reading.take_table(item, source)
            found.append(reading.completed(source))
        return tuple(found)

    def completed(self, place: str) -> T:
        for key, setting in self._known.items():
            if setting.required and f"{self._where}{key}" not in self.sources:
                self._bad.add(key)
                self._note(place, key, f"is missing: {setting.reason}")
        values = {
            key: self._values.get(key, setting.default) for key, setting in self._known.items()
        }
        settings = _built(self._table, values)
        self.problems += _broken_rules(settings, self.sources, place, self._bad, self._where)
        return settings

    def _note(self, source: str, key: str, text: str) -> None:
        self.problems.append(Problem(source, f"`{self._where}{key}` {text}"))


def _built(table: type[S], values: Mapping[str, Any], prefix: str = "") -> S:
    found: dict[str, Any] = {}
    for name, field in fields_of(table).items():
        key, kind = f"{prefix}{name}", field.type
        found[field.name] = _built(kind, values, f"{key}.") if is_table(kind) else values[key]
    return table(**found)


def _broken_rules(
    settings: Table,
    sources: Mapping[str, str],
    place: str,
    bad: Iterable[str] = (),
    where: str = "",
) -> Iterator[Problem]:
    for rule in getattr(settings, "rules", ()):
        if not {*bad} & {*rule.keys} and (text := _why_broken(rule, settings)):
            setters = [sources[f"{where}{key}"] for key in rule.keys if f"{where}{key}" in sources]
            yield Problem(setters[-1] if setters else place, text)


def _why_broken(rule: Rule, settings: Table) -> str:
    try:
        return rule.broken(settings)
    except InvalidRequestError as error:
        return str(error)


def _why_unknown(key: str, known: Iterable[str]) -> str:
    if instead := instead_of(key):
        return f"was removed: {instead}"
    return f"is unknown; {did_you_mean(key, known, 'docs/configuration.md lists all')}"


def _shown(raw: object) -> str:
    if isinstance(raw, Mapping):
        return "(a table)"
    if isinstance(raw, bool):
        text = str(raw).lower()
    else:
        text = quoted(str(raw)) if isinstance(raw, str | Path) else str(raw)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."


# ------------------------------------------------------------------------------------ removed

CONSTANTS = {
    "forming": "claims_quiet flap_hold flap_window gather gather_quiet root_cause_window "
    "stop_margin store_backoff store_backoff_longest",
    "lease": "heartbeats reconnect_grace",
    "limits": "away commands_per_second http_connections http_connections_per_peer http_requests "
    "inbox job_timeout jobs_per_node local_world_size log_buffer log_readers log_window "
    "message nodes_per_job outbox scrapes watchers",
    "oidc": "keys_refresh",
    "quarantine": "window",
    "retention": "events look_every",
    "timings": "deaf_after first_request handshake hello_timeout leaderless_hold log_answer "
    "metrics_of_ended stop_grace store_retry",
}
"""The settings that became constants, as nobody had set them, by their tables."""

REMOVED = {
    "notify.style": "each event is posted as JSON, with its sentence in `text`; leave it out, and "
    "for a chat use Alertmanager or the receiver in docs/operations.md",
    **{
        f"{table}.{name}": "it is a constant, which nobody had set; leave it out"
        for table, names in CONSTANTS.items()
        for name in names.split()
    },
    "relay": "nodes connect to the servers themselves, each of which holds 10,000; leave it out, "
    "and give agents the addresses of the servers",
    "otlp": "leave it out; `rdzvctl trace JOB -o FILE` writes a job's rounds for ui.perfetto.dev",
    "upstream": "it was for `relay`, which was removed as well; leave it out",
}
"""What to do in place of each removed setting, by its key or that of its table."""


def instead_of(key: str) -> str:
    """Return what to do in place of a removed setting, or "" if `key` does not name one."""
    return REMOVED.get(key) or REMOVED.get(key.partition(".")[0], "")


def instead_of_option(option: str) -> str:
    """Return what to do in place of a removed option, or "" if `option` is not one."""
    key = option.removeprefix("--").replace("-", "_")
    return instead_of(key) or instead_of(key.replace("_", ".", 1))


# ------------------------------------------------------------------------------------ one value


class _RefusedError(ValueError):
    """A value cannot be used."""


def _converted(setting: Setting, raw: object, *, in_file: bool) -> Any:
    if setting.kind is Path:
        return _path(setting, raw, in_file=in_file)
    has_parse = hasattr(setting.kind, "parse")
    try:
        value = convert(_number(setting, raw), str if has_parse else setting.type)
    except (ValidationError, UnicodeEncodeError) as error:
        # msgspec's message would quote the value; arguments may contain bytes that are not UTF-8.
        remedy = did_you_mean(str(raw), setting.choices, "")
        raise _RefusedError(
            f"must be {setting.valid}" + (f"; {remedy}" if remedy else "")
        ) from error
    if has_parse:
        return _checked(setting.kind.parse, value)
    for text in _texts(value):
        if not text:
            raise _RefusedError("must not be empty; give it a value, or leave it out")
        if setting.check is not None:
            _checked(setting.check, text)
    return MappingProxyType(value) if isinstance(value, dict) else value


def _texts(value: object) -> Iterable[str]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, str | tuple):
        return (value,) if isinstance(value, str) else value
    return ()


def _path(setting: Setting, raw: object, *, in_file: bool) -> Path:
    # A service has no working folder to resolve a relative path against.
    if not isinstance(raw, str | Path) or (in_file and not Path(raw).is_absolute()):
        raise _RefusedError(f"must be {setting.valid}")
    if "\0" in str(raw) or not str(raw):
        raise _RefusedError("must not be empty or have a NUL character; correct it")
    return Path(raw)


def _checked(check: Callable[[str], object], text: str) -> object:
    try:
        return check(text)
    except InvalidRequestError as error:
        raise _RefusedError(f"cannot be used: {error}") from error


_MEASURED = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)", re.ASCII)


def _number(setting: Setting, raw: object) -> object:
    """Return a number in milliseconds or bytes if it has a unit, or any other value unchanged."""
    found = _MEASURED.fullmatch(raw.strip()) if isinstance(raw, str) else None
    unit = setting.units.get(found[2]) if found is not None else None
    if found is not None and unit is not None:
        raw = float(found[1]) * unit
    if setting.kind not in (int, float) or not isinstance(raw, int | float):
        return raw
    if not abs(raw) < MAX_NUMBER:
        raise _RefusedError("must be a smaller number")
    if setting.units is not DURATION_UNITS or isinstance(raw, bool):
        return int(raw) if unit is not None and float(raw).is_integer() else raw
    # A number without a unit is one of seconds.
    number = raw if unit is not None else raw * 1_000
    if not math.isclose(round(number), number, rel_tol=1e-9, abs_tol=1e-6):
        raise _RefusedError("must be a whole number of milliseconds")
    return round(number)


# ------------------------------------------------------------------------------------ comparing


class Reload(Struct, Generic[T], frozen=True):
    """The effects of a reload on a running program."""

    loaded: Loaded[T]
    """The configuration now in effect. It differs from the previous one only in settings that a
    reload applies."""
    applied: tuple[str, ...]
    """The keys of the changes that take effect immediately."""
    waiting: tuple[str, ...]
    """The keys of the changes that need a restart."""
    lines: tuple[str, ...]


def compare(running: Loaded[T], wanted: Loaded[T]) -> Reload[T]:
    """Compare a running configuration with a new one, and return the outcome of a reload."""
    table, sources = type(running.settings), dict(running.sources)
    values: dict[str, Any] = {}
    applied: list[str] = []
    waiting: list[str] = []
    lines = []
    for key, setting in settings_of(table).items():
        before, after = setting.of(running.settings), setting.of(wanted.settings)
        values[key] = after if setting.reload else before
        if before == after:
            continue
        (applied if setting.reload else waiting).append(key)
        if setting.reload:
            sources[key] = wanted.sources.get(key, "")
        lines.append(_change(setting, before, after))
    settings = _built(table, values)
    if broken := tuple(_broken_rules(settings, sources, "a reload")):
        until = f"while {', '.join(waiting)} is still unchanged: restart instead of reloading"
        raise ConfigurationError(Problem(each.source, f"{each.text}; {until}") for each in broken)
    loaded = Loaded(settings, MappingProxyType(sources))
    return Reload(loaded, tuple(applied), tuple(waiting), tuple(lines))


def _change(setting: Setting, before: object, after: object) -> str:
    if setting.each is not None:
        done = "has changed" if setting.reload else "is to change: that needs a restart"
        return f"{setting.key} {done}"
    old, new = setting.spelled(before), setting.spelled(after)
    if setting.reload:
        return f"{setting.key} is now {new} (it was {old})"
    return f"{setting.key} is to be {new} (it is {old}): that needs a restart"
