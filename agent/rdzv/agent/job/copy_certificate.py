"""Creates the key and self-signed certificate of a snapshot carrier.

Other nodes verify the certificate by its digest, which they receive from the server.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from rdzv.agent.runner_link import CopyCredentials


def certified() -> CopyCredentials:
    """Return new credentials without a token. The first call is slow because it loads a library."""
    from cryptography import x509  # The import takes 36 ms and 10 MiB.
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "rdzv snapshots")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Used only while its process is alive; the dates allow for wrong clocks on other nodes.
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2100, 1, 1, tzinfo=UTC))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = certificate.public_bytes(serialization.Encoding.DER)
    pem = private + certificate.public_bytes(serialization.Encoding.PEM)
    return CopyCredentials("", hashlib.sha256(public).hexdigest(), pem.decode())
