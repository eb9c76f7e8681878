"""The live page: serves the files in `rdzv/web` with headers that make data from nodes harmless.

The page gets its data from the API; its files are the same for every caller. Their content security
policy makes a browser load nothing from elsewhere, run only the page's own scripts and, through
trusted types, never turn text into a script: a job's name or a log line remains text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from html import escape
from ipaddress import ip_address
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware
from yarl import URL

from rdzv.errors import DeniedError, InvalidRequestError
from rdzv.transport.endpoints import Listen

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

FOLDER = Path(__file__).parents[2] / "web"

TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}

GRAFANA = b'<meta name="rdzv-grafana" content="%s">'
"""The line in index.html that contains Grafana's URL."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)


def page_routes(grafana: str | None = None) -> list[web.RouteDef]:
    routes = []
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in TYPES:
            where, data = f"/web/{path.name}", path.read_bytes()
            if path.name == "index.html":
                where = "/"
                data = data.replace(GRAFANA % b"", GRAFANA % escape(grafana or "").encode())
            routes.append(web.get(where, _file(data, TYPES[path.suffix])))
    return routes


def _file(data: bytes, content_type: str) -> Handler:
    tag = hashlib.sha256(data).hexdigest()[:16]

    async def serve(request: web.Request) -> web.Response:
        # The browser revalidates each time, and is sent no body if the file has not changed.
        known = any(one.value == tag for one in request.if_none_match or ())
        response = web.Response(
            status=304 if known else 200,
            body=None if known else data,
            content_type=content_type,
            charset="utf-8",
            zlib_executor_size=1024,
        )
        response.etag = tag
        response.headers["Cache-Control"] = "no-cache"
        response.headers["Content-Security-Policy"] = POLICY
        if not known:
            response.enable_compression()
        return response

    return serve


async def harmless_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Forbid browsers to guess types, store answers, or show them in another site's page.

    Answers may be secret, and they change all the time.
    """
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["X-Frame-Options"] = "DENY"
    response.headers["Referrer-Policy"] = "no-referrer"
    response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
    response.headers.setdefault("Cache-Control", "no-store")


def refusing_strangers(listen: Listen) -> Middleware:
    """Return middleware that refuses requests from other sites' pages.

    On loopback, a request is refused if its Host header names another machine. If a site's name is
    made to resolve to 127.0.0.1, a browser on this machine lets that site's page read from this
    server, but the requests still carry that name. Probes and metrics are exempt, because they are
    for programs and reveal little. On any address, a POST is refused if its Origin header names
    another site; programs do not send this header.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_checked = request.path not in ("/healthz", "/readyz", "/metrics", "/sd")
        if is_checked and listen.loopback and not _means_an_address(request.host):
            raise InvalidRequestError(
                f"this server listens on loopback, and was asked for by the name "
                f"{request.host[:80]!r}; ask for 127.0.0.1, [::1] or localhost, or have the proxy "
                "that stands before it do so in its Host header"
            )
        origin = request.headers.get("Origin")
        if request.method == "POST" and origin and origin.partition("://")[2] != request.host:
            raise DeniedError(f"{request.path} is not for the pages of another site, {origin[:80]}")
        return await handler(request)

    return check


def _means_an_address(host: str) -> bool:
    try:
        name = URL(f"http://{host}").host or ""
        if name == "localhost" or name.endswith(".localhost"):
            return True
        ip_address(name)
    except ValueError:
        return False
    return True
