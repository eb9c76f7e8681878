"""Opens channels to rdzvd, in plaintext or over TLS, with the client's credentials.

Files are read again for each channel, so a certificate or token renewed on disk is used from the
next connection on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from datetime import UTC, datetime
from pathlib import Path

import grpc

from rdzv.errors import InvalidRequestError
from rdzv.structs import struct
from rdzv.transport import certificates
from rdzv.transport.endpoints import Endpoint, is_loopback

VARIABLES = {
    "ca": "RDZV_TLS_CA",
    "cert": "RDZV_TLS_CERT",
    "key": "RDZV_TLS_KEY",
    "token_file": "RDZV_TOKEN_FILE",
}
"""The environment variables for credentials not given on the command line."""

TOKEN_VARIABLE = "RDZV_TOKEN"

TOKEN_METADATA_KEY = "authorization"
"""The call metadata key for the token, which is sent as `Bearer TOKEN`."""

_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{1,4096}")
"""A token from rdzvd, or from a Kubernetes service account (about 1,200 characters)."""


Metadata = tuple[tuple[str, str], ...]


@struct(frozen=True)
class Credentials:
    """A client's credentials: its CA, and its certificate or token.

    Without a CA, connections are in plaintext. A token is sent only over TLS or to loopback, so
    that others cannot read it.
    """

    ca: Path | None = None
    """The CA that must have signed the server's certificate. If set, connections use TLS."""
    cert: Path | None = None
    key: Path | None = None
    token_file: Path | None = None
    token: str = field(default="", repr=False)
    by_node: bool = False
    """Whether the server is one of the job's own nodes, which serve without TLS."""

    @classmethod
    def parse(cls, given: Mapping[str, Path | None], environ: Mapping[str, str]) -> Credentials:
        """Return checked credentials, with those not in `given` taken from the environment."""
        files = {
            name: given.get(name) or (Path(environ[variable]) if environ.get(variable) else None)
            for name, variable in VARIABLES.items()
        }
        token = "" if files["token_file"] else environ.get(TOKEN_VARIABLE, "")
        found = cls(**files, token=token, by_node=False)
        found.check()
        return found

    @property
    def tls(self) -> bool:
        return self.ca is not None

    def check(self) -> None:
        """Check that the credentials can be used."""
        if (self.cert is None) != (self.key is None):
            raise InvalidRequestError(
                f"client certificate {self.cert} and key {self.key}: one without the other cannot "
                "be used; give --tls-cert and --tls-key, or neither"
            )
        if self.cert is not None and self.ca is None:
            raise InvalidRequestError(
                f"client certificate {self.cert}: without --tls-ca connections are not encrypted, "
                "and it is never sent; give --tls-ca, the CA of the server's certificate"
            )
        if self.ca is not None:
            certificates.check_authorities(self.ca, "CA")
        if self.cert is not None and self.key is not None:
            certificates.check_pair(self.cert, self.key, "client certificate")
        self._read_token()

    def channel(self, server: Endpoint, options: Sequence[tuple[str, int]]) -> grpc.Channel:
        """Open a channel."""
        if not self.tls:
            return grpc.insecure_channel(server.target, options=options)
        return grpc.secure_channel(server.target, self._credentials(), options=options)

    def aio_channel(self, server: Endpoint, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
        """Open a channel for the running event loop, in the same way as `channel`."""
        if not self.tls:
            return grpc.aio.insecure_channel(server.target, options=options)
        return grpc.aio.secure_channel(server.target, self._credentials(), options=options)

    def _credentials(self) -> grpc.ChannelCredentials:
        self.check()

        def read(path: Path | None) -> bytes | None:
            return path.read_bytes() if path else None

        try:
            return grpc.ssl_channel_credentials(read(self.ca), read(self.key), read(self.cert))
        except OSError as error:
            raise InvalidRequestError(
                f"{error.filename} cannot be read: {error.strerror}"
            ) from error

    def metadata(self, server: Endpoint) -> Metadata:
        """Return the metadata to send with every call to a server."""
        token = self._read_token()
        if not token:
            return ()
        if not self.tls and not is_loopback(server.host):
            raise InvalidRequestError(
                f"a token is not sent to {server}: without TLS everyone on the way can take it; "
                "give --tls-ca, the CA of the server's certificate"
            )
        return ((TOKEN_METADATA_KEY, f"Bearer {token}"),)

    def _read_token(self) -> str:
        if self.token_file is None:
            where, token = TOKEN_VARIABLE, self.token.strip()
        else:
            where = f"token file {self.token_file}"
            try:
                token = self.token_file.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is not text"
                raise InvalidRequestError(f"{where} cannot be read: {reason}") from error
            if not token:
                raise InvalidRequestError(f"{where} is empty; put a token into it")
        if token and not _TOKEN.fullmatch(token):
            # Do not show the token, because even a damaged one is a secret.
            raise InvalidRequestError(f"{where} holds no valid token; create the file again")
        return token

    def stamp(self) -> certificates.Stamp:
        paths = (self.ca, self.cert, self.key)
        return certificates.stamp_of(path for path in paths if path is not None)

    def expires(self) -> datetime | None:
        """Return when the client certificate expires, or None if it is absent or unreadable."""
        if self.cert is None:
            return None
        try:
            return certificates.read_certificate(self.cert.read_bytes(), str(self.cert)).not_after
        except (OSError, InvalidRequestError):
            return None

    def shown(self) -> str:
        """Describe the client certificate: its file, its holder and, if it is invalid, why."""
        assert self.cert is not None
        try:
            found = certificates.read_certificate(self.cert.read_bytes(), str(self.cert))
        except (OSError, InvalidRequestError):
            return str(self.cert)
        trouble = found.trouble(datetime.now(UTC))
        return f"{self.cert} (of {found.common_name}{', which ' + trouble if trouble else ''})"


PLAIN = Credentials()
BY_NODE = Credentials(by_node=True)
CHECK_NODE = "check the address, and that the node that serves there has been started"


# ------------------------------------------------------------------------------------ in words

_NEVER = "failed to connect to all addresses.*"
"""Matches gRPC's message for a connection that was never established, but not for one that ended.
"""

_HANDSHAKES = (
    (
        "unable to get (local )?issuer|self.signed|unable to verify",
        "its certificate is not signed by the CA in {ca}",
        "give the CA of this server's certificate as --tls-ca",
    ),
    (
        "certificate has expired",
        "its certificate has expired",
        "renew the server's certificate",
    ),
    (
        "certificate is not yet valid",
        "its certificate is not valid yet",
        "compare the clock of this machine with the server's",
    ),
    (
        "hostname verification check failed|is not in peer certificate",
        "its certificate is not for the name {host}",
        "ask for the server by a name that is in its certificate, or add this one to it "
        "(subjectAltName)",
    ),
    (
        "wrong_version_number",
        "it does not speak TLS there",
        "check the address; an rdzvd without TLS is reached without --tls-ca (RDZV_TLS_CA)",
    ),
)
"""What gRPC says of a failed handshake, what that means, and the remedy."""

_CLOSED = re.compile(f"{_NEVER}(socket closed|reset by peer)", re.I | re.DOTALL)


def handshake_trouble(
    details: str, server: Endpoint, credentials: Credentials
) -> tuple[str, str] | None:
    """Return why a handshake failed and the remedy, or None if something else failed.

    `details` is gRPC's message. gRPC gives no reason when a server hangs up after the handshake,
    which means that the server refused the client's certificate or requires one.
    """
    if not credentials.tls:
        if not _CLOSED.search(details):
            return None
        if credentials.by_node:
            return "the other side closed the connection at once", CHECK_NODE
        # A server killed at this moment also closes the connection in this way.
        return (
            "the other side closed the connection at once",
            "if it is not just starting or ending, it may want TLS: give --tls-ca (RDZV_TLS_CA), "
            "the CA of its certificate; else check the address",
        )
    for pattern, reason, remedy in _HANDSHAKES:
        if re.search(pattern, details, re.IGNORECASE):
            return reason.format(ca=credentials.ca, host=server.host), remedy
    if _CLOSED.search(details):
        return _not_accepted(credentials)
    return None


def _not_accepted(credentials: Credentials) -> tuple[str, str]:
    if credentials.cert is None:
        return (
            "it ended the handshake, as a server does if it requires a client certificate",
            "give --tls-cert and --tls-key (RDZV_TLS_CERT, RDZV_TLS_KEY)",
        )
    return (
        f"it ended the handshake, as a server does if it refuses the client certificate "
        f"{credentials.shown()}",
        "give one that is valid, and signed by the client CA of the server",
    )
