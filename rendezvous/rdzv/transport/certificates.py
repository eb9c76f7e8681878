"""Checks that PEM files contain usable certificates and keys, and reads names, roles and dates.

Python's TLS library loads the files first, because with a bad file gRPC fails handshakes without
giving a reason. A certificate's fields are parsed here from DER, because importing `cryptography`
would cost each program that connects over TLS 36 ms and 10 MiB.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from rdzv.errors import InvalidRequestError
from rdzv.structs import struct

_BLOCK = re.compile(
    r"-----BEGIN CERTIFICATE-----\s.*?-----END CERTIFICATE-----", re.DOTALL | re.ASCII
)
_COMMON_NAME = bytes.fromhex("550403")
_ORGANIZATION = bytes.fromhex("55040a")

_REASONS = {
    "KEY_VALUES_MISMATCH": "the key does not belong to the certificate",
    "KEY_TYPE_MISMATCH": "the key does not belong to the certificate",
    "BAD_DECRYPT": "the key has a passphrase",
    "NO_CERTIFICATE_OR_CRL_FOUND": "it holds no certificate in PEM",
}
"""Plain-language versions of the TLS library's reasons; others are shown unchanged."""


Stamp = tuple[tuple[int, int, int], ...]
"""A value that identifies the contents of files, and changes whenever any of them changes."""


@struct(frozen=True)
class Certificate:
    """The holder and the validity period of a certificate."""

    common_name: str
    organizations: tuple[str, ...]
    not_before: datetime
    not_after: datetime

    @property
    def in_words(self) -> str:
        """The holder and the expiry date, for use in messages."""
        return f"of {self.common_name or 'no name'}, valid until {_spelled(self.not_after)}"

    def trouble(self, now: datetime) -> str:
        """Return why the certificate is not valid at `now`, or an empty string if it is."""
        if now > self.not_after:
            return f"expired on {_spelled(self.not_after)}"
        if now < self.not_before:
            return f"is not valid before {_spelled(self.not_before)}"
        return ""


def _spelled(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def stamp_of(paths: Iterable[Path]) -> Stamp:
    """Return the current stamp of a set of files, any of which may be missing."""
    return tuple(map(_stamp, paths))


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_ino, found.st_size


def check_authorities(path: Path, what: str) -> None:
    """Check that a file contains CA certificates; `what` describes the file in errors."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequestError(
            f"{what} {path} cannot be used: {_said(error)}; give a readable PEM file"
        ) from error


def check_pair(cert: Path, key: Path, what: str) -> None:
    """Check that a certificate and a key belong together; `what` describes them in errors."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequestError(
            f"{what} {cert} with key {key} cannot be used: {_which(cert, key)}{_said(error)}; "
            "give readable PEM files that belong together, the key without a passphrase"
        ) from error


def _which(*paths: Path) -> str:
    """Return the first unreadable file, or "" if there is none; the TLS library names no file."""
    for path in paths:
        try:
            with path.open("rb"):
                pass
        except OSError:
            return f"{path}: "
    return ""


def _said(error: OSError) -> str:
    reason = getattr(error, "reason", None) or ""
    return _REASONS.get(reason) or error.strerror or str(error)


def read_certificate(pem: bytes, what: str) -> Certificate:
    """Parse the first certificate in a PEM file, which is the holder's own."""
    found = _BLOCK.search(pem.decode(errors="replace"))
    if found is None:
        raise InvalidRequestError(f"{what} cannot be used: it holds no certificate in PEM")
    try:
        return _read_der(ssl.PEM_cert_to_DER_cert(found[0]))
    except (ValueError, IndexError) as error:
        raise InvalidRequestError(
            f"{what} cannot be used: its certificate cannot be read ({error})"
        ) from error


def _read_der(der: bytes) -> Certificate:
    """Parse the required fields of RFC 5280's TBSCertificate."""
    fields = list(_parts(_first(_first(der))))
    if fields[0][0] == 0xA0:  # The optional version.
        del fields[0]
    _, _, _, (_, validity), (_, subject) = fields[:5]
    not_before, not_after = (_time(tag, content) for tag, content in _parts(validity))
    names = list(_names(subject))
    return Certificate(
        next((value for kind, value in names if kind == _COMMON_NAME), ""),
        tuple(value for kind, value in names if kind == _ORGANIZATION),
        not_before,
        not_after,
    )


def _names(subject: bytes) -> Iterator[tuple[bytes, str]]:
    for _, several in _parts(subject):
        for _, one in _parts(several):
            (_, kind), (_, value) = _parts(one)
            yield kind, value.decode(errors="replace")


def _time(tag: int, content: bytes) -> datetime:
    # UTCTime has a two-digit year; RFC 5280 splits the centuries at 50, strptime at 69.
    text = content.decode("ascii")
    if tag == 0x17:
        text = ("19" if text[:2] >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _first(data: bytes) -> bytes:
    for _, content in _parts(data):
        return content
    raise ValueError("something is empty")


def _parts(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tag and content of each element of a DER sequence."""
    at = 0
    while at < len(data):
        tag, length, at = data[at], data[at + 1], at + 2
        if length >= 0x80:
            count = length & 0x7F
            length, at = int.from_bytes(data[at : at + count]), at + count
        if at + length > len(data):
            raise ValueError("it ends too soon")
        yield tag, data[at : at + length]
        at += length
