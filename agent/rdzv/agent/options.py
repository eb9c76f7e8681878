"""rdzvrun's command line: torchrun's options, turned into a launch."""

from __future__ import annotations

import argparse
import copy
import logging
import math
import os
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rdzv.agent.core.model import Job
from rdzv.agent.launch import Launch
from rdzv.client import Endpoint, parse_endpoint
from rdzv.core.model import ScaleUp, Settings
from rdzv.errors import InvalidRequestError

log = logging.getLogger("rdzv.agent")

DEFAULT_PORT = 29400
MAX_COUNT = 1_000_000
"""Above every limit of a server, which then says which; what is larger fits into no message."""
MAX_CONF_S = 30 * 86_400

_CONF_KEYS = {
    "join_timeout": "seconds to wait for min_nodes before giving up (default 600)",
    "last_call_timeout": "seconds to wait for more nodes once min_nodes are there (default 30)",
    "scale_up": "eager: newcomers end the running round; on-restart: they wait (default eager)",
    "restart_window": "seconds after which a spent restart is forgotten (default: never)",
    "reuse": "false: refuse to begin a new run of a job whose last run has ended (default true)",
    "failure_stop_timeout": "seconds between SIGTERM and SIGKILL after a failure (default 5)",
    "server_timeout": "seconds to wait for a lost server without workers (default 600)",
}


class _HelpFormatter(argparse.HelpFormatter):
    """Shows each option in one spelling; underscores are accepted, but not worth showing."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if "_" not in name]
        return super()._format_action_invocation(shown)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rdzvrun",
        formatter_class=_HelpFormatter,
        description="Run a distributed PyTorch job on this node; a drop-in for torchrun.",
        epilog="Exit codes: 0 success, 1 the job failed, 2 usage, 75 trying again is sensible "
        "(no server, too few nodes), 128+n ended by signal n, 130 Ctrl-C.",
        allow_abbrev=False,
    )
    version = metadata.version("rdzv")
    parser.add_argument("--version", action="version", version=f"rdzvrun {version}")
    for names, settings in _options():
        both = dict.fromkeys((*names, *(_underscored(name) for name in names)))
        parser.add_argument(*both, **settings)
    parser.add_argument("training_script", metavar="script", help="script, module or program")
    parser.add_argument(
        "training_script_args", nargs=argparse.REMAINDER, metavar="...", help="its arguments"
    )
    return parser


def _underscored(name: str) -> str:
    return "--" + name[2:].replace("-", "_") if name.startswith("--") else name


def _options() -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """List every option: its names, and what argparse is told of it."""
    conf = "; ".join(f"{key}: {text}" for key, text in _CONF_KEYS.items())

    def option(*names: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
        return names, settings

    return [
        option(
            "--nnodes",
            default="1:1",
            metavar="N|MIN:MAX",
            help="number of nodes of the job (default 1:1)",
        ),
        option(
            "--nproc-per-node", default="1", metavar="N", help="workers on this node (default 1)"
        ),
        option(
            "--rdzv-endpoint",
            default="",
            metavar="HOST[:PORT]",
            help=f"the rdzvd server (default port {DEFAULT_PORT}), or several, comma separated",
        ),
        option("--rdzv-backend", default="", metavar="rdzv", help="only rdzv: a standing rdzvd"),
        option(
            "--rdzv-id", default="", metavar="JOB", help="name of the job, the same on all nodes"
        ),
        option("--rdzv-conf", default="", metavar="K=V,...", help=conf),
        option("--standalone", action="store_true", help="one node, with a server of its own"),
        option(
            "--node-id",
            default="",
            metavar="NAME",
            help="name of this node (default: host name and process id)",
        ),
        option(
            "--max-restarts",
            type=int,
            default=0,
            metavar="N",
            help="worker failures that the whole job survives (default 0); nodes that are lost, "
            "leave or join cost none",
        ),
        option("--role", default="default", metavar="ROLE", help="role of this node's workers"),
        option(
            "--topology",
            default="",
            metavar="LABEL",
            help="this node's place in the network, e.g. its rack; nodes of one place sit together",
        ),
        option(
            "--local-addr",
            default="",
            metavar="ADDR",
            help="where the other nodes reach this one (default: its address towards the server)",
        ),
        option(
            "--log-dir",
            default=None,
            type=Path,
            metavar="DIR",
            help="folder of worker logs and error files (default: a new one in the temporary "
            "folder)",
        ),
        option(
            "-r",
            "--redirects",
            default="0",
            metavar="0..3|RANK:N,...",
            help="worker output that goes to files in the log folder: 1 stdout, 2 stderr, 3 both "
            "(default 0: to the console); for all, or by LOCAL_RANK",
        ),
        option(
            "--shutdown-timeout",
            type=float,
            default=None,
            metavar="SECONDS",
            help="between SIGTERM and SIGKILL when workers are stopped (default 30)",
        ),
        option("-m", "--module", action="store_true", help="run a module, as python -m does"),
        option("--no-python", action="store_true", help="run a program, without python"),
    ]


def parse_launch(argv: Sequence[str] | None = None) -> tuple[Launch, list[Endpoint]]:
    """Turn a command line into a launch and the servers to go to; none: one of our own.

    Raises:
        InvalidRequestError: a value makes no sense; the message names it, why, and a remedy.
        SystemExit: usage (2), --help and --version (0).

    """
    args = _parser().parse_args(argv)
    for option in ("rdzv_id", "node_id", "role", "topology", "local_addr"):
        _check_printable(option, getattr(args, option))
    min_nodes, max_nodes = parse_nnodes(args.nnodes)
    conf = parse_conf(args.rdzv_conf)
    standalone = args.standalone or (not args.rdzv_endpoint and max_nodes == 1)
    _check_backend(args, standalone, max_nodes)
    node_id = args.node_id or f"{socket.gethostname()}-{os.getpid()}"
    job = Job(
        rdzv_id=args.rdzv_id or f"standalone-{uuid.uuid4().hex[:8]}",
        node_id=node_id,
        settings=Settings(
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            max_restarts=_at_least("--max-restarts", args.max_restarts, 0),
            join_timeout_ms=_conf_ms(conf, "join_timeout", 600, least_ms=1),
            last_call_timeout_ms=_conf_ms(conf, "last_call_timeout", 30),
            scale_up=_scale_up(conf.get("scale_up", ScaleUp.EAGER.value)),
            restart_window_ms=_conf_ms(conf, "restart_window", 0),
        ),
        local_world_size=_nproc(args.nproc_per_node),
        shutdown_timeout_ms=_shutdown_timeout_ms(args.shutdown_timeout),
        failure_stop_timeout_ms=_conf_ms(conf, "failure_stop_timeout", 5),
        server_timeout_ms=_conf_ms(conf, "server_timeout", 600),
    )
    if args.module and args.no_python:
        raise InvalidRequestError("-m and --no-python exclude each other; leave one of them out")
    launch = Launch(
        job=job,
        script=args.training_script,
        args=tuple(args.training_script_args),
        module=args.module,
        no_python=args.no_python,
        python=os.environ.get("PYTHON_EXEC", sys.executable),
        role=args.role,
        topology=args.topology,
        local_addr=args.local_addr,
        log_dir=_absolute(args.log_dir) if args.log_dir else None,
        redirects=parse_redirects(args.redirects, job.local_world_size),
        refuse_reuse=not _conf_bool(conf, "reuse", default=True),
    )
    endpoints = [
        parse_endpoint(text.strip(), DEFAULT_PORT)
        for text in args.rdzv_endpoint.split(",")
        if text.strip() and not standalone
    ]
    if not endpoints and not standalone:
        raise InvalidRequestError(
            f"--rdzv-endpoint={args.rdzv_endpoint} names no server; give HOST:PORT of an rdzvd"
        )
    return launch, endpoints


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


def _check_backend(args: argparse.Namespace, standalone: bool, max_nodes: int) -> None:
    if args.rdzv_backend not in ("", "rdzv"):
        raise InvalidRequestError(
            f"--rdzv-backend={args.rdzv_backend} is not supported by this version; use rdzv with "
            "--rdzv-endpoint=HOST:PORT of an rdzvd, or --standalone"
        )
    if standalone and max_nodes > 1:
        raise InvalidRequestError(
            f"--standalone is for one node, and --nnodes={args.nnodes} asks for more; leave one "
            "of them out"
        )
    if not standalone and not args.rdzv_endpoint:
        raise InvalidRequestError(
            f"--nnodes={args.nnodes} needs a server; start rdzvd and give its address as "
            "--rdzv-endpoint=HOST:PORT"
        )
    if not standalone and not args.rdzv_id:
        raise InvalidRequestError(
            "--rdzv-id is missing: without a name of its own the job could be mixed up with "
            "another; give all nodes of this job the same --rdzv-id=NAME"
        )


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
        if key not in _CONF_KEYS:
            log.warning("--rdzv-conf: unknown key %s; known: %s", key, ", ".join(_CONF_KEYS))
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


def _nproc(text: str) -> int:
    if not text.isdecimal():
        raise InvalidRequestError(
            f"--nproc-per-node={text} is no number of workers; give one from 1 on"
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


def parse_redirects(text: str, local_world_size: int) -> dict[int, int]:
    """Read one of 0 to 3 for all workers, or a map by LOCAL_RANK.

    >>> parse_redirects("3", 2), parse_redirects("0:1,11:2", 12)
    ({0: 3, 1: 3}, {0: 1, 11: 2})
    """
    if text in ("0", "1", "2", "3"):
        return dict.fromkeys(range(local_world_size), int(text))
    redirects = {}
    for pair in text.split(","):
        rank, _, what = pair.partition(":")
        if not rank.isdecimal() or what not in ("0", "1", "2", "3"):
            raise InvalidRequestError(
                f"--redirects={text}: {pair!r} is not of the form LOCAL_RANK:N with N from 0 to 3"
            )
        redirects[_count(f"--redirects={text}", rank)] = int(what)
    return redirects
