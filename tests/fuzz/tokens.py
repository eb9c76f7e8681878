"""Invalid bearer tokens: over HTTP, and over gRPC as its client sends them, or as none would.

A step is a way in and the value of `authorization` there. `{}` in it stands for a token that is
valid except for the step's change to it, so no such caller may be admitted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc

from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc as pb_grpc
from tests.fuzz import raw, surface
from tests.fuzz.server import JOB, Guard, Served, talking
from tests.fuzz.surface import HANG_S, FoundError, Input, Surface, Take

WAYS = ("call", "stream", "grpc", "http")
"""An rpc, and a node's stream, with gRPC's own client; an rpc in our own bytes; HTTP."""

HARMS: dict[str, Callable[[str], str]] = {
    "cut": lambda token: token[:-1],
    "long": lambda token: token + "A",
    "doubled": lambda token: token + token,
    "flipped": lambda token: token[:-1] + ("A" if token[-1] != "A" else "B"),
    "upper": lambda token: token.upper(),
    "id": lambda token: "_".join(token.split("_")[:2]),
    "other-id": lambda token: "rdzv_00000000_" + token.split("_", 2)[2],
    "split": lambda token: token[:20] + " " + token[20:],
    "none": lambda token: "",
}
"""Changes to a valid token; nobody was ever given the results."""

SHAPES = (
    *("Bearer {}", "bearer {}", "BEARER  {}", "Bearer\t{}", "Bearer{}", "{}", "Basic {}", "Bearer"),
    *("Bearer Bearer {}", "Bearer {},Bearer {}", "Bearer {}; x", "Digest username={}", ""),
)
PATHS = ("/api/v1/jobs", f"/api/v1/jobs/{JOB}", "/api/v1/stream", "/metrics", "/api/v1/nodes")
RPCS = ("ListJobs", "ListNodes", "ListTokens", "GetStatus")


def _inputs(dice: random.Random) -> Input:
    steps = []
    for _ in range(dice.randint(1, 4)):
        shown = dice.choice(SHAPES)
        which = dice.random()
        if which < 0.3:
            shown = shown.replace("{}", "{}" + surface.text(dice))
        elif which < 0.4:
            shown = "Bearer " + "{}" * dice.choice((2, 50, 400))
        data = shown.encode(errors="replace")
        if dice.random() < 0.3:
            at = dice.randint(0, len(data))
            data = data[:at] + dice.randbytes(dice.choice((1, 3, 40))) + data[at:]
        steps.append((f"{dice.choice(WAYS)}:{dice.choice(tuple(HARMS))}", data))
    return tuple(steps)


async def _talk(served: Served, steps: Input) -> None:
    for kind, data in steps:
        way, _, harm = kind.partition(":")
        token = HARMS[harm](served.token).encode()
        shown = data.replace(b"{}", token)
        match way:
            case "grpc":
                await _in_bytes(served.grpc, "grpc", _call(shown, len(data)))
            case "http":
                path = PATHS[len(data) % len(PATHS)].encode()
                head = b"GET " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: " + shown
                said = await _in_bytes(served.http, "http", head + b"\r\n\r\n")
                if said.startswith(b"HTTP/1.1 200"):
                    raise FoundError(f"escape: HTTP lets in who shows {data!r} ({harm})")
            case _:
                await _by_client(served, way, shown.decode(errors="replace"))


async def _by_client(served: Served, way: str, shown: str) -> None:
    """Call with a value that gRPC's own client sends; others need no refusal."""
    metadata = (("authorization", shown),)
    # Which values it accepts, and how it refuses others, is not up to us.
    try:
        if way == "call":
            control: Any = pb_grpc.ControlStub(served.channel)  # type: ignore[no-untyped-call]
            request = pb.GetStatusRequest(rdzv_id=JOB)
            await control.GetStatus(request, metadata=metadata, timeout=HANG_S)
        else:
            stub: Any = pb_grpc.RendezvousStub(served.channel)  # type: ignore[no-untyped-call]
            call = stub.Attach(metadata=metadata, timeout=HANG_S)
            if await call.read() is grpc.aio.EOF:
                return
    except grpc.aio.AioRpcError as error:
        if error.code() not in (
            *(grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED),
            # From gRPC itself, which limits metadata and refuses invalid characters.
            *(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL),
            grpc.StatusCode.UNAVAILABLE,
        ):
            raise FoundError(f"crash: {way} answers {error.code()}") from error
        return
    except (ValueError, TypeError, UnicodeError, grpc.aio.InternalError):
        return
    raise FoundError(f"escape: {way} lets in who shows {shown[:100]!r}")


async def _in_bytes(port: int, kind: str, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with suppress(ConnectionError):
            writer.write(data)
            await asyncio.wait_for(writer.drain(), HANG_S)
        said = await raw.listen(kind, reader)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    if JOB.encode() in said:
        raise FoundError(f"escape: {kind} tells of a job")
    return said


def _call(shown: bytes, number: int) -> bytes:
    """Write an rpc as HTTP/2 with any bytes as `authorization`, sometimes twice."""
    method = RPCS[number % len(RPCS)]
    pairs = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", f"/rdzv.v1.Control/{method}".encode()),
        (b":authority", b"127.0.0.1"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        *((b"authorization", shown) for _ in range(1 + (number % 7 == 0))),
    ]
    # Without compression, each name and value in full.
    block = b"".join(b"\x00" + _string(name) + _string(value) for name, value in pairs)
    settings = b"\0\0\0\4\0\0\0\0\0"
    body = len(block).to_bytes(3, "big") + b"\x01\x04\x00\x00\x00\x01" + block
    message = b"\x00\x00\x05\x00\x01\x00\x00\x00\x01" + bytes(5)
    return raw.PREFACE + settings + body + message


def _string(data: bytes) -> bytes:
    """Write a string of HPACK (RFC 7541): its length in 7 bits or more, and its bytes."""
    length = len(data)
    if length < 0x7F:
        return bytes((length,)) + data
    found, length = bytearray((0x7F,)), length - 0x7F
    while length >= 0x80:
        found.append(length & 0x7F | 0x80)
        length >>= 7
    found.append(length)
    return bytes(found) + data


@contextmanager
def _open(folder: Path) -> Iterator[Take]:
    with talking(_talk, Guard.TOKENS, folder) as take:
        yield take


TOKENS = Surface(
    name="tokens",
    promise="nobody is let in or told of a job, no answer 500, no bug logged; the server serves on",
    make=_inputs,
    open=_open,
)
