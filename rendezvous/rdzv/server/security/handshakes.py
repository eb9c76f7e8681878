"""Limits TLS handshakes: a connection that has not completed its handshake in time is closed.

`timings.handshake` applies to gRPC (TLS and the beginning of HTTP/2) and to HTTP with TLS alike.
The number of open connections is limited at each port, by `limits.connections` and
`limits.http_connections`.
"""

from __future__ import annotations

from rdzv.server.settings.config import Timings


def grpc_timeout_option(timings: Timings) -> tuple[str, int]:
    """Return the gRPC server option that limits the time of a handshake."""
    return ("grpc.server_handshake_timeout_ms", timings.handshake_ms)


def http_timeout_s(timings: Timings) -> float:
    """Return how long HTTP's listener waits for a handshake."""
    return timings.handshake_ms / 1000
