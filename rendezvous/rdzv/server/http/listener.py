"""The HTTP listener: probes (/healthz, /readyz), /metrics, and /sd, which lists scrape targets.

Metrics of a node come from its agent, on the stream that it has opened.

It also serves the JSON API (`api`) and the live page, which shows data from the API (`page_files`).
The gate checks every request (`_checking_roles`). /sd answers in the format of Prometheus's HTTP
service discovery.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from urllib.parse import quote

from aiohttp import web
from aiohttp.typedefs import Middleware

from rdzv.errors import LimitExceededError
from rdzv.runtime.exposition import CONTENT_TYPE, http_log
from rdzv.server.driver import STOP_GRACE_MS
from rdzv.server.http.api import Api, answering_errors
from rdzv.server.http.connection_limits import GuardedSite
from rdzv.server.http.page_files import harmless_headers, page_routes, refusing_strangers
from rdzv.server.http.state_feeds import Feeds
from rdzv.server.operations.handlers import Server
from rdzv.server.operations.table import OPERATIONS, PREFIX
from rdzv.server.replication.replica import Replica
from rdzv.server.security import callers
from rdzv.server.security.callers import Caller
from rdzv.server.security.roles import OPEN, READ, Call, Gate, Row
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.server.telemetry.metrics_page import MetricsPage
from rdzv.structs import struct
from rdzv.transport.endpoints import Listen, cannot_listen

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


NODE_METRICS = "/metrics/nodes/{node_id}"

SCRAPES_PER_S = 100
"""How often agents are read at most, over all nodes: each time takes 0.6 ms of the server's CPU."""

SCRAPE_EVERY_S = 15
"""Prometheus' interval in deploy/prometheus, which applies to all but very many agents."""

PATHS: dict[str, Row] = {
    "GET /healthz": OPEN,
    "GET /readyz": OPEN,
    "GET /metrics": READ,
    f"GET {NODE_METRICS}": READ,
    "GET /sd": READ,
    # The page's files are the same for every caller; its data comes from the API.
    "GET /": OPEN,
    "GET /web/": OPEN,
    **{
        f"{one.http.method} {PREFIX}{one.http.path}": one.row
        for one in OPERATIONS
        if one.http is not None
    },
}
"""The rows of the table of roles for HTTP, by method and the route's path."""

request_log = http_log("rdzv.http", "rdzvctl and nodes connect to --listen, not to --http")


@struct(frozen=True)
class Serving:
    """A running HTTP listener."""

    bound: Listen
    """The listening address, with the actual port for port 0."""
    feeds: Feeds


@asynccontextmanager
async def serving_http(
    server: Server, metrics: MetricsPage, listen: Listen
) -> AsyncIterator[Serving]:
    replica, config = server.replica, server.config
    app = web.Application(
        middlewares=[answering_errors, refusing_strangers(listen), _checking_roles(server.gate)]
    )
    app.add_routes(
        [
            web.get("/healthz", _healthz),
            web.get("/readyz", _readyz_of(replica)),
            web.get("/metrics", _metrics_of(metrics)),
            web.get(NODE_METRICS, _node_metrics_of(replica)),
            web.get("/sd", _sd_of(replica, config, listen)),
        ]
    )
    app.on_response_prepare.append(harmless_headers)
    async with Feeds.running(server, config.limits) as feeds:
        app.add_routes(Api(server, feeds).routes())
        app.add_routes(page_routes(config.grafana))
        # Cancel a handler whose client is gone, because a waiting handler would not notice.
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=request_log,
            handler_cancellation=True,
            shutdown_timeout=STOP_GRACE_MS / 1000,
        )
        await runner.setup()
        try:
            context = None if server.tls is None else server.tls.http
            site = GuardedSite(runner, listen, context)
            try:
                await site.start()
            except OSError as error:
                raise cannot_listen(listen, error, "--http") from error
            yield Serving(Listen(listen.host, runner.addresses[0][1]), feeds)
        finally:
            feeds.close()
            await runner.cleanup()


def _checking_roles(gate: Gate) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None:
            # There is no route with this path, so the handler answers 404.
            return await handler(request)
        path = resource.canonical
        what = f"{request.method} {path}"
        # A HEAD asks for less than a GET. `/web/` stands for all files below it.
        method = "GET" if request.method == "HEAD" else request.method
        row_path = "/web/" if path.startswith("/web/") else path
        call = Call(
            what=what,
            row=PATHS.get(f"{method} {row_path}"),
            request=SimpleNamespace(**request.match_info),
            peer=str(request.remote),
            header=request.headers.get("Authorization"),
            certified=lambda: _certified_by_tls(request),
            verb=f"take {path.rpartition('/')[2]}",
        )
        async with gate.admitted(call):
            return await handler(request)

    return check


def _certified_by_tls(request: web.Request) -> Caller | None:
    connection = request.get_extra_info("ssl_object")
    der = connection.getpeercert(binary_form=True) if connection is not None else None
    return callers.certified(ssl.DER_cert_to_PEM_cert(der).encode()) if der else None


async def _healthz(request: web.Request) -> web.Response:
    return web.Response(text="ok\n")


def _readyz_of(replica: Replica) -> Handler:
    async def _readyz(request: web.Request) -> web.Response:
        if trouble := replica.trouble:
            return web.Response(status=503, text=f"{trouble}\n")
        return web.Response(text=f"leads (leadership {replica.driver.leadership})\n")

    return _readyz


def _metrics_of(metrics: MetricsPage) -> Handler:
    async def _metrics(request: web.Request) -> web.Response:
        try:
            text = await metrics.text()
        except LimitExceededError as error:
            return web.Response(status=503, text=f"{error}\n")
        # Compress even small pages in a thread, so that the event loop does not wait.
        response = web.Response(
            body=text, headers={"Content-Type": CONTENT_TYPE}, zlib_executor_size=1024
        )
        response.enable_compression()
        return response

    return _metrics


def _node_metrics_of(replica: Replica) -> Handler:
    async def _node_metrics(request: web.Request) -> web.Response:
        page = await replica.driver.requests.read_metrics(request.match_info["node_id"])
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE})

    return _node_metrics


def _sd_of(replica: Replica, config: RdzvdSettings, listen: Listen) -> Handler:
    """Return a handler that lists this server and, if it leads, every rdzv-agent.

    Each server lists itself: if it dies, it stays on Prometheus's list and its absence is noticed.
    """

    async def _sd(request: web.Request) -> web.Response:
        assert request.transport is not None, "a client that has asked is connected"
        # `listen` may have port 0, or a host to which clients cannot connect.
        host, port = request.transport.get_extra_info("sockname")[:2]
        if listen.unspecified and config.advertise is not None:
            host = config.advertise.host
        elif not listen.unspecified:
            host = listen.host
        driver, target = replica.proven_driver(), str(Listen(host, port))
        labels = [{"rdzv_kind": "server"}]
        labels += agent_labels(driver.fleet.agents()) if driver is not None else []
        return web.json_response([{"targets": [target], "labels": one} for one in labels])

    return _sd


def agent_labels(node_ids: Sequence[str]) -> list[dict[str, str]]:
    """Return the labels with which Prometheus reads each agent; of many, it reads each less often.

    >>> agent_labels(["n1"])
    [{'rdzv_kind': 'agent', 'node_id': 'n1', '__metrics_path__': '/metrics/nodes/n1'}]
    """
    every_s = math.ceil(len(node_ids) / SCRAPES_PER_S)
    rarely = {"__scrape_interval__": f"{every_s}s"} if every_s > SCRAPE_EVERY_S else {}
    paths = [NODE_METRICS.format(node_id=quote(node_id, safe="")) for node_id in node_ids]
    return [
        {"rdzv_kind": "agent", "node_id": node_id, "__metrics_path__": path, **rarely}
        for node_id, path in zip(node_ids, paths, strict=True)
    ]
