"""What is asked by HTTP: the probes (/healthz, /readyz), /metrics, and /sd, which says where it is.

/sd answers as Prometheus' HTTP service discovery expects.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from rdzv.errors import InvalidRequestError, LimitExceededError
from rdzv.server.config import Config, Listen
from rdzv.server.metrics import CONTENT_TYPE, Metrics
from rdzv.server.replica import Replica

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving_http(
    replica: Replica, metrics: Metrics, config: Config, listen: Listen
) -> AsyncIterator[Listen]:
    """Serve until the body ends; yield the address, with the port that was given for port 0.

    Raises:
        InvalidRequestError: the address can not be listened on.

    """
    app = web.Application()
    app.add_routes(
        [
            web.get("/healthz", _healthz),
            web.get("/readyz", _readyz_of(replica)),
            web.get("/metrics", _metrics_of(metrics)),
            web.get("/sd", _sd_of(config, listen)),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, listen.host, listen.port)
        try:
            await site.start()
        except OSError as error:
            raise InvalidRequestError(
                f"can not listen on {listen}: {error.strerror}; give another address with --http"
            ) from error
        yield Listen(listen.host, runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def _healthz(request: web.Request) -> web.Response:
    return web.Response(text="ok\n")


def _readyz_of(replica: Replica) -> Handler:
    async def _readyz(request: web.Request) -> web.Response:
        if trouble := replica.trouble:
            return web.Response(status=503, text=f"{trouble}\n")
        return web.Response(text=f"leads (leadership {replica.driver.leadership})\n")

    return _readyz


def _metrics_of(metrics: Metrics) -> Handler:
    async def _metrics(request: web.Request) -> web.Response:
        try:
            text = await metrics.text()
        except LimitExceededError as error:
            return web.Response(status=503, text=f"{error}\n")
        # Any size of it is compressed in a thread: the event loop does not wait.
        response = web.Response(
            body=text, headers={"Content-Type": CONTENT_TYPE}, zlib_executor_size=1024
        )
        response.enable_compression()
        return response

    return _metrics


def _sd_of(config: Config, listen: Listen) -> Handler:
    """Name this server alone, for no agent has metrics yet.

    Each server names itself, so that one that dies stays on Prometheus' list, and is missed.
    """

    async def _sd(request: web.Request) -> web.Response:
        assert request.transport is not None, "who has asked is connected"
        # Not `listen`: its port may be 0, and its host no address to connect to.
        host, port = request.transport.get_extra_info("sockname")[:2]
        if listen.unspecified and config.advertise is not None:
            host = config.advertise.host
        elif not listen.unspecified:
            host = listen.host
        labels = {"__meta_rdzv_kind": "server"}
        return web.json_response([{"targets": [str(Listen(host, port))], "labels": labels}])

    return _sd
