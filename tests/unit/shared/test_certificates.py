"""Certificates and keys in files: valid ones are read correctly, each bad one has its own error."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st
from tls_files import Files

from rdzv.errors import InvalidRequestError
from rdzv.transport.certificates import check_authorities, check_pair, read_certificate, stamp_of

pytestmark = pytest.mark.slow


def signed(
    name: str, roles: tuple[str, ...], since: datetime, until: datetime, kind: str = "ec"
) -> x509.Certificate:
    subject = x509.Name(
        [
            *(x509.NameAttribute(NameOID.ORGANIZATION_NAME, role) for role in roles),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody else")])
    key = {
        "ec": lambda: ec.generate_private_key(ec.SECP256R1()),
        "rsa": lambda: rsa.generate_private_key(65537, 2048),
        "ed25519": ed25519.Ed25519PrivateKey.generate,
    }[kind]()
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), 1, since, until)
    return builder.sign(key, None if kind == "ed25519" else hashes.SHA256())


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize("kind", ["ec", "rsa", "ed25519"])
@pytest.mark.parametrize(
    "until", [datetime(2049, 12, 31, tzinfo=UTC), datetime(2061, 1, 2, tzinfo=UTC)]
)
def test_a_certificate_says_whose_it_is_and_for_how_long(kind: str, until: datetime) -> None:
    since = datetime(1999, 5, 6, 7, 8, 9, tzinfo=UTC)
    found = read_certificate(pem(signed("Zoë", ("submit", "read"), since, until, kind)), "it")
    assert found.common_name == "Zoë"
    assert found.organizations == ("submit", "read")
    assert (found.not_before, found.not_after) == (since, until)


def test_the_first_of_several_is_the_holders(tmp_path: Path) -> None:
    files = Files(tmp_path)
    chain = (tmp_path / "server.crt").read_bytes() + files.ca.read_bytes()
    assert read_certificate(b"some words\n" + chain, "it").common_name == "127.0.0.1"


@pytest.mark.quick
def test_a_certificate_is_valid_between_its_two_dates() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    day = timedelta(days=1)
    found = read_certificate(pem(signed("n", (), now, now + day)), "it")
    assert found.trouble(now) == found.trouble(now + day) == ""
    assert found.trouble(now + 2 * day) == "expired on 2026-01-02 00:00 UTC"
    assert found.trouble(now - day) == "is not valid before 2026-01-01 00:00 UTC"


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 255))
def test_what_is_no_certificate_is_refused(noise: bytes, at: int, byte: int) -> None:
    with pytest.raises(InvalidRequestError, match="it cannot be used"):
        read_certificate(noise, "it")
    der = bytearray(_DER)
    der[at % len(der)] = byte
    damaged = ssl.DER_cert_to_PEM_cert(bytes(der)).encode()
    try:
        read_certificate(damaged, "it")
    except InvalidRequestError as error:
        assert "it cannot be used" in str(error)


_DER = signed(
    "n1", ("node",), datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)
).public_bytes(serialization.Encoding.DER)


@pytest.mark.quick
def test_a_pair_that_can_be_used_is_not_refused(tmp_path: Path) -> None:
    Files(tmp_path)
    check_pair(tmp_path / "server.crt", tmp_path / "server.key", "certificate")
    check_authorities(tmp_path / "ca.crt", "CA")


@pytest.mark.parametrize(
    ("cert", "key", "said"),
    [
        ("server.crt", "ca.key", "the key does not belong to the certificate"),
        ("none.crt", "server.key", "none.crt: No such file or directory"),
        ("server.crt", "none.key", "none.key: No such file or directory"),
        (
            "server.crt",
            "locked.key",
            "PEM files that belong together, the key without a passphrase",
        ),
        ("empty", "server.key", "empty with key"),
        ("server.key", "server.crt", "cannot be used"),
    ],
)
def test_a_pair_that_can_not_be_used_is_refused_in_words(
    tmp_path: Path, cert: str, key: str, said: str
) -> None:
    Files(tmp_path)
    (tmp_path / "empty").touch()
    locked = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (tmp_path / "locked.key").write_bytes(locked)
    with pytest.raises(InvalidRequestError, match=r"^certificate ") as refused:
        check_pair(tmp_path / cert, tmp_path / key, "certificate")
    assert said in str(refused.value)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "said"), [(None, "No such file"), ("", "no certificate"), ("words", "no certificate")]
)
def test_a_ca_without_a_certificate_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    ca = tmp_path / "ca"
    if text is not None:
        ca.write_text(text)
    with pytest.raises(InvalidRequestError, match=said):
        check_authorities(ca, "CA")


@pytest.mark.quick
def test_a_stamp_changes_with_its_files(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("1")
    before = stamp_of((one, other))
    assert stamp_of((one, other)) == before
    other.write_text("")
    assert stamp_of((one, other)) != before
