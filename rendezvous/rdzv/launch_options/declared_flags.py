"""The flags of rdzvrun, both torchrun's and our own: kind, default, target and help of each.

A flag's value is in the attribute of its name, or of `dest`: where a field of `Settings`,
`JobTerms` or `Launch` has that name, it is filled from there.

Source: `torch/distributed/run.py` (`get_args_parser`) of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from rdzv import bounds
from rdzv.errors import InvalidRequestError, did_you_mean
from rdzv.launch_options import kinds
from rdzv.launch_options.kinds import DAY_S, MAX_COUNT, MAX_TIMEOUT_S, Kind
from rdzv.structs import struct


@struct(frozen=True)
class Flag:
    """A declared flag."""

    names: tuple[str, ...]
    """Its long name, after its short name if it has one."""
    settings: Mapping[str, Any]
    own: bool
    """Whether torchrun lacks it. It cannot be abbreviated then, so that torchrun's abbreviations
    keep their meaning."""
    environ: bool
    """Whether PET_<NAME> in the environment is its default."""

    @property
    def dest(self) -> str:
        dest: str = self.settings.get("dest") or self.key
        return dest

    @property
    def key(self) -> str:
        """Its name in a file, and in PET_<NAME>."""
        return self.names[-1][2:].replace("-", "_")


def value(
    name: str, metavar: str | None, kind: Kind, text: str, *,
    short: str = "", own: bool = False, environ: bool = True, **settings: Any,
) -> Flag:  # fmt: skip
    """Declare a flag that takes a value; `text` is its help, and `settings` are argparse's.

    A default that is a string is parsed like a given value.
    """
    names = (short, name) if short else (name,)
    given = {"metavar": metavar, "help": _joined(text), "type": partial(kind, name), **settings}
    return Flag(names, given, own, environ)


def switch(
    name: str, text: str, *, short: str = "", own: bool = False, environ: bool = True,
    **settings: Any,
) -> Flag:  # fmt: skip
    """Declare a flag without a value; `text` is its help."""
    names = (short, name) if short else (name,)
    given = {"action": "store_true", "help": _joined(text), **settings}
    return Flag(names, given, own, environ)


def _joined(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.split("\n\n"))


# ---------------------------------------------------------------------- the keys of --rdzv-conf
# Each key and flag is one paragraph.
# fmt: off

Keys = Mapping[str, tuple[Kind, str | None, str]]
"""The kind, default and help of each key; a key without a default is None unless it is given."""

CONF: Keys = {
    "join_timeout": (kinds.positive_timeout, "600", """
        seconds to wait for min_nodes before giving up (default 600)"""),
    "last_call_timeout": (kinds.timeout, "30", """
        seconds to wait for more nodes once min_nodes are there (default 30)"""),
    "scale_up": (kinds.scale_up, "eager", """
        eager: new nodes end the running round; on-restart: they wait; after:SECONDS: they end it
        when it has run for this time (default eager)"""),
    "restart_window": (kinds.timeout, None, "as --restart-window"),
    "restart_backoff": (kinds.backoff, None, "as --restart-backoff"),
    "reuse": (kinds.truth, "true", """
        false: refuse to begin a new run of a job whose last run has ended (default true)"""),
    "failure_stop_timeout": (kinds.timeout, "5", """
        seconds between SIGTERM and SIGKILL after a failure (default 5)"""),
    "server_timeout": (kinds.timeout, "600", """
        without workers: seconds to wait for a lost server (default 600)"""),
    "etcd_prefix": (kinds.text, "/torchelastic/p2p", """
        etcd: prefix of the keys of all jobs (default /torchelastic/p2p)"""),
    "protocol": (kinds.text, "http", "etcd: http or https (default http)"),
    "cacert": (kinds.path, None, "etcd: file with the CA of its certificates (PEM); also ca_cert"),
    "cert": (kinds.path, None, """
        etcd: file with this node's certificate (PEM), with `key`; also ssl_cert"""),
    "key": (kinds.path, None, """
        etcd: file with the key of that certificate (PEM); also ssl_cert_key"""),
    "etcd_user": (kinds.text, "", "etcd: user of the nodes, with `etcd_password_file`"),
    "etcd_password_file": (kinds.path, None, "etcd: file with the password in its first line"),
    "is_host": (kinds.truth, None, """
        c10d: whether this node serves the job (default: if it owns the endpoint's host)"""),
}

CONF_ALIASES = {"ca_cert": "cacert", "ssl_cert": "cert", "ssl_cert_key": "key"}
"""The names of keys in torchrun's etcd-v2 backend."""

TORCH_CONF_KEYS = frozenset({
    *("close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt"),
    *("read_timeout", "store_type", "timeout"),
})
"""Keys of torchrun's backends that have no effect in rdzvrun, whose streams need no such timings.
"""
# fmt: on


def parse_conf(flag: str, text: str) -> dict[str, Any]:
    """Parse K=V,K=V into the value of every key in `CONF`, and the text of any other."""
    given: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key or not value:
            raise InvalidRequestError(f"{flag}: {pair!r} is not of the form key=value")
        given[key] = value
    for alias, key in CONF_ALIASES.items():
        if alias in given:
            given.setdefault(key, given.pop(alias))
    return read_keys(CONF, given)


def read_keys(keys: Keys, given: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = dict(given)
    for key, (kind, default, _) in keys.items():
        text = given.get(key, default)
        found[key] = None if text is None else kind(f"--rdzv-conf: {key}", text)
    return found


def unknown_keys(conf: Iterable[str]) -> list[str]:
    return [unknown_key(key, CONF) for key in conf if key not in CONF.keys() | TORCH_CONF_KEYS]


def unknown_key(key: str, known: Iterable[str]) -> str:
    remedy = did_you_mean(key, known, f"known keys: {', '.join(known)}")
    return f"--rdzv-conf: ignoring unknown key {key}; {remedy}"


# ---------------------------------------------------------------------- the flags

# fmt: off
_NO_EFFECT = "accepted as by torchrun; has no effect"
_STREAMS = "1 stdout, 2 stderr, 3 both; for all, or by LOCAL_RANK as in 0:3,1:2"

GROUPS = {
    "the job, its nodes and their server": [
        value("--nnodes", "N|MIN:MAX", kinds.nnodes, """
            number of nodes of the job (default 1:1)""", default="1:1"),
        value("--nproc-per-node", "N", kinds.nproc, """
            workers on this node (default 1): a number; gpu, xpu or cpu, as many as it has; auto,
            the first of these that it has""", default="1"),
        value("--rdzv-backend", "NAME", kinds.text, """
            rdzv: a standing rdzvd at the endpoint; c10d: the node that owns the endpoint's host
            serves; static: node rank 0 serves (default: static if --node-rank or --master-* is
            given, or one node serves itself at an endpoint that is free, else rdzv)""",
            default=""),
        value("--rdzv-endpoint", "HOST[:PORT]", kinds.text, """
            the server (default port 29400; c10d: 0 for a free one); several rdzvd, separated by
            commas""", default=""),
        value("--rdzv-id", "JOB", bounds.name, "name of the job, the same on all nodes"),
        value("--rdzv-conf", "K=V,...", parse_conf,
            "\n\n".join(f"{key}: {text}" for key, (_, _, text) in CONF.items()), default=""),
        switch("--standalone", "one node, with a server of its own"),
        value("--node-id", "NAME", kinds.any_name, """
            name of this node (default: host name and process id)""", default="", own=True),
        value("--node-rank", "N", kinds.whole(0), "static: rank of this node"),
        value("--master-addr", "ADDR", bounds.label, """
            static: address of node rank 0 (default 127.0.0.1)""", default=""),
        value("--master-port", "PORT", kinds.whole(0, 65_535), """
            static: port at which node rank 0 serves the rendezvous (default 29500)"""),
        value("--local-addr", "ADDR", bounds.label, """
            address at which other nodes reach this one (default: its address towards the
            server)""", default=""),
        value("--topology", "LABEL", bounds.label, """
            this node's place in the network, e.g. its rack; ranks of one place are adjacent""",
            default="", own=True),
        # These have their defaults in RDZV_* variables, as for rdzvctl and the plug-in.
        value("--tls-ca", "FILE", kinds.path, """
            reach rdzvd over TLS: the CA of its certificate (PEM; default RDZV_TLS_CA)""",
            own=True, environ=False),
        value("--tls-cert", "FILE", kinds.path, """
            this node's certificate for rdzvd (PEM; default RDZV_TLS_CERT)""",
            own=True, environ=False),
        value("--tls-key", "FILE", kinds.path, """
            the key of that certificate (default RDZV_TLS_KEY)""", own=True, environ=False),
        value("--token-file", "FILE", kinds.path, """
            the token for rdzvd (default RDZV_TOKEN_FILE, or the token in RDZV_TOKEN); it is sent
            only over TLS, or to this machine""", own=True, environ=False),
    ],
    "workers, failures and restarts": [
        value("--max-restarts", "N", kinds.whole(0), """
            worker failures that the whole job survives (default 0); a node that is lost, leaves or
            joins does not count""", default=0),
        value("--restart-window", "SECONDS", kinds.timeout, """
            restarts older than this do not count (default: all count)""", own=True),
        value("--restart-backoff", "BASE[:MAX]", kinds.backoff, """
            seconds before the second restart in a row if rounds fail within a minute, doubled with
            each further one, up to MAX; the first restart never waits (default 1:60; 0: no
            wait)""", own=True),
        value("--max-preemptions", "N", kinds.whole(0), """
            rounds that may end because a node was lost or left; the next fails the job (default:
            any number)""", own=True),
        value("--max-store-failures", "N", kinds.whole(0), """
            rounds that may end because their store failed; the next fails the job (default: any
            number)""", own=True),
        value("--no-progress-restarts", "K", kinds.whole(0), """
            fail, with exit code 93, after K restarts in a row without progress: no new highest step
            in RDZV_PROGRESS_FILE, and no change of --snapshot (default 0: any number)""",
            default=0, own=True),
        value("--snapshot", "PATH", kinds.printable_path, """
            file or folder that the job saves its state to; a change to it counts as progress""",
            own=True),
        value("--no-restart-on", "END,...", kinds.worker_ends, """
            fail at once if the worker whose failure counts ended so: an exit code, a signal such as
            SIGKILL, or an exception such as torch.OutOfMemoryError; see docs/restarts.md""",
            default=(), own=True),
        value("--restart-on", "END,...", kinds.worker_ends, """
            restart only if it ended so, within --max-restarts; fail at once otherwise""",
            default=(), own=True),
        value("--exit-code", "1|root-cause", kinds.root_cause, """
            exit code if the job has failed: 1 (default), or that of the worker whose failure ended
            it, and 128 + n after signal n; see docs/troubleshooting.md""",
            default=False, dest="root_cause_exit", own=True),
        value("--role", "ROLE", bounds.label, "role of this node's workers", default="default"),
        switch("--module", "run a module, as python -m does", short="-m"),
        switch("--no-python", "run a program, without python"),
        switch("--run-path", "run the script with runpy.run_path, as a library might"),
        value("--shutdown-timeout", "SECONDS", kinds.ms(0, DAY_S), """
            between SIGTERM and SIGKILL when workers are stopped (default 30)"""),
        value("--fence-after", "SECONDS", kinds.ms(
            1, 3_600, ", and at least 1 s below the server's lease"), """
            kill this node's workers after this time without proof that the server hears the node,
            so that they are gone before others take their place; at least 1 s below the server's
            lease of 5 s or more (default: they continue without a server)""",
            default=0, dest="fence_after_ms", own=True),
        value("--hang-timeout", "SECONDS|auto", kinds.hang_timeout, """
            treat a worker as hung if it has reported progress (RDZV_PROGRESS_FILE) or completed
            collectives, and then none for this long: its round ends as after a failure, and the
            stacks of all workers are kept; auto: learned from its steps (default: off); see
            docs/hangs.md""", own=True),
        switch("--no-collective-trace", """
            do not give the agent access to torch's record of collectives, which names the worker
            that the others wait for, or to the exception that ends a script; see
            docs/hangs.md""", own=True),
        value("--keep-timeout", "SECONDS", kinds.ms(0, DAY_S), """
            seconds that workers using rdzv.worker have, when a round ends, to close their
            connections and wait for the next round, which they enter as the same processes; 0: all
            workers are stopped (default 10); see docs/workers-that-stay.md""",
            default=10_000, dest="keep_timeout_ms", own=True),
        value("--park-timeout", "SECONDS", kinds.ms(0, DAY_S), """
            end waiting workers after this time without a next round, as they hold their GPUs; if
            above 600, also how long they may wait in a round for others to start (default 600)""",
            default=600_000, dest="park_timeout_ms", own=True),
        value("--standby", "hot|cold", kinds.text, """
            hot: while this node waits for a seat, its workers run the script up to its function
            under @elastic of rdzv.worker, and wait there; cold: they start when it gets one
            (default hot); see docs/standby.md""",
            choices=("hot", "cold"), default="hot", own=True),
        value("--snapshot-memory", "GB", kinds.number(0, 1_000_000, "gigabytes", scale=10**9), """
            the most memory of this node for what state.save() saves; 0: none (default: half of
            what is free at the first save)""", own=True),
        value("--snapshot-copy-rate", "MB", kinds.or_zero(kinds.number(
            1, 100_000, "megabytes a second", scale=10**6,
            also=", or 0 to have no copies on other nodes")), """
            how many megabytes of snapshots of a sharded state a node sends to others in a second,
            at most, so that they keep copies; 0: no copies (default 200)""",
            default=200_000_000, own=True),
        value("--snapshot-dir", "DIR", kinds.printable_path, """
            shared folder for the newest snapshot that state.save() has made, written at the end of
            the run, when this node is about to leave, and periodically; a new run resumes from it
            (default: none); see docs/snapshots.md""", own=True),
        value("--snapshot-dir-every", "SECONDS", kinds.or_zero(kinds.number(
            1, MAX_TIMEOUT_S, "seconds", also=", or 0 to write only at the end")), """
            write to --snapshot-dir at this interval during training (default 600; 0: only at the
            end)""", default=600.0, own=True),
        value("--snapshot-dir-keep", "N", kinds.whole(1, MAX_COUNT), """
            steps that stay in --snapshot-dir; older ones are removed once a newer one is whole
            (default 2)""", default=2, own=True),
        value("--notice-signal", "SIG", kinds.notice_signum, """
            signal to the workers when this node is about to leave (a drain, a preemption), early
            enough to save their state; none: only the file that RDZV_NOTICE_FILE names (default
            SIGTERM)""", default="SIGTERM", dest="notice_signum", own=True),
        value("--preemption-file", "PATH", kinds.path, """
            when this file appears, this node is about to be taken away: its workers get a notice,
            and it leaves; the first line may be the seconds that are left (default 30)""",
            own=True),
        value("--signals-to-handle", "SIG,...", kinds.signals, """
            signals on which this node leaves; its workers get them, too (default
            SIGTERM,SIGINT,SIGHUP,SIGQUIT)""", default="SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
        switch("--virtual-local-rank", "LOCAL_RANK is 0 for every worker, which sees one GPU"),
        value("--warm", "MODULES", kinds.modules, """
            fork the workers of all rounds from an interpreter that has imported these (default
            torch, and with it torch._dynamo); docs/warm.md lists what they must not do""",
            nargs="?", const="torch", own=True),
        # The later of --warm and this one wins, and both override PET_WARM.
        switch("--no-warm", """
            start the workers of restarts cold, too; without this and --warm they are forked from
            an interpreter that imports torch once the first workers have""",
            action="store_const", dest="warm", const=(), own=True, environ=False),
        value("--numa-binding", "MODE", kinds.text, """
            bind each worker to CPUs near its GPU: node, socket, exclusive or core-complex""",
            choices=("node", "socket", "exclusive", "core-complex"), environ=False),
    ],
    "output": [
        value("--log-dir", "DIR", kinds.path, """
            folder of worker logs and error files (default: a new one in the temporary folder)"""),
        value("--redirects", "0..3|RANK:N,...", kinds.streams, f"""
            worker output that goes to files in the log folder: {_STREAMS}""",
            short="-r", default=0),
        value("--tee", "0..3|RANK:N,...", kinds.streams, f"""
            worker output that goes to files and, with a prefix, to the console: {_STREAMS}""",
            short="-t", default=0),
        value("--local-ranks-filter", "RANK,...", kinds.text, """
            show the output of these LOCAL_RANKs only; the files contain everyone's""",
            default=""),
        value("--duplicate-stdout-filters", "TEXT,...", kinds.text, """
            copy teed stdout lines with any of these texts into filtered_stdout.log; ,, is a
            comma""", default=""),
        value("--duplicate-stderr-filters", "TEXT,...", kinds.text, """
            the same for stderr, into filtered_stderr.log""", default=""),
        value("--log-line-prefix-template", "TEXT", kinds.text, """
            prefix of teed lines; ${role_name}, ${rank}, ${local_rank} and ${hostname} are replaced
            (default: TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else [${role_name}${local_rank}]:)""",
            own=True),
    ],
    "known to torchrun": [
        value("--monitor-interval", "SECONDS", kinds.number(0, MAX_TIMEOUT_S, "seconds"),
            _NO_EFFECT, default=0.1),
        value("--start-method", None, kinds.text, _NO_EFFECT,
            default="spawn", choices=("spawn", "fork", "forkserver")),
        value("--event-log-handler", "NAME", kinds.text, """
            where torchelastic's events go: null (default), console, or a name that is registered
            with torch in the job's interpreter""", default="null"),
        value("--logs-specs", "NAME", kinds.text, """
            class that decides where workers' output goes: an entry point of the group
            torchrun.logs_specs in the job's interpreter""", environ=False),
    ],
}
# fmt: on

FLAGS = [flag for flags in GROUPS.values() for flag in flags]

LEGACY_FLAGS = [
    switch(
        "--use-env",
        "pass no --local-rank to the script: LOCAL_RANK is in the environment",
        environ=False,
    )
]
"""The options of torch.distributed.launch that torchrun lacks."""
