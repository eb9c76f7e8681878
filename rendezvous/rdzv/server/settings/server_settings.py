"""rdzvd's configuration: the knobs that operators turn, the `Config` that they make, and reloads.

The file and the command line say the same things; the command line wins. What a reload applies is
only what is read when it is used: it is changed in the `Limits` and `Timings` that everyone in the
server already holds (`config.alter`), so no part of the server knows of reloads.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rdzv.core.model import Tuning
from rdzv.core.nodes import NodesTuning
from rdzv.core.quarantine import QuarantineTuning
from rdzv.errors import InvalidRequestError
from rdzv.server.settings.config import (
    Config,
    Limits,
    Timings,
    TlsFiles,
    alter,
    check_otlp,
    default_data_dir,
)
from rdzv.settings.toml_settings import Kind, Knob, Knobs, Rule, Values, compare, load, spelled
from rdzv.structs import struct
from rdzv.transport.endpoints import Listen

if TYPE_CHECKING:
    from rdzv.stores.etcd_config import EtcdConfig

log = logging.getLogger("rdzv.server")

DEFAULT_FILE = Path("/etc/rdzv/rdzvd.toml")
"""Read if it is there and no other is named."""

MINUTE = 60
HOUR = 3_600
DAY = 86_400

_PARTS = {
    "limits": Limits(),
    "timings": Timings(),
    "tuning": Tuning(),
    "nodes_tuning": NodesTuning(),
    "quarantine": QuarantineTuning(),
}
"""By name, the parts of a `Config` whose fields knobs turn, at their defaults."""


@struct(frozen=True)
class _Bound:
    """A knob that turns one field, or several alike: `part.field`."""

    knob: Knob
    fields: tuple[str, ...]


def _bound(key: str, kind: Kind, fields: tuple[str, ...], reason: str, **more: Any) -> _Bound:
    defaults = {getattr(_PARTS[part], name) for part, name in (f.split(".") for f in fields)}
    assert len(defaults) == 1, f"{fields} have several defaults"
    default = defaults.pop()
    if kind is Kind.DURATION:
        default = default // 1000 if default % 1000 == 0 else default / 1000
    return _Bound(Knob(key=key, kind=kind, default=default, reason=reason, **more), fields)


def _duration(key: str, *fields: str, reason: str, **more: Any) -> _Bound:
    return _bound(key, Kind.DURATION, fields, reason, **more)


def _count(key: str, field: str, unit: str, reason: str, **more: Any) -> _Bound:
    return _bound(key, Kind.INT, (field,), reason, unit=unit, **more)


def _size(key: str, field: str, reason: str, **more: Any) -> _Bound:
    return _bound(key, Kind.SIZE, (field,), reason, **more)


def _etcd_endpoint(text: str) -> None:
    from rdzv.stores.etcd_config import parse_endpoints

    if "," in text:
        raise InvalidRequestError(f"{text!r} has a comma; give each endpoint by itself")
    parse_endpoints(text)


_PLAIN = (
    Knob(
        key="listen",
        kind=Kind.STR,
        default="127.0.0.1:29400",
        unit="HOST:PORT",
        parse=Listen.parse,
        reason="Where nodes and operators connect. Port 0 takes a free one; an IPv6 host stands in "
        "brackets. Other than loopback only with `tls.client_ca`, or `insecure`.",
    ),
    Knob(
        key="advertise",
        kind=Kind.STR,
        unit="HOST:PORT",
        parse=Listen.parse,
        default_words="where it listens",
        reason="Where nodes and operators reach this rdzvd, if not where it listens.",
    ),
    Knob(
        key="http",
        kind=Kind.STR,
        unit="HOST:PORT",
        parse=Listen.parse,
        default_words="nowhere",
        reason="Serve the live page, /api, /metrics, /sd, /healthz and /readyz here, by TLS if "
        "`tls.cert` is given. Other than loopback only with `tls.client_ca`, or `insecure`.",
    ),
    Knob(
        key="otlp",
        kind=Kind.STR,
        unit="URL",
        parse=check_otlp,
        default_words="nowhere",
        reason="Send rounds as traces to this OpenTelemetry collector, by OTLP over HTTP; `env`: "
        "where OTEL_EXPORTER_OTLP_ENDPOINT says. Needs rdzv[otel].",
    ),
    Knob(
        key="insecure",
        kind=Kind.BOOL,
        default=False,
        reason="Listen beyond loopback although nothing is encrypted, or nobody authenticated: "
        "everyone who reaches the port may run and end jobs.",
    ),
    Knob(
        key="auth",
        kind=Kind.STR,
        default_words="required with `tls.client_ca`, else none",
        choices=("none", "required"),
        reason="Whether callers have to prove who they are, by a client certificate or a token; "
        "docs/roles.md says who may then do what. `none`: everyone may do everything.",
    ),
    Knob(
        key="init_admin_token",
        kind=Kind.PATH,
        default_words="none",
        reason="While there is no token of an admin: the one in this file becomes one, and if "
        "there is no such file, it is made. Only with `auth` = required.",
    ),
    Knob(
        key="data_dir",
        kind=Kind.PATH,
        default_words="`$STATE_DIRECTORY` if set (systemd does), `/var/lib/rdzv` for root, else "
        "`$XDG_STATE_HOME/rdzv` (`~/.local/state/rdzv`)",
        reason="Where jobs are remembered, on a local disk; one rdzvd owns it.",
    ),
    Knob(
        key="store",
        kind=Kind.STR,
        default="sqlite",
        choices=("sqlite", "memory", "etcd"),
        reason="sqlite survives restarts; memory forgets; etcd is shared by several rdzvd, of "
        "which one leads and any other takes over.",
    ),
    Knob(
        key="c10d",
        kind=Kind.STR,
        unit="HOST:PORT",
        parse=Listen.parse,
        default_words="nowhere",
        reason="Serve torch's own store here too, for torchrun --rdzv-backend=c10d; `rdzvctl` "
        "shows its jobs. They do not outlive this rdzvd. Other than loopback only with `insecure`.",
    ),
    Knob(
        key="c10d_python",
        kind=Kind.PATH,
        default_words="the one that runs rdzvd",
        reason="The interpreter that serves torch's own store; it needs torch.",
    ),
    Knob(
        key="log_level",
        kind=Kind.STR,
        default="info",
        choices=("debug", "info", "warning", "error"),
        reload=True,
        reason="The least that is logged, to stderr.",
    ),
    Knob(
        key="log_format",
        kind=Kind.STR,
        default="human",
        choices=("human", "json"),
        reload=True,
        reason="Lines for eyes, or one JSON object a line.",
    ),
    Knob(
        key="tls.cert",
        kind=Kind.PATH,
        default_words="connections are not encrypted",
        reason="The certificate that this rdzvd shows to those who connect, with those between it "
        "and the CA, if any (PEM). This file and the next two are read anew when they have "
        "changed and somebody connects; what is connected stays.",
    ),
    Knob(
        key="tls.key",
        kind=Kind.PATH,
        reason="The key of that certificate (PEM), which only rdzvd may read.",
    ),
    Knob(
        key="tls.client_ca",
        kind=Kind.PATH,
        default_words="nobody is asked for a certificate",
        reason="Let in only those who show a certificate that this CA has signed (PEM).",
    ),
    Knob(
        key="tls.http_client_auth",
        kind=Kind.STR,
        default="require",
        choices=("require", "accept"),
        reason="With `tls.client_ca`: whether who connects to `http` has to show a certificate, or "
        "may show a token instead, as browsers do.",
    ),
    Knob(
        key="tls.token_listen",
        kind=Kind.STR,
        unit="HOST:PORT",
        parse=Listen.parse,
        default_words="nowhere",
        reason="With `tls.client_ca`: where nodes and operators without a certificate connect, and "
        "show a token. gRPC can not leave that open at one port: who connects to `listen` always "
        "has to show a certificate.",
    ),
    Knob(
        key="etcd.endpoints",
        kind=Kind.STRINGS,
        unit="HOST:PORT",
        parse=_etcd_endpoint,
        default_words="none",
        reason="The members of the etcd v3 cluster, for the store etcd; with https:// in front for "
        "TLS.",
    ),
    Knob(
        key="etcd.prefix",
        kind=Kind.STR,
        default="/rdzv",
        reason="Where all keys lie; servers with the same prefix share their jobs.",
    ),
    Knob(key="etcd.user", kind=Kind.STR, reason="Who rdzvd is to etcd."),
    Knob(
        key="etcd.password_file",
        kind=Kind.PATH,
        reason="Its password: the first line of this file, which only rdzvd should be able to "
        "read.",
    ),
    Knob(
        key="etcd.ca",
        kind=Kind.PATH,
        default_words="the system's authorities",
        reason="etcd's CA (PEM).",
    ),
    Knob(key="etcd.cert", kind=Kind.PATH, reason="rdzvd's certificate for etcd (PEM)."),
    Knob(key="etcd.key", kind=Kind.PATH, reason="Its private key (PEM)."),
    Knob(
        key="etcd.ttl",
        kind=Kind.INT,
        default=3,
        unit="seconds",
        least=2,
        most=300,
        reason="How long after a leader was last heard another takes over; raise it if leaders "
        "change without need.",
    ),
)

_BOUND = (
    # ---------------------------------------------------------------- how nodes are given up
    _duration(
        "lease.duration",
        "nodes_tuning.lease_ms",
        least=2,
        most=10 * MINUTE,
        reason="How long a silent node is waited for before its seat is given away. Raise it on a "
        "network that stalls; --fence-after of every node must stay 1 s below it.",
    ),
    _count(
        "lease.nodes",
        "nodes_tuning.lease_nodes",
        "nodes",
        least=1,
        reason="Up to so many nodes have the lease above; with more it grows, so that heartbeats "
        "do not fill the server's time.",
    ),
    _duration(
        "lease.longest",
        "nodes_tuning.lease_max_ms",
        least=2,
        most=10 * MINUTE,
        reason="The lease when there are `longest_nodes` or more.",
    ),
    _count(
        "lease.longest_nodes",
        "nodes_tuning.lease_nodes_max",
        "nodes",
        least=1,
        reason="From so many nodes on the lease is the longest.",
    ),
    _count(
        "lease.heartbeats",
        "nodes_tuning.heartbeats_per_lease",
        "heartbeats",
        least=2,
        most=20,
        reason="How often a node says that it lives within a lease of up to 15 s: one may be lost "
        "and the next one late. In a longer one it does so early enough to be late by 10 s.",
    ),
    _duration(
        "lease.takeover_grace",
        "tuning.takeover_grace_ms",
        "nodes_tuning.takeover_grace_ms",
        least=5,
        most=HOUR,
        reason="After a start, a take-over or a pause of the server: how long nobody is given up "
        "unheard. Nodes try to reconnect at least every 5 s.",
    ),
    _duration(
        "lease.reconnect_grace",
        "tuning.reconnect_grace_ms",
        "nodes_tuning.reconnect_grace_ms",
        least=0,
        most=MINUTE,
        reason="How long a seat is kept for an rdzvrun whose stream ended: its workers die with "
        "it, so there is nothing to wait for but a connection that was cut.",
    ),
    # ---------------------------------------------------------------- how groups form
    _duration(
        "forming.gather_quiet",
        "tuning.gather_quiet_ms",
        least=0,
        most=10 * MINUTE,
        reason="Newcomers are let into a running job when none has come for so long, so that "
        "several cost one restart.",
    ),
    _duration(
        "forming.gather",
        "tuning.gather_ms",
        least=0,
        most=HOUR,
        reason="They are let in so long after the first of them, whoever else comes.",
    ),
    _duration(
        "forming.claims_quiet",
        "tuning.claims_quiet_ms",
        least=1,
        most=HOUR,
        reason="A server without memory learns a round from its nodes: how long none of them has "
        "to say anything new before those that said nothing are given up.",
    ),
    _duration(
        "forming.stop_margin",
        "tuning.stop_margin_ms",
        least=1,
        most=HOUR,
        reason="What a node may take to stop its workers beyond its own shutdown_timeout, before "
        "it is given up. Raise it where processes take long to die, as with GPUs they do.",
    ),
    _duration(
        "forming.flap_window",
        "tuning.flap_window_ms",
        least=1,
        most=7 * DAY,
        reason="A node that is lost twice within this time has to wait before it may end a running "
        "round.",
    ),
    _duration(
        "forming.flap_hold",
        "tuning.flap_hold_ms",
        least=0,
        most=DAY,
        reason="How long it waits; the wait doubles with each further loss.",
    ),
    _duration(
        "forming.store_backoff",
        "tuning.store_backoff_ms",
        least=0.01,
        most=10 * MINUTE,
        reason="The wait before the next round when a store host has failed; it doubles with each "
        "failure in a row.",
    ),
    _duration(
        "forming.store_backoff_longest",
        "tuning.store_backoff_max_ms",
        least=0.01,
        most=HOUR,
        reason="It becomes no longer than this.",
    ),
    _duration(
        "forming.root_cause_window",
        "tuning.root_cause_window_ms",
        least=0,
        most=MINUTE,
        reason="Failures so soon after the first are shown with it, for they may have one cause. "
        "Raise it if collectives take longer to fail elsewhere.",
    ),
    # ---------------------------------------------------------------- nodes that fail
    _count(
        "quarantine.failures",
        "quarantine.failures",
        "rounds",
        least=0,
        most=1_000,
        reason="A daemon's node is quarantined when so many rounds have ended by its fault: its "
        "worker was the root cause, or could not be killed. 0: never.",
    ),
    _duration(
        "quarantine.window",
        "quarantine.window_ms",
        least=1,
        most=30 * DAY,
        reason="Only what was within this time counts together: broken hardware fails again soon.",
    ),
    _duration(
        "quarantine.ttl",
        "quarantine.ttl_ms",
        least=1,
        most=365 * DAY,
        reason="For how long nothing is placed on a quarantined node: until somebody has looked at "
        "it. `rdzvctl uncordon` lifts it.",
    ),
    _count(
        "quarantine.max_nodes",
        "quarantine.max_nodes",
        "nodes",
        least=0,
        most=1_000_000,
        reason="How many are quarantined at a time. 0: a quarter of the daemons that are known, at "
        "least one; the only one never is.",
    ),
    # ---------------------------------------------------------------- what is named
    _duration(
        "progress.straggler_after",
        "timings.straggler_after_ms",
        least=1,
        most=DAY,
        reason="How long a worker has to take more than twice as long for a step as the median of "
        "its role until it is named as a straggler.",
    ),
    # ---------------------------------------------------------------- what is kept
    _duration(
        "retention.ended_for",
        "timings.ended_kept_ms",
        least=1,
        most=3_650 * DAY,
        reload=True,
        reason="How long a job is remembered after its end, with its events. Its name goes on "
        "counting rounds for so long.",
    ),
    _count(
        "retention.ended_jobs",
        "limits.ended_jobs",
        "jobs",
        least=1,
        most=1_000_000,
        reload=True,
        reason="How many jobs that have ended are remembered; those that ended first are forgotten "
        "first. Each costs a look at every start.",
    ),
    _duration(
        "retention.look_every",
        "timings.prune_every_ms",
        least=1,
        most=DAY,
        reload=True,
        reason="How often ended jobs are looked at, and so how soon a change of the two lines "
        "above is felt; a change of this one holds after the next look.",
    ),
    _count(
        "retention.events",
        "limits.history_rows",
        "events of one job",
        least=100,
        most=1_000_000,
        reason="How many of a job's newest events are kept.",
    ),
    # ---------------------------------------------------------------- what is accepted
    _count(
        "limits.jobs",
        "limits.jobs",
        "jobs",
        least=1,
        most=1_000_000,
        reload=True,
        reason="Jobs with somebody in them or with a round that is not settled; each takes memory.",
    ),
    _count(
        "limits.nodes",
        "limits.nodes",
        "nodes",
        least=1,
        most=1_000_000,
        reload=True,
        reason="Nodes, connected or away; each stream needs about 30 KB.",
    ),
    _count(
        "limits.nodes_per_job",
        "limits.nodes_per_job",
        "nodes",
        least=1,
        most=1_000_000,
        reload=True,
        reason="What max_nodes of a job may be: the largest job that rdzvd is measured with.",
    ),
    _count(
        "limits.local_world_size",
        "limits.local_world_size",
        "workers",
        least=1,
        most=65_536,
        reload=True,
        reason="Workers that one node may bring to a job.",
    ),
    _count(
        "limits.jobs_per_node",
        "limits.beliefs",
        "jobs",
        least=1,
        most=10_000,
        reload=True,
        reason="Jobs that one node may be in.",
    ),
    _duration(
        "limits.job_timeout",
        "limits.timeout_ms",
        least=1,
        most=3_650 * DAY,
        reload=True,
        reason="What any timeout of a job may be; a job is remembered for at least as long.",
    ),
    _duration(
        "limits.away",
        "limits.away_ms",
        least=1,
        most=DAY,
        reload=True,
        reason="How long an agent that is restarted on purpose may have its seats kept.",
    ),
    _count(
        "limits.commands_per_second",
        "limits.commands_per_second",
        "commands",
        least=1,
        most=100_000,
        reason="What one node may ask of its jobs each second, after a burst of 2,048: joins, for "
        "instance. Beyond it is refused what it asks.",
    ),
    _count(
        "limits.connections",
        "limits.connections",
        "connections",
        least=1,
        most=1_000_000,
        reason="Connections over gRPC. The open files that the system gives rdzvd, less 512, are a "
        "bound, too.",
    ),
    _count(
        "limits.http_connections",
        "limits.http_connections",
        "connections",
        least=1,
        most=1_000_000,
        reason="Connections to the HTTP port.",
    ),
    _count(
        "limits.http_connections_per_peer",
        "limits.http_connections_per_peer",
        "connections",
        least=1,
        most=1_000_000,
        reason="The same of one address; browsers behind a proxy have one together.",
    ),
    _count(
        "limits.watchers",
        "limits.watchers",
        "callers",
        least=1,
        most=1_000_000,
        reload=True,
        reason="Callers that watch jobs at once; each costs a message for every change.",
    ),
    _count(
        "limits.log_readers",
        "limits.log_readers",
        "callers",
        least=1,
        most=10_000,
        reload=True,
        reason="Callers that read logs at once; each may have `log_buffer` on its way.",
    ),
    _size(
        "limits.log_buffer",
        "limits.log_buffer",
        least=64 * 1024,
        most=2**32,
        reload=True,
        reason="What of workers' logs waits for one slow reader, over all nodes; for readers that "
        "come after the change.",
    ),
    _size(
        "limits.log_window",
        "limits.log_window",
        least=4 * 1024,
        most=2**30,
        reload=True,
        reason="What one node sends ahead of one reader; raise it where nodes are far away.",
    ),
    _count(
        "limits.outbox",
        "limits.outbox",
        "messages",
        least=16,
        most=1_000_000,
        reload=True,
        reason="Messages that wait for one slow reader before its stream is closed; for streams "
        "that are opened after the change.",
    ),
    _count(
        "limits.inbox",
        "limits.inbox",
        "messages",
        least=16,
        most=1_000_000,
        reload=True,
        reason="Messages of one node that wait while the store is away, before its stream is "
        "closed; for streams that are opened after the change.",
    ),
    _size(
        "limits.message",
        "limits.message_bytes",
        least=64 * 1024,
        most=2**30,
        reason="The largest message that is accepted.",
    ),
    _count(
        "limits.scrapes",
        "limits.scrapes",
        "callers",
        least=1,
        most=100,
        reason="Callers that read /metrics at once: each has all of it in memory.",
    ),
    _count(
        "limits.http_requests",
        "limits.http_requests",
        "requests",
        least=1,
        most=10_000,
        reload=True,
        reason="Requests of the HTTP API that are answered at once.",
    ),
    _count(
        "limits.http_streams",
        "limits.http_streams",
        "readers",
        least=1,
        most=100_000,
        reload=True,
        reason="Pages and programs that follow the stream of the HTTP API at once.",
    ),
    # ---------------------------------------------------------------- times of the server itself
    _duration(
        "timings.ping_interval",
        "timings.ping_interval_ms",
        least=1,
        most=HOUR,
        reason="How often a silent connection is pinged; lower it below what a firewall in "
        "between forgets.",
    ),
    _duration(
        "timings.ping_timeout",
        "timings.ping_timeout_ms",
        least=0.1,
        most=HOUR,
        reason="An unanswered ping ends the connection after this.",
    ),
    _duration(
        "timings.handshake",
        "timings.handshake_ms",
        least=0.1,
        most=120,
        reason="How long a new connection may take for TLS and HTTP/2 before it is closed.",
    ),
    _duration(
        "timings.first_request",
        "timings.first_request_ms",
        least=0.1,
        most=120,
        reason="How long a new HTTP connection may take for its first request.",
    ),
    _duration(
        "timings.hello_timeout",
        "timings.hello_timeout_ms",
        least=1,
        most=HOUR,
        reload=True,
        reason="A stream that says nothing is closed after this, for nobody else would notice it.",
    ),
    _duration(
        "timings.leaderless_hold",
        "timings.leaderless_hold_ms",
        least=0,
        most=8,
        reload=True,
        reason="How long a node's call is held while no server leads, so that it need not ask "
        "again; nodes wait 10 s for an answer.",
    ),
    _duration(
        "timings.log_answer",
        "timings.log_answer_ms",
        least=1,
        most=HOUR,
        reason="How long a node that is asked for logs may send nothing.",
    ),
    _duration(
        "timings.store_retry",
        "timings.store_retry_ms",
        least=0.1,
        most=10 * MINUTE,
        reload=True,
        reason="How often a store that is away is tried again.",
    ),
    _duration(
        "timings.stop_grace",
        "timings.stop_grace_ms",
        least=0,
        most=MINUTE,
        reload=True,
        reason="What open calls get to end when the server stops.",
    ),
    _duration(
        "timings.deaf_after",
        "timings.deaf_after_ms",
        least=0.05,
        most=MINUTE,
        reason="When the server itself was held up for longer than this, what nodes did not say "
        "meanwhile proves nothing.",
    ),
    _duration(
        "timings.metrics_of_ended",
        "timings.ended_job_ms",
        least=1,
        most=DAY,
        reason="How long /metrics tells of a job that has ended, so that its last counts are "
        "scraped.",
    ),
)


def _in_order(lower: str, upper: str) -> Rule:
    """Demand that one knob is not above another."""

    def broken(values: Values) -> str:
        one, other = values.by_key[lower], values.by_key[upper]
        assert isinstance(one, int | float) and isinstance(other, int | float)
        if one <= other:
            return ""
        kind = values.knobs.by_key[lower].kind
        return (
            f"`{lower}` = {spelled(one, kind)} is above `{upper}` = {spelled(other, kind)}; lower "
            "the one or raise the other"
        )

    return Rule((lower, upper), broken)


def _often_enough(values: Values) -> str:
    lease_ms, heartbeats = values.ms("lease.duration"), values.get("lease.heartbeats", int)
    if lease_ms >= heartbeats * 250:
        return ""
    return (
        f"`lease.heartbeats` = {heartbeats} is more often than every 250 ms with `lease.duration` "
        f"= {spelled(values.by_key['lease.duration'], Kind.DURATION)}; lower it"
    )


_TLS = ("tls.cert", "tls.key", "tls.client_ca", "tls.token_listen", "tls.http_client_auth")


def _tls_together(values: Values) -> str:
    cert, key, client_ca, token_listen, http = (values.by_key[name] for name in _TLS)
    if (cert is None) != (key is None):
        return "`tls.cert` and `tls.key` go together; one is missing"
    if client_ca is not None and cert is None:
        return (
            "`tls.client_ca` asks those who connect for a certificate, which takes one of this "
            "server; give `tls.cert` and `tls.key`"
        )
    if (token_listen is not None or http != "require") and client_ca is None:
        return (
            "`tls.token_listen` and `tls.http_client_auth` are for callers without a certificate, "
            "and without `tls.client_ca` nobody is asked for one; leave them out, or give it"
        )
    return ""


KNOBS = Knobs(
    "rdzvd",
    (*_PLAIN, *(bound.knob for bound in _BOUND)),
    (
        _in_order("lease.duration", "lease.longest"),
        _in_order("lease.nodes", "lease.longest_nodes"),
        Rule(("lease.duration", "lease.heartbeats"), _often_enough),
        _in_order("forming.gather_quiet", "forming.gather"),
        _in_order("forming.store_backoff", "forming.store_backoff_longest"),
        _in_order("limits.nodes_per_job", "limits.nodes"),
        _in_order("limits.log_window", "limits.log_buffer"),
        # Nobody who was in a job may still wait when it is forgotten, or it would begin anew.
        _in_order("limits.job_timeout", "retention.ended_for"),
        Rule(_TLS, _tls_together),
    ),
)


# ------------------------------------------------------------------------------------ a Config


def make_config(values: Values) -> Config:
    """Make what the server runs with, and check it as a whole.

    Raises:
        InvalidRequestError: a file that it names can not be used, or knobs do not go together.

    """
    parts = {name: _part(name, values) for name in _PARTS}
    python = values.maybe("c10d_python", Path)
    config = Config(
        listen=Listen.parse(values.get("listen", str)),
        data_dir=values.maybe("data_dir", Path) or default_data_dir(),
        store=values.get("store", str),
        insecure=values.get("insecure", bool),
        tls=_tls(values),
        advertise=_address(values, "advertise"),
        auth=_auth(values),
        init_admin_token=values.maybe("init_admin_token", Path),
        etcd=_etcd(values),
        http=_address(values, "http"),
        otlp=values.maybe("otlp", str),
        c10d=_address(values, "c10d"),
        c10d_python=str(python) if python else sys.executable,
        log_level=values.get("log_level", str),
        log_format=values.get("log_format", str),
        **parts,
    )
    config.check()
    return config


def _auth(values: Values) -> bool:
    """Say whether callers must prove who they are: where certificates can do that, they must."""
    said = values.maybe("auth", str)
    return said == "required" if said else values.maybe("tls.client_ca", Path) is not None


def _part(part: str, values: Values) -> Any:
    fields = {
        field.partition(".")[2]: _value(bound.knob, values)
        for bound in _BOUND
        for field in bound.fields
        if field.partition(".")[0] == part
    }
    return type(_PARTS[part])(**fields)


def _value(knob: Knob, values: Values) -> int:
    return values.ms(knob.key) if knob.kind is Kind.DURATION else values.get(knob.key, int)


def _address(values: Values, key: str) -> Listen | None:
    text = values.maybe(key, str)
    return None if text is None else Listen.parse(text)


def _tls(values: Values) -> TlsFiles | None:
    cert, key = values.maybe("tls.cert", Path), values.maybe("tls.key", Path)
    if cert is None or key is None:
        return None
    return TlsFiles(
        cert,
        key,
        values.maybe("tls.client_ca", Path),
        http_requires=values.get("tls.http_client_auth", str) == "require",
        token_listen=_address(values, "tls.token_listen"),
    )


def _etcd(values: Values) -> EtcdConfig | None:
    endpoints = values.strings("etcd.endpoints")
    if not endpoints:
        return None
    from rdzv.stores.etcd_config import EtcdConfig, first_line

    password = values.maybe("etcd.password_file", Path)
    return EtcdConfig.parse(
        ",".join(endpoints),
        prefix=values.get("etcd.prefix", str),
        user=values.maybe("etcd.user", str) or "",
        password=first_line(password) if password else "",
        ca=values.maybe("etcd.ca", Path),
        cert=values.maybe("etcd.cert", Path),
        key=values.maybe("etcd.key", Path),
        ttl_s=values.get("etcd.ttl", int),
    )


# ------------------------------------------------------------------------------------ reloads


class Configuration:
    """The configuration of one rdzvd, from its start and through its reloads."""

    def __init__(self, file: Path | None, given: Mapping[str, object]) -> None:
        """Read the file, and what was `given` on the command line, which wins.

        Raises:
            InvalidRequestError: something is wrong with it; all of it is named.

        """
        self._file = file or _default_file()
        self._given = given
        self.values = load(KNOBS, self._file, given)
        self.config = make_config(self.values)

    @property
    def source(self) -> str:
        """Where it comes from, for people."""
        given = any(value is not None for value in self._given.values())
        parts = [str(self._file)] if self._file else []
        parts += ["the command line"] if given else []
        return " and ".join(parts) or "defaults"

    def reload(self, set_up_logging: Callable[[str, str], None]) -> bool:
        """Read the file again, apply what can be applied, and say in the log what became of it.

        If anything is wrong with it, nothing is changed. Return whether it was in order.
        """
        file = self._file or _default_file()
        try:
            wanted = load(KNOBS, file, self._given)
            # Files that it names may be wrong, too.
            make_config(wanted)
            change = compare(self.values, wanted)
        except InvalidRequestError as error:
            log.error("the configuration is not reloaded, and nothing was changed: %s", error)
            return False
        self._file, self.values = file, change.values
        for line in change.lines:
            log.warning("configuration: %s", line)
        self._apply(change.applied, set_up_logging)
        log.info(
            "the configuration is reloaded from %s: %d applied, %d wait for a restart",
            *(self.source, len(change.applied), len(change.waiting)),
        )
        return True

    def _apply(self, keys: tuple[str, ...], set_up_logging: Callable[[str, str], None]) -> None:
        held: dict[str, Limits | Timings]
        held = {"limits": self.config.limits, "timings": self.config.timings}
        for bound in _BOUND:
            if bound.knob.key in keys:
                for field in bound.fields:
                    part, _, name = field.partition(".")
                    alter(held[part], name, _value(bound.knob, self.values))
        if not {"log_level", "log_format"}.isdisjoint(keys):
            level, log_format = (self.values.get(k, str) for k in ("log_level", "log_format"))
            set_up_logging(level, log_format)


def _default_file() -> Path | None:
    return DEFAULT_FILE if DEFAULT_FILE.exists() else None
