"""rdzvd's settings: everything that rdzvd.toml may contain, with bounds, defaults and reasons.

A setting with `sets` gives its value to the fields of `Config` named there and takes its default
from them. A reload changes only values that are read at each use.
"""

# The annotations are used as data, so their evaluation is not postponed.
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from rdzv.core.fleet.nodes import NodesTuning
from rdzv.core.fleet.quarantine import QuarantineTuning
from rdzv.core.model import Tuning
from rdzv.errors import InvalidRequestError
from rdzv.server.settings.config import Limits, Timings, check_grafana
from rdzv.settings.setting_types import Duration, Rule, Table, setting, settings_of
from rdzv.transport.endpoints import DEFAULT_PORT, Listen

MINUTE = 60
HOUR = 60 * MINUTE
DAY = 24 * HOUR

PARTS: dict[str, Any] = {
    "limits": Limits(),
    "timings": Timings(),
    "tuning": Tuning(),
    "nodes_tuning": NodesTuning(),
    "quarantine": QuarantineTuning(),
}
"""The parts of a `Config` that settings change, by name, with their defaults."""


def _sets(*fields: str, reason: str, **more: Any) -> Meta:
    defaults = {getattr(PARTS[part], name) for part, name in (f.split(".") for f in fields)}
    assert len(defaults) == 1, f"{fields} have several defaults"
    default = defaults.pop() / 1000 if fields[0].endswith("_ms") else defaults.pop()
    return setting(reason=reason, default=default, sets=fields, **more)


def _etcd_endpoint(text: str) -> None:
    from rdzv.stores.etcd_config import parse_endpoints

    if "," in text:
        raise InvalidRequestError(f"{text!r} has a comma; give each endpoint by itself")
    parse_endpoints(text)


# Each setting reads as one paragraph: its name, type and bounds, and the reason to change it.
# fmt: off


class Tls(Table, frozen=True):
    """Settings for how connections are encrypted and who may connect."""

    cert: Annotated[Path | None, setting(default_words="connections are not encrypted", reason="""
        The certificate that rdzvd presents, with any certificates between it and the CA (PEM). This
        file and the next two are read again when they have changed and a caller connects; existing
        connections stay.""")] = None
    key: Annotated[Path | None, setting(reason="""
        The key of that certificate (PEM); only rdzvd may read it.""")] = None
    client_ca: Annotated[Path | None, setting(
        default_words="callers need no certificate", reason="""
        Accept only callers with a certificate that this CA has signed (PEM).""")] = None
    http_client_auth: Annotated[Literal["require", "accept"], setting(reason="""
        With `tls.client_ca`: `require` a certificate of callers of `http`, or `accept` a token
        instead, as browsers send it.""")] = "require"
    token_listen: Annotated[Listen | None, setting(
        unit="HOST:PORT", default_words="nowhere", reason="""
        With `tls.client_ca`: the address for nodes and operators that have a token and no
        certificate. gRPC cannot leave that open at one port: callers of `listen` always need a
        certificate.""")] = None


def _issuer(text: str) -> None:
    if not text.startswith("https://") or any(char.isspace() for char in text):
        raise InvalidRequestError(
            f"{text!r} is not an https address, which the issuer is named by; `kubectl get --raw "
            "/.well-known/openid-configuration` shows that of a cluster"
        )


ROLES = ("read", "submit", "node", "admin")
"""The values of `security.callers.Role`. A test compares the two."""


def _role(text: str) -> None:
    if text not in ROLES:
        raise InvalidRequestError(f"{text!r} is not a role; the roles are: {', '.join(ROLES)}")


def _kubernetes_name(text: str) -> None:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", text):
        raise InvalidRequestError(
            f"{text!r} is no name of Kubernetes, which has small letters, digits, - and ."
        )


def _account(settings: "OidcAccount") -> str:
    if ("node" in settings.roles) == (settings.known_as == "node"):
        return ""
    return (
        '`roles` = ["node"] and `known_as` = "node" go together: a caller with the role node '
        "speaks for the node of its own name; give both or neither"
    )


class OidcAccount(Table, frozen=True, kw_only=True):
    """One Kubernetes service account, or all accounts in a namespace, and their roles."""

    rules = (Rule(("roles", "known_as"), _account),)

    namespace: Annotated[str, setting(check=_kubernetes_name, reason="""
        The namespace of the account.""")]
    name: Annotated[str | None, setting(
        check=_kubernetes_name, default_words="every account of the namespace", reason="""
        The account. A table with a name wins over the one of its namespace without.""")] = None
    roles: Annotated[tuple[str, ...], setting(check=_role, reason="""
        The account's roles: any of read, submit, node and admin.""")]
    known_as: Annotated[Literal["account", "namespace", "node"], setting(reason="""
        The caller's name, and so whose jobs are its own: ACCOUNT@NAMESPACE; the namespace, whose
        accounts then share their jobs; or the node that its pod runs on, for agents.""",
    )] = "account"


class Oidc(Table, frozen=True):
    """Callers that Kubernetes authenticates: pods with their service account's token."""

    issuer: Annotated[str | None, setting(
        unit="https URL", check=_issuer, default_words="none: such tokens are refused", reason="""
        Accept service account tokens of this issuer, given as the URL in its tokens. Its keys are
        fetched from there by OpenID discovery. Needs `tls.cert` and rdzv[oidc].""")] = None
    audience: Annotated[str, setting(reason="""
        The audience that tokens must have; tokens for other services are refused.""")] = "rdzvd"
    account: Annotated[tuple[OidcAccount, ...], setting(reason="""
        A service account and its roles; accounts without a table are refused.""")] = ()
    ca: Annotated[Path | None, setting(default_words="the system's authorities", reason="""
        The CA of the issuer (PEM); in a pod /var/run/secrets/kubernetes.io/serviceaccount/ca.crt.
        """)] = None
    token_file: Annotated[Path | None, setting(default_words="none", reason="""
        The token that rdzvd sends to the issuer; Kubernetes' API server requires one.""")] = None
    leeway: Annotated[Duration, setting(ge=0, le=5 * MINUTE, unit="seconds", reason="""
        How far the clocks of the issuer and of rdzvd may be apart.""")] = 30
    keys_kept: Annotated[Duration, setting(ge=MINUTE, le=30 * DAY, unit="seconds", reason="""
        How long the keys stay good while the issuer cannot be reached.""")] = DAY


class Etcd(Table, frozen=True):
    """The etcd cluster shared by several rdzvd servers."""

    endpoints: Annotated[tuple[str, ...], setting(
        unit="HOST:PORT", check=_etcd_endpoint, default_words="none", reason="""
        The members of the etcd v3 cluster, for the store etcd; for TLS with https:// in front.""",
    )] = ()
    prefix: Annotated[str, setting(reason="""
        The prefix of all keys; servers with the same prefix share their jobs.""")] = "/rdzv"
    user: Annotated[str | None, setting(reason="""
        The etcd user of rdzvd.""")] = None
    password_file: Annotated[Path | None, setting(reason="""
        The password: the first line of this file. Only rdzvd should be able to read it.""")] = None
    ca: Annotated[Path | None, setting(default_words="the system's authorities", reason="""
        The CA of etcd (PEM).""")] = None
    cert: Annotated[Path | None, setting(reason="""
        The certificate of rdzvd for etcd (PEM).""")] = None
    key: Annotated[Path | None, setting(reason="""
        The key of that certificate (PEM).""")] = None
    ttl: Annotated[int, setting(ge=2, le=300, unit="seconds", reason="""
        How long a leader may be silent before another server takes over; raise it if leaders change
        without need.""")] = 3


class Notify(Table, frozen=True):
    """A webhook notified when a run ends, a node is quarantined, or a job waits too long."""

    url_file: Annotated[Path | None, setting(default_words="no notifications", reason="""
        The webhook's address: the first line of this file. Anyone who knows it can post there, so
        only rdzvd should be able to read it.""")] = None
    queued_after: Annotated[Duration, setting(ge=0, le=7 * DAY, unit="seconds", reason="""
        Report a job that has waited in the queue for this long; 0: never.""")] = 600


class Lease(Table, frozen=True):
    """Settings for how long nodes may be silent."""

    duration: Annotated[Duration, _sets("nodes_tuning.lease_ms", ge=2, le=10 * MINUTE, reason="""
        How long a node may be silent before its seat is given away. Raise it on a network that
        stalls; --fence-after of every node must stay 1 s below it.""")]
    nodes: Annotated[int, _sets("nodes_tuning.lease_nodes", ge=1, unit="nodes", reason="""
        Up to this number of nodes, the lease is `duration`; with more it grows, so that heartbeats
        do not fill the server's time.""")]
    longest: Annotated[Duration, _sets("nodes_tuning.lease_max_ms", ge=2, le=10 * MINUTE, reason="""
        The lease with `longest_nodes` or more.""")]
    longest_nodes: Annotated[int, _sets(
        "nodes_tuning.lease_nodes_max", ge=1, unit="nodes", reason="""
        From this number of nodes on, the lease is `longest`.""")]
    takeover_grace: Annotated[Duration, _sets(
        "tuning.takeover_grace_ms", "nodes_tuning.takeover_grace_ms", ge=5, le=HOUR, reason="""
        How long the server gives up no silent node after its start, a takeover or a pause. Nodes
        try to reconnect at least every 5 s. After a start or a takeover with more than 6,000 nodes
        it is longer: 5 ms for each.""")]


class Quarantine(Table, frozen=True):
    """Quarantine of nodes on which workers keep failing."""

    failures: Annotated[int, _sets("quarantine.failures", ge=0, le=1_000, unit="rounds", reason="""
        The node of a daemon is quarantined after its machine ended this number of rounds (a signal,
        an error of the device, a worker that could not be killed). A script's exceptions count
        if two jobs failed there. 0: never.""")]
    ttl: Annotated[Duration, _sets("quarantine.ttl_ms", ge=1, le=365 * DAY, reason="""
        How long a quarantined node gets no job: time for a person to look at it.
        `rdzvctl uncordon` ends the quarantine.""")]
    max_nodes: Annotated[int, _sets(
        "quarantine.max_nodes", ge=0, le=1_000_000, unit="nodes", reason="""
        The largest number of nodes in quarantine. 0: a quarter of the known daemons, and at least
        one; a single daemon never is.""")]


class Progress(Table, frozen=True):
    """When a slow worker counts as a straggler."""

    straggler_after: Annotated[Duration, _sets(
        "timings.straggler_after_ms", ge=1, le=DAY, reason="""
        A worker is named as a straggler when for this time the others have waited for it in
        collectives, or, where torch has no record of these, when it has taken more than twice as
        long for a step as the median of its role.""")]


class Retention(Table, frozen=True):
    """How long ended jobs are kept."""

    ended_for: Annotated[Duration, _sets(
        "timings.ended_kept_ms", ge=30 * DAY, le=3650 * DAY, reload=True, reason="""
        How long a job is remembered after its end, with its events: at least as long as the longest
        timeout of a job. For this time its round numbers continue when its name is used again.
        """)]
    ended_jobs: Annotated[int, _sets(
        "limits.ended_jobs", ge=1, le=1_000_000, unit="jobs", reload=True, reason="""
        How many ended jobs are remembered; the ones that ended first are forgotten first. Each
        costs a little time at every start.""")]


class LimitSettings(Table, frozen=True):
    """Limits on what is accepted from callers and on what is kept for them."""

    jobs: Annotated[int, _sets(
        "limits.jobs", ge=1, le=1_000_000, unit="jobs", reload=True, reason="""
        Jobs that have nodes, or a round that is not settled; each takes memory.""")]
    nodes: Annotated[int, _sets(
        "limits.nodes", ge=1, le=1_000_000, unit="nodes", reload=True, reason="""
        Nodes, connected or away; each stream needs about 30 KB.""")]
    connections: Annotated[int, _sets(
        "limits.connections", ge=1, le=1_000_000, unit="connections", reason="""
        Connections over gRPC. The open files that the system allows rdzvd, less 512, are a bound,
        too.""")]
    http_streams: Annotated[int, _sets(
        "limits.http_streams", ge=1, le=100_000, unit="readers", reload=True, reason="""
        Pages and programs that follow the stream of the HTTP API at once.""")]


class TimingSettings(Table, frozen=True):
    """The server's own timings."""

    ping_interval: Annotated[Duration, _sets("timings.ping_interval_ms", ge=1, le=HOUR, reason="""
        How often a silent connection is pinged; keep it below the idle timeout of firewalls on the
        way.""")]
    ping_timeout: Annotated[Duration, _sets("timings.ping_timeout_ms", ge=0.1, le=HOUR, reason="""
        An unanswered ping ends the connection after this time.""")]
# fmt: on


def _in_order(lower: str, upper: str) -> Rule:
    """Return the rule that the setting `lower` must not exceed the setting `upper`."""

    def broken(settings: Table) -> str:
        known = settings_of(RdzvdSettings)
        one, other = known[lower].of(settings), known[upper].of(settings)
        if one <= other:
            return ""
        return (
            f"`{lower}` = {known[lower].spelled(one)} is above `{upper}` = "
            f"{known[upper].spelled(other)}; lower the one or raise the other"
        )

    return Rule((lower, upper), broken)


def _tls_together(settings: "RdzvdSettings") -> str:
    tls = settings.tls
    if (tls.cert is None) != (tls.key is None):
        return "`tls.cert` and `tls.key` go together; one is missing"
    if tls.client_ca is not None and tls.cert is None:
        return (
            "`tls.client_ca` makes rdzvd ask callers for a certificate, so rdzvd needs one of its "
            "own; give `tls.cert` and `tls.key`"
        )
    if (tls.token_listen or tls.http_client_auth != "require") and tls.client_ca is None:
        return (
            "`tls.token_listen` and `tls.http_client_auth` are for callers without a certificate, "
            "and without `tls.client_ca` no caller is asked for one; leave them out, or give it"
        )
    return ""


def _oidc_together(settings: "RdzvdSettings") -> str:
    oidc = settings.oidc
    if oidc.issuer is None:
        return (
            "`oidc.account` without `oidc.issuer` lets nobody in; give both" if oidc.account else ""
        )
    if not oidc.account:
        return "`oidc.issuer` without any [[oidc.account]] lets nobody in; give both"
    named = [f"{one.namespace}/{one.name or 'every account'}" for one in oidc.account]
    if twice := sorted({name for name in named if named.count(name) > 1}):
        return f"[[oidc.account]] has {', '.join(twice)} twice; leave only one table"
    if settings.tls.cert is None:
        return "tokens are taken by TLS alone; with `oidc.issuer`, give `tls.cert` and `tls.key`"
    if settings.auth == "none":
        return (
            '`oidc.issuer` names callers, and with `auth` = "none" nobody is asked for a name; '
            "leave `auth` out"
        )
    return ""


# fmt: off
class RdzvdSettings(Table, frozen=True, kw_only=True):
    """Everything that rdzvd.toml may contain."""

    program = "rdzvd"
    rules = (
        _in_order("lease.duration", "lease.longest"),
        _in_order("lease.nodes", "lease.longest_nodes"),
        Rule(tuple(f"tls.{name}" for name in Tls.__struct_fields__), _tls_together),
        Rule(("oidc.issuer", "oidc.account", "tls.cert", "auth"), _oidc_together),
    )

    listen: Annotated[Listen, setting(unit="HOST:PORT", reason="""
        The address for nodes and operators. Port 0 takes a free one; an IPv6 host is in brackets.
        Any but loopback needs `tls.client_ca` or `insecure`.""",
    )] = Listen("127.0.0.1", DEFAULT_PORT)
    advertise: Annotated[Listen | None, setting(
        unit="HOST:PORT", default_words="the value of `listen`", reason="""
        The address at which nodes and operators reach this rdzvd, if not `listen`.""")] = None
    http: Annotated[Listen | None, setting(unit="HOST:PORT", default_words="nowhere", reason="""
        Serve the live page, /api, /metrics, /sd, /healthz and /readyz here, by TLS if `tls.cert` is
        given. Any address but loopback needs `tls.client_ca` or `insecure`.""")] = None
    grafana: Annotated[str | None, setting(
        unit="URL", check=check_grafana, default_words="none", reason="""
        The Grafana that has the dashboards of `deploy/grafana`: the page of a job links to its
        dashboard there.""")] = None
    insecure: Annotated[bool, setting(reason="""
        Listen beyond loopback without encryption or authentication: anyone who can reach the
        port can run and end jobs.""")] = False
    auth: Annotated[Literal["none", "required"] | None, setting(
        default_words="required with `tls.client_ca` or `oidc.issuer`, else none", reason="""
        Whether callers must authenticate, by a client certificate or a token; docs/roles.md says
        what each may do then. `none`: anyone may do anything.""")] = None
    init_admin_token: Annotated[Path | None, setting(default_words="none", reason="""
        While no admin token exists, the token in this file becomes one; a missing file is created.
        Only with `auth` = required.""")] = None
    data_dir: Annotated[Path | None, setting(
        default_words="`$STATE_DIRECTORY` if set (systemd does), `/var/lib/rdzv` for root, else "
        "`$XDG_STATE_HOME/rdzv` (`~/.local/state/rdzv`)", reason="""
        The folder of the stored jobs, on a local disk; one rdzvd owns it.""")] = None
    store: Annotated[Literal["sqlite", "memory", "etcd"], setting(reason="""
        sqlite survives restarts; memory forgets; etcd is shared by several rdzvd, of which one
        leads and any other takes over.""")] = "sqlite"
    c10d: Annotated[Listen | None, setting(unit="HOST:PORT", default_words="nowhere", reason="""
        Serve torch's own store here too, for torchrun --rdzv-backend=c10d; `rdzvctl` shows its
        jobs. They end with this rdzvd. Any address but loopback needs `insecure`.""")] = None
    c10d_python: Annotated[Path | None, setting(default_words="the one that runs rdzvd", reason="""
        The interpreter that serves torch's own store; it needs torch.""")] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], setting(
        reload=True, reason="""
        The lowest level that is logged, to stderr.""")] = "info"
    log_format: Annotated[Literal["human", "json"], setting(reload=True, reason="""
        Lines for people, or one JSON object a line.""")] = "human"
    tls: Tls
    oidc: Oidc
    etcd: Etcd
    notify: Notify
    lease: Lease
    quarantine: Quarantine
    progress: Progress
    retention: Retention
    limits: LimitSettings
    timings: TimingSettings
