"""Parses and checks the request made by `rdzvctl submit`: a command line and a job file.

The server is not contacted until the whole request is valid.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import secrets
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path, PurePosixPath
from typing import Any

from rdzv import bounds
from rdzv.core.model import PRIORITY, JobSpec, Settings
from rdzv.core.words import listed
from rdzv.ctl.command_line import CONNECTION, MAX_TIMEOUT_S
from rdzv.errors import InvalidRequestError, did_you_mean
from rdzv.launch_options import declared_flags, flags, kinds
from rdzv.launch_options.declared_flags import switch, value
from rdzv.launch_options.flags import Given
from rdzv.settings.toml_files import read_document
from rdzv.structs import struct

REFUSED = {
    "standalone": "the nodes that run it have a server; leave it out",
    "rdzv_endpoint": "the server asked takes the job; name it with --server or RDZV_SERVER",
    "rdzv_backend": "the server asked forms the group; leave it out",
    "node_id": "every node has its own name; leave it out, and choose nodes with --labels",
    "node_rank": "the server assigns the ranks; leave it out",
    "master_addr": "the node of GROUP_RANK 0 is the master; leave it out",
    "master_port": "the node of GROUP_RANK 0 chooses a port; leave it out",
    "local_addr": "every node knows its own address; leave it out",
    "preemption_file": "every node has its own, as [preemption] in agent.toml; leave it out",
}
"""Flags that a submitted job cannot have, with the reason and the remedy, keyed by the flag's dest.
"""

_CONNECTION = {
    option.opts[0].lstrip("-").replace("-", "_"): option.name or "" for option in CONNECTION
}
"""The connection options: the name in `connection`, keyed by the flag's dest."""

_REFUSED_IN_FILES = REFUSED | dict.fromkeys(
    _CONNECTION.keys() - {"server", "timeout"},
    "it is for this command, not for the job: every node connects with its own; give it "
    "on the command line or in the environment",
)


@struct(frozen=True)
class CallerContext:
    """The caller's directory and environment, for values that the command line omits."""

    directory: str
    environ: Mapping[str, str]

    @classmethod
    def here(cls) -> CallerContext:
        return cls(_working_directory(os.environ.get("PWD", "")), os.environ)


@struct(frozen=True)
class Request:
    """A job to submit, and the caller's options for this command."""

    rdzv_id: str
    run: str
    """The run's uid, chosen here so that a repeated request submits the job only once."""
    settings: Settings
    spec: JobSpec
    follow: bool
    root_cause_exit: bool
    dry_run: bool
    output: str
    connection: Mapping[str, Any]
    notes: tuple[str, ...]


@struct(frozen=True)
class JobFile:
    """A job file's contents."""

    given: tuple[Given, ...] = ()
    rest: tuple[str, ...] = ()
    """The script and its arguments."""
    env: Mapping[str, str] = field(default_factory=dict)
    env_from: tuple[str, ...] = ()
    """Variables that take the caller's values."""


def wants_help(words: Sequence[str]) -> bool:
    """Return whether --help is among the flags; words after the flags belong to the script."""
    given, _ = make_parser().split(words)
    return any(action.dest == "help" for one in given for action in one.actions)


def help_text() -> str:
    return make_parser().format_help().rstrip()


def option_names() -> list[str]:
    return sorted(
        name
        for name, action in make_parser().options.items()
        if name.startswith("--") and "_" not in name and action.dest not in REFUSED
    )


def read(words: Sequence[str], caller: CallerContext) -> Request:
    """Parse the words after `rdzvctl submit`."""
    parser = make_parser()
    given, rest = parser.split(words)
    for one in given:
        _check_given(one)
    file = JobFile()
    paths = [one.value for one in given if one.actions[-1].dest == "file"]
    if paths and paths[-1]:
        file = _File(Path(caller.directory, paths[-1])).read()
        on_line = {action.dest for one in given for action in one.actions}
        given = [*(one for one in file.given if one.actions[0].dest not in on_line), *given]
    rest = rest or list(file.rest)
    if rest in ([], ["--"]):
        raise InvalidRequestError(
            "what is to run is missing; give a script after the flags, or `script` in a --file"
        )
    args = parser.parse_split(given, rest)
    settings = flags.read_settings(args)
    if args.follow and args.output != "text":
        raise InvalidRequestError(
            f"--follow shows the workers' output, and -o {args.output} a document; leave one out"
        )
    chdir = _chdir(args.chdir, caller.directory)
    counted = isinstance(args.nproc_per_node, str)
    spec = JobSpec(
        args=_job_args(given, rest, chdir),
        env=_environment(args.env or (), file, caller.environ),
        chdir=chdir,
        labels=args.labels,
        priority=args.priority,
        gpus_per_node=args.gpus_per_node,
        local_world_size=0 if counted else args.nproc_per_node,
        needs_gpu=args.nproc_per_node == "gpu",
        account=args.user,
    )
    return Request(
        rdzv_id=args.rdzv_id or _name_for(args.training_script, args),
        run=uuid.uuid4().hex,
        settings=settings,
        spec=spec,
        follow=args.follow,
        root_cause_exit=args.root_cause_exit,
        dry_run=args.dry_run,
        output=args.output,
        connection={
            name: given
            for dest, name in _CONNECTION.items()
            if (given := getattr(args, dest)) is not None
        },
        notes=_notes(args.rdzv_conf, caller.environ),
    )


# ------------------------------------------------------------------------------------ its flags


def _labels(flag: str, text: str) -> tuple[tuple[str, str], ...]:
    pairs = [part.strip() for part in text.split(",") if part.strip()]
    for pair in pairs:
        if "=" not in pair:
            raise InvalidRequestError(
                f"{flag}: {pair!r} is not NAME=VALUE; give, for example, gpu=h100,zone=a"
            )
    split = (pair.partition("=") for pair in pairs)
    return bounds.labels(flag, ((name.strip(), value.strip()) for name, _, value in split))


# fmt: off
_OF_JOB = (
    value("--env", "NAME[=VALUE]", kinds.text, """
        a variable of the job's environment, by default with the caller's value; may be repeated.
        Values are never shown, but stored with the job""", action="append", own=True),
    value("--chdir", "DIR", kinds.text, """
        working directory on every node (default: the caller's own, for nodes that share a file
        system)""", own=True),
    value("--labels", "NAME=VALUE,...", _labels, """
        only nodes that have all of these labels""", default="", own=True),
    value("--gpus-per-node", "N", kinds.whole(0, bounds.GPUS), """
        GPUs of each node (default: one for each worker on nodes that have GPUs; all with
        --nproc-per-node=gpu or auto)""", own=True),
    value("--priority", "N", kinds.whole(-PRIORITY, PRIORITY), """
        jobs with a higher one are placed first (default 0); running jobs are not affected""",
        default=0, own=True),
    value("--user", "NAME", bounds.label, """
        the account that it runs as on its nodes, if they allow it (default: the first that each
        node maps to you)""", default="", own=True),
)

_CONNECTION_KINDS = {"SECONDS": kinds.number(0.001, MAX_TIMEOUT_S, "seconds"), "FILE": kinds.path}

_OF_COMMAND = (
    value("--file", "FILE", kinds.text, "a TOML file with some or all of these options", own=True),
    switch("--follow", """
        show the workers' output until the job has ended, and exit with its code; Ctrl-C leaves it
        running""", own=True),
    switch("--dry-run", "check and show the job, but send nothing", own=True),
    value("--output", "FORMAT", kinds.text, "text for people (default); json or yaml for programs",
        short="-o", default="text", choices=("text", "json", "yaml"), own=True),
    *(value(one.opts[0], one.metavar, _CONNECTION_KINDS.get(one.metavar or "", kinds.text),
        one.help or "", own=True) for one in CONNECTION),
    switch("--help", "show this", short="-h", own=True),
)
# fmt: on

_RDZVRUNS = tuple(flag for flag in declared_flags.FLAGS if flag.dest not in _CONNECTION)

_OWN = frozenset(flag.dest for flag in (*_OF_JOB, *_OF_COMMAND))
"""The dests of this command's own flags, which are not passed on to rdzvrun."""


@functools.cache
def make_parser() -> flags.Parser:
    parser = flags.Parser(
        prog="rdzvctl submit",
        usage="rdzvctl submit [rdzvrun's flags] [flags below] [--] script ...",
        description="Submit a job to the server, which chooses its nodes among those whose "
        "rdzv-agent takes submitted jobs, as soon as enough are free. The "
        "script, its folder and its interpreter must exist on every node: nothing is "
        "copied.",
        epilog="PET_* of this environment do not count. Exit codes: 0 "
        "submitted, 1 refused, 2 usage, 75 the server cannot be reached; with --follow 0 the job "
        "has succeeded, 1 failed, 3 stopped, 93 failed without progress, 130 Ctrl-C.",
        add_help=False,
    )
    groups = {
        "what it needs": _OF_JOB,
        "this command": _OF_COMMAND,
        "rdzvrun's flags": _RDZVRUNS,
    }
    for title, declared in groups.items():
        group = parser.add_argument_group(title)
        for flag in declared:
            # What a submitted job cannot have is recognized all the same, but not shown.
            parser.add(group, flag, hidden=flag.dest in REFUSED)
    parser.add_script()
    return parser


def _check_given(one: Given) -> None:
    for action in one.actions:
        if action.dest in REFUSED:
            flag = one.words[0].partition("=")[0].replace("_", "-")
            raise InvalidRequestError(f"{flag} is not for submitted jobs: {REFUSED[action.dest]}")
        if action.dest in _OWN and len(one.actions) > 1:
            raise InvalidRequestError(
                f"{one.words[0]} mixes flags of rdzvrun and of rdzvctl; write them apart"
            )


# ------------------------------------------------------------------------------------ its parts


def _job_args(given: Sequence[Given], rest: Sequence[str], chdir: str) -> tuple[str, ...]:
    """Return the arguments for rdzvrun, without the job's name and this command's own flags."""
    words: list[str] = []
    for one in given:
        dest = one.actions[-1].dest
        if dest == "log_dir":
            # A node's daemon has its own working directory.
            words.append(f"--log-dir={Path(chdir, one.value or '')}")
        elif dest not in _OWN and dest != "rdzv_id":
            words += one.words
    args = (*words, *rest)
    for arg in args:
        _check_utf8("argument", arg)
    return bounds.arguments("arguments", args)


def _environment(
    given: Iterable[str], file: JobFile, environ: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """Return the job's variables; the command line overrides the file."""
    env = dict(file.env)
    env.update((name, _from_caller(name, "env_from: ", environ)) for name in file.env_from)
    on_line: set[str] = set()
    for text in given:
        name, equals, value = text.partition("=")
        if not name:
            # Values are never shown, so the error does not show this one.
            raise InvalidRequestError(
                "--env: there is no name before the `=`; give NAME=VALUE, or only NAME "
                "for the caller's value"
            )
        if name in on_line:
            raise InvalidRequestError(f"--env {name} is given twice; leave one of them out")
        on_line.add(name)
        if not _is_utf8(value):
            raise InvalidRequestError(f"--env {name}: its value is not UTF-8; put it into a file")
        env[name] = value if equals else _from_caller(name, "--env ", environ)
    return kinds.environment("--env", env, "say how many with --gpus-per-node")


def _from_caller(name: str, given: str, environ: Mapping[str, str]) -> str:
    if name not in environ:
        raise InvalidRequestError(
            f"{given}{name}: it is not set here; set it, or give {name}=VALUE"
        )
    return environ[name]


def _check_utf8(what: str, text: str) -> None:
    if not _is_utf8(text):
        raise InvalidRequestError(f"{what} {text!r} cannot be used: it is not UTF-8")


def _is_utf8(text: str) -> bool:
    """Return whether text can be sent; a word of the command line may have any bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _name_for(script: str, args: argparse.Namespace) -> str:
    """Name a job after its script, with four random hex digits to distinguish it from others."""
    stem = script.rpartition(".")[2] if args.module else PurePosixPath(script).stem
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip(".-")[:64] or "job"
    return f"{stem}-{secrets.token_hex(2)}"


def _working_directory(given: str) -> str:
    """Return the caller's directory as named by the shell, or an empty string if it is gone.

    That name may contain links, and may be valid on nodes where the resolved path is not.
    """
    try:
        here = str(Path.cwd())
    except OSError:
        return ""
    try:
        same = given.startswith("/") and Path(given).samefile(here)
    except OSError:
        same = False
    return given if same else here


def _chdir(given: str | None, directory: str) -> str:
    if given == "":
        raise InvalidRequestError("--chdir is empty; name a folder, or leave it out")
    chdir = str(Path(directory, given or ""))
    if not chdir.startswith("/"):
        raise InvalidRequestError(
            f"--chdir={given or ''}: the working directory is gone; give an absolute path"
        )
    _check_utf8("--chdir", chdir)
    return bounds.no_nul("--chdir", chdir)


def _notes(conf: Iterable[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    notes = declared_flags.unknown_keys(conf)
    if defaults := sorted(name for name in environ if name.startswith("PET_")):
        notes.append(f"{listed(defaults)} in this environment have no effect here; give flags")
    return tuple(notes)


# ------------------------------------------------------------------------------------ its file


class _File:
    """A job as TOML: flags by their long names, with underscores or dashes, and what they apply to.

    The other keys are `script`, `args`, `env` and `env_from`. `env` is a table; `labels` and
    `rdzv_conf` may be tables. Unknown keys are refused.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        options = make_parser().options
        self._flags = {flag.key: options[flag.names[-1]] for flag in (*_RDZVRUNS, *_OF_JOB)}

    def read(self) -> JobFile:
        """Return the file's contents; a relative `chdir` is relative to its folder."""
        document = read_document(self._path, f"--file={self._path}")
        found: dict[str, tuple[str, Any]] = {}
        for key, given in document.items():
            dest = key.replace("-", "_")
            if dest in found:
                raise self._bad(key, f"is given twice, also as `{found[dest][0]}`", "keep one")
            found[dest] = (key, given)
        script = self._script(*found.pop("script", ("script", None)))
        args = self._strings(*found.pop("args", ("args", [])))
        if args and not script:
            raise self._bad("args", "need a script", "add `script`, or leave them out")
        return JobFile(
            env=self._env(*found.pop("env", ("env", {}))),
            env_from=self._strings(*found.pop("env_from", ("env_from", []))),
            rest=(*script, *args),
            given=tuple(
                one for dest, (key, raw) in found.items() for one in self._given(dest, key, raw)
            ),
        )

    def _given(self, dest: str, key: str, value: Any) -> list[Given]:
        if dest in _REFUSED_IN_FILES:
            raise self._bad(key, "is not for submitted jobs", _REFUSED_IN_FILES[dest])
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
        known = sorted(
            {*self._flags.keys() - _REFUSED_IN_FILES.keys(), "script", "args", "env", "env_from"}
        )
        remedy = did_you_mean(key.replace("-", "_"), known, f"known: {', '.join(known)}")
        return self._bad(key, "is unknown", remedy)

    def _bad(self, key: str, why: str, remedy: str) -> InvalidRequestError:
        return InvalidRequestError(f"--file={self._path}: `{key}` {why}; {remedy}")
