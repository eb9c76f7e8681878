"""How a TLS handshake is limited: a connection that has not completed it in time is closed.

`timings.handshake` counts for gRPC (TLS and the beginning of HTTP/2) and for HTTP with TLS alike.
How many connections may be open at once is limited at each port, by `limits.connections` and
`limits.http_connections`.
"""

from __future__ import annotations

from rdzv.server.settings.config import Timings


def grpc_option(timings: Timings) -> tuple[str, int]:
    """Return the option of gRPC's server that limits a handshake."""
    return ("grpc.server_handshake_timeout_ms", timings.handshake_ms)


def http_timeout_s(timings: Timings) -> float:
    """Return how long HTTP's listener waits for a handshake."""
    return timings.handshake_ms / 1000
