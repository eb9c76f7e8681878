"""The JSON API at /api/v1, which shows the same information as rdzvctl. It changes no job or node.

`operations.table` lists the operations. Each answer is a document as printed by `rdzvctl -o json`.
An error is a document with the error's code and message, and has the matching HTTP status.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from rdzv import errors
from rdzv.server.http import openapi
from rdzv.server.http.state_feeds import Feeds, frame
from rdzv.server.operations.handlers import Server
from rdzv.server.operations.table import LOG_BYTES, OPERATIONS, PREFIX, Http, Operation
from rdzv.transport.wire import CONTROL
from rdzv.view import as_json
from rdzv.view.answers import LogLines
from rdzv.view.log_lines import Printer, note_of

log = logging.getLogger("rdzv.api")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

STATUSES = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "FAILED_PRECONDITION": 409,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""The HTTP status for each gRPC status in the error table. All others map to 500."""

REFUSED_WITHIN_S = 0.25
"""How soon a request to follow logs is refused, if it is; then the answer begins."""

LOG_ANSWER_MOST_S = 30.0
"""How long one answer waits for logs in total before it shows what has arrived."""

STREAM_BEAT_S = 5.0
"""How often the stream sends data, so that readers notice when it breaks."""

STREAM_WRITE_S = 20.0
"""How long a reader of the stream may accept no data before it is dropped. Pages reconnect."""

REQUESTS = 32
"""The number of requests that are answered at once."""

BEAT = b": still here\n" + frame("beat", json.dumps({"version": as_json.VERSION}))


class Api:
    """The API's request handlers: a loop over the table of operations."""

    def __init__(self, server: Server, feeds: Feeds) -> None:
        self._server = server
        self._feeds = feeds
        self._asked = 0

    def routes(self) -> list[web.RouteDef]:
        # In aiohttp's syntax, names may contain braces.
        return [
            web.route(
                http.method, PREFIX + http.path.replace("}", ":[^/]+}"), self._handler(one, http)
            )
            for one in OPERATIONS
            if (http := one.http) is not None
        ]

    def _handler(self, one: Operation, http: Http) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            given = {**request.match_info, **_parameters(http, request)}
            if http.media_type == "text/event-stream":
                return await self._stream(request, given["job"])
            if http.media_type == "text/plain":
                return await self._logs(request, one, given)
            with self._one_more():
                if one.answer is None:
                    return _json(json.dumps(openapi.document(), indent=2))
                answer = await one.answer(self._server, _asked(one, given))
                if http.media_type == "image/svg+xml":
                    return web.Response(text=answer, content_type=http.media_type)
                # Encode in a thread, because the answer may be large.
                return _json(await asyncio.to_thread(as_json.document, answer))

        return handle

    @contextmanager
    def _one_more(self) -> Iterator[None]:
        if self._asked >= REQUESTS:
            raise errors.LimitExceededError(
                f"{self._asked} requests are being answered, which is the limit; ask again soon, "
                "or follow the stream"
            )
        self._asked += 1
        try:
            yield
        finally:
            self._asked -= 1

    # ---------------------------------------------------------------- logs

    async def _logs(
        self, request: web.Request, one: Operation, given: dict[str, Any]
    ) -> web.StreamResponse:
        contains, tail_lines = given.pop("contains") or "", given.pop("tail")
        asked = _asked(one, given | {"tail_lines": tail_lines, "tail_bytes": LOG_BYTES})
        assert one.answer is not None, "the table has a function for it"
        async with (
            aclosing(one.answer(self._server, asked)) as pieces,
            aclosing(
                _texts(pieces, one_rank=given["rank"] is not None, contains=contains)
            ) as texts,
        ):
            if given["follow"]:
                return await self._log_stream(request, texts)
            return web.Response(text=await self._whole(texts))

    async def _whole(self, texts: AsyncIterator[str]) -> str:
        """Return the whole text, or truncate it with a note at the limits on size and time."""
        parts, size, most = list[str](), 0, LOG_BYTES
        try:
            async with asyncio.timeout(LOG_ANSWER_MOST_S):
                async for text in texts:
                    parts.append(text)
                    size += len(text)
                    if size > most:
                        parts.append(
                            f"rdzv: more than {most} bytes were written; ask for one RANK, or for "
                            "a shorter tail\n"
                        )
                        break
        except TimeoutError:
            parts.append("rdzv: the output is incomplete, as it took too long; ask again\n")
        return "".join(parts)

    async def _log_stream(
        self, request: web.Request, texts: AsyncIterator[str]
    ) -> web.StreamResponse:
        # A refusal comes at once and becomes the response, while the first output may take hours.
        coming = asyncio.ensure_future(anext(texts, None))
        try:
            done, _ = await asyncio.wait([coming], timeout=REFUSED_WITHIN_S)
            if done and coming.exception() is not None:
                await coming
            response = web.StreamResponse(headers={"Content-Type": "text/plain; charset=utf-8"})
            await response.prepare(request)
            try:
                while (text := await coming) is not None:
                    await self._write(request, response, text.encode())
                    coming = asyncio.ensure_future(anext(texts, None))
            except errors.RendezvousError as error:
                await self._write(request, response, f"rdzv: {error}\n".encode())
            return response
        finally:
            coming.cancel()
            # The generator can be closed only when it is no longer running. Its result is ignored.
            await asyncio.wait([coming])
            if not coming.cancelled():
                coming.exception()

    async def _write(self, request: web.Request, response: web.StreamResponse, data: bytes) -> None:
        """Write to a reader, and drop the reader if it accepts no data for too long."""
        try:
            async with asyncio.timeout(STREAM_WRITE_S):
                await response.write(data)
        except TimeoutError:
            log.info("dropping reader %s, which does not accept data", request.remote)
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the reader accepts no data") from None

    # ---------------------------------------------------------------- the stream

    async def _stream(self, request: web.Request, rdzv_id: str | None) -> web.StreamResponse:
        async with self._feeds.followed(rdzv_id) as reader:
            response = web.StreamResponse(
                headers={
                    "Content-Type": "text/event-stream; charset=utf-8",
                    # Otherwise nginx would buffer the events.
                    "X-Accel-Buffering": "no",
                }
            )
            await response.prepare(request)
            while True:
                try:
                    async with asyncio.timeout(STREAM_BEAT_S):
                        data = await reader.next()
                except TimeoutError:
                    data = BEAT
                if data is None:
                    break
                await self._write(request, response, data)
            assert reader.ended is not None, "a stream without an end has a next frame"
            log.info("ending the stream of %s: %s", request.remote, reader.ended)
            end = frame("end", json.dumps(_error_fields(reader.ended)))
            await self._write(request, response, end)
            return response


def _asked(one: Operation, given: dict[str, Any]) -> Any:
    """Return the message of the same call over gRPC or, if there is none, the names and values."""
    if not one.rpc:
        return SimpleNamespace(**given)
    try:
        return CONTROL[one.rpc][0](**given)
    except ValueError as error:
        raise errors.InvalidRequestError(f"the request cannot be read: {error}") from error


def _parameters(http: Http, request: web.Request) -> dict[str, Any]:
    known = {parameter.name: parameter for parameter in http.query}
    for name in request.query:
        if name not in known:
            shown = ", ".join(known) or "none"
            raise errors.InvalidRequestError(
                f"there is no parameter {name[:40]!r} here; the parameters are: {shown}"
            )
        if len(request.query.getall(name)) > 1:
            raise errors.InvalidRequestError(f"{name} is given more than once; give it once")
    return {name: parameter.read(request.query.get(name)) for name, parameter in known.items()}


async def _texts(
    pieces: AsyncIterator[LogLines], *, one_rank: bool, contains: str
) -> AsyncGenerator[str, None]:
    """Yield pieces of logs joined into whole lines, as rdzvctl prints them.

    Each note is a separate line. Other lines are omitted unless they contain the text `contains`,
    ignoring case.
    """
    out = io.BytesIO()
    printer = Printer(out, prefixed=not one_rank, escaped=False, as_it_comes=False)
    wanted = contains.lower()

    def taken() -> str:
        text = out.getvalue().decode(errors="replace")
        out.seek(0)
        out.truncate()
        if not wanted:
            return text
        return "".join(line for line in text.splitlines(keepends=True) if wanted in line.lower())

    async for piece in pieces:
        if piece.note is None:
            printer.take(piece)
        else:
            yield f"rdzv: {note_of(piece)}\n"
        if text := taken():
            yield text
    printer.end()
    if text := taken():
        yield text


# ------------------------------------------------------------------------------------ answers


def _json(text: str, status: int = 200) -> web.Response:
    # Compress even small texts in a thread, so that the event loop does not wait.
    response = web.Response(
        text=text, status=status, content_type="application/json", zlib_executor_size=1024
    )
    if len(text) > 1024:
        response.enable_compression()
    return response


def _error_fields(error: errors.RendezvousError) -> dict[str, object]:
    leader = error.leader if isinstance(error, errors.NotLeaderError) else None
    return _fields(error.code, str(error), leader or None)


def _fields(code: str, message: str, leader: str | None = None) -> dict[str, object]:
    return {"version": as_json.VERSION, "code": code, "message": message, "leader": leader}


def error_response(error: errors.RendezvousError) -> web.Response:
    status = STATUSES.get(error.grpc_status, 500)
    response = _json(json.dumps(_error_fields(error), indent=2), status)
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if status in (429, 503):
        response.headers["Retry-After"] = "1"
    return response


@web.middleware
async def answering_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except errors.RendezvousError as error:
        return error_response(error)
    except web.HTTPException as error:
        if not request.path.startswith("/api/"):
            raise
        response = _json(json.dumps(_fields("HttpError", _in_words(request, error)), indent=2))
        response.set_status(error.status)
        if allow := error.headers.get("Allow"):
            response.headers["Allow"] = allow
        return response
    except ConnectionError:
        raise
    except Exception:
        if not request.path.startswith("/api/"):
            raise
        log.exception("a bug in rdzvd, please report it: %s", request.path)
        fields = _fields(errors.RendezvousError.code, "a bug in rdzvd; its log says more")
        return _json(json.dumps(fields, indent=2), 500)


def _in_words(request: web.Request, error: web.HTTPException) -> str:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{request.method} is not possible here: this API is read-only; use GET"
    if isinstance(error, web.HTTPNotFound):
        shown = unquote(request.path)[:200]
        return f"there is nothing at {shown!r}; {PREFIX}/openapi.json says what there is"
    return error.reason
