"""What probes ask by HTTP: does the process live (/healthz), and does it serve nodes (/readyz)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from rdzv.errors import InvalidRequestError
from rdzv.server.config import Listen
from rdzv.server.replica import Replica


@asynccontextmanager
async def serving_http(replica: Replica, listen: Listen) -> AsyncIterator[Listen]:
    """Serve until the body ends; yield the address, with the port that was given for port 0.

    Raises:
        InvalidRequestError: the address can not be listened on.

    """
    app = web.Application()
    app.add_routes([web.get("/healthz", _healthz), web.get("/readyz", _readyz_of(replica))])
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


def _readyz_of(replica: Replica) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def _readyz(request: web.Request) -> web.Response:
        if trouble := replica.trouble:
            return web.Response(status=503, text=f"{trouble}\n")
        return web.Response(text=f"leads (leadership {replica.driver.leadership})\n")

    return _readyz
