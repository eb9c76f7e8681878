"""Applies the gate to every HTTP request."""

from __future__ import annotations

import ssl
from types import SimpleNamespace

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from rdzv.errors import DeniedError, UnauthenticatedError
from rdzv.server.security import callers, roles
from rdzv.server.security.callers import Caller
from rdzv.server.security.role_gate import Gate


def checking_roles(gate: Gate) -> Middleware:
    """Return middleware that checks every request against `gate`, by the route's path."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None:
            # There is no route with this path, so the handler answers 404.
            return await handler(request)
        path = resource.canonical
        what = f"{request.method} {path}"
        row_path = "/web/" if path.startswith("/web/") else path
        if request.method == "POST":
            row_path = what
        if row_path not in roles.PATHS:
            raise DeniedError(f"{path} is not open to anyone: no row of the table of roles has it")
        if (row := roles.PATHS[row_path]) is None:
            return await handler(request)
        caller = callers.NOBODY
        try:
            header = request.headers.get("Authorization")
            caller = await gate.caller(header, lambda: _certified_by_tls(request))
            await gate.admit(caller, row, what, request.match_info.get("rdzv_id"))
        except (UnauthenticatedError, DeniedError) as error:
            gate.note_refusal(f"{caller} at {request.remote}", error.code, f"{what}: {error}")
            raise
        callers.present.set(caller)
        if not row.changes:
            return await handler(request)
        response = await handler(request)
        named = SimpleNamespace(**request.match_info)
        verb = f"take {path.rpartition('/')[2]}"
        await gate.audit(caller, verb, named, str(request.remote), "", "")
        return response

    return check


def _certified_by_tls(request: web.Request) -> Caller | None:
    connection = request.get_extra_info("ssl_object")
    der = connection.getpeercert(binary_form=True) if connection is not None else None
    return callers.certified(ssl.DER_cert_to_PEM_cert(der).encode()) if der else None
