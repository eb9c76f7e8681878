"""rdzvrun's command line: torchrun's flags, their defaults, and ours beside them.

Every flag of torchrun is here, in both spellings (dashes, underscores), and with torchrun's default
from the environment: PET_<NAME> stands for --<name>. `rdzvctl submit` takes the same flags.
`job_options` and the agent's `options` interpret them.

Source: `torch/distributed/run.py` (`get_args_parser`) and `torch/distributed/argparse_util.py` of
torch 2.13.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rdzv.errors import InvalidRequestError
from rdzv.launch_options.help_format import DESCRIPTION, EPILOG, HelpFormatter
from rdzv.structs import struct
from rdzv.version import VERSION

CONF_KEYS = {
    "join_timeout": "seconds to wait for min_nodes before giving up (default 600)",
    "last_call_timeout": "seconds to wait for more nodes once min_nodes are there (default 30)",
    "scale_up": "eager: new nodes end the running round; on-restart: they wait; after:SECONDS: "
    "they end it when it has run for this time (default eager)",
    "restart_window": "as --restart-window",
    "restart_backoff": "as --restart-backoff",
    "reuse": "false: refuse to begin a new run of a job whose last run has ended (default true)",
    "failure_stop_timeout": "seconds between SIGTERM and SIGKILL after a failure (default 5)",
    "server_timeout": "seconds to wait for a lost server without workers (default 600)",
    "etcd_prefix": "etcd: prefix of the keys of all jobs (default /torchelastic/p2p)",
    "protocol": "etcd: http or https (default http)",
    "cacert": "etcd: file with the CA of its certificates (PEM); also ca_cert",
    "cert": "etcd: file with this node's certificate (PEM), with `key`; also ssl_cert",
    "key": "etcd: file with the key of that certificate (PEM); also ssl_cert_key",
    "etcd_user": "etcd: user of the nodes, with `etcd_password_file`",
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
"""Keys of torchrun's back-ends without effect in rdzvrun: its streams need no such timings."""

CONF_ALIASES = frozenset({"ca_cert", "ssl_cert", "ssl_cert_key"})
"""The names of `cacert`, `cert` and `key` in torchrun's etcd-v2 back-end."""

_NO_EFFECT = "accepted as by torchrun; has no effect"

Option = tuple[tuple[str, ...], dict[str, Any]]


OWN = frozenset(
    {
        *("--fence-after", "--hang-timeout", "--keep-timeout"),
        *("--log-line-prefix-template", "--max-preemptions", "--max-store-failures"),
        *("--no-progress-restarts", "--no-collective-trace", "--no-warm", "--node-id"),
        *("--notice-signal", "--park-timeout", "--preemption-file", "--restart-backoff"),
        *("--restart-window", "--snapshot", "--tls-ca", "--tls-cert", "--tls-key"),
        *("--token-file", "--topology", "--version", "--warm"),
    }
)
"""Flags that torchrun lacks: they never change the meaning of torchrun's abbreviations."""


def parse(
    argv: Sequence[str] | None, environ: Mapping[str, str], *, legacy: bool = False
) -> argparse.Namespace:
    """Read a command line; PET_* of `environ` are the defaults.

    `legacy` selects the command line of torch.distributed.launch: torchrun's, and --use-env.

    Raises:
        SystemExit: usage (2), --help and --version (0).
    """
    parser = _parser(environ, legacy=legacy)
    words = sys.argv[1:] if argv is None else argv
    try:
        return parser.parse_args(expand(words, options(parser)))
    except InvalidRequestError as error:
        parser.error(str(error))


@struct(frozen=True)
class Given:
    """A flag as given: its words, the first spelled out in full, and their actions."""

    actions: tuple[argparse.Action, ...]
    """One action; or several short flags in one word, of which only the last may have a value."""
    words: tuple[str, ...]


def split(
    argv: Sequence[str], options: Mapping[str, argparse.Action], whole: Set[str] = OWN
) -> tuple[list[Given], list[str]]:
    """Split the flags from the words after them, and expand abbreviated flags.

    An abbreviation means what it means to torchrun's argparse: the one flag of torchrun that begins
    with it. Flags that torchrun lacks, `whole`, are never abbreviated. The words after the flags
    are the script and its arguments, or begin with a word that argparse refuses.

    Raises:
        InvalidRequestError: several flags of torchrun begin with an abbreviation.
    """
    given: list[Given] = []
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "--":
        name, equals, value = argv[at].partition("=")
        if name.startswith("--"):
            name = _written_out(name, options, whole)
            first = f"{name}{equals}{value}"
            actions, has_value = [options[name]] if name in options else [], bool(equals)
        else:
            first = argv[at]
            actions, has_value = _short(first, options)
        if not actions:
            break
        if actions[-1].nargs == "?" and not has_value:
            # An optional value is given with `=`: the next word is the script.
            first, has_value = f"{first}={actions[-1].const}", True
        end = at + (1 if actions[-1].nargs == 0 or has_value else 2)
        given.append(Given(tuple(actions), (first, *argv[at + 1 : end])))
        at = end
    return given, list(argv[at:])


def expand(argv: Sequence[str], options: Mapping[str, argparse.Action]) -> list[str]:
    """Expand abbreviated flags; see `split`."""
    given, rest = split(argv, options)
    return [*(word for one in given for word in one.words), *rest]


def _written_out(name: str, options: Mapping[str, argparse.Action], whole: Set[str]) -> str:
    """Return the full flag of an abbreviation; any other word is left for argparse to refuse."""
    if name in options:
        return name
    meant = {
        id(action): option
        for option, action in options.items()
        if option.startswith(name) and action.option_strings[0] not in whole
    }
    if len(meant) > 1:
        candidates = sorted(option.replace("_", "-") for option in meant.values())
        raise InvalidRequestError(f"{name} may be {' or '.join(candidates)}; write one of them out")
    return next(iter(meant.values()), name)


def _short(word: str, options: Mapping[str, argparse.Action]) -> tuple[list[argparse.Action], bool]:
    """Return the short flags in -m, -mt or -mt1, and whether the word holds the last one's value.

    The list is empty if one of them is unknown.
    """
    actions = []
    for place, letter in enumerate(word[1:], start=1):
        action = options.get(f"-{letter}")
        if action is None:
            return [], False
        actions.append(action)
        if action.nargs != 0:
            return actions, place + 1 < len(word)
    return actions, False


def options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return all flags of a parser, by each of their names."""
    return {name: action for action in parser._actions for name in action.option_strings}


def described() -> list[Option]:
    """List rdzvrun's flags: their names, and their arguments for argparse."""
    return [option for options in grouped().values() for option in options]


def grouped() -> dict[str, list[Option]]:
    """List rdzvrun's flags by what they are about."""
    return {
        "the job, its nodes and their server": _where(),
        "workers, failures and restarts": _what(),
        "output": _output(),
        "known to torchrun": _torchrun_only(),
    }


def add(
    parser: argparse._ActionsContainer,
    option: Option,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> argparse.Action:
    """Add a flag in both spellings; the environment may hold its default."""
    names, settings = option
    both = dict.fromkeys((*names, *(_underscored(name) for name in names)))
    action = parser.add_argument(*both, **settings)
    variable = f"PET_{action.dest.upper()}"
    text = environ.get(variable)
    if text is None or option is NO_WARM or action.dest in _WITHOUT_ENVIRONMENT:
        return action
    if action.nargs != 0:
        # argparse parses a text like the option's value.
        action.default = text
    elif text.isdecimal():
        action.default = bool(int(text))
    else:
        raise InvalidRequestError(f"{variable}={text} is not 0 or 1")
    return action


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add the script and its arguments."""
    parser.add_argument("training_script", metavar="script", help="script, module or program")
    parser.add_argument(
        "training_script_args", nargs=argparse.REMAINDER, metavar="...", help="its arguments"
    )


def _parser(environ: Mapping[str, str], *, legacy: bool) -> argparse.ArgumentParser:
    program = "python -m rdzv.agent.distributed_launch" if legacy else "rdzvrun"
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} [flags] script [its arguments]",
        formatter_class=HelpFormatter,
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rdzvrun {VERSION}")
    try:
        for title, options_ in grouped().items():
            group = parser.add_argument_group(title)
            for option in options_:
                add(group, option, environ)
        for option in _legacy() if legacy else ():
            add(parser, option, environ)
    except InvalidRequestError as error:
        parser.error(str(error))
    add_script(parser)
    return parser


_WITHOUT_ENVIRONMENT = frozenset(
    {
        *("numa_binding", "logs_specs", "help", "version", "use_env"),
        # RDZV_* sets these, for rdzvctl and the plug-in as well.
        *("tls_ca", "tls_cert", "tls_key", "token_file"),
    }
)


def _underscored(name: str) -> str:
    return "--" + name[2:].replace("-", "_") if name.startswith("--") else name


def value(
    name: str, metavar: str | None, text: str, *, short: str | None = None, **settings: Any
) -> Option:
    """Declare a flag that has a value: `text` is its help, and `settings` are argparse's."""
    names = (name,) if short is None else (short, name)
    return names, {"default": None, "metavar": metavar, "help": text, **settings}


def switch(name: str, text: str, *, short: str | None = None) -> Option:
    """Declare a flag without a value: `text` is its help."""
    names = (name,) if short is None else (short, name)
    return names, {"action": "store_true", "help": text}


# It is --warm= in words, so that of the two the last one holds, and each overrides PET_WARM.
NO_WARM: Option = (
    ("--no-warm",),
    {
        **{"action": "store_const", "dest": "warm", "const": ""},
        "help": "start the workers of restarts cold, too; without this and --warm they are forked "
        "from an interpreter that imports torch once the first workers have",
    },
)


def _where() -> list[Option]:
    """List the options of the job, its nodes and their server."""
    conf = "\n".join(f"{key}: {text}" for key, text in CONF_KEYS.items())
    return [
        value("--nnodes", "N|MIN:MAX", "number of nodes of the job (default 1:1)", default="1:1"),
        value(
            "--nproc-per-node",
            "N",
            "workers on this node (default 1): a number; gpu, xpu or cpu, as many as it has; "
            "auto, the first of these that it has",
            default="1",
        ),
        value(
            "--rdzv-backend",
            "NAME",
            "rdzv: a standing rdzvd at the endpoint; c10d: the node that owns the endpoint's "
            "host serves; static: node rank 0 serves (default: static if --node-rank or --master-* "
            "is given, or one node serves itself at an endpoint that is free, else rdzv)",
            default="",
        ),
        value(
            "--rdzv-endpoint",
            "HOST[:PORT]",
            "the server (default port 29400; c10d: 0 for a free one); several rdzvd with "
            "commas between them",
            default="",
        ),
        value("--rdzv-id", "JOB", "name of the job, the same on all nodes"),
        value("--rdzv-conf", "K=V,...", conf, default=""),
        switch("--standalone", "one node, with a server of its own"),
        value(
            "--node-id", "NAME", "name of this node (default: host name and process id)", default=""
        ),
        value("--node-rank", "N", "static: rank of this node", type=int),
        value(
            "--master-addr",
            "ADDR",
            "static: address of node rank 0 (default 127.0.0.1)",
            default="",
        ),
        value(
            "--master-port",
            "PORT",
            "static: port at which node rank 0 serves the rendezvous (default 29500)",
            type=int,
        ),
        value(
            "--local-addr",
            "ADDR",
            "address of this node for the others (default: its address towards the server)",
            default="",
        ),
        value(
            "--topology",
            "LABEL",
            "this node's place in the network, e.g. its rack; ranks of one place are adjacent",
            default="",
        ),
        value(
            "--tls-ca",
            "FILE",
            "reach rdzvd by TLS: the CA of its certificate (PEM; default RDZV_TLS_CA)",
            type=Path,
        ),
        value(
            "--tls-cert",
            "FILE",
            "this node's certificate for rdzvd (PEM; default RDZV_TLS_CERT)",
            type=Path,
        ),
        value("--tls-key", "FILE", "the key of that certificate (default RDZV_TLS_KEY)", type=Path),
        value(
            "--token-file",
            "FILE",
            "the token for rdzvd (default RDZV_TOKEN_FILE, or the token in RDZV_TOKEN); it is "
            "sent only by TLS, or to this machine",
            type=Path,
        ),
    ]


def _what() -> list[Option]:
    """List the options of the workers."""
    return [
        value(
            "--max-restarts",
            "N",
            "worker failures that the whole job survives (default 0); a node that is lost, "
            "leaves or joins does not count",
            type=int,
            default=0,
        ),
        value(
            "--restart-window",
            "SECONDS",
            "restarts longer ago no longer count (default: all count)",
        ),
        value(
            "--restart-backoff",
            "BASE[:MAX]",
            "seconds before the second restart in a row if rounds fail within a minute, "
            "doubled with each further one, up to MAX; the first never waits (default 1:60; 0: no "
            "wait)",
        ),
        value(
            "--max-preemptions",
            "N",
            "rounds that may end because a node was lost or left; the next fails the job "
            "(default: any number)",
            type=int,
        ),
        value(
            "--max-store-failures",
            "N",
            "rounds that may end because their store failed; the next fails the job "
            "(default: any number)",
            type=int,
        ),
        value(
            "--no-progress-restarts",
            "K",
            "fail, with exit code 93, after K restarts in a row without progress: "
            "no step in RDZV_PROGRESS_FILE above all before, and no change of --snapshot "
            "(default 0: any number)",
            type=int,
            default=0,
        ),
        value(
            "--snapshot",
            "PATH",
            "file or folder that the job saves its state to; a change of it is progress",
            type=Path,
        ),
        value("--role", "ROLE", "role of this node's workers", default="default"),
        switch("--module", "run a module, as python -m does", short="-m"),
        switch("--no-python", "run a program, without python"),
        switch("--run-path", "run the script with runpy.run_path, as a library might"),
        value(
            "--shutdown-timeout",
            "SECONDS",
            "between SIGTERM and SIGKILL when workers are stopped (default 30)",
            type=float,
        ),
        value(
            "--fence-after",
            "SECONDS",
            "kill this node's workers after this time without proof that the server hears the "
            "node, so that they are gone before others take their place; at least 1 s below the "
            "server's lease of 5 s or more (default: they continue without a server)",
            type=float,
        ),
        value(
            "--hang-timeout",
            "SECONDS|auto",
            "a worker that has reported progress (RDZV_PROGRESS_FILE), or completed collectives, "
            "and then none for this time hangs: its round ends as by a failure, and the stacks of "
            "all workers are kept; auto: learned from its steps (default: off); see docs/hangs.md",
        ),
        switch(
            "--no-collective-trace",
            "do not open torch's record of collectives to the agent, which names the worker that "
            "the others wait for; see docs/hangs.md",
        ),
        value(
            "--keep-timeout",
            "SECONDS",
            "when a round ends, the time for workers that use rdzv.worker to cut their "
            "connections and wait, to go on in the next round as the same processes; "
            "0: all workers are stopped (default 10); see docs/workers-that-stay.md",
            type=float,
            default=10.0,
        ),
        value(
            "--park-timeout",
            "SECONDS",
            "end such workers after this time without a next round, as they hold their GPUs; if "
            "above 600, also how long they may wait in a round for others to start (default 600)",
            type=float,
            default=600.0,
        ),
        value(
            "--notice-signal",
            "SIG",
            "signal to the workers when this node is about to leave (a drain, a preemption), "
            "early enough to save their state; none: only the file that RDZV_NOTICE_FILE names "
            "(default SIGTERM)",
            default="SIGTERM",
        ),
        value(
            "--preemption-file",
            "PATH",
            "when this file appears, this node is about to be taken away: its workers get a "
            "notice, and it leaves; the first line may be the seconds that are left (default 30)",
            type=Path,
        ),
        value(
            "--signals-to-handle",
            "SIG,...",
            "signals on which this node leaves; its workers get them, too "
            "(default SIGTERM,SIGINT,SIGHUP,SIGQUIT)",
            default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        ),
        switch("--virtual-local-rank", "LOCAL_RANK is 0 for every worker, which sees one GPU"),
        value(
            "--warm",
            "MODULES",
            "fork the workers of all rounds from an interpreter that has imported these "
            "(default torch, and with it torch._dynamo); docs/warm.md lists what they must not do",
            nargs="?",
            const="torch",
        ),
        NO_WARM,
        value(
            "--numa-binding",
            "MODE",
            "bind each worker to CPUs near its GPU: node, socket, exclusive or core-complex",
            choices=("node", "socket", "exclusive", "core-complex"),
        ),
    ]


def _output() -> list[Option]:
    """List the options of the workers' output."""
    streams = "1 stdout, 2 stderr, 3 both; for all, or by LOCAL_RANK as in 0:3,1:2"
    return [
        value(
            "--log-dir",
            "DIR",
            "folder of worker logs and error files (default: a new one in the temporary folder)",
            type=Path,
        ),
        value(
            "--redirects",
            "0..3|RANK:N,...",
            f"worker output that goes to files in the log folder: {streams}",
            short="-r",
            default="0",
        ),
        value(
            "--tee",
            "0..3|RANK:N,...",
            f"worker output that goes to files and, with a prefix, to the console: {streams}",
            short="-t",
            default="0",
        ),
        value(
            "--local-ranks-filter",
            "RANK,...",
            "show the output of these LOCAL_RANKs only; files have that of all",
            default="",
        ),
        value(
            "--duplicate-stdout-filters",
            "TEXT,...",
            "copy teed stdout lines with any of these texts into filtered_stdout.log; ,, is a "
            "comma",
            default="",
        ),
        value(
            "--duplicate-stderr-filters",
            "TEXT,...",
            "the same for stderr, into filtered_stderr.log",
            default="",
        ),
        value(
            "--log-line-prefix-template",
            "TEXT",
            "prefix of teed lines; ${role_name}, ${rank} and ${local_rank} are replaced "
            "(default: TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else [${role_name}${local_rank}]:)",
        ),
    ]


def _torchrun_only() -> list[Option]:
    """List the options that only torchrun needs."""
    return [
        value("--monitor-interval", "S", _NO_EFFECT, type=float, default=0.1),
        value(
            "--start-method",
            None,
            _NO_EFFECT,
            default="spawn",
            choices=("spawn", "fork", "forkserver"),
        ),
        value(
            "--event-log-handler",
            "NAME",
            "where torchelastic's events go: null (default), console, or a name that is "
            "registered with torch in the job's interpreter",
            default="null",
        ),
        value(
            "--logs-specs",
            "NAME",
            "class that decides where workers' output goes: an entry point of the group "
            "torchrun.logs_specs in the job's interpreter",
        ),
    ]


def _legacy() -> list[Option]:
    """List the options that torch.distributed.launch has besides torchrun's."""
    return [
        switch("--use-env", "pass no --local-rank to the script: LOCAL_RANK is in the environment"),
    ]
