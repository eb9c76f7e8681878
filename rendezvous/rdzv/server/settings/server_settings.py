"""rdzvd's settings: everything that rdzvd.toml may contain, with bounds, defaults and reasons.

All parts of a server read these structs. A reload changes values of `reload` settings in them; only
values that are read at each use have it.
"""

# The annotations are used as data, so their evaluation is not postponed.
import os
import re
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from msgspec import field

from rdzv.core.fleet.nodes import LeaseRules
from rdzv.core.fleet.quarantine import QuarantineRules
from rdzv.errors import InvalidRequestError
from rdzv.settings.setting_types import Rule, Table, settings_of
from rdzv.structs import Duration, setting
from rdzv.transport.certificates import Certificate, check_authorities, check_pair, read_certificate
from rdzv.transport.endpoints import DEFAULT_PORT, Listen

if TYPE_CHECKING:
    from rdzv.stores.etcd_config import EtcdConfig

SECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR


def _grafana(text: str) -> None:
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
        raise InvalidRequestError(
            f"{text!r} is not the address of a Grafana; give the URL of its first page, such as "
            "https://grafana.example.org"
        )


def _etcd_endpoint(text: str) -> None:
    from rdzv.stores.etcd_config import parse_endpoints

    if "," in text:
        raise InvalidRequestError(f"{text!r} has a comma; give each endpoint by itself")
    parse_endpoints(text)


# Each setting reads as one paragraph: its name, type and bounds, and the reason to change it.
# fmt: off


class TlsSettings(Table, frozen=True):
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
        With `tls.client_ca`: `require` a certificate from callers of `http`, or `accept` a token
        too, which a browser can send.""")] = "require"
    token_listen: Annotated[Listen | None, setting(
        unit="HOST:PORT", default_words="nowhere", reason="""
        With `tls.client_ca`: the address for nodes and operators that have a token instead of a
        certificate. gRPC cannot accept both at one port: callers of `listen` always need a
        certificate.""")] = None

    @property
    def pair(self) -> tuple[Path, Path] | None:
        return None if self.cert is None or self.key is None else (self.cert, self.key)

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.cert, self.key, self.client_ca) if path is not None)

    def check(self) -> Certificate:
        assert self.pair is not None, "there are no files to check"
        if self.client_ca is not None:
            check_authorities(self.client_ca, "client CA")
        cert, key = self.pair
        check_pair(cert, key, "certificate")
        certificate = read_certificate(cert.read_bytes(), f"certificate {cert}")
        if trouble := certificate.trouble(datetime.now(UTC)):
            raise InvalidRequestError(
                f"certificate {cert} cannot be used: it {trouble}; give one that is valid"
            )
        return certificate


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
        "acts for the node of its own name; give both or neither"
    )


class OidcAccount(Table, frozen=True, kw_only=True):
    """One Kubernetes service account, or all accounts in a namespace, and their roles."""

    rules = (Rule(("roles", "known_as"), _account),)

    namespace: Annotated[str, setting(check=_kubernetes_name, reason="""
        The namespace of the account.""")]
    name: Annotated[str | None, setting(
        check=_kubernetes_name, default_words="every account of the namespace", reason="""
        The account. A table with a name takes precedence over its namespace's table without one.
        """)] = None
    roles: Annotated[tuple[str, ...], setting(check=_role, reason="""
        The account's roles: any of read, submit, node and admin.""")]
    known_as: Annotated[Literal["account", "namespace", "node"], setting(reason="""
        The caller's name, which decides which jobs are its own: ACCOUNT@NAMESPACE; the namespace,
        whose accounts then share their jobs; or, for agents, the node of its pod.""",
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
    leeway_ms: Annotated[Duration, setting(ge=0, le=5 * MINUTE, reason="""
        How far the clocks of the issuer and of rdzvd may be apart.""")] = 30 * SECOND
    keys_kept_ms: Annotated[Duration, setting(ge=MINUTE, le=30 * DAY, reason="""
        How long the keys stay valid while the issuer cannot be reached.""")] = DAY

    def check(self) -> None:
        """Check everything that can be checked without the issuer."""
        if find_spec("jwt") is None:
            raise InvalidRequestError(
                f"`oidc.issuer` = {self.issuer!r} needs PyJWT, which is not installed here; "
                "pip install 'rdzv[oidc]', or leave `oidc` out"
            )
        # A missing token file may still appear before the keys are fetched; if not, that is logged.
        if self.ca is not None:
            check_authorities(self.ca, "CA of the issuer")


class Etcd(Table, frozen=True):
    """The etcd cluster shared by several rdzvd servers."""

    endpoints: Annotated[tuple[str, ...], setting(
        unit="HOST:PORT", check=_etcd_endpoint, default_words="none", reason="""
        The members of the etcd v3 cluster, for the store etcd; with https:// in front for TLS.""",
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

    def config(self) -> "EtcdConfig | None":
        from rdzv.stores.etcd_config import EtcdConfig, first_line

        if not self.endpoints:
            return None
        return EtcdConfig.parse(
            ",".join(self.endpoints),
            prefix=self.prefix,
            user=self.user or "",
            password=first_line(self.password_file) if self.password_file else "",
            ca=self.ca,
            cert=self.cert,
            key=self.key,
            ttl_s=self.ttl,
        )


class Notify(Table, frozen=True):
    """A webhook notified when a run ends, a node is quarantined, or a job waits too long."""

    url_file: Annotated[Path | None, setting(default_words="no notifications", reason="""
        The webhook's address: the first line of this file. Anyone who knows it can post there, so
        only rdzvd should be able to read it.""")] = None
    queued_after_ms: Annotated[Duration, setting(ge=0, le=7 * DAY, reason="""
        Report a job that has waited in the queue for this long; 0: never.""")] = 10 * MINUTE

    def read_url(self) -> str:
        from rdzv.stores.etcd_config import first_line

        assert self.url_file is not None, "there is no webhook"
        url = first_line(self.url_file, "`notify.url_file`")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            # Do not show the address, because anyone who knows it may be able to post there.
            raise InvalidRequestError(
                f"`notify.url_file` {self.url_file}: its first line is not an http or https address"
            )
        return url


class ProgressSettings(Table, frozen=True):
    """When a slow worker counts as a straggler."""

    straggler_after_ms: Annotated[Duration, setting(ge=SECOND, le=DAY, reason="""
        A worker is reported as a straggler if the others have waited for it in collectives for this
        time. Where torch has no record of collectives: if its steps have taken more than twice the
        median of its role.""")] = 30 * SECOND


class Retention(Table, frozen=True):
    """How long ended jobs are kept."""

    ended_for_ms: Annotated[Duration, setting(ge=30 * DAY, le=3650 * DAY, reload=True, reason="""
        How long an ended job is kept, with its events: at least as long as the longest timeout of a
        job. For this time, a new job with its name continues its round numbers.""")] = 30 * DAY
    ended_jobs: Annotated[int, setting(ge=1, le=1_000_000, unit="jobs", reload=True, reason="""
        How many ended jobs are kept; those that ended first are removed first. Each costs a little
        time at every start.""")] = 10_000


class Limits(Table, frozen=True):
    """Limits on what is accepted from callers and on what is kept for them."""

    jobs: Annotated[int, setting(ge=1, le=1_000_000, unit="jobs", reload=True, reason="""
        Jobs that have nodes, or a round that is not settled; each takes memory.""")] = 10_000
    nodes: Annotated[int, setting(ge=1, le=1_000_000, unit="nodes", reload=True, reason="""
        Nodes, connected or away; each stream needs about 30 KB. A job that needs more is refused.
        """)] = 20_000
    connections: Annotated[int, setting(ge=1, le=1_000_000, unit="connections", reason="""
        Connections over gRPC. The system's limit of open files for rdzvd, less 512, applies too.
        """)] = 32_768
    http_streams: Annotated[int, setting(ge=1, le=100_000, unit="readers", reload=True, reason="""
        Pages and programs that may follow the stream of the HTTP API at the same time.""")] = 200


class Timings(Table, frozen=True):
    """The server's own timings."""

    ping_interval_ms: Annotated[Duration, setting(ge=SECOND, le=HOUR, reason="""
        How often a silent connection is pinged; keep it below the idle timeout of firewalls on the
        way.""")] = 20 * SECOND
    ping_timeout_ms: Annotated[Duration, setting(ge=100, le=HOUR, reason="""
        An unanswered ping ends the connection after this time.""")] = 20 * SECOND
# fmt: on


def _in_order(lower: str, upper: str) -> Rule:
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
        Rule(tuple(f"tls.{name}" for name in TlsSettings.__struct_fields__), _tls_together),
        Rule(("oidc.issuer", "oidc.account", "tls.cert", "auth"), _oidc_together),
    )

    listen: Annotated[Listen, setting(unit="HOST:PORT", reason="""
        The address for nodes and operators. Port 0 picks a free one; write an IPv6 host in
        brackets. Any address but loopback needs `tls.client_ca` or `insecure`.""",
    )] = Listen("127.0.0.1", DEFAULT_PORT)
    advertise: Annotated[Listen | None, setting(
        unit="HOST:PORT", default_words="the value of `listen`", reason="""
        The address at which nodes and operators reach this rdzvd, if not `listen`.""")] = None
    http: Annotated[Listen | None, setting(unit="HOST:PORT", default_words="nowhere", reason="""
        Serve the live page, /api, /metrics, /sd, /healthz and /readyz here, with TLS if `tls.cert`
        is given. Any address but loopback needs `tls.client_ca` or `insecure`.""")] = None
    grafana: Annotated[str | None, setting(
        unit="URL", check=_grafana, default_words="none", reason="""
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
        sqlite survives restarts; memory loses all jobs at a restart; etcd is shared by several
        rdzvd: one leads, and another takes over.""")] = "sqlite"
    c10d: Annotated[Listen | None, setting(unit="HOST:PORT", default_words="nowhere", reason="""
        Serve torch's own store here too, for torchrun --rdzv-backend=c10d; `rdzvctl` shows its
        jobs. They end with this rdzvd. Any address but loopback needs `insecure`.""")] = None
    c10d_python: Annotated[Path | None, setting(default_words="the one that runs rdzvd", reason="""
        The interpreter that serves torch's own store; it needs torch.""")] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], setting(
        reload=True, reason="""
        The lowest level that is logged, to stderr.""")] = "info"
    log_format: Annotated[Literal["human", "json"], setting(reload=True, reason="""
        Log lines for people, or one JSON object per line.""")] = "human"
    tls: TlsSettings = field(default_factory=TlsSettings)
    oidc: Oidc = field(default_factory=Oidc)
    etcd: Etcd = field(default_factory=Etcd)
    notify: Notify = field(default_factory=Notify)
    lease: LeaseRules = field(default_factory=LeaseRules)
    quarantine: QuarantineRules = field(default_factory=QuarantineRules)
    progress: ProgressSettings = field(default_factory=ProgressSettings)
    retention: Retention = field(default_factory=Retention)
    limits: Limits = field(default_factory=Limits)
    timings: Timings = field(default_factory=Timings)
    # fmt: on

    @property
    def data_folder(self) -> Path:
        return self.data_dir or default_data_dir()

    @property
    def authenticates(self) -> bool:
        """Whether every caller must authenticate.

        If callers can do so by certificate or service account, they must.
        """
        if self.auth is None:
            return bool(self.tls.client_ca or self.oidc.issuer)
        return self.auth == "required"

    @property
    def needs_tokens(self) -> bool:
        """Whether callers can authenticate only by rdzvd's own tokens."""
        return self.authenticates and not (self.tls.client_ca or self.oidc.issuer)

    @property
    def open(self) -> str:
        """Why anyone might be able to do anything here; empty if access is restricted."""
        if self.tls.cert is None and self.authenticates:
            return "nothing here is encrypted, so anyone on the network path can steal a token"
        if self.tls.cert is None:
            return "nothing here is encrypted or authenticated"
        if self.tls.client_ca is None and not self.authenticates:
            return "no caller is asked to authenticate"
        return ""

    @property
    def exposed(self) -> str:
        """The same as `open`, but empty if only this machine can reach the server."""
        reached = [at for at in (self.listen, self.http, self.tls.token_listen) if at]
        return "" if all(listen.loopback for listen in reached) else self.open


def default_data_dir() -> Path:
    """Return the data directory that is used if no setting names one.

    This is systemd's `$STATE_DIRECTORY` if set, `/var/lib/rdzv` for root, and otherwise
    `$XDG_STATE_HOME/rdzv`, which defaults to `~/.local/state/rdzv`.
    """
    if state_directory := os.environ.get("STATE_DIRECTORY"):
        return Path(state_directory.split(":", maxsplit=1)[0])
    if os.geteuid() == 0:
        return Path("/var/lib/rdzv")
    state_home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state_home).expanduser() / "rdzv"
