"""The file that `rdzvctl submit --file` reads: a job as TOML.

A key is a flag's long name, with underscores or dashes (`nnodes`, `nproc_per_node`, `max_restarts`,
`priority`, ...), or `script`, `args`, `env` or `env_from`. `env` is a table; `labels` and
`rdzv_conf` may be tables. Unknown keys are refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from rdzv.errors import InvalidRequestError, did_you_mean
from rdzv.launch_options.flags import Given
from rdzv.settings.toml_files import read_document
from rdzv.structs import struct


@struct(frozen=True)
class JobFile:
    """A job file's contents."""

    given: tuple[Given, ...] = ()
    rest: tuple[str, ...] = ()
    """The script and its arguments."""
    env: Mapping[str, str] = field(default_factory=dict)
    env_from: tuple[str, ...] = ()
    """Variables that take the caller's values."""


NOTHING = JobFile()


def read(path: Path, flags: Mapping[str, argparse.Action], refused: Mapping[str, str]) -> JobFile:
    """Parse a job file; `flags` are all flags by key, `refused` those of no job.

    A relative `chdir` is relative to the file's folder.

    Raises:
        InvalidRequestError: the file cannot be read, is not TOML, or a key or value is not valid.
    """
    keys = _Keys(path, flags, refused)
    return keys.read(read_document(path, f"--file={path}"))


class _Keys:
    """Converts a file's keys to command-line arguments."""

    def __init__(
        self, path: Path, flags: Mapping[str, argparse.Action], refused: Mapping[str, str]
    ) -> None:
        self._path = path
        self._refused = refused
        self._flags = flags

    def read(self, document: Mapping[str, Any]) -> JobFile:
        found: dict[str, tuple[str, Any]] = {}
        for key, value in document.items():
            dest = key.replace("-", "_")
            if dest in found:
                raise self._bad(key, f"is given twice, also as `{found[dest][0]}`", "keep one")
            found[dest] = (key, value)
        script = self._script(*found.pop("script", ("script", None)))
        args = self._strings(*found.pop("args", ("args", [])))
        if args and not script:
            raise self._bad("args", "need a script", "add `script`, or leave them out")
        return JobFile(
            env=self._env(*found.pop("env", ("env", {}))),
            env_from=self._strings(*found.pop("env_from", ("env_from", []))),
            rest=(*script, *args),
            given=tuple(
                one for dest, (key, value) in found.items() for one in self._given(dest, key, value)
            ),
        )

    def _given(self, dest: str, key: str, value: Any) -> list[Given]:
        if dest in self._refused:
            raise self._bad(key, "is not for submitted jobs", self._refused[dest])
        action = self._flags.get(dest)
        if action is None:
            raise self._unknown(key)
        name = next(name for name in action.option_strings if name.startswith("--"))
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise self._bad(key, f"{value!r} is neither true nor false", "give one of them")
            return [Given((action,), (name,))] if value else []
        return [Given((action,), (f"{name}={self._text(dest, key, value)}",))]

    def _text(self, dest: str, key: str, value: Any) -> str:
        if dest in ("labels", "rdzv_conf") and isinstance(value, dict):
            return ",".join(f"{name}={self._item(key, name, one)}" for name, one in value.items())
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self._bad(key, f"{value!r} is neither text nor a number", "write it as one")
        if dest == "chdir":
            return str(Path(self._path.parent, str(value)))
        return str(value)

    def _item(self, key: str, name: str, value: Any) -> str:
        """Format one value of a table as it appears in a comma-separated list."""
        if isinstance(value, bool):
            return str(value).lower()
        if not isinstance(value, str | int | float) or "," in f"{name}{value}":
            raise self._bad(
                f"{key}.{name}", f"{value!r} cannot be used", "give text without commas"
            )
        return str(value)

    def _script(self, key: str, value: Any) -> tuple[str, ...]:
        if value is None:
            return ()
        if not isinstance(value, str) or not value:
            raise self._bad(key, f"{value!r} is not a script", "give its path, as text")
        return ("--", value) if value.startswith("-") else (value,)

    def _strings(self, key: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._bad(key, "is not a list of strings", f'write {key} = ["...", "..."]')
        return tuple(value)

    def _env(self, key: str, value: Any) -> dict[str, str]:
        """Return the checked variables. Errors never show a variable's value."""
        if not isinstance(value, dict):
            raise self._bad(key, "is not a table", 'write NAME = "VALUE" lines below [env]')
        for name, one in value.items():
            if not isinstance(one, str):
                raise self._bad(f"{key}.{name}", "is not a string", "put its value in quotes")
        return value

    def _unknown(self, key: str) -> InvalidRequestError:
        known = sorted({*self._flags.keys() - self._refused.keys(), *_OTHERS})
        remedy = did_you_mean(key.replace("-", "_"), known, f"known: {', '.join(known)}")
        return self._bad(key, "is unknown", remedy)

    def _bad(self, key: str, why: str, remedy: str) -> InvalidRequestError:
        return InvalidRequestError(f"--file={self._path}: `{key}` {why}; {remedy}")


_OTHERS = ("script", "args", "env", "env_from")
