"""Parses rdzvrun's command line into a launch, or refuses it with a suggested remedy."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rdzv.agent.cli import backends
from rdzv.agent.cli.backends import Meeting
from rdzv.agent.core.model import JobTerms
from rdzv.agent.launch import launch
from rdzv.agent.launch.numa import NumaBinding
from rdzv.agent.output.console_tee import parse_filters, parse_ranks
from rdzv.core.model import Settings
from rdzv.errors import InvalidRequestError
from rdzv.launch_options import declared_flags, flags, kinds
from rdzv.transport.endpoints import refuse_link_local
from rdzv.transport.job_secret import without_secrets

log = logging.getLogger("rdzv.agent")

_SNAPSHOT_DIR_VARIABLE = "RDZV_SNAPSHOT_DIR"
"""The environment variable that passes --snapshot-dir to workers."""

_LOCAL_RANK_ARGUMENT = "--local-rank=${local_rank}"
"""The argument that torch.distributed.launch inserts before the script's own arguments."""


def parse_launch(
    argv: Sequence[str] | None = None,
    *,
    legacy: bool = False,
    environ: Mapping[str, str] | None = None,
    chdir: Path | None = None,
    counted: int | None = None,
) -> tuple[launch.Launch, Meeting]:
    """Parse a command line into a launch and the place to meet the other nodes.

    `legacy` accepts the command line of torch.distributed.launch. `environ` and `chdir` are the
    job's, and default to this process's own. `counted` is the number of workers if --nproc-per-node
    is a word such as `gpu`; by default, the devices are counted, which may take a while.
    """
    environ = dict(os.environ if environ is None else environ)
    args = flags.parse(argv, environ, legacy=legacy)
    _warn_of_keys(args.rdzv_conf)
    meeting = backends.choose(args)
    if meeting.elect_by is None:
        refuse_link_local(meeting.endpoints, args.local_addr)
    event_log = launch.EventSink(args.event_log_handler, _backend(args.rdzv_backend, meeting))
    python = _python(environ, chdir)
    size = args.nproc_per_node
    if isinstance(size, str):
        size = counted or _count(size, python, environ)
    job = _job(args, meeting, size, environ)
    for name in ("snapshot", "snapshot_dir", "preemption_file", "log_dir"):
        path = getattr(args, name)
        setattr(args, name, path and _absolute(f"--{name.replace('_', '-')}", path, chdir))
    args.no_python = args.no_python and not args.run_path
    cold_restarts = args.warm is not None or args.no_python
    args.warm = args.warm or ()
    args.numa_binding = args.numa_binding and NumaBinding(args.numa_binding)
    return launch.Launch(
        job=job,
        script=args.training_script,
        args=_script_args(args, legacy=legacy),
        python=python,
        environ=_environ(environ, args.snapshot_dir),
        chdir=chdir,
        snapshot_files=args.snapshot_dir
        and launch.SnapshotFiles(
            args.snapshot_dir, args.snapshot_dir_every, args.snapshot_dir_keep
        ),
        master=meeting.master,
        refuse_reuse=not args.rdzv_conf["reuse"],
        warm_restarts=not cold_restarts and _may_restart(job.settings),
        collective_trace=not args.no_collective_trace,
        signals=args.signals_to_handle,
        output=_output(args, size, environ),
        event_log=event_log,
        **flags.same_named(args, launch.Launch),
    ), meeting


def _job(
    args: argparse.Namespace, meeting: Meeting, size: int, environ: Mapping[str, str]
) -> JobTerms:
    args.rdzv_id = meeting.rdzv_id
    args.node_id = meeting.node_id or args.node_id or f"{socket.gethostname()}-{os.getpid()}"
    job = JobTerms(
        settings=flags.read_settings(args),
        local_world_size=size,
        shutdown_timeout_ms=_shutdown_timeout_ms(args.shutdown_timeout, environ),
        failure_stop_timeout_ms=args.rdzv_conf["failure_stop_timeout"],
        server_timeout_ms=args.rdzv_conf["server_timeout"],
        **flags.same_named(args, JobTerms),
    )
    if job.fence_after_ms and not meeting.endpoints:
        raise InvalidRequestError(
            f"--fence-after={job.fence_after_ms / 1000:g} has no effect here: this node has its "
            "own server and cannot be cut off from it; leave it out, or give --rdzv-endpoint"
        )
    return job


def _script_args(args: argparse.Namespace, *, legacy: bool) -> tuple[str, ...]:
    first = (_LOCAL_RANK_ARGUMENT,) if legacy and not args.use_env else ()
    return (*first, *args.training_script_args)


def _may_restart(settings: Settings) -> bool:
    return settings.max_restarts != 0 or settings.min_nodes < settings.max_nodes


def _output(args: argparse.Namespace, size: int, environ: Mapping[str, str]) -> launch.Output:
    def by_rank(streams: int | dict[int, int]) -> dict[int, int]:
        return streams if isinstance(streams, dict) else dict.fromkeys(range(size), streams)

    output = launch.Output(
        log_dir=args.log_dir,
        redirects=by_rank(args.redirects),
        tee=by_rank(args.tee),
        shown_ranks=parse_ranks(args.local_ranks_filter),
        stdout_filters=parse_filters(args.duplicate_stdout_filters),
        stderr_filters=parse_filters(args.duplicate_stderr_filters),
        prefix_template=args.log_line_prefix_template
        or environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        logs_specs=args.logs_specs or "",
    )
    # As under torchrun, without log files all output goes to the console, whatever the options say.
    if output.log_dir == launch.NO_FILES and not output.logs_specs:
        return launch.Output(log_dir=launch.NO_FILES)
    return output


def _backend(given: str, meeting: Meeting) -> str:
    """Return the back-end's name in torchrun's events, where a single node counts as c10d."""
    if meeting.node_id:
        return "static"
    return (given or "rdzv") if meeting.endpoints else "c10d"


def _environ(environ: Mapping[str, str], snapshot_dir: Path | None) -> dict[str, str]:
    base = without_secrets(environ)
    base.pop(_SNAPSHOT_DIR_VARIABLE, None)
    return base if snapshot_dir is None else {**base, _SNAPSHOT_DIR_VARIABLE: str(snapshot_dir)}


def _absolute(flag: str, path: Path, chdir: Path | None) -> Path:
    try:
        return path.absolute() if chdir is None else chdir / path
    except OSError as error:
        raise InvalidRequestError(
            f"{flag}={path}: the current directory is gone ({error.strerror}); give an "
            "absolute path"
        ) from error


def _warn_of_keys(conf: Mapping[str, object]) -> None:
    for key in declared_flags.TORCH_CONF_KEYS & conf.keys():
        log.info("--rdzv-conf: %s configures torchrun's store and has no effect here", key)
    for warning in declared_flags.unknown_keys(conf):
        log.warning("%s", warning)


def _python(environ: Mapping[str, str], chdir: Path | None) -> str:
    """A path is relative to the workers' working directory."""
    python = environ.get("PYTHON_EXEC", sys.executable)
    return python if chdir is None or os.sep not in python else str(chdir / python)


def _count(kind: str, python: str, environ: Mapping[str, str]) -> int:
    if kind == "cpu":
        return launch.count_cpus()
    return asyncio.run(launch.ask_count_devices(kind, python, environ))


def _shutdown_timeout_ms(given_ms: int | None, environ: Mapping[str, str]) -> int:
    if given_ms is not None:
        return given_ms
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    found: int = kinds.ms(0, kinds.DAY_S)(name, environ.get(name, "30"))
    return found
