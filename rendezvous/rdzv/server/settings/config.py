"""Every limit and timing of rdzvd, with its unit, its default and the reason for it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rdzv.core.model import Tuning
from rdzv.core.nodes import NodesTuning
from rdzv.core.quarantine import QuarantineTuning
from rdzv.errors import InvalidRequestError
from rdzv.stores.base import HISTORY_ROWS
from rdzv.structs import struct
from rdzv.transport import protocol
from rdzv.transport.certificates import Certificate, check_authorities, check_pair, read_certificate
from rdzv.transport.endpoints import DEFAULT_PORT, Listen

if TYPE_CHECKING:
    from rdzv.stores.etcd_config import EtcdConfig

PROTOCOL_VERSION = protocol.VERSION


def oldest_protocol_version(ours: int) -> int:
    """Return the oldest protocol that a server of `ours` accepts.

    One back, so that servers may be upgraded before agents.
    """
    return max(ours - 1, 1)


OLDEST_PROTOCOL_VERSION = oldest_protocol_version(PROTOCOL_VERSION)

OTLP_ENVIRONMENT = "env"
"""In the place of a collector's address: OTEL_EXPORTER_OTLP_ENDPOINT says it."""

MINUTE_MS = 60_000
DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what is accepted and kept, so that no caller can exhaust the server."""

    # What a caller may send.
    name_chars: int = 128
    """rdzv_id and node_id: long enough for a pod's full name; they become names of folders."""
    uid_chars: int = 64
    """instance and run: random ids, a UUID is 36."""
    address_chars: int = 255
    """The longest DNS name."""
    label_chars: int = 255
    """role, topology, machine, versions."""
    secret_chars_least: int = 16
    """A job's secret: its hash is stored, and a short one could be found from that."""
    reason_chars: int = 1_000
    """A sentence for people; longer ones are cut."""
    traceback_chars: int = 16_384
    """Tracebacks are stored with the job; longer ones lose their beginning."""
    args_bytes: int = 128 * 1024
    """The arguments of a submitted job, which are stored with it and sent to each node."""
    env_bytes: int = 128 * 1024
    """Its environment, likewise; Linux takes as much in one variable."""
    env_variables: int = 1_000
    """The variables of that environment."""
    labels: int = 64
    """Labels of a node, and those that a job asks for."""
    gpus: int = 1_024
    """GPUs of a node: machines have 8 or 16."""
    capacity: int = 1_024
    """Jobs that a node takes at once."""
    priority: int = 1_000_000
    """A priority's distance from 0."""
    failing_checks: int = 16
    """Failing checks that one node tells of; one is enough not to place anything there."""
    failures: int = 64
    """Failed workers in one report; the earliest are kept, as in the core."""
    pids: int = 64
    """Stuck processes in one report; the others are dropped, for one is reason enough."""
    message_bytes: int = 4 * 1024 * 1024
    """One message on the wire; gRPC's own default. A hello with 64 jobs is far below."""
    nodes_per_job: int = 10_000
    """max_nodes: the largest job that the server is measured with."""
    local_world_size: int = 4_096
    """Workers of one node."""
    restarts: int = 1_000_000
    """max_restarts: more than can be spent."""
    timeout_ms: int = 30 * DAY_MS
    """Any timeout of a job, and any age: a month is longer than any launch waits."""
    away_ms: int = 60 * MINUTE_MS
    """Away(deadline): an upgrade of a node takes minutes; its seat is kept no longer."""

    # What is kept for callers.
    jobs: int = 10_000
    """Jobs with somebody in them, or with a round that is not settled."""
    nodes: int = 20_000
    """Nodes, connected or away: twice the largest job."""
    beliefs: int = 256
    """Jobs of one node in its hello."""
    outbox: int = 1_024
    """Messages that wait for one slow reader before its stream is closed."""
    inbox: int = 1_024
    """Messages of one node that wait while the store is away, before its stream is closed."""
    commands_at_once: int = 2_048
    """What one node may ask of its jobs at once: a hello with all of them is far below."""
    commands_per_second: int = 100
    """The same each second after that: a node has a few jobs, and a few words for each round."""
    connections: int = 32_768
    """Connections over gRPC: nodes, and some more; files for 512 others are kept back from what the
    system gives this process."""
    calls_per_connection: int = 1_024
    """Calls at once on one connection; more wait until others have ended."""
    metadata_bytes: int = 8 * 1024
    """Metadata of one call: a token and a trace are far below."""
    http_connections: int = 2_048
    """Connections to the HTTP port."""
    http_connections_per_peer: int = 512
    """The same of one address: a proxy before many browsers is below."""
    watchers: int = 1_000
    """Callers that watch a job, each of which costs a message for every change."""
    ended_jobs: int = 10_000
    """Jobs that have ended: as many as may be alive. Above, those that ended first are forgotten;
    each costs a look at every start, and its history some MiB at most."""
    log_readers: int = 32
    """Callers that read logs; each may have `log_buffer` on its way."""
    log_buffer: int = 4 * 1024 * 1024
    """Bytes of logs that wait for one slow reader, over all nodes, unless it reads many nodes."""
    log_window: int = 256 * 1024
    """Bytes that one node sends ahead of one reader: four pieces, so that neither waits."""
    log_window_least: int = 4 * 1024
    """The same where `log_buffer` is shared by many nodes."""
    log_positions: int = 65_536
    """Files in which one reader may go on after its stream was cut."""
    log_piece_bytes: int = 64 * 1024
    """What one piece of a log carries."""
    stack_takings: int = 8
    """Rounds whose stacks are being taken at once; each may have `stack_bytes` in memory."""
    stack_bytes: int = 384 * 1024
    """Stacks that are kept of one round: well below what a document may hold."""
    stack_groups: int = 256
    """Places at which the workers of one round are told apart."""
    stack_threads: int = 64
    """Threads of one worker that are kept; more are cut, as more frames are."""
    stack_frames: int = 128
    """Frames of one thread, likewise."""
    stack_workers: int = 256
    """Workers in one message of a node: it sends them one by one."""
    history_rows: int = HISTORY_ROWS
    """Rows of history of one job; see `stores.base`."""
    history_default: int = 200
    """Rows that ListEvents returns when none are asked for."""
    pending_rows: int = 256
    """Rows of history that wait for the next commit of their job before they get their own."""
    tokens: int = 2_000
    """Tokens of callers; all of them are in one document."""
    scrapes: int = 4
    """Callers that read /metrics at once: each has all of it in memory."""
    http_requests: int = 32
    """Requests of the HTTP API that are answered at once; streams and logs have their own."""
    http_streams: int = 200
    """Pages and programs that follow the HTTP API's stream. Those that follow the same share what
    it costs to write down a change, so each costs little more than its connection."""
    stream_frames: int = 512
    """Events that wait for one of them before it is dropped: a minute of a busy fleet."""
    stream_bytes: int = 8 * 1024 * 1024
    """Bytes of them: twice the first sight of ten thousand jobs. They are shared by all readers."""
    http_log_bytes: int = 1024 * 1024
    """What one answer shows of logs, over all RANKs, unless they are followed."""
    http_log_lines: int = 10_000
    """Lines of each file that one answer may be asked to show."""


@dataclass(frozen=True, slots=True)
class Timings:
    """The driver's own times; those of the cores are in `Tuning` and `NodesTuning`."""

    hello_timeout_ms: int = 10_000
    """A stream that says nothing is closed after this, for nobody else would notice it."""
    handshake_ms: int = 10_000
    """How long a new connection may take for TLS, and for HTTP/2's first words."""
    first_request_ms: int = 10_000
    """How long a new HTTP connection may take for its first request."""
    idle_connection_ms: int = 10 * MINUTE_MS
    """How long a gRPC connection without a call is kept; clients connect again by themselves."""
    leaderless_hold_ms: int = 4_000
    """How long a node's call is held while no server leads: well below its wait for a Welcome."""
    hear_every_ms: int = 1_000
    """Heartbeats enter the nodes core in one batch: well below the shortest lease of 5 s."""
    show_progress_every_ms: int = 1_000
    """How often whoever watches a job sees progress alone: nodes say it once a second."""
    watch_every_ms: int = 250
    """How often the loop looks whether it was held up."""
    deaf_after_ms: int = 500
    """A loop that was late by more than this could not hear: silence proves nothing."""
    settle_ms: int = 1_000
    """After such a pause, what has come in is read before any deadline counts."""
    place_quiet_ms: int = 20
    """How soon after a change submitted jobs are placed: changes that come together are one."""
    store_retry_ms: int = 1_000
    """How often a store that is away is tried again."""
    ended_kept_ms: int = 30 * DAY_MS
    """How long a job is kept after its end, and so how long its name goes on counting its rounds;
    no timeout of a job is longer, so nobody who was in it still waits to hear how it ended."""
    prune_every_ms: int = 60 * MINUTE_MS
    """How often ended jobs are looked at: small against how long they are kept."""
    log_answer_ms: int = 10_000
    """How long a node that is asked for logs may send nothing: longer than a lease."""
    stacks_answer_ms: int = 10_000
    """How long nodes that are asked for stacks may take: py-spy needs some 20 ms a worker."""
    straggler_after_ms: int = 60_000
    """How long a worker has to be slow until it is named: a rate is that of the last minute."""
    hang_gather_ms: int = 2_000
    """How long the other nodes of a round get to say that their workers hang too: they have looked
    within a second of each other."""
    stop_grace_ms: int = 500
    """What open streams get to end when the server stops."""
    ping_interval_ms: int = 20_000
    """HTTP/2 pings to a silent peer; the heartbeats of the streams are faster and lead."""
    ping_timeout_ms: int = 20_000
    """An unanswered ping ends the connection after this; gRPC's default is a minute."""
    min_ping_interval_ms: int = 300
    """Clients may ping this often, else gRPC ends them with "Too many pings"."""
    stream_beat_ms: int = 5_000
    """How often the HTTP API's stream says something, so that a reader knows when it has ended."""
    stream_rest_ms: int = 250
    """How long changes are gathered before those who follow see them."""
    stream_write_ms: int = 20_000
    """How long such a reader may take nothing: a page that sleeps comes back by itself."""
    log_answer_most_ms: int = 30_000
    """How long one HTTP answer waits for logs in all: what has come by then is shown."""
    traces_close_ms: int = 2_000
    """How long a collector may take for the last traces when the server stops."""
    ended_job_ms: int = 5 * MINUTE_MS
    """How long /metrics tells of a job that has ended, so that its last counts are scraped."""


def alter(held: Limits | Timings, name: str, value: int) -> None:
    """Change one limit or timing of a running server, for all who hold them: a reload alone may.

    It has an effect where the value is read when it is used; `configuration` knows which those are.
    """
    # Frozen, so that nobody else can do this; the event loop is the one thread that reads them.
    object.__setattr__(held, name, value)


def check_otlp(text: str) -> None:
    """Refuse what is no address of a collector.

    Raises:
        InvalidRequestError: it is neither a URL nor `env`.

    """
    url = urlsplit(text)
    if text != OTLP_ENVIRONMENT and (url.scheme not in ("http", "https") or not url.hostname):
        raise InvalidRequestError(
            f"{text!r} is no collector; give a URL such as http://127.0.0.1:4318, or "
            f"{OTLP_ENVIRONMENT!r} for what OTEL_EXPORTER_OTLP_ENDPOINT says"
        )


def _has_opentelemetry() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


_EXAMPLE = f"127.0.0.1:{DEFAULT_PORT}"


def default_data_dir() -> Path:
    """Return where data lives if nobody says otherwise.

    systemd's `$STATE_DIRECTORY` if it is set, `/var/lib/rdzv` for root, else
    `$XDG_STATE_HOME/rdzv`, which is `~/.local/state/rdzv`.
    """
    if state_directory := os.environ.get("STATE_DIRECTORY"):
        return Path(state_directory.split(":", maxsplit=1)[0])
    if os.geteuid() == 0:
        return Path("/var/lib/rdzv")
    state_home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state_home).expanduser() / "rdzv"


@struct(frozen=True)
class TlsFiles:
    """What the server shows to those who connect, and what it asks of them; all in PEM."""

    cert: Path
    key: Path
    client_ca: Path | None = None
    """Who has signed the certificates of those who connect; None: they are not asked for any."""
    http_requires: bool = True
    """Whether, with a client CA, who connects by HTTP has to show one, too."""
    token_listen: Listen | None = None
    """Where gRPC is served to those who have none; None: nowhere."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """All of them."""
        return (self.cert, self.key, *((self.client_ca,) if self.client_ca else ()))

    def check(self) -> Certificate:
        """Return what the certificate says.

        Raises:
            InvalidRequestError: the files cannot be used; the message names file and remedy.

        """
        if self.client_ca is not None:
            check_authorities(self.client_ca, "client CA")
        check_pair(self.cert, self.key, "certificate")
        found = read_certificate(self.cert.read_bytes(), f"certificate {self.cert}")
        if trouble := found.trouble(datetime.now(UTC)):
            raise InvalidRequestError(
                f"certificate {self.cert} can not be used: it {trouble}; give one that is valid"
            )
        return found


@struct(frozen=True)
class Config:
    """Everything that one rdzvd was started with."""

    listen: Listen
    data_dir: Path
    store: str = "sqlite"
    insecure: bool = False
    tls: TlsFiles | None = None
    """How connections are encrypted; None: they are not."""
    advertise: Listen | None = None
    """Where nodes and operators reach this server, if not where it listens."""
    etcd: EtcdConfig | None = None
    """The etcd that several servers share; only with the store `etcd`."""
    http: Listen | None = None
    """Where /healthz, /readyz, /metrics and /sd are answered; None: nowhere."""
    auth: bool = False
    """Whether every caller has to prove who it is."""
    init_admin_token: Path | None = None
    """Where the token of the first admin is, or is put, while there is no other admin."""
    otlp: str | None = None
    """Where rounds are sent as traces, by OTLP over HTTP, or `env`; None: nowhere."""
    c10d: Listen | None = None
    """Where torch's own store is served for torchrun's own rendezvous; None: nowhere."""
    c10d_python: str = sys.executable
    """The interpreter that serves it; it needs torch."""
    log_level: str = "info"
    log_format: str = "human"
    limits: Limits = field(default_factory=Limits)
    timings: Timings = field(default_factory=Timings)
    tuning: Tuning = field(default_factory=Tuning)
    nodes_tuning: NodesTuning = field(default_factory=NodesTuning)
    quarantine: QuarantineTuning = field(default_factory=QuarantineTuning)

    def check(self) -> None:
        """Refuse what would be unsafe, and files that cannot be used.

        Raises:
            InvalidRequestError: one of these; the message has the remedy.

        """
        if not self.listen.loopback and not self.insecure and self.open:
            raise InvalidRequestError(
                f"{self.listen} can be reached from other machines, and {self.open}; listen on "
                f"loopback ({_EXAMPLE}), {self._remedy}, or say --insecure if everyone who can "
                "reach this port may run and end jobs"
            )
        if self.http is not None and not self.http.loopback and not self.insecure and self.open:
            raise InvalidRequestError(
                f"--http {self.http} can be reached from other machines, and {self.open}; listen "
                f"on loopback, {self._remedy}, or say --insecure"
            )
        if self.tls is not None:
            self.tls.check()
            if (self.tls.token_listen or not self.tls.http_requires) and not self.auth:
                raise InvalidRequestError(
                    "--tls-token-listen and --tls-http-client-auth=accept are for callers with a "
                    "token in place of a certificate, and nobody would have to show one; give "
                    "--auth=required with it"
                )
        if self.init_admin_token is not None and not self.auth:
            raise InvalidRequestError(
                "--init-admin-token makes a token, and nobody would have to show one; give "
                "--auth=required with it"
            )
        if self.otlp is not None and not _has_opentelemetry():
            raise InvalidRequestError(
                f"`otlp` = {self.otlp!r} needs OpenTelemetry, which is not installed here; "
                "pip install 'rdzv[otel]', or leave `otlp` out"
            )
        self._check_replica()
        if self.c10d is not None:
            self._check_c10d(self.c10d)

    @property
    def open(self) -> str:
        """Say why whoever reaches this server may do everything; empty: not everyone may."""
        if self.tls is None and self.auth:
            return "nothing here is encrypted, so whoever is on the way may take a token"
        if self.tls is None:
            return "nothing here is encrypted or authenticated"
        if self.tls.client_ca is None and not self.auth:
            return "nobody who connects is asked who they are"
        return ""

    @property
    def exposed(self) -> str:
        """Say why everyone on other machines may do everything; empty: not everyone may."""
        token_listen = None if self.tls is None else self.tls.token_listen
        reached = [listen for listen in (self.listen, self.http, token_listen) if listen]
        return "" if all(listen.loopback for listen in reached) else self.open

    @property
    def _remedy(self) -> str:
        if self.tls is None:
            also = "" if self.auth else " and --tls-client-ca"
            return f"give --tls-cert, --tls-key{also} (`rdzvctl certs` makes them)"
        return "give --tls-client-ca (`rdzvctl certs` makes one) or --auth=required"

    def _check_replica(self) -> None:
        """Refuse a server that shares its store and that the others' nodes could not reach."""
        if (self.store == "etcd") != (self.etcd is not None):
            raise InvalidRequestError(
                "--store=etcd and --etcd-endpoints=HOST:PORT,... go together; one is missing"
            )
        at = self.advertise or self.listen
        if self.etcd is not None and (at.unspecified or (self.advertise and not at.port)):
            raise InvalidRequestError(
                f"{at} is no address at which others reach this server, and with a shared store "
                "they are told it; give --advertise=HOST:PORT"
            )

    def _check_c10d(self, c10d: Listen) -> None:
        if not c10d.loopback and not self.insecure:
            raise InvalidRequestError(
                f"--c10d {c10d} can be reached from other machines, and torch's store encrypts and "
                f"authenticates nothing; give a loopback address ({_EXAMPLE}), or say --insecure "
                "if everyone who can reach this port may run code on the nodes of its jobs"
            )
        if c10d == self.listen and c10d.port:
            raise InvalidRequestError(
                f"--c10d {c10d} is where --listen has nodes and operators connect; give one of "
                "them another port (torchrun's default for c10d is 29400)"
            )
