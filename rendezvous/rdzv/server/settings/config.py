"""The configuration of a running rdzvd: its limits, its timings, and checks across settings."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rdzv.core.fleet.nodes import NodesTuning
from rdzv.core.fleet.quarantine import QuarantineTuning
from rdzv.core.model import Tuning
from rdzv.errors import InvalidRequestError
from rdzv.structs import struct
from rdzv.transport import protocol
from rdzv.transport.certificates import Certificate, check_authorities, check_pair, read_certificate
from rdzv.transport.endpoints import DEFAULT_PORT, Listen

if TYPE_CHECKING:
    from rdzv.stores.etcd_config import EtcdConfig

PROTOCOL_VERSION = protocol.VERSION


MINUTE_MS = 60_000
DAY_MS = 86_400_000


# `server_settings` gives the reasons for all fields that can be set, and their bounds.


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what is kept, so that no caller can exhaust the server."""

    jobs: int = 10_000
    nodes: int = 20_000
    """Twice the size of the largest job."""
    connections: int = 32_768
    ended_jobs: int = 10_000
    http_streams: int = 200
    """Readers of the same stream share the cost of each change."""


@dataclass(frozen=True, slots=True)
class Timings:
    """The driver's own timings. The cores' timings are in `Tuning` and `NodesTuning`."""

    ended_kept_ms: int = 30 * DAY_MS
    """At least as long as any job timeout, so no node can still be waiting to learn how its job
    ended."""
    straggler_after_ms: int = 30_000
    """A worker's rate is averaged over the last minute."""
    ping_interval_ms: int = 20_000
    ping_timeout_ms: int = 20_000


def alter(held: Limits | Timings, name: str, value: int) -> None:
    """Change a limit or timing on a reload, for all parts of a running server that hold it.

    The change takes effect only where the value is read at each use; `server_settings` marks such
    settings with `reload`.
    """
    # Both classes are frozen against all other changes; only the event loop's thread reads them.
    object.__setattr__(held, name, value)


def check_grafana(text: str) -> None:
    """Refuse text that is not the address of a Grafana server.

    Raises:
        InvalidRequestError: the text is not an http or https URL, or has a query or a fragment.

    """
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
        raise InvalidRequestError(
            f"{text!r} is not the address of a Grafana; give the URL of its first page, such as "
            "https://grafana.example.org"
        )


_EXAMPLE = f"127.0.0.1:{DEFAULT_PORT}"


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


@struct(frozen=True)
class TlsFiles:
    """The files for TLS connections, all in PEM format."""

    cert: Path
    key: Path
    client_ca: Path | None = None
    """The CA for callers' certificates, or None if callers need no certificate."""
    http_requires: bool = True
    """Whether HTTP callers also need a certificate if there is a client CA."""
    token_listen: Listen | None = None
    """Where gRPC is served to callers without a certificate, or None if nowhere."""

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.cert, self.key, *((self.client_ca,) if self.client_ca else ()))

    def check(self) -> Certificate:
        """Check the files and return the server's certificate.

        Raises:
            InvalidRequestError: a file cannot be used; the message names the file and the remedy.

        """
        if self.client_ca is not None:
            check_authorities(self.client_ca, "client CA")
        check_pair(self.cert, self.key, "certificate")
        found = read_certificate(self.cert.read_bytes(), f"certificate {self.cert}")
        if trouble := found.trouble(datetime.now(UTC)):
            raise InvalidRequestError(
                f"certificate {self.cert} cannot be used: it {trouble}; give one that is valid"
            )
        return found


@struct(frozen=True)
class OidcAccount:
    """A service account (or all accounts in a namespace, if the name is empty) and its roles."""

    namespace: str
    name: str
    roles: tuple[str, ...]
    known_as: str = "account"
    """The source of the caller's name: account, namespace or node."""


@struct(frozen=True)
class Oidc:
    """The service accounts whose tokens are accepted, and their roles."""

    issuer: str
    audience: str
    accounts: tuple[OidcAccount, ...]
    ca: Path | None = None
    """The issuer's CA, or None to use the system's authorities."""
    token_file: Path | None = None
    """The token that rdzvd sends to the issuer."""
    leeway_s: float = 30
    keys_kept_s: float = 86_400

    def check(self) -> None:
        """Check everything that can be checked without the issuer.

        Raises:
            InvalidRequestError: a file cannot be used, or PyJWT is missing.

        """
        if find_spec("jwt") is None:
            raise InvalidRequestError(
                f"`oidc.issuer` = {self.issuer!r} needs PyJWT, which is not installed here; "
                "pip install 'rdzv[oidc]', or leave `oidc` out"
            )
        if self.ca is not None:
            check_authorities(self.ca, "CA of the issuer")
        # A missing token file may still appear before the keys are fetched; if it does not, that is
        # logged.


@struct(frozen=True)
class Notify:
    """The webhook to which notifications are posted."""

    url_file: Path
    """The file that contains the webhook's address."""
    queued_after_ms: int = 600_000
    """Report jobs that have been queued for this long; 0 disables these reports."""

    def read_url(self) -> str:
        """Return the webhook's address, which is read from its file.

        Raises:
            InvalidRequestError: the file cannot be read, or does not begin with an address.

        """
        from rdzv.stores.etcd_config import first_line

        url = first_line(self.url_file, "`notify.url_file`")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            # Do not show the address, because anyone who knows it may be able to post there.
            raise InvalidRequestError(
                f"`notify.url_file` {self.url_file}: its first line is not an http or https address"
            )
        return url


@struct(frozen=True)
class Config:
    """The configuration of one rdzvd."""

    listen: Listen
    data_dir: Path
    store: str = "sqlite"
    insecure: bool = False
    tls: TlsFiles | None = None
    """How connections are encrypted, or None if they are not."""
    advertise: Listen | None = None
    """The address at which nodes and operators reach this server, if it is not the listen
    address."""
    etcd: EtcdConfig | None = None
    """The etcd cluster that several servers share. Set only with the store `etcd`."""
    http: Listen | None = None
    """Where the live page, /api, /metrics, /sd and the probes are served, or None if nowhere."""
    auth: bool = False
    """Whether every caller must authenticate."""
    oidc: Oidc | None = None
    """The service accounts whose tokens are accepted, or None if no such tokens are accepted."""
    init_admin_token: Path | None = None
    """The file for the first admin's token, used while there is no other admin."""
    grafana: str | None = None
    notify: Notify | None = None
    """Where notifications are posted, or None if nowhere."""
    c10d: Listen | None = None
    """Where torch's own store is served for torchrun's own rendezvous, or None if nowhere."""
    c10d_python: str = sys.executable
    """The interpreter that runs torch's store and therefore needs torch."""
    log_level: str = "info"
    log_format: str = "human"
    limits: Limits = field(default_factory=Limits)
    timings: Timings = field(default_factory=Timings)
    tuning: Tuning = field(default_factory=Tuning)
    nodes_tuning: NodesTuning = field(default_factory=NodesTuning)
    quarantine: QuarantineTuning = field(default_factory=QuarantineTuning)

    def check(self) -> None:
        """Refuse an unsafe configuration and files that cannot be used.

        Raises:
            InvalidRequestError: the configuration is unsafe, or a file is unusable; the message
                includes the remedy.

        """
        if not self.listen.loopback and not self.insecure and self.open:
            raise InvalidRequestError(
                f"{self.listen} can be reached from other machines, and {self.open}; listen on "
                f"loopback ({_EXAMPLE}), {self._remedy}, or give --insecure if anyone who can "
                "reach this port may run and end jobs"
            )
        if self.http is not None and not self.http.loopback and not self.insecure and self.open:
            raise InvalidRequestError(
                f"--http {self.http} can be reached from other machines, and {self.open}; listen "
                f"on loopback, {self._remedy}, or give --insecure"
            )
        if self.tls is not None:
            self.tls.check()
            if (self.tls.token_listen or not self.tls.http_requires) and not self.auth:
                raise InvalidRequestError(
                    "--tls-token-listen and --tls-http-client-auth=accept are for callers with a "
                    "token in place of a certificate, and no caller would need one; give "
                    "--auth=required with it"
                )
        if self.init_admin_token is not None and not self.auth:
            raise InvalidRequestError(
                "--init-admin-token makes a token, and no caller would need one; give "
                "--auth=required with it"
            )
        if self.oidc is not None:
            self.oidc.check()
        if self.notify is not None:
            self.notify.read_url()
        self._check_replica()
        if self.c10d is not None:
            self._check_c10d(self.c10d)

    @property
    def open(self) -> str:
        """Why anyone might be able to do anything here; empty if access is restricted."""
        if self.tls is None and self.auth:
            return "nothing here is encrypted, so anyone on the network path can steal a token"
        if self.tls is None:
            return "nothing here is encrypted or authenticated"
        if self.tls.client_ca is None and not self.auth:
            return "no caller is asked to authenticate"
        return ""

    @property
    def exposed(self) -> str:
        """The same as `open`, but empty if only this machine can reach the server."""
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
        """Refuse a server on a shared store if nodes of the other servers could not reach it."""
        if (self.store == "etcd") != (self.etcd is not None):
            raise InvalidRequestError(
                "--store=etcd and --etcd-endpoints=HOST:PORT,... go together; one is missing"
            )
        at = self.advertise or self.listen
        if self.etcd is not None and (at.unspecified or (self.advertise and not at.port)):
            raise InvalidRequestError(
                f"{at} is not an address at which others reach this server, and with a shared "
                "store they get it; give --advertise=HOST:PORT"
            )

    def _check_c10d(self, c10d: Listen) -> None:
        if not c10d.loopback and not self.insecure:
            raise InvalidRequestError(
                f"--c10d {c10d} can be reached from other machines, and torch's store encrypts and "
                f"authenticates nothing; give a loopback address ({_EXAMPLE}), or give --insecure "
                "if anyone who can reach this port may run code on the nodes of its jobs"
            )
        if c10d == self.listen and c10d.port:
            raise InvalidRequestError(
                f"--c10d {c10d} is where --listen has nodes and operators connect; give one of "
                "them another port (torchrun's default for c10d is 29400)"
            )
