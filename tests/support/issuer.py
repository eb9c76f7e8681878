"""An issuer of service accounts' tokens: a real HTTPS server with its own keys."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from tests.support.tls_files import Files

AUDIENCE = "rdzvd"


class Key:
    """A signing key of an issuer."""

    def __init__(self, kid: str, algorithm: str = "ES256") -> None:
        self.kid, self.algorithm = kid, algorithm
        self.private: Any
        if algorithm == "ES256":
            self.private = ec.generate_private_key(ec.SECP256R1())
            public = ECAlgorithm.to_jwk(self.private.public_key(), as_dict=True)
        else:
            self.private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
            public = RSAAlgorithm.to_jwk(self.private.public_key(), as_dict=True)
        self.public = {**public, "kid": kid, "alg": algorithm, "use": "sig"}


class Issuer:
    """A running issuer; its attributes may be changed at any time."""

    def __init__(self, files: Files, port: int) -> None:
        self.ca = files.ca
        self.url = f"https://127.0.0.1:{port}"
        self.keys = [Key("one")]
        self.away = False
        self.wants_token = ""
        self.calls_itself: str | None = None
        self.asked: list[str] = []

    def answer(self, path: str, token: str) -> tuple[int, dict[str, Any]]:
        self.asked.append(path)
        if self.away:
            return 503, {}
        if self.wants_token and token != f"Bearer {self.wants_token}":
            return 403, {}
        if path == "/.well-known/openid-configuration":
            return 200, {"issuer": self.calls_itself or self.url, "jwks_uri": f"{self.url}/keys"}
        return 200, {"keys": [key.public for key in self.keys]}

    def claims(
        self, account: str = "train", namespace: str = "team-a", node: str = "gpu-7", **more: Any
    ) -> dict[str, Any]:
        """Return the claims of a token of Kubernetes; claims that are None are left out."""
        now = time.time()
        claims = {
            "iss": self.url,
            "sub": f"system:serviceaccount:{namespace}:{account}",
            "aud": [AUDIENCE],
            "iat": int(now),
            "nbf": int(now),
            "exp": int(now) + 3600,
            "kubernetes.io": {
                "namespace": namespace,
                "node": {"name": node, "uid": "30b5"},
                "pod": {"name": f"{account}-0", "uid": "7d1c"},
                "serviceaccount": {"name": account, "uid": "a2f0"},
            },
            **more,
        }
        return {name: value for name, value in claims.items() if value is not None}

    def token(self, account: str = "train", *, key: Key | None = None, **more: Any) -> str:
        """Return a signed token."""
        key = key or self.keys[0]
        claims = self.claims(account, **more)
        return jwt.encode(claims, key.private, key.algorithm, headers={"kid": key.kid})


@contextmanager
def issuing(folder: Path) -> Iterator[Issuer]:
    """Serve an issuer on loopback until the body ends."""
    folder.mkdir(exist_ok=True)
    files = Files(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = issuer.answer(self.path, self.headers.get("Authorization", ""))
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Ignore clients that hang up, which are part of the tests."""

    server = Server(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.folder / "server.crt", files.folder / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    issuer = Issuer(files, server.server_port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield issuer
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
