"""Parses rdzvrun's command line into a launch, or refuses it with a suggested remedy."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rdzv.agent.cli import backends
from rdzv.agent.cli.backends import Meeting, RendezvousOptions
from rdzv.agent.core.model import JobTerms
from rdzv.agent.launch.launch import (
    NO_FILES,
    EventSink,
    Launch,
    Output,
    SnapshotFiles,
    count_cpus,
    count_devices,
)
from rdzv.agent.launch.numa import NumaBinding
from rdzv.agent.output.console_tee import parse_filters, parse_ranks
from rdzv.core.model import Settings
from rdzv.errors import InvalidRequestError
from rdzv.launch_options import declared_flags, flags
from rdzv.launch_options.job_options import (
    check_words,
    conf_bool,
    conf_ms,
    fence_after_ms,
    hang_timeout,
    keep_timeouts_ms,
    parse_conf,
    parse_nnodes,
    parse_notice_signal,
    parse_nproc,
    parse_signals,
    parse_streams,
    read_settings,
    shutdown_timeout_ms,
    snapshot_copy_rate,
    snapshot_memory,
    unknown_key_warnings,
    wants_root_cause,
)
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
) -> tuple[Launch, Meeting]:
    """Parse a command line into a launch and the place to meet the other nodes.

    `legacy` accepts the command line of torch.distributed.launch. `environ` and `chdir` are the
    job's, and default to this process's own. `counted` is the number of workers if --nproc-per-node
    is a word such as `gpu`; by default, the devices are counted, which may take a while.

    Raises:
        InvalidRequestError: a value makes no sense; the message gives the value, reason and remedy.
        SystemExit: --help, --version or --print-completion is done (0).
    """
    environ = dict(os.environ if environ is None else environ)
    args = flags.parse(argv, environ, legacy=legacy)
    check_words(args)
    conf = _conf(args.rdzv_conf)
    meeting = _meeting(args, conf)
    python = _python(environ, chdir)
    size = parse_nproc(args.nproc_per_node) or counted
    if size is None:
        size = _count(args.nproc_per_node, python, environ)
    job = _job(args, conf, meeting, size, environ)
    no_python = args.no_python and not args.run_path
    return Launch(
        job=job,
        script=args.training_script,
        args=_script_args(args, legacy=legacy),
        module=args.module,
        no_python=no_python,
        run_path=args.run_path,
        python=python,
        environ=_environ(environ, args, chdir),
        chdir=chdir,
        snapshot=_path("--snapshot", args.snapshot, chdir),
        snapshot_files=_snapshot_files(args, chdir),
        snapshot_memory=snapshot_memory(args.snapshot_memory),
        snapshot_copy_rate=snapshot_copy_rate(args.snapshot_copy_rate),
        preemption_file=_path("--preemption-file", args.preemption_file, chdir),
        role=args.role,
        topology=args.topology,
        local_addr=args.local_addr,
        master=meeting.master,
        refuse_reuse=not conf_bool(conf, "reuse", default=True),
        virtual_local_rank=args.virtual_local_rank,
        numa_binding=NumaBinding(args.numa_binding) if args.numa_binding else None,
        warm=parse_modules(args.warm),
        warm_restarts=args.warm is None and not no_python and _may_restart(job.settings),
        collective_trace=not args.no_collective_trace,
        hang_timeout=hang_timeout(args.hang_timeout),
        signals=parse_signals(args.signals_to_handle),
        root_cause_exit=wants_root_cause(args.exit_code),
        output=_output(args, size, environ, chdir),
        event_log=EventSink(args.event_log_handler, _backend(args.rdzv_backend, meeting)),
    ), meeting


def _script_args(args: argparse.Namespace, *, legacy: bool) -> tuple[str, ...]:
    first = (_LOCAL_RANK_ARGUMENT,) if legacy and not args.use_env else ()
    return (*first, *args.training_script_args)


def _may_restart(settings: Settings) -> bool:
    """Return whether the run may have another round after the current one."""
    return settings.max_restarts != 0 or settings.min_nodes < settings.max_nodes


def parse_modules(text: str | None) -> tuple[str, ...]:
    """Parse --warm, a comma-separated list of modules to preload.

    >>> parse_modules("torch,transformers"), parse_modules(None)
    (('torch', 'transformers'), ())
    """
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise InvalidRequestError(
                f"--warm={text}: {name!r} is not a module name; give names such as "
                "--warm=torch,numpy"
            )
    return names


def _output(
    args: argparse.Namespace,
    local_world_size: int,
    environ: Mapping[str, str],
    chdir: Path | None,
) -> Output:
    output = Output(
        log_dir=_absolute("--log-dir", args.log_dir, chdir) if args.log_dir else None,
        redirects=parse_streams("--redirects", args.redirects, local_world_size),
        tee=parse_streams("--tee", args.tee, local_world_size),
        shown_ranks=parse_ranks(args.local_ranks_filter),
        stdout_filters=parse_filters(args.duplicate_stdout_filters),
        stderr_filters=parse_filters(args.duplicate_stderr_filters),
        prefix_template=args.log_line_prefix_template
        or environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        logs_specs=args.logs_specs or "",
    )
    # As under torchrun, without log files all output goes to the console, whatever the options say.
    if output.log_dir == NO_FILES and not output.logs_specs:
        return Output(log_dir=NO_FILES)
    return output


def _meeting(args: argparse.Namespace, conf: Mapping[str, str]) -> Meeting:
    meeting = backends.choose(_rendezvous_options(args, conf))
    if meeting.elect_by is None:
        refuse_link_local(meeting.endpoints, args.local_addr)
    return meeting


def _rendezvous_options(args: argparse.Namespace, conf: Mapping[str, str]) -> RendezvousOptions:
    min_nodes, max_nodes = parse_nnodes(args.nnodes)
    return RendezvousOptions(
        backend=args.rdzv_backend,
        endpoint=args.rdzv_endpoint,
        rdzv_id=args.rdzv_id or "",
        standalone=args.standalone,
        nnodes=args.nnodes,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_rank=args.node_rank,
        master_addr=args.master_addr,
        master_port=args.master_port,
        is_host=conf_bool(conf, "is_host", default=False) if "is_host" in conf else None,
        conf=conf,
        files={
            "ca": args.tls_ca,
            "cert": args.tls_cert,
            "key": args.tls_key,
            "token_file": args.token_file,
        },
        places_node=bool(args.node_id or args.topology),
    )


def _backend(given: str, meeting: Meeting) -> str:
    """Return the back-end's name in torchrun's events, where a single node counts as c10d."""
    if meeting.node_id:
        return "static"
    return (given or "rdzv") if meeting.endpoints else "c10d"


def _job(
    args: argparse.Namespace,
    conf: Mapping[str, str],
    meeting: Meeting,
    local_world_size: int,
    environ: Mapping[str, str],
) -> JobTerms:
    keep_ms, park_ms = keep_timeouts_ms(args.keep_timeout, args.park_timeout)
    own_name = args.node_id or f"{socket.gethostname()}-{os.getpid()}"
    return JobTerms(
        rdzv_id=meeting.rdzv_id,
        node_id=meeting.node_id or own_name,
        settings=read_settings(args, conf),
        local_world_size=local_world_size,
        shutdown_timeout_ms=_shutdown_timeout_ms(args.shutdown_timeout, environ),
        failure_stop_timeout_ms=conf_ms(conf, "failure_stop_timeout", 5),
        server_timeout_ms=conf_ms(conf, "server_timeout", 600),
        fence_after_ms=_fence_after_ms(args.fence_after, meeting),
        keep_timeout_ms=keep_ms,
        park_timeout_ms=park_ms,
        notice_signum=parse_notice_signal(args.notice_signal) or 0,
    )


def _path(flag: str, path: Path | None, chdir: Path | None) -> Path | None:
    return None if path is None else _absolute(flag, path, chdir)


def _snapshot_files(args: argparse.Namespace, chdir: Path | None) -> SnapshotFiles | None:
    folder = _path("--snapshot-dir", args.snapshot_dir, chdir)
    if folder is None:
        return None
    return SnapshotFiles(folder, args.snapshot_dir_every, args.snapshot_dir_keep)


def _environ(
    environ: Mapping[str, str], args: argparse.Namespace, chdir: Path | None
) -> dict[str, str]:
    base = without_secrets(environ)
    base.pop(_SNAPSHOT_DIR_VARIABLE, None)
    folder = _path("--snapshot-dir", args.snapshot_dir, chdir)
    return base if folder is None else {**base, _SNAPSHOT_DIR_VARIABLE: str(folder)}


def _absolute(flag: str, path: Path, chdir: Path | None) -> Path:
    try:
        return path.absolute() if chdir is None else chdir / path
    except OSError as error:
        raise InvalidRequestError(
            f"{flag}={path}: the current directory is gone ({error.strerror}); give an "
            "absolute path"
        ) from error


def _conf(text: str) -> dict[str, str]:
    conf = parse_conf(text)
    for key in conf:
        if key in declared_flags.TORCH_CONF_KEYS:
            log.info("--rdzv-conf: %s configures torchrun's store and has no effect here", key)
    for warning in unknown_key_warnings(conf):
        log.warning("%s", warning)
    return conf


def _python(environ: Mapping[str, str], chdir: Path | None) -> str:
    """Return the job's interpreter. A path is relative to the workers' working directory."""
    python = environ.get("PYTHON_EXEC", sys.executable)
    return python if chdir is None or os.sep not in python else str(chdir / python)


def _count(text: str, python: str, environ: Mapping[str, str]) -> int:
    return count_cpus() if text == "cpu" else count_devices(text, python, environ)


def _shutdown_timeout_ms(seconds: float | None, environ: Mapping[str, str]) -> int:
    if seconds is not None:
        return shutdown_timeout_ms(f"--shutdown-timeout={seconds:g}", str(seconds))
    text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    return shutdown_timeout_ms(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={text}", text)


def _fence_after_ms(seconds: float | None, meeting: Meeting) -> int:
    fence_ms = fence_after_ms(seconds)
    if fence_ms and not meeting.endpoints:
        raise InvalidRequestError(
            f"--fence-after={seconds:g} has no effect here: this node has its own server "
            "and cannot be cut off from it; leave it out, or give --rdzv-endpoint"
        )
    return fence_ms
