"""Runs a relay, consisting of its listener and its call to the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rdzv.runtime.concurrency import beside
from rdzv.server.rpc.grpc_listener import bind_all, insisting_on, listener_options
from rdzv.server.rpc.grpc_log import quiet_grpc
from rdzv.server.rpc.grpc_server import grpc_server
from rdzv.server.security.tls import Tls
from rdzv.server.settings.config import Config, RelayTo
from rdzv.server.stream_relay.service import RelayService
from rdzv.server.stream_relay.upstream import Upstream
from rdzv.transport.addresses import is_loopback
from rdzv.transport.endpoints import Listen


@asynccontextmanager
async def relaying(config: Config, to: RelayTo, tls: Tls | None) -> AsyncIterator[Listen]:
    """Relay until the body ends; yield the listening address, with the actual port for port 0.

    Raises:
        InvalidRequestError: the relay cannot listen on the address, or cannot use a TLS file.
        RendezvousStateError: gRPC's server has ended on its own; the body is cancelled.

    """
    quiet_grpc()
    credentials = to.credentials()
    upstream = Upstream(to.servers, credentials)
    service = RelayService(
        upstream, config, lambda: credentials.tls or is_loopback(upstream.server.host)
    )
    server = grpc_server([], listener_options(config.limits, config.timings))
    service.register_with(server)
    # SERVING means that the relay is running. If it cannot reach its server, it refuses streams.
    health_servicer = health.aio.HealthServicer()
    await health_servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    bound = bind_all(server, config, tls)
    await server.start()
    try:
        async with insisting_on(server, str(bound)), beside(upstream.run()):
            yield bound
    finally:
        await server.stop(config.timings.stop_grace_ms / 1000)
