"""The server's certificate and key, and its clients' CA, reloaded when they change.

The server checks whether the files have changed at each new connection and on SIGHUP. Open
connections keep using the old files. If new files are unusable, the old ones stay in use and the
reason is logged. Only TLS 1.3 is allowed: the context enforces this for HTTP, and
`rdzv.server.__main__` enforces it for gRPC.
"""

from __future__ import annotations

import functools
import logging
import os
import ssl
import stat
import sys
import threading
from datetime import UTC, datetime, timedelta

import grpc

from rdzv.errors import InvalidRequestError
from rdzv.server.settings.server_settings import TlsSettings
from rdzv.structs import struct
from rdzv.transport.certificates import Certificate, Stamp, stamp_of

EXPIRY_WARNING = timedelta(days=14)

READS = 3
"""How often to reread files that keep changing before leaving them to the next connection."""

log = logging.getLogger("rdzv.server")


@struct(frozen=True)
class _Loaded:
    stamp: Stamp
    shown: Certificate
    key: os.stat_result
    grpc: grpc.ServerCertificateConfiguration
    context: ssl.SSLContext


class Tls:
    """The server's certificate, and the CA that verifies its clients' certificates.

    The event loop and gRPC's own threads may use it at the same time.
    """

    def __init__(self, files: TlsSettings) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._now = self._load()
        self._tried = self._now.stamp
        """The state of the files when they were last read, whether they were usable or not."""
        self._warn()
        self.http = _context(files)
        """The TLS context for HTTP; each handshake uses the current files."""
        self.http.sni_callback = self._choose
        quiet_handshakes()

    @property
    def shown(self) -> Certificate:
        return self._now.shown

    def expires(self) -> datetime:
        self.refresh()
        return self.shown.not_after

    def grpc_credentials(self, *, asks: bool) -> grpc.ServerCredentials:
        """Return the credentials for a gRPC port; with `asks`, clients must send a certificate."""
        fetched = self._now

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Return the current files for a handshake, or None if this port already has them."""
            nonlocal fetched
            with self._lock:
                self._refresh()
                if self._now is fetched:
                    return None
                fetched = self._now
                return fetched.grpc

        # Returning None is allowed and means that nothing has changed.
        return grpc.dynamic_ssl_server_credentials(fetched.grpc, fetch, asks)  # type: ignore[arg-type]

    def refresh(self) -> None:
        """Reload the files if they have changed; unusable files do not replace those in use."""
        with self._lock:
            self._refresh()

    def _refresh(self) -> None:
        stamp = stamp_of(self._files.paths)
        if stamp == self._tried:
            return
        self._tried = stamp
        try:
            self._now = self._load()
        except InvalidRequestError as error:
            log.error(
                "%s; the TLS files have changed, but new connections keep using the old ones", error
            )
            return
        log.info("reloaded the TLS files: %s", self._now.shown.in_words)
        self._warn()

    def _choose(
        self, connection: ssl.SSLObject | ssl.SSLSocket, _: str | None, __: ssl.SSLContext
    ) -> None:
        self.refresh()
        connection.context = self._now.context

    # ------------------------------------------------------------------ the files

    def _load(self) -> _Loaded:
        for _ in range(READS):
            stamp = stamp_of(self._files.paths)
            try:
                loaded = self._read(stamp)
            except OSError as error:
                # The TLS library also raises this if a file has changed since it was checked.
                raise InvalidRequestError(
                    f"{error.filename or self._files.cert} cannot be read: {error.strerror}"
                ) from error
            # If the files have changed in the meantime, those checked may not be those read.
            if stamp_of(self._files.paths) == stamp:
                return loaded
        raise InvalidRequestError(
            f"certificate {self._files.cert}: the TLS files keep changing while they are read"
        )

    def _read(self, stamp: Stamp) -> _Loaded:
        files = self._files
        assert files.pair is not None, "they are given"
        cert, key = files.pair
        shown = files.check()
        context = _context(files)
        context.load_cert_chain(cert, key)
        authorities = files.client_ca.read_bytes() if files.client_ca else None
        pair = (key.read_bytes(), cert.read_bytes())
        config = grpc.ssl_server_certificate_configuration([pair], authorities)
        return _Loaded(stamp, shown, key.stat(), config, context)

    def _warn(self) -> None:
        key = self._now.key
        # A key owned by another account, as in a Kubernetes secret, is read through its group.
        if key.st_mode & (0o077 if key.st_uid == os.geteuid() else 0o007):
            log.warning(
                "TLS key %s is readable by users other than its owner (mode %04o); run chmod 600 "
                "on it",
                *(self._files.key, stat.S_IMODE(key.st_mode)),
            )
        if self._now.shown.not_after - datetime.now(UTC) < EXPIRY_WARNING:
            log.warning("certificate %s: %s", self._files.cert, self._now.shown.in_words)


def _context(files: TlsSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if files.client_ca is not None:
        context.load_verify_locations(cafile=files.client_ca)
        context.verify_mode = (
            ssl.CERT_REQUIRED if files.http_client_auth == "require" else ssl.CERT_OPTIONAL
        )
    return context


@functools.cache
def quiet_handshakes() -> None:
    """Prevent a traceback when the server name in a client's TLS hello is not text.

    The handshake fails anyway. With an `sni_callback`, Python itself decodes the name and reports
    errors only to `sys.unraisablehook`.
    """
    former = sys.unraisablehook

    def hear(unraisable: sys.UnraisableHookArgs) -> None:
        damaged = isinstance(unraisable.exc_value, UnicodeDecodeError)
        if not (damaged and isinstance(unraisable.object, bytes)):
            former(unraisable)

    sys.unraisablehook = hear
