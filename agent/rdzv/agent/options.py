"""What rdzvrun's command line means: its words turned into a launch, or refused with a remedy."""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rdzv.agent import backends, flags
from rdzv.agent.backends import Meeting, Wish
from rdzv.agent.core.model import Job
from rdzv.agent.launch import NO_FILES, EventSink, Launch, Output, count_cpus, count_devices
from rdzv.agent.numa import NumaBinding
from rdzv.agent.tee import parse_filters, parse_ranks
from rdzv.core.model import ScaleUp, Settings
from rdzv.errors import InvalidRequestError

log = logging.getLogger("rdzv.agent")

MAX_COUNT = 1_000_000
"""Above every limit of a server, which then says which; what is larger fits into no message."""
MAX_CONF_S = 30 * 86_400
MAX_FENCE_S = 3_600
"""Above every lease; the server says which it gives."""

_LOCAL_RANK_ARGUMENT = "--local-rank=${local_rank}"
"""What torch.distributed.launch passes to a script, before its own arguments."""


def parse_launch(
    argv: Sequence[str] | None = None, *, legacy: bool = False
) -> tuple[Launch, Meeting]:
    """Turn a command line into what to launch, and where to meet the other nodes.

    `legacy` is the command line of torch.distributed.launch.

    Raises:
        InvalidRequestError: a value makes no sense; the message names it, why, and a remedy.
        SystemExit: usage (2), --help and --version (0).

    """
    args = flags.parse(argv, os.environ, legacy=legacy)
    for option in ("rdzv_id", "node_id", "role", "topology", "local_addr", "master_addr"):
        _check_printable(option, getattr(args, option))
    _check_exclusive(args)
    script_args = tuple(args.training_script_args)
    if legacy and not args.use_env:
        script_args = (_LOCAL_RANK_ARGUMENT, *script_args)
    conf = parse_conf(args.rdzv_conf)
    meeting = backends.choose(_wish(args, conf))
    job = _job(args, conf, meeting)
    size = job.local_world_size
    return Launch(
        job=job,
        script=args.training_script,
        args=script_args,
        module=args.module,
        no_python=args.no_python and not args.run_path,
        run_path=args.run_path,
        python=os.environ.get("PYTHON_EXEC", sys.executable),
        role=args.role,
        topology=args.topology,
        local_addr=args.local_addr,
        refuse_reuse=not _conf_bool(conf, "reuse", default=True),
        virtual_local_rank=args.virtual_local_rank,
        numa_binding=NumaBinding(args.numa_binding) if args.numa_binding else None,
        signals=parse_signals(args.signals_to_handle),
        output=_output(args, size),
        event_log=EventSink(args.event_log_handler, _backend(args.rdzv_backend, meeting)),
    ), meeting


def _output(args: argparse.Namespace, local_world_size: int) -> Output:
    output = Output(
        log_dir=_absolute(args.log_dir) if args.log_dir else None,
        redirects=parse_streams("--redirects", args.redirects, local_world_size),
        tee=parse_streams("--tee", args.tee, local_world_size),
        shown_ranks=parse_ranks(args.local_ranks_filter),
        stdout_filters=parse_filters(args.duplicate_stdout_filters),
        stderr_filters=parse_filters(args.duplicate_stderr_filters),
        prefix_template=args.log_line_prefix_template
        or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        logs_specs=args.logs_specs or "",
    )
    # As under torchrun: without files all output is the console's, whatever else is asked for.
    if output.log_dir == NO_FILES and not output.logs_specs:
        return Output(log_dir=NO_FILES)
    return output


def _check_exclusive(args: argparse.Namespace) -> None:
    if args.module and args.no_python:
        raise InvalidRequestError("-m and --no-python exclude each other; leave one of them out")
    if args.module and args.run_path:
        raise InvalidRequestError("-m and --run-path exclude each other; leave one of them out")
    # torch.distributed.launch refuses it whatever else is asked for.
    if args.no_python and not getattr(args, "use_env", True):
        raise InvalidRequestError(
            "--no-python passes no --local-rank to the program; add --use-env, and read LOCAL_RANK"
        )


def _wish(args: argparse.Namespace, conf: Mapping[str, str]) -> Wish:
    _, max_nodes = parse_nnodes(args.nnodes)
    return Wish(
        backend=args.rdzv_backend,
        endpoint=args.rdzv_endpoint,
        rdzv_id=args.rdzv_id,
        standalone=args.standalone,
        nnodes=args.nnodes,
        max_nodes=max_nodes,
        node_rank=args.node_rank,
        master_addr=args.master_addr,
        master_port=args.master_port,
        is_host=_conf_bool(conf, "is_host", default=False) if "is_host" in conf else None,
        conf=conf,
    )


def _backend(given: str, meeting: Meeting) -> str:
    """Name the back-end as torchrun's events would: a node that meets nobody is c10d there."""
    if not meeting.endpoints:
        return "c10d"
    return given or ("static" if meeting.node_id else "rdzv")


def _job(args: argparse.Namespace, conf: Mapping[str, str], meeting: Meeting) -> Job:
    min_nodes, max_nodes = parse_nnodes(args.nnodes)
    own_name = args.node_id or f"{socket.gethostname()}-{os.getpid()}"
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    return Job(
        rdzv_id=meeting.rdzv_id,
        node_id=meeting.node_id or own_name,
        settings=Settings(
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            max_restarts=_at_least("--max-restarts", args.max_restarts, 0),
            join_timeout_ms=_conf_ms(conf, "join_timeout", 600, least_ms=1),
            last_call_timeout_ms=_conf_ms(conf, "last_call_timeout", 30),
            scale_up=_scale_up(conf.get("scale_up", ScaleUp.EAGER.value)),
            restart_window_ms=_conf_ms(conf, "restart_window", 0),
        ),
        local_world_size=_nproc(args.nproc_per_node, python),
        shutdown_timeout_ms=_shutdown_timeout_ms(args.shutdown_timeout),
        failure_stop_timeout_ms=_conf_ms(conf, "failure_stop_timeout", 5),
        server_timeout_ms=_conf_ms(conf, "server_timeout", 600),
        fence_after_ms=_fence_after_ms(args.fence_after, meeting),
    )


def _check_printable(option: str, value: str) -> None:
    """Refuse what no message can carry, and what would do things to a terminal."""
    if not value.isprintable():
        raise InvalidRequestError(
            f"--{option.replace('_', '-')}={value!r} has characters that can not be printed; "
            "leave them out"
        )


def _absolute(log_dir: Path) -> Path:
    try:
        return log_dir.absolute()
    except OSError as error:
        raise InvalidRequestError(
            f"--log-dir={log_dir}: the working directory can not be found ({error.strerror}); "
            "give an absolute path"
        ) from error


def parse_nnodes(text: str) -> tuple[int, int]:
    """Read N or MIN:MAX.

    >>> parse_nnodes("2:4"), parse_nnodes("3")
    ((2, 4), (3, 3))
    """
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise InvalidRequestError(
            f"--nnodes={text} is no number of nodes; give N or MIN:MAX, e.g. 2:4"
        )
    low, high = (_count(f"--nnodes={text}", part) for part in (parts[0], parts[-1]))
    if low < 1:
        raise InvalidRequestError(
            f"--nnodes={text}: a job needs at least 1 node; raise the minimum"
        )
    if low > high:
        raise InvalidRequestError(
            f"--nnodes={text}: the minimum {low} is above the maximum {high}; swap them?"
        )
    return low, high


def parse_conf(text: str) -> dict[str, str]:
    """Read K=V,K=V; unknown keys are warned of, with the known ones."""
    conf: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key or not value:
            raise InvalidRequestError(f"--rdzv-conf: {pair!r} is not of the form key=value")
        if key in flags.TORCH_CONF_KEYS:
            log.info("--rdzv-conf: %s is of torchrun's store, and has no effect here", key)
        elif key not in flags.CONF_KEYS and key not in flags.CONF_ALIASES:
            known = ", ".join(flags.CONF_KEYS)
            log.warning("--rdzv-conf: unknown key %s; known: %s", key, known)
        conf[key] = value
    return conf


def _conf_ms(conf: Mapping[str, str], key: str, default_s: float, least_ms: int = 0) -> int:
    text = conf.get(key, str(default_s))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise InvalidRequestError(
            f"--rdzv-conf: {key}={text} is no number of seconds; give one from 0 on"
        )
    if seconds > MAX_CONF_S:
        raise InvalidRequestError(
            f"--rdzv-conf: {key}={text} is too long; give at most {MAX_CONF_S} seconds (30 days)"
        )
    ms = round(seconds * 1000)
    if ms < least_ms:
        raise InvalidRequestError(
            f"--rdzv-conf: {key}={text} is too short; give at least {least_ms / 1000:g} seconds"
        )
    return ms


def _conf_bool(conf: Mapping[str, str], key: str, *, default: bool) -> bool:
    text = conf.get(key, str(default)).lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidRequestError(f"--rdzv-conf: {key}={text} is neither true nor false")
    return text in ("true", "1")


def _scale_up(text: str) -> ScaleUp:
    try:
        return ScaleUp(text)
    except ValueError:
        known = ", ".join(ScaleUp)
        raise InvalidRequestError(f"--rdzv-conf: scale_up={text} is none of {known}") from None


def _nproc(text: str, python: str) -> int:
    """Read a number of workers, or count what there is one worker for."""
    if text == "cpu":
        return count_cpus()
    if text in ("auto", "gpu", "xpu"):
        return count_devices(text, python)
    if not text.isdecimal():
        raise InvalidRequestError(
            f"--nproc-per-node={text} is no number of workers; give one from 1 on, or auto, cpu, "
            "gpu, xpu"
        )
    count = _count(f"--nproc-per-node={text:.20}", text)
    return _at_least("--nproc-per-node", count, 1)


def _count(given: str, digits: str) -> int:
    """Read a number of decimal digits, of which there may be any number."""
    too_long = len(digits.lstrip("0")) > len(str(MAX_COUNT))
    if too_long or int(digits) > MAX_COUNT:
        raise InvalidRequestError(f"{given} is too large; give at most {MAX_COUNT}")
    return int(digits)


def _at_least(option: str, value: int, least: int) -> int:
    if value < least:
        raise InvalidRequestError(f"{option}={value} is too small; give at least {least}")
    if value > MAX_COUNT:
        raise InvalidRequestError(f"{option}={value} is too large; give at most {MAX_COUNT}")
    return value


def _shutdown_timeout_ms(seconds: float | None) -> int:
    if seconds is None:
        text = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
        given = f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={text}"
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
    else:
        given = f"--shutdown-timeout={seconds:g}"
    if not 0 <= seconds <= 86_400:
        raise InvalidRequestError(f"{given}: give a number of seconds from 0 to 86400")
    return round(seconds * 1000)


def _fence_after_ms(seconds: float | None, meeting: Meeting) -> int:
    if seconds is None:
        return 0
    given = f"--fence-after={seconds:g}"
    if not 1 <= seconds <= MAX_FENCE_S:
        raise InvalidRequestError(
            f"{given}: give a number of seconds from 1 to {MAX_FENCE_S}, and at least 1 s below "
            "the server's lease"
        )
    if not meeting.endpoints:
        raise InvalidRequestError(
            f"{given} has no use here: this node has a server of its own, from which it can not be "
            "cut off; leave it out, or give --rdzv-endpoint"
        )
    return round(seconds * 1000)


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Read names of signals with commas between them.

    >>> parse_signals("SIGTERM,SIGUSR1")
    (<Signals.SIGTERM: 15>, <Signals.SIGUSR1: 10>)
    """
    signals = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise InvalidRequestError(
                f"--signals-to-handle={text}: {name} is no signal that can be handled; give names "
                "such as SIGTERM,SIGINT"
            )
        signals.append(signal.Signals[name])
    return tuple(signals)


def parse_streams(option: str, text: str, local_world_size: int) -> dict[int, int]:
    """Read one of 0 to 3 for all workers, or a map by LOCAL_RANK.

    >>> parse_streams("--tee", "3", 2), parse_streams("--tee", "0:1,11:2", 12)
    ({0: 3, 1: 3}, {0: 1, 11: 2})
    """
    if text in ("0", "1", "2", "3"):
        return dict.fromkeys(range(local_world_size), int(text))
    streams = {}
    for pair in text.split(","):
        rank, _, what = pair.partition(":")
        if not rank.isdecimal() or what not in ("0", "1", "2", "3"):
            raise InvalidRequestError(
                f"{option}={text}: {pair!r} is not of the form LOCAL_RANK:N with N from 0 to 3"
            )
        streams[_count(f"{option}={text}", rank)] = int(what)
    return streams
