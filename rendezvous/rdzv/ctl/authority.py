"""A small CA and the certificates that it signs, for users without their own CA.

One folder holds everything: `ca.crt`, which everyone trusts, `ca.key`, which stays here, and a pair
of files for each holder. The common name (CN) in a caller's certificate is the caller's name, and
its organizations (O) are the caller's roles. A caller cannot use a server's certificate, nor a
server a caller's.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rdzv.ctl.new_files import new_file
from rdzv.errors import InvalidRequestError
from rdzv.structs import struct

CLOCKS_APART = timedelta(minutes=5)
"""How far certificates are backdated, because other machines' clocks may be behind."""

OF_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
"""The names in every server's certificate, for clients on the same machine."""

CALLER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,63}")
"""A valid holder name. It is also a file name, and a common name has at most 64 characters."""
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")

_Key = ec.EllipticCurvePrivateKey


@struct(frozen=True)
class Made:
    """A holder's certificate and key files."""

    cert: Path
    key: Path


@struct(frozen=True)
class Shown:
    """A certificate's contents, as shown to users."""

    file: Path
    kind: str
    name: str
    roles: tuple[str, ...]
    hosts: tuple[str, ...]
    not_after: datetime


@dataclass(frozen=True)
class Authority:
    """A CA in its folder, with its signing key."""

    folder: Path
    key: _Key
    certificate: x509.Certificate

    @classmethod
    def make(cls, folder: Path, days: int, *, replace: bool) -> Authority:
        """Create a CA."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequestError(
                f"{folder} cannot be created: {error.strerror}; give another --dir"
            ) from error
        name = _subject(f"rdzv CA of {datetime.now(UTC):%Y-%m-%d %H:%M:%S}")
        files, key = _files(folder, "ca", replace=replace), _new_key()
        certificate = _signed(name, name, key, key, days)
        _write(files, key, certificate, replace=replace)
        return cls(folder, key, certificate)

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """Open the CA in a folder."""
        files = _files(folder, "ca", replace=True)
        try:
            key = serialization.load_pem_private_key(files.key.read_bytes(), None)
            certificate = x509.load_pem_x509_certificate(files.cert.read_bytes())
        except OSError as error:
            raise InvalidRequestError(
                f"{error.filename} cannot be read: {error.strerror}; create a CA with "
                "`rdzvctl certs init`, or name its folder with --dir"
            ) from error
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise InvalidRequestError(
                f"the CA in {folder} cannot be used: {error}; give another folder"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InvalidRequestError(
                f"{files.key} is another kind of key than rdzvctl creates; sign with the "
                "tools that created it"
            )
        return cls(folder, key, certificate)

    def server(self, hosts: Sequence[str], days: int, *, replace: bool) -> Made:
        """Create the files for a server that is reached at `hosts`, and return their paths."""
        names = map(_host, dict.fromkeys((*hosts, *OF_THIS_MACHINE)))
        purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        subject = _subject(hosts[0][:64])
        more = (purpose, x509.SubjectAlternativeName(names))
        return self._make("server", subject, more, days, replace=replace)

    def caller(
        self, file: str, name: str, roles: Sequence[str], days: int, *, replace: bool
    ) -> Made:
        """Create the files for a caller with these roles, and return their paths."""
        if not CALLER_NAME.fullmatch(name):
            raise InvalidRequestError(
                f"name {name!r} cannot be used: give up to 64 letters, digits and . _ @ -, the "
                "first a letter, a digit or _"
            )
        purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
        subject = _subject(name, roles)
        return self._make(f"{file}-{name}", subject, (purpose,), days, replace=replace)

    def _make(
        self,
        name: str,
        subject: x509.Name,
        extensions: Iterable[x509.ExtensionType],
        days: int,
        *,
        replace: bool,
    ) -> Made:
        files, key = _files(self.folder, name, replace=replace), _new_key()
        until = self.certificate.not_valid_after_utc
        if datetime.now(UTC) + timedelta(days=days) > until:
            raise InvalidRequestError(
                f"--days {days} is longer than the CA is valid, until {until:%Y-%m-%d}; give fewer"
            )
        made = _signed(subject, self.certificate.subject, key, self.key, days, extensions)
        _write(files, key, made, replace=replace)
        return files


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    key: _Key,
    by: _Key,
    days: int,
    extensions: Iterable[x509.ExtensionType] = (),
) -> x509.Certificate:
    """Return a certificate for `key`; one that is signed by itself is a CA's."""
    now, is_ca = datetime.now(UTC), by is key
    builder = x509.CertificateBuilder(
        issuer,
        subject,
        key.public_key(),
        x509.random_serial_number(),
        now - CLOCKS_APART,
        now + timedelta(days=days),
    )
    usage = x509.KeyUsage(not is_ca, False, False, False, False, is_ca, is_ca, False, False)
    critical = (x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), usage)
    for extension in critical:
        builder = builder.add_extension(extension, critical=True)
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key())
    for extension in (own, *((signer,) if not is_ca else ()), *extensions):
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(by, hashes.SHA256())


def show(files: Sequence[Path]) -> list[Shown]:
    """Read certificates, and return their contents."""
    found = []
    for file in files:
        try:
            certificate = x509.load_pem_x509_certificate(file.read_bytes())
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not a certificate in PEM"
            raise InvalidRequestError(f"{file} cannot be read: {reason}") from error
        names: Iterable[x509.GeneralName] = ()
        with suppress(x509.ExtensionNotFound):
            extension = x509.SubjectAlternativeName
            names = certificate.extensions.get_extension_for_class(extension).value
        one = Shown(
            file=file,
            kind=_kind(certificate),
            name=next(iter(_texts(certificate, NameOID.COMMON_NAME)), ""),
            roles=_texts(certificate, NameOID.ORGANIZATION_NAME),
            hosts=tuple(str(name.value) for name in names),
            not_after=certificate.not_valid_after_utc,
        )
        found.append(one)
    return found


def _texts(certificate: x509.Certificate, oid: x509.ObjectIdentifier) -> tuple[str, ...]:
    return tuple(str(part.value) for part in certificate.subject.get_attributes_for_oid(oid))


def _kind(certificate: x509.Certificate) -> str:
    try:
        if certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            return "CA"
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return "any"
    return "server" if ExtendedKeyUsageOID.SERVER_AUTH in usage else "caller"


def parse_hosts(given: Sequence[str]) -> tuple[str, ...]:
    """Parse host names and addresses; an argument may contain several, separated by commas."""
    names = [part.strip() for word in given for part in word.split(",") if part.strip()]
    if not names:
        raise InvalidRequestError("no name of the server is given; give --server HOST,ADDRESS")
    for name in names:
        _host(name)
    return tuple(dict.fromkeys(names))


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        if not _HOST.fullmatch(name):
            raise InvalidRequestError(
                f"{name!r} is not a host name or address; give those by which clients "
                "reach the server, without a port"
            ) from None
        return x509.DNSName(name)


def _subject(name: str, roles: Iterable[str] = ()) -> x509.Name:
    organizations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, role) for role in roles]
    return x509.Name([*organizations, x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _new_key() -> _Key:
    return ec.generate_private_key(ec.SECP256R1())


def _files(folder: Path, name: str, *, replace: bool) -> Made:
    """Return a holder's files, which may exist already if they `replace` others.

    They are refused before any is written, as a new key does not match an old certificate.
    """
    files = Made(folder / f"{name}.crt", folder / f"{name}.key")
    for path in () if replace else (files.cert, files.key):
        if path.exists():
            raise InvalidRequestError(f"{path} already exists; --force replaces it")
    return files


def _write(files: Made, key: _Key, certificate: x509.Certificate, *, replace: bool) -> None:
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    with new_file(files.key, replace=replace) as written:
        written.write(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    with new_file(files.cert, replace=replace, mode=0o644) as written:
        written.write(certificate.public_bytes(pem))
