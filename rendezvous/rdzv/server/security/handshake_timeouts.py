"""Limits how long TLS handshakes may take, and closes connections that take longer.

`timings.handshake` applies both to gRPC (TLS and the start of HTTP/2) and to HTTP over TLS. The
number of open connections is limited by `limits.connections` and `limits.http_connections`.
"""

from __future__ import annotations

from rdzv.server.settings.config import Timings


def grpc_timeout_option(timings: Timings) -> tuple[str, int]:
    """Return the gRPC server option that limits how long a handshake may take."""
    return ("grpc.server_handshake_timeout_ms", timings.handshake_ms)


def http_timeout_s(timings: Timings) -> float:
    """Return how long the HTTP listener waits for a handshake."""
    return timings.handshake_ms / 1000
