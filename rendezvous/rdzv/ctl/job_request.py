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
from pathlib import Path, PurePosixPath
from typing import Any

from rdzv import bounds
from rdzv.core.model import PRIORITY, JobSpec, Settings
from rdzv.core.words import listed
from rdzv.ctl import job_file
from rdzv.ctl.command_line import CONNECTION, MAX_TIMEOUT_S
from rdzv.errors import InvalidRequestError
from rdzv.launch_options import declared_flags, flags, job_options
from rdzv.launch_options.declared_flags import Option, switch, value
from rdzv.launch_options.flags import Given
from rdzv.launch_options.job_options import WORKERS_OWN
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
    option.flag.lstrip("-").replace("-", "_"): name for name, option in CONNECTION.items()
}
"""The connection options: the name in `connection`, keyed by the flag's dest."""

_REFUSED_IN_FILES = REFUSED | dict.fromkeys(
    _CONNECTION.keys() - {"server", "timeout"},
    "it is for this command, not for the job: every node connects with its own; give it "
    "on the command line or in the environment",
)


@struct(frozen=True)
class Caller:
    """The caller's directory and environment, for values that the command line omits."""

    directory: str
    environ: Mapping[str, str]

    @classmethod
    def here(cls) -> Caller:
        """Return this process's caller, with the directory as named by the shell."""
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
    """The connection options that are given, as `connection_options` names them."""
    notes: tuple[str, ...]
    """Notes on options and variables that have no effect."""


def wants_help(words: Sequence[str]) -> bool:
    """Return whether --help is among the flags; words after the flags belong to the script."""
    given, _ = flags.split(words, flags.options(make_parser()), _WHOLE)
    return any(action.dest == "help" for one in given for action in one.actions)


def help_text() -> str:
    """Return the command's help text."""
    return make_parser().format_help().rstrip()


def option_names() -> list[str]:
    """List all accepted flags, for completion."""
    return sorted(
        name
        for name, action in flags.options(make_parser()).items()
        if name.startswith("--") and "_" not in name and action.dest not in REFUSED
    )


def read(words: Sequence[str], caller: Caller) -> Request:
    """Parse the words after `rdzvctl submit`.

    Raises:
        InvalidRequestError: a value is not valid; the message names it, the reason, and a remedy.
    """
    parser = make_parser()
    known = flags.options(parser)
    given, rest = flags.split(words, known, _WHOLE)
    for one in given:
        _check_given(one)
    file = job_file.NOTHING
    if path := _last_value(given, "file"):
        file = job_file.read(Path(caller.directory, path), known, _REFUSED_IN_FILES)
        on_line = {action.dest for one in given for action in one.actions}
        given = [*(one for one in file.given if one.actions[0].dest not in on_line), *given]
    rest = rest or list(file.rest)
    if rest in ([], ["--"]):
        raise InvalidRequestError(
            "what is to run is missing; give a script after the flags, or `script` in a --file"
        )
    args = parser.parse_split(given, rest)
    return _request(args, given, rest, file, caller)


def _request(
    args: argparse.Namespace,
    given: Sequence[Given],
    rest: Sequence[str],
    file: job_file.JobFile,
    caller: Caller,
) -> Request:
    job_options.check_words(args)
    conf = job_options.parse_conf(args.rdzv_conf)
    settings = job_options.read_settings(args, conf)
    local_world_size = job_options.parse_nproc(args.nproc_per_node)
    _check_for_nodes(args, conf, local_world_size)
    if args.follow and args.output != "text":
        raise InvalidRequestError(
            f"--follow shows the workers' output, and -o {args.output} a document; leave one out"
        )
    if args.timeout is not None and not 0 < args.timeout <= MAX_TIMEOUT_S:
        raise InvalidRequestError(
            f"--timeout={args.timeout:g}: give a number of seconds above 0, at most {MAX_TIMEOUT_S}"
        )
    chdir = _chdir(args.chdir, caller.directory)
    spec = JobSpec(
        args=_job_args(given, rest, chdir),
        env=_environment(args.env or (), file, caller.environ),
        chdir=chdir,
        labels=_labels(args.labels),
        priority=bounds.within("--priority", args.priority, -PRIORITY, PRIORITY),
        gpus_per_node=None
        if args.gpus_per_node is None
        else bounds.within("--gpus-per-node", args.gpus_per_node, 0, bounds.GPUS),
        local_world_size=local_world_size,
        needs_gpu=args.nproc_per_node == "gpu",
        account=bounds.label("--user", args.user),
    )
    return Request(
        rdzv_id=_name_for(args.training_script, args)
        if args.rdzv_id is None
        else bounds.name("--rdzv-id", args.rdzv_id),
        run=uuid.uuid4().hex,
        settings=settings,
        spec=spec,
        follow=args.follow,
        root_cause_exit=job_options.wants_root_cause(args.exit_code),
        dry_run=args.dry_run,
        output=args.output,
        connection={
            name: given
            for dest, name in _CONNECTION.items()
            if (given := getattr(args, dest)) is not None
        },
        notes=_notes(conf, caller.environ),
    )


# ------------------------------------------------------------------------------------ its flags


@functools.cache
def make_parser() -> flags.Parser:
    """Return the parser of the flags of `rdzvctl submit`."""
    parser = flags.Parser(
        prog="rdzvctl submit",
        usage="rdzvctl submit [rdzvrun's flags] [flags below] [--] script ...",
        formatter_class=flags.HelpFormatter,
        description="Submit a job to the server, which chooses its nodes among those whose "
        "rdzv-agent takes submitted jobs, as soon as enough are free. The "
        "script, its folder and its interpreter must exist on every node: nothing is "
        "copied.",
        epilog="PET_* of this environment do not count. Exit codes: 0 "
        "submitted, 1 refused, 2 usage, 75 the server cannot be reached; with --follow 0 the job "
        "has succeeded, 1 failed, 3 stopped, 93 failed without progress, 130 Ctrl-C.",
        allow_abbrev=False,
        add_help=False,
    )
    groups = (
        ("what it needs", _of_job()),
        ("this command", _of_command()),
        ("rdzvrun's flags", _of_rdzvrun()),
    )
    for title, options in groups:
        group = parser.add_argument_group(title)
        for option in options:
            flags.add(group, option)
    flags.add_script(parser)
    return parser


def _of_rdzvrun() -> list[Option]:
    """List rdzvrun's flags; flags that a submitted job cannot have are hidden but recognized."""
    hidden = {"help": argparse.SUPPRESS}
    return [
        (option[0], {**option[1], **(hidden if _dest(option) in REFUSED else {})})
        for option in declared_flags.FLAGS
        if _dest(option) not in _CONNECTION
    ]


def _of_job() -> list[Option]:
    return [
        value(
            "--env",
            "NAME[=VALUE]",
            "a variable of the job's environment, by default with the caller's value; "
            "may be repeated. Values are never shown, but stored with the job",
            action="append",
        ),
        value(
            "--chdir",
            "DIR",
            "working directory on every node (default: the caller's own, for nodes that "
            "share a file system)",
        ),
        value("--labels", "NAME=VALUE,...", "only nodes that have all of these labels", default=""),
        value(
            "--gpus-per-node",
            "N",
            "GPUs of each node (default: one for each worker on nodes that have GPUs; all "
            "with --nproc-per-node=gpu or auto)",
            type=int,
        ),
        value(
            "--priority",
            "N",
            "jobs with a higher one are placed first (default 0); running jobs are not affected",
            type=int,
            default=0,
        ),
        value(
            "--user",
            "NAME",
            "the account that it runs as on its nodes, if they allow it (default: the "
            "first that each node maps to you)",
            default="",
        ),
    ]


def _of_command() -> list[Option]:
    return [
        value("--file", "FILE", "a TOML file with some or all of these options"),
        switch(
            "--follow",
            "show the workers' output until the job has ended, and exit with its code; "
            "Ctrl-C leaves it running",
        ),
        switch("--dry-run", "check and show the job, but send nothing"),
        value(
            "--output",
            "FORMAT",
            "text for people (default); json or yaml for programs",
            short="-o",
            default="text",
            choices=("text", "json", "yaml"),
        ),
        *(
            value(one.flag, one.unit, one.help, type=_TYPES.get(one.unit, str))
            for one in CONNECTION.values()
        ),
        switch("--help", "show this", short="-h"),
    ]


_TYPES = {"SECONDS": float, "FILE": Path}


def _dest(option: Option) -> str:
    return option[0][-1].lstrip("-").replace("-", "_")


_OWN = frozenset(map(_dest, (*_of_job(), *_of_command())))
"""The dests of this command's own flags, which are not passed on to rdzvrun."""

_WHOLE = declared_flags.OWN | {names[0] for names, _ in (*_of_job(), *_of_command())}
"""Flags that cannot be abbreviated, so that abbreviations mean the same as in torchrun."""


def _check_given(one: Given) -> None:
    for action in one.actions:
        if action.dest in REFUSED:
            flag = one.words[0].partition("=")[0].replace("_", "-")
            raise InvalidRequestError(f"{flag} is not for submitted jobs: {REFUSED[action.dest]}")
        if action.dest in _OWN and len(one.actions) > 1:
            raise InvalidRequestError(
                f"{one.words[0]} mixes flags of rdzvrun and of rdzvctl; write them apart"
            )


def _last_value(given: Sequence[Given], dest: str) -> str | None:
    """Return a flag's last value, or None. Argparse refuses a flag that lacks its value."""
    for one in reversed(given):
        if one.actions[-1].dest == dest:
            _, equals, value = one.words[0].partition("=")
            return value if equals else (one.words[1] if len(one.words) > 1 else None)
    return None


# ------------------------------------------------------------------------------------ its parts


def _check_for_nodes(
    args: argparse.Namespace, conf: Mapping[str, str], local_world_size: int
) -> None:
    """Refuse values that every node would refuse, so that the user finds out early."""
    job_options.conf_bool(conf, "reuse", default=True)
    job_options.conf_ms(conf, "failure_stop_timeout", 5)
    job_options.conf_ms(conf, "server_timeout", 600)
    job_options.parse_signals(args.signals_to_handle)
    job_options.parse_notice_signal(args.notice_signal)
    job_options.parse_streams("--redirects", args.redirects, local_world_size)
    job_options.parse_streams("--tee", args.tee, local_world_size)
    job_options.fence_after_ms(args.fence_after)
    job_options.hang_timeout(args.hang_timeout)
    job_options.keep_timeouts_ms(args.keep_timeout, args.park_timeout)
    if args.shutdown_timeout is not None:
        given = f"--shutdown-timeout={args.shutdown_timeout:g}"
        job_options.shutdown_timeout_ms(given, str(args.shutdown_timeout))


def _job_args(given: Sequence[Given], rest: Sequence[str], chdir: str) -> tuple[str, ...]:
    """Return the arguments for rdzvrun, without the job's name and this command's own flags."""
    words: list[str] = []
    for one in given:
        dest = one.actions[-1].dest
        if dest == "log_dir":
            # A node's daemon has its own working directory.
            words.append(f"--log-dir={Path(chdir, _last_value([one], dest) or '')}")
        elif dest not in _OWN and dest != "rdzv_id":
            words += one.words
    args = (*words, *rest)
    for arg in args:
        _check_utf8("argument", arg)
    return bounds.arguments("arguments", args)


def _environment(
    given: Iterable[str], file: job_file.JobFile, environ: Mapping[str, str]
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
    checked = bounds.environment("--env", tuple(env.items()))
    for name in env:
        if name in WORKERS_OWN:
            raise InvalidRequestError(
                f"variable {name}: it is different in every worker and round; leave it out"
            )
        if name == "CUDA_VISIBLE_DEVICES":
            raise InvalidRequestError(
                f"variable {name}: each node assigns GPUs to the job; say how many with "
                "--gpus-per-node"
            )
    return checked


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


def _labels(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [part.strip() for part in text.split(",") if part.strip()]
    for pair in pairs:
        if "=" not in pair:
            raise InvalidRequestError(
                f"--labels: {pair!r} is not NAME=VALUE; give, for example, gpu=h100,zone=a"
            )
    split = (pair.partition("=") for pair in pairs)
    return bounds.labels("--labels", ((name.strip(), value.strip()) for name, _, value in split))


def _name_for(script: str, args: argparse.Namespace) -> str:
    """Name a job after its script, with four random hex digits to distinguish it from others."""
    stem = script.rpartition(".")[2] if args.module else PurePosixPath(script).stem
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip(".-")[:64] or "job"
    return f"{stem}-{secrets.token_hex(2)}"


def _working_directory(said: str) -> str:
    """Return the caller's directory as named by the shell, or an empty string if it is gone.

    That name may contain links, and may be valid on nodes where the resolved path is not.
    """
    try:
        here = str(Path.cwd())
    except OSError:
        return ""
    try:
        same = said.startswith("/") and Path(said).samefile(here)
    except OSError:
        same = False
    return said if same else here


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


def _notes(conf: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return notes on options and variables that have no effect."""
    notes = job_options.unknown_key_warnings(conf)
    if defaults := sorted(name for name in environ if name.startswith("PET_")):
        notes.append(f"{listed(defaults)} in this environment have no effect here; give flags")
    return tuple(notes)
