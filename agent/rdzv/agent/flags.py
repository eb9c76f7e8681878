"""rdzvrun's command line, word for word: torchrun's flags, their defaults, and ours beside them.

Every flag that torchrun has is here, in both spellings (dashes, underscores), and with torchrun's
environment default: PET_<NAME> stands for --<name>. What the words mean is `options`' business.

Source: `torch/distributed/run.py` (`get_args_parser`) and `torch/distributed/argparse_util.py` of
torch 2.13.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rdzv.errors import InvalidRequestError

CONF_KEYS = {
    "join_timeout": "seconds to wait for min_nodes before giving up (default 600)",
    "last_call_timeout": "seconds to wait for more nodes once min_nodes are there (default 30)",
    "scale_up": "eager: newcomers end the running round; on-restart: they wait (default eager)",
    "restart_window": "seconds after which a spent restart is forgotten (default: never)",
    "reuse": "false: refuse to begin a new run of a job whose last run has ended (default true)",
    "failure_stop_timeout": "seconds between SIGTERM and SIGKILL after a failure (default 5)",
    "server_timeout": "seconds to wait for a lost server without workers (default 600)",
    "etcd_prefix": "etcd: where the keys of all jobs lie (default /torchelastic/p2p)",
    "protocol": "etcd: http or https (default http)",
    "cacert": "etcd: file with the CA of its certificates (PEM); also ca_cert",
    "cert": "etcd: file with this node's certificate (PEM), with `key`; also ssl_cert",
    "key": "etcd: file with the key of that certificate (PEM); also ssl_cert_key",
    "etcd_user": "etcd: who the nodes are to it, with `etcd_password_file`",
    "etcd_password_file": "etcd: file with the password in its first line",
    "is_host": "c10d: whether this node serves the job (default: if it owns the endpoint's host)",
}

TORCH_CONF_KEYS = frozenset(
    {
        "close_timeout",
        "heartbeat_timeout",
        "keep_alive_interval",
        "keep_alive_max_attempt",
        "read_timeout",
        "store_type",
        "timeout",
    }
)
"""What torchrun's back-ends take and rdzvrun has no use for: its streams need no such timings."""

CONF_ALIASES = frozenset({"ca_cert", "ssl_cert", "ssl_cert_key"})
"""What torchrun's etcd-v2 back-end calls `cacert`, `cert` and `key`."""

_NO_EFFECT = "accepted for torchrun's sake; has no effect"

Option = tuple[tuple[str, ...], dict[str, Any]]


OWN = frozenset(
    {
        "--fence-after",
        "--log-line-prefix-template",
        "--node-id",
        "--topology",
        "--version",
    }
)
"""What torchrun has not: none of it may change what an abbreviation means under torchrun."""


def parse(
    argv: Sequence[str] | None, environ: Mapping[str, str], *, legacy: bool = False
) -> argparse.Namespace:
    """Read a command line; PET_* of `environ` are the defaults.

    `legacy` is the command line of torch.distributed.launch: torchrun's, and --use-env.

    Raises:
        SystemExit: usage (2), --help and --version (0).
    """
    parser = _parser(environ, legacy=legacy)
    words = sys.argv[1:] if argv is None else argv
    try:
        return parser.parse_args(expand(words, _options(parser)))
    except InvalidRequestError as error:
        parser.error(str(error))


def expand(argv: Sequence[str], options: Mapping[str, argparse.Action]) -> list[str]:
    """Write out the flags that are abbreviated, as torchrun's argparse would understand them.

    An abbreviation is one of torchrun's flags if no other of torchrun's begins like it; flags
    that only rdzvrun has are written whole. The script and what follows it are left alone.

    Raises:
        InvalidRequestError: several of torchrun's flags begin like it.
    """
    words = list(argv)
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        name, equals, value = words[at].partition("=")
        if name.startswith("--"):
            name = _whole(name, options)
            words[at] = f"{name}{equals}{value}"
            action, rest = options.get(name), equals
        else:
            action, rest = _last_short(words[at], options)
        if action is None:
            break  # The script, or what argparse refuses.
        at += 1 if action.nargs == 0 or rest else 2
    return words


def _whole(name: str, options: Mapping[str, argparse.Action]) -> str:
    """Return the flag that is meant; what means none is left for argparse to refuse."""
    if name in options:
        return name
    meant = {
        id(action): option
        for option, action in options.items()
        if option.startswith(name) and action.option_strings[0] not in OWN
    }
    if len(meant) > 1:
        candidates = sorted(option.replace("_", "-") for option in meant.values())
        raise InvalidRequestError(
            f"{name} may be {' or '.join(candidates)}; write out the one that is meant"
        )
    return next(iter(meant.values()), name)


def _last_short(
    word: str, options: Mapping[str, argparse.Action]
) -> tuple[argparse.Action | None, str]:
    """Return the last of the short flags in -m, -mt or -mt1, and what of the word is its value."""
    action = None
    for place, letter in enumerate(word[1:], start=1):
        action = options.get(f"-{letter}")
        if action is None or action.nargs != 0:
            return action, word[place + 1 :]
    return action, ""


def _options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {name: action for action in parser._actions for name in action.option_strings}


class _HelpFormatter(argparse.HelpFormatter):
    """Shows each option in one spelling; underscores are accepted, but not worth showing."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if "_" not in name]
        return super()._format_action_invocation(shown)


def _parser(environ: Mapping[str, str], *, legacy: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rdzv.agent.distributed_launch" if legacy else "rdzvrun",
        formatter_class=_HelpFormatter,
        description="Run a distributed PyTorch job on this node; a drop-in for torchrun.",
        epilog="PET_<NAME> in the environment is the default of --<name>. Exit codes: 0 success, "
        "1 the job failed, 2 usage, 75 trying again is sensible (no server, too few nodes), 128+n "
        "ended by signal n, 130 Ctrl-C.",
        allow_abbrev=False,
    )
    version = metadata.version("rdzv")
    parser.add_argument("--version", action="version", version=f"rdzvrun {version}")
    options = [*_where(), *_what(), *_output(), *_torchrun_only()]
    for names, settings in [*options, *(_legacy() if legacy else ())]:
        _add(parser, names, settings, environ)
    parser.add_argument("training_script", metavar="script", help="script, module or program")
    parser.add_argument(
        "training_script_args", nargs=argparse.REMAINDER, metavar="...", help="its arguments"
    )
    return parser


def _add(
    parser: argparse.ArgumentParser,
    names: tuple[str, ...],
    settings: dict[str, Any],
    environ: Mapping[str, str],
) -> None:
    both = dict.fromkeys((*names, *(_underscored(name) for name in names)))
    action = parser.add_argument(*both, **settings)
    text = environ.get(f"PET_{action.dest.upper()}")
    if text is None or action.dest in _WITHOUT_ENVIRONMENT:
        return
    if action.nargs != 0:
        # A text: argparse reads it as it would read the option's value.
        action.default = text
    elif text.isdecimal():
        action.default = bool(int(text))
    else:
        parser.error(f"PET_{action.dest.upper()}={text} is neither 0 nor 1")


_WITHOUT_ENVIRONMENT = frozenset({"numa_binding", "logs_specs", "help", "version", "use_env"})


def _underscored(name: str) -> str:
    return "--" + name[2:].replace("-", "_") if name.startswith("--") else name


def _option(*names: str, **settings: Any) -> Option:
    return names, settings


def _where() -> list[Option]:
    """List the options about the job, its nodes and where they meet."""
    conf = "; ".join(f"{key}: {text}" for key, text in CONF_KEYS.items())
    return [
        _option(
            "--nnodes",
            default="1:1",
            metavar="N|MIN:MAX",
            help="number of nodes of the job (default 1:1)",
        ),
        _option(
            "--nproc-per-node",
            default="1",
            metavar="N",
            help="workers on this node (default 1): a number; gpu, xpu or cpu, as many as it has; "
            "auto, the first of these that it has",
        ),
        _option(
            "--rdzv-backend",
            default="",
            metavar="NAME",
            help="rdzv: a standing rdzvd at the endpoint; c10d: the node that owns the endpoint's "
            "host serves; static: node rank 0 serves (default: static if --node-rank or --master-* "
            "is given, else rdzv)",
        ),
        _option(
            "--rdzv-endpoint",
            default="",
            metavar="HOST[:PORT]",
            help="the server (default port 29400); several rdzvd with commas between them",
        ),
        _option(
            "--rdzv-id", default="", metavar="JOB", help="name of the job, the same on all nodes"
        ),
        _option("--rdzv-conf", default="", metavar="K=V,...", help=conf),
        _option("--standalone", action="store_true", help="one node, with a server of its own"),
        _option(
            "--node-id",
            default="",
            metavar="NAME",
            help="name of this node (default: host name and process id)",
        ),
        _option(
            "--node-rank", type=int, default=None, metavar="N", help="static: rank of this node"
        ),
        _option(
            "--master-addr",
            default="",
            metavar="ADDR",
            help="static: address of node rank 0 (default 127.0.0.1)",
        ),
        _option(
            "--master-port",
            type=int,
            default=None,
            metavar="PORT",
            help="static: port at which node rank 0 serves the rendezvous (default 29500)",
        ),
        _option(
            "--local-addr",
            default="",
            metavar="ADDR",
            help="where the other nodes reach this one (default: its address towards the server)",
        ),
        _option(
            "--topology",
            default="",
            metavar="LABEL",
            help="this node's place in the network, e.g. its rack; nodes of one place sit together",
        ),
    ]


def _what() -> list[Option]:
    """List the options about the workers."""
    return [
        _option(
            "--max-restarts",
            type=int,
            default=0,
            metavar="N",
            help="worker failures that the whole job survives (default 0); nodes that are lost, "
            "leave or join cost none",
        ),
        _option("--role", default="default", metavar="ROLE", help="role of this node's workers"),
        _option("-m", "--module", action="store_true", help="run a module, as python -m does"),
        _option("--no-python", action="store_true", help="run a program, without python"),
        _option(
            "--run-path",
            action="store_true",
            help="run the script with runpy.run_path, as a library might",
        ),
        _option(
            "--shutdown-timeout",
            type=float,
            default=None,
            metavar="SECONDS",
            help="between SIGTERM and SIGKILL when workers are stopped (default 30)",
        ),
        _option(
            "--fence-after",
            type=float,
            default=None,
            metavar="SECONDS",
            help="kill this node's workers after so long without proof that the server hears the "
            "node, so that they are gone before others take their place; at least 1 s below the "
            "server's lease of 5 s or more (default: they train on without a server)",
        ),
        _option(
            "--signals-to-handle",
            default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            metavar="SIG,...",
            help="signals that make this node leave, and that its workers get "
            "(default SIGTERM,SIGINT,SIGHUP,SIGQUIT)",
        ),
        _option(
            "--virtual-local-rank",
            action="store_true",
            help="LOCAL_RANK is 0 for every worker, which sees one GPU",
        ),
        _option(
            "--numa-binding",
            default=None,
            metavar="MODE",
            choices=("node", "socket", "exclusive", "core-complex"),
            help="bind each worker to CPUs near its GPU: node, socket, exclusive or core-complex",
        ),
    ]


def _output() -> list[Option]:
    """List the options about what workers write."""
    streams = "1 stdout, 2 stderr, 3 both; for all, or by LOCAL_RANK as in 0:3,1:2"
    return [
        _option(
            "--log-dir",
            default=None,
            type=Path,
            metavar="DIR",
            help="folder of worker logs and error files (default: a new one in the temporary "
            "folder)",
        ),
        _option(
            "-r",
            "--redirects",
            default="0",
            metavar="0..3|RANK:N,...",
            help=f"worker output that goes to files in the log folder: {streams}",
        ),
        _option(
            "-t",
            "--tee",
            default="0",
            metavar="0..3|RANK:N,...",
            help=f"worker output that goes to files and, with a prefix, to the console: {streams}",
        ),
        _option(
            "--local-ranks-filter",
            default="",
            metavar="RANK,...",
            help="show the output of these LOCAL_RANKs only; files are written all the same",
        ),
        _option(
            "--duplicate-stdout-filters",
            default="",
            metavar="TEXT,...",
            help="copy teed stdout lines with any of these texts into filtered_stdout.log; ,, is a "
            "comma",
        ),
        _option(
            "--duplicate-stderr-filters",
            default="",
            metavar="TEXT,...",
            help="the same for stderr, into filtered_stderr.log",
        ),
        _option(
            "--log-line-prefix-template",
            default=None,
            metavar="TEXT",
            help="prefix of teed lines; ${role_name}, ${rank} and ${local_rank} are replaced "
            "(default: TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else [${role_name}${local_rank}]:)",
        ),
    ]


def _torchrun_only() -> list[Option]:
    """List what rdzvrun has for torchrun's sake."""
    return [
        _option("--monitor-interval", type=float, default=0.1, metavar="S", help=_NO_EFFECT),
        _option(
            "--start-method",
            default="spawn",
            choices=("spawn", "fork", "forkserver"),
            help=_NO_EFFECT,
        ),
        _option(
            "--event-log-handler",
            default="null",
            metavar="NAME",
            help="where torchelastic's events go: null (default), console, or a name that is "
            "registered with torch in the job's interpreter",
        ),
        _option(
            "--logs-specs",
            default=None,
            metavar="NAME",
            help="who decides where workers' output goes: an entry point of the group "
            "torchrun.logs_specs in the job's interpreter",
        ),
    ]


def _legacy() -> list[Option]:
    """List what torch.distributed.launch has beside torchrun's options."""
    return [
        _option(
            "--use-env",
            action="store_true",
            help="leave LOCAL_RANK to the environment: pass no --local-rank to the script",
        ),
    ]
