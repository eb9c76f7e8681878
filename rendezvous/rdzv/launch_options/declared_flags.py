"""The flags of rdzvrun, both torchrun's and our own, with their defaults and help texts.

Source: `torch/distributed/run.py` (`get_args_parser`) of torch 2.13.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONF_KEYS = {
    "join_timeout": "seconds to wait for min_nodes before giving up (default 600)",
    "last_call_timeout": "seconds to wait for more nodes once min_nodes are there (default 30)",
    "scale_up": "eager: new nodes end the running round; on-restart: they wait; after:SECONDS: "
    "they end it when it has run for this time (default eager)",
    "restart_window": "as --restart-window",
    "restart_backoff": "as --restart-backoff",
    "reuse": "false: refuse to begin a new run of a job whose last run has ended (default true)",
    "failure_stop_timeout": "seconds between SIGTERM and SIGKILL after a failure (default 5)",
    "server_timeout": "without workers: seconds to wait for a lost server (default 600)",
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
"""Keys of torchrun's backends that have no effect in rdzvrun, whose streams need no such timings.
"""

CONF_ALIASES = frozenset({"ca_cert", "ssl_cert", "ssl_cert_key"})
"""The names of `cacert`, `cert` and `key` in torchrun's etcd-v2 backend."""

_NO_EFFECT = "accepted as by torchrun; has no effect"

Option = tuple[tuple[str, ...], dict[str, Any]]


OWN = frozenset(
    {
        *("--exit-code", "--fence-after", "--hang-timeout", "--keep-timeout"),
        *("--log-line-prefix-template", "--max-preemptions", "--max-store-failures"),
        *("--no-progress-restarts", "--no-collective-trace", "--no-warm", "--node-id"),
        *("--no-restart-on", "--restart-on"),
        *("--notice-signal", "--park-timeout", "--preemption-file", "--print-completion"),
        *("--restart-backoff", "--restart-window", "--snapshot", "--snapshot-copy-rate"),
        *("--snapshot-dir", "--snapshot-dir-every", "--snapshot-dir-keep", "--snapshot-memory"),
        *("--tls-ca", "--tls-cert", "--tls-key", "--token-file"),
        *("--topology", "--version", "--warm"),
    }
)
"""Flags that torchrun lacks. They cannot be abbreviated, so that torchrun's abbreviations keep
their meaning."""


def value(
    name: str, metavar: str | None, text: str, *, short: str | None = None, **settings: Any
) -> Option:
    """Declare a flag that takes a value; `text` is its help, and `settings` are argparse's."""
    names = (name,) if short is None else (short, name)
    if (kind := settings.get("type")) in (int, float):
        settings["type"] = _number(kind, _UNITS.get(metavar or "", ""))
    return names, {"default": None, "metavar": metavar, "help": text, **settings}


_UNITS = {"SECONDS": " of seconds", "GB": " of gigabytes", "MB": " of megabytes"}


def _number(kind: type[int] | type[float], unit: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise ArgumentTypeError(f"give {what}{unit}, not {text!r}") from None

    return read


def switch(name: str, text: str, *, short: str | None = None) -> Option:
    """Declare a flag without a value; `text` is its help."""
    names = (name,) if short is None else (short, name)
    return names, {"action": "store_true", "help": text}


# Equivalent to `--warm=`, so the later of the two wins, and both override PET_WARM.
NO_WARM: Option = (
    ("--no-warm",),
    {
        **{"action": "store_const", "dest": "warm", "const": ""},
        "help": "start the workers of restarts cold, too; without this and --warm they are forked "
        "from an interpreter that imports torch once the first workers have",
    },
)


_CONF = "\n".join(f"{key}: {text}" for key, text in CONF_KEYS.items())
_STREAMS = "1 stdout, 2 stderr, 3 both; for all, or by LOCAL_RANK as in 0:3,1:2"

GROUPS = {
    "the job, its nodes and their server": [
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
            "the server (default port 29400; c10d: 0 for a free one); several rdzvd, separated by "
            "commas",
            default="",
        ),
        value("--rdzv-id", "JOB", "name of the job, the same on all nodes"),
        value("--rdzv-conf", "K=V,...", _CONF, default=""),
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
            "address at which other nodes reach this one (default: its address towards the server)",
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
            "reach rdzvd over TLS: the CA of its certificate (PEM; default RDZV_TLS_CA)",
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
            "sent only over TLS, or to this machine",
            type=Path,
        ),
    ],
    "workers, failures and restarts": [
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
            "restarts older than this do not count (default: all count)",
        ),
        value(
            "--restart-backoff",
            "BASE[:MAX]",
            "seconds before the second restart in a row if rounds fail within a minute, "
            "doubled with each further one, up to MAX; the first restart never waits "
            "(default 1:60; 0: no wait)",
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
            "no new highest step in RDZV_PROGRESS_FILE, and no change of --snapshot "
            "(default 0: any number)",
            type=int,
            default=0,
        ),
        value(
            "--snapshot",
            "PATH",
            "file or folder that the job saves its state to; a change to it counts as progress",
            type=Path,
        ),
        value(
            "--no-restart-on",
            "END,...",
            "fail at once if the worker whose failure counts ended so: an exit code, a signal such "
            "as SIGKILL, or an exception such as torch.OutOfMemoryError; see docs/restarts.md",
        ),
        value(
            "--restart-on",
            "END,...",
            "restart only if it ended so, within --max-restarts; fail at once otherwise",
        ),
        value(
            "--exit-code",
            "1|root-cause",
            "exit code if the job has failed: 1 (default), or that of the worker whose failure "
            "ended it, and 128 + n after signal n; see docs/troubleshooting.md",
            default="1",
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
            "treat a worker as hung if it has reported progress (RDZV_PROGRESS_FILE) or completed "
            "collectives, and then none for this long: its round ends as after a failure, and the "
            "stacks of all workers are kept; auto: learned from its steps (default: off); see "
            "docs/hangs.md",
        ),
        switch(
            "--no-collective-trace",
            "do not give the agent access to torch's record of collectives, which names the worker "
            "that the others wait for, or to the exception that ends a script; see docs/hangs.md",
        ),
        value(
            "--keep-timeout",
            "SECONDS",
            "seconds that workers using rdzv.worker have, when a round ends, to close their "
            "connections and wait for the next round, which they enter as the same processes; "
            "0: all workers are stopped (default 10); see docs/workers-that-stay.md",
            type=float,
            default=10.0,
        ),
        value(
            "--park-timeout",
            "SECONDS",
            "end waiting workers after this time without a next round, as they hold their GPUs; if "
            "above 600, also how long they may wait in a round for others to start (default 600)",
            type=float,
            default=600.0,
        ),
        value(
            "--snapshot-memory",
            "GB",
            "the most memory of this node for what state.save() saves; 0: none (default: half of "
            "what is free at the first save)",
            type=float,
        ),
        value(
            "--snapshot-copy-rate",
            "MB",
            "how many megabytes of snapshots of a sharded state a node sends to others in a "
            "second, at most, so that they keep copies; 0: no copies (default 200)",
            type=float,
            default=200.0,
        ),
        value(
            "--snapshot-dir",
            "DIR",
            "shared folder for the newest snapshot that state.save() has made, written at the end "
            "of the run, when this node is about to leave, and periodically; a new run resumes "
            "from it (default: none); see docs/workers-that-stay.md",
            type=Path,
        ),
        value(
            "--snapshot-dir-every",
            "SECONDS",
            "write to --snapshot-dir at this interval during training (default 600; 0: only at the "
            "end)",
            type=float,
            default=600.0,
        ),
        value(
            "--snapshot-dir-keep",
            "N",
            "steps that stay in --snapshot-dir; older ones are removed once a newer one is whole "
            "(default 2)",
            type=int,
            default=2,
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
    ],
    "output": [
        value(
            "--log-dir",
            "DIR",
            "folder of worker logs and error files (default: a new one in the temporary folder)",
            type=Path,
        ),
        value(
            "--redirects",
            "0..3|RANK:N,...",
            f"worker output that goes to files in the log folder: {_STREAMS}",
            short="-r",
            default="0",
        ),
        value(
            "--tee",
            "0..3|RANK:N,...",
            f"worker output that goes to files and, with a prefix, to the console: {_STREAMS}",
            short="-t",
            default="0",
        ),
        value(
            "--local-ranks-filter",
            "RANK,...",
            "show the output of these LOCAL_RANKs only; the files contain everyone's",
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
            "prefix of teed lines; ${role_name}, ${rank}, ${local_rank} and ${hostname} are "
            "replaced (default: TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else "
            "[${role_name}${local_rank}]:)",
        ),
    ],
    "known to torchrun": [
        value("--monitor-interval", "SECONDS", _NO_EFFECT, type=float, default=0.1),
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
    ],
}
"""rdzvrun's flags, each as its names and argparse arguments, grouped by subject."""

FLAGS = [option for options in GROUPS.values() for option in options]

LEGACY_FLAGS = [
    switch("--use-env", "pass no --local-rank to the script: LOCAL_RANK is in the environment"),
]
"""The options of torch.distributed.launch that torchrun lacks."""
