"""Connection settings for etcd: endpoints, TLS files and password, read and checked."""

from __future__ import annotations

import re
from dataclasses import field
from pathlib import Path

from rdzv.errors import InvalidRequestError
from rdzv.structs import struct
from rdzv.transport.certificates import check_authorities, check_pair
from rdzv.transport.endpoints import Endpoint, parse_endpoint

DEFAULT_PORT = 2379


def first_line(file: Path, what: str = "etcd password file") -> str:
    """Read a secret from the first line of a file; `what` describes the file in errors."""
    try:
        line = file.read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{what} {file} cannot be read: {error}") from None
    if not line:
        raise InvalidRequestError(f"{what} {file}: its first line is empty")
    return line


@struct(frozen=True)
class EtcdConfig:
    """Connection settings for etcd, and the place where rdzv keeps its data in it."""

    endpoints: tuple[Endpoint, ...]
    prefix: str = "/rdzv"
    """All keys begin with this prefix and a slash, so several rdzvd clusters can share one etcd."""
    tls: bool = False
    """Whether endpoints use https; implied by a CA or a certificate."""
    user: str = ""
    password: str = field(default="", repr=False)
    ca: Path | None = None
    """The CA for the members' certificates, or None to use the system's CAs."""
    cert: Path | None = None
    key: Path | None = None
    ttl_s: int = 3
    """The time for which a leader may be silent before its lease expires. etcd raises it to at
    least one and a half times its own election timeout."""
    timeout_ms: int = 3_000
    """The time limit of one call, including all repetitions."""

    @classmethod
    def parse(cls, endpoints: str, **given: object) -> EtcdConfig:
        """Parse `HOST:PORT,HOST:PORT`, each with or without http(s)://, into a checked config."""
        parsed, tls = parse_endpoints(endpoints)
        config = cls(parsed, tls=tls, **given)  # type: ignore[arg-type]
        config.check()
        return config

    @property
    def secure(self) -> bool:
        return self.tls or self.ca is not None or self.cert is not None

    @property
    def place(self) -> str:
        return f"etcd at {','.join(map(str, self.endpoints))}: {self.prefix}"

    def check(self) -> None:
        """Check the configuration. Errors name the value, the reason and the remedy."""
        if not re.fullmatch(r"(/[A-Za-z0-9._-]+)+", self.prefix):
            raise InvalidRequestError(
                f"etcd prefix {self.prefix!r} cannot be used: it is not a path of letters, digits "
                "and . _ -; give one like /rdzv"
            )
        if bool(self.user) != bool(self.password):
            raise InvalidRequestError(
                f"etcd user {self.user!r} {'has no' if self.user else 'is missing for the'} "
                "password; give both or neither"
            )
        if (self.cert is None) != (self.key is None):
            raise InvalidRequestError(
                f"etcd client certificate {self.cert} and key {self.key}: one without the other "
                "cannot be used; give both or neither"
            )
        if self.ca is not None:
            check_authorities(self.ca, "etcd CA")
        if self.cert is not None and self.key is not None:
            check_pair(self.cert, self.key, "etcd client certificate")


def parse_endpoints(text: str) -> tuple[tuple[Endpoint, ...], bool]:
    """Parse `HOST:PORT,HOST:PORT`, with or without a scheme; also return whether it is https.

    >>> parse_endpoints("https://a:1,https://[::1]")
    ((Endpoint(host='a', port=1), Endpoint(host='::1', port=2379)), True)
    """
    endpoints: list[Endpoint] = []
    schemes: set[str] = set()
    for part in text.split(","):
        scheme, found, rest = part.strip().partition("://")
        if found and scheme not in ("http", "https"):
            raise InvalidRequestError(
                f"etcd endpoint {part.strip()!r} cannot be used: {scheme!r} is not a scheme of "
                "etcd; give http, https or none"
            )
        schemes.add(scheme if found else "http")
        endpoint = parse_endpoint(rest.removesuffix("/") if found else scheme, DEFAULT_PORT)
        if endpoint in endpoints:
            raise InvalidRequestError(
                f"etcd endpoints {text!r} cannot be used: {endpoint} is given twice; leave one out"
            )
        endpoints.append(endpoint)
    if len(schemes) > 1:
        raise InvalidRequestError(
            f"etcd endpoints {text!r} cannot be used: some are https and some are not; give "
            "all of them alike"
        )
    return tuple(endpoints), schemes == {"https"}
