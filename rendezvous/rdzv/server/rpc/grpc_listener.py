"""Serves the gRPC services, health checks and reflection at the addresses given by `--listen`.

gRPC's server is modified to survive calls with arbitrary paths, and to log nothing of callers:
HTTP/2 allows paths that are not UTF-8, and gRPC decodes the path before the caller is known.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio
from grpc._cython import cygrpc
from grpc.aio import _server
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rdzv.errors import InvalidRequestError, RendezvousConnectionError, RendezvousStateError
from rdzv.runtime.tasks import beside
from rdzv.server.driver import STOP_GRACE_MS
from rdzv.server.operations.handlers import Server
from rdzv.server.replication.replica import Replica
from rdzv.server.rpc.calls import Interceptor, control_service
from rdzv.server.rpc.rendezvous_service import RendezvousService
from rdzv.server.settings.server_settings import Limits, RdzvdSettings, Timings
from rdzv.structs import replace
from rdzv.transport.endpoints import Listen, cannot_listen
from rdzv.v1 import rdzv_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from rdzv.server.security.tls import Tls

log = logging.getLogger("rdzv.service")

OTHER_FILES = 512
"""The number of open files reserved for other uses, such as the store and the HTTP port."""

MESSAGE_BYTES = 4 * 1024 * 1024
"""The largest message that is accepted. A hello with 64 jobs is far smaller."""

METADATA_BYTES = 8 * 1024
"""The size of a call's metadata. A token and a trace context need far less."""

CALLS_PER_CONNECTION = 1_024
"""The number of concurrent calls on one connection. Further calls wait."""

IDLE_CONNECTION_MS = 10 * 60_000
"""How long a connection without a call is kept. Clients reconnect by themselves."""

MIN_PING_INTERVAL_MS = 300
"""The interval at which clients may send pings. gRPC disconnects faster clients with "Too many
pings"."""

HANDSHAKE_MS = 10_000
"""How long a new connection may take for TLS (and HTTP/2, with gRPC) before it is closed."""

UNHEARD_S = 120
"""How long a call may wait until this server accepts it. Nodes give up earlier."""

SERVICES = ("rdzv.v1.Rendezvous", "rdzv.v1.Control")


@asynccontextmanager
async def serving(server: Server, *, reflection: bool = True) -> AsyncIterator[Listen]:
    """Serve until the body ends; yield the listening address, with the actual port for port 0.

    At the end, every stream is closed with the advice to reconnect, and open calls are given a
    moment to finish. Without `reflection`, callers cannot list the services.
    """
    replica, config = server.replica, server.config
    grpcs = grpc_server([Interceptor(server.gate)], _options(config.limits, config.timings))
    pb_grpc.add_RendezvousServicer_to_server(RendezvousService(replica, server.clock), grpcs)
    control: Any = control_service(server)
    pb_grpc.add_ControlServicer_to_server(control, grpcs)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, grpcs)
    if reflection:
        # The import takes time.
        from grpc_reflection.v1alpha import reflection as listing

        names = (*SERVICES, health.SERVICE_NAME, listing.SERVICE_NAME)
        listing.enable_server_reflection(names, grpcs)
    bound = _bind_all(grpcs, config, server.tls)
    await grpcs.start()
    try:
        at = str(config.advertise or bound)
        async with (
            _insisting_on(grpcs, at),
            _telling_health(replica, health_servicer, at, config.exposed),
        ):
            yield bound
    finally:
        replica.stand_by(
            RendezvousConnectionError("this server is stopping; workers continue, connect again")
        )
        await grpcs.stop(STOP_GRACE_MS / 1000)


def _options(limits: Limits, timings: Timings) -> list[tuple[str, int]]:
    connections = connections_at_once(limits)
    return [
        # Otherwise, two servers could share a port, and each would get some of the connections.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.max_metadata_size", METADATA_BYTES),
        # Both limits are the same, because gRPC refuses metadata between the two at random.
        ("grpc.absolute_max_metadata_size", METADATA_BYTES),
        ("grpc.max_concurrent_streams", CALLS_PER_CONNECTION),
        ("grpc.max_allowed_incoming_connections", connections),
        # All nodes may call at once after a restart. By default, gRPC cancels some calls if more
        # than 1,000 are waiting, and any call that has waited for 30 s, and the nodes have to start
        # over.
        ("grpc.server.max_pending_requests", connections),
        ("grpc.server.max_pending_requests_hard_limit", connections),
        ("grpc.server_max_unrequested_time_in_server", UNHEARD_S),
        # Otherwise, each read is followed by a ping that measures how much data may be in flight.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_CONNECTION_MS),
        ("grpc.keepalive_time_ms", timings.ping_interval_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # This option, not keepalive_timeout_ms, ends a connection to a stopped peer.
        ("grpc.http2.ping_timeout_ms", timings.ping_timeout_ms),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        # After a pause, the server reads several pings at once, and ping strikes would end healthy
        # streams.
        ("grpc.http2.max_ping_strikes", 0),
    ]


def connections_at_once(limits: Limits) -> int:
    """Return how many connections to allow so that enough open files remain for other uses."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return limits.connections
    return min(limits.connections, max(files - OTHER_FILES, files // 2))


@asynccontextmanager
async def _insisting_on(server: grpc.aio.Server, address: str) -> AsyncIterator[None]:
    """Cancel the body if gRPC's server stops, so that the process does not run on unreachable."""
    # This task ends when the server has stopped. Cancelling it would also cancel the stop.
    ended = asyncio.create_task(server.wait_for_termination())

    async def wait() -> None:
        await asyncio.shield(ended)
        raise RendezvousStateError(
            f"gRPC's server at {address} has ended by itself (the log says why, if gRPC did); "
            "start this one again"
        )

    async with beside(wait()):
        yield


@asynccontextmanager
async def _telling_health(
    replica: Replica, servicer: health.aio.HealthServicer, address: str, exposed: str
) -> AsyncIterator[None]:
    """Report to health checks, until the body ends, that the server runs and whether it leads."""
    changed = asyncio.Event()
    leading = False

    def tell(leads: bool) -> None:
        nonlocal leading
        leading = leads
        changed.set()

    async def follow() -> None:
        while True:
            changed.clear()
            for name in SERVICES:
                await servicer.set(name, _SERVING if leading else _NOT_SERVING)
            await changed.wait()

    await servicer.set("", _SERVING)
    replica.serve_as(address, tell, exposed)
    async with beside(follow()):
        yield


_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def _bind_all(server: grpc.aio.Server, config: RdzvdSettings, tls: Tls | None) -> Listen:
    asks = config.tls.client_ca is not None
    bound = replace(config.listen, port=_bind(server, config.listen, tls, asks=asks))
    if (listen := config.tls.token_listen) is not None:
        at_port = replace(listen, port=_bind(server, listen, tls, asks=False))
        log.info("callers without a certificate can connect to %s with a token", at_port)
    return bound


def _bind(server: grpc.aio.Server, listen: Listen, tls: Tls | None, *, asks: bool) -> int:
    """Bind an address and return its port. With `asks`, clients must present a certificate."""
    try:
        if tls is None:
            return server.add_insecure_port(str(listen))
        return server.add_secure_port(str(listen), tls.grpc_credentials(asks=asks))
    except RuntimeError as error:
        raise _why_not(listen) from error


def _why_not(listen: Listen) -> InvalidRequestError:
    """Return the error for an address that gRPC cannot bind; gRPC does not report a reason."""
    refused = OSError("gRPC refused it")
    try:
        infos = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in infos:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
    except OSError as error:
        refused = error
    return cannot_listen(listen, refused, "--listen")


# ------------------------------------------------------------------------------------ the server

_NO_TEXT = "Invalid encoding on"
"""The beginning of gRPC's log line about metadata that is not text. The line contains a traceback
and quotes the value, which may be a damaged token. It is not needed, because the call is refused
and the refusal is logged."""


def grpc_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]
) -> grpc.aio.Server:
    """Return a gRPC server.

    Generated services register their methods with it. Calls to other methods are answered with
    UNIMPLEMENTED.
    """
    logging.getLogger("grpc._cython.cygrpc").addFilter(_quotes_nobody)
    server: Any = _Server(interceptors, options)
    return server  # type: ignore[no-any-return]


def _quotes_nobody(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_NO_TEXT)


class _Server(_server.Server):
    def __init__(
        self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]
    ) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, None, (), interceptors, tuple(options), None)


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """A server whose loop survives a path that is not UTF-8.

    gRPC's loop decodes the path of a call to an unregistered method, and an error there shuts down
    the whole server: in version 1.85.1, a single frame is enough. The loop in version 1.78.0
    tolerates such a path and does not call the method below.
    """

    def _make_request_call_future(self, method: bytes | None) -> Any:
        if method is not None:
            return super()._make_request_call_future(method)
        return asyncio.get_running_loop().create_task(self._refuse_the_unknown())

    async def _refuse_the_unknown(self) -> NoReturn:
        """Answer calls to unregistered methods without reading their paths.

        Ends when the server does, with an exception that gRPC's loop expects.
        """
        loop = asyncio.get_running_loop()
        answering: set[asyncio.Task[None]] = set()
        while True:
            call = await self._request_call()
            refusal = cygrpc._handle_rpc("", _NoMethods(), (), call, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(refusal, call, loop, ""))
            answering.add(task)
            task.add_done_callback(answering.discard)


class _NoMethods:
    def resolve_handler(self, _: object) -> None:
        """Return None, so that gRPC answers UNIMPLEMENTED."""
