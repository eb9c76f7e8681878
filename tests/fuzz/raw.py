"""Raw bytes at the gRPC and the HTTP port: not HTTP, incomplete, or damaged.

A step is sent at once to one of the two ports; all steps to the same port use one connection.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.fuzz.server import Served, talking
from tests.fuzz.surface import HANG_S, FoundError, Input, Step, Surface, Take

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CLIENT_HELLO = bytes.fromhex(
    "16030100a5010000a10303000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20"
    "e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0008130213031301c02f0100"
)
"""The beginning of one; the rest never comes."""
PATHS = (
    *("/", "/healthz", "/readyz", "/metrics", "/sd", "/api/v1/jobs", "/api/v1/stream", "/web/"),
    *("/../../../../etc/passwd", "/web/../../../../etc/passwd", "/web/%2e%2e/%2e%2e/etc/passwd"),
    *("/web//etc/passwd", "/web/..%2f..%2f..%2fetc%2fpasswd", "/api/v1/jobs/..%2f..", "*", "//h"),
    *("/api/v1/jobs/\x1b[2J", "/%00", "/" + "a" * 9_000, "http://elsewhere/", "/api/v1/jobs?x=%ff"),
)
HEADERS = (
    *("Host: 127.0.0.1", "Host: elsewhere", "Connection: close", "Connection: upgrade"),
    *("Upgrade: websocket", "Upgrade: h2c", "Content-Length: 5", "Content-Length: -1"),
    *("Content-Length: 99999999999999999999", "Transfer-Encoding: chunked", "Expect: 100-continue"),
    *("Range: bytes=0-", "Accept-Encoding: gzip, br, \x00", "Authorization: Bearer \x1b[2J"),
    *(
        "Cookie: " + "a=b; " * 2_000,
        "X: " + "y" * 20_000,
        " folded",
        ": nameless",
        "Sec-Fetch-Site: x",
    ),
)
SECRET_OF_A_FOLDER = b"root:x:0"
"""No path below the served ones leads there."""

LISTEN_S = 0.03
PAUSE_S = 0.002


def _frame(dice: random.Random) -> bytes:
    """Make a frame of HTTP/2, whose length may be wrong."""
    body = dice.randbytes(dice.choice((0, 4, 6, 8, 40, 500)))
    length = len(body) if dice.random() < 0.8 else dice.choice((0, 1, 16_384, 2**24 - 1))
    kind, flags = dice.randint(0, 10), dice.choice((0, 1, 4, 5, 8, 0x20, 255))
    stream = dice.choice((0, 1, 2, 3, 2**31 - 1))
    return length.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def _headers_frame(dice: random.Random) -> bytes:
    """Call an rpc as gRPC does, without header compression."""
    pairs = {
        ":method": "POST",
        ":scheme": "http",
        ":path": dice.choice(("/rdzv.v1.Control/ListJobs", "/rdzv.v1.Rendezvous/Attach", "/x")),
        ":authority": "h",
        "content-type": "application/grpc",
        "te": "trailers",
        "grpc-timeout": dice.choice(("1S", "99999999H", "-1S", "x")),
        "x": dice.choice(("", "\x1b[2J", "y" * 100)),
    }
    block = b"".join(
        b"\x00" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
        for name, value in pairs.items()
    )
    return len(block).to_bytes(3, "big") + b"\x01\x04\x00\x00\x00\x01" + block


def _data_frame(dice: random.Random) -> bytes:
    body = dice.randbytes(dice.choice((0, 2, 30)))
    said = dice.choice((0, 1, 255)).to_bytes(1, "big")
    size = len(body) if dice.random() < 0.7 else dice.choice((0, 2**31, 2**32 - 1))
    body = said + size.to_bytes(4, "big") + body
    return len(body).to_bytes(3, "big") + b"\x00\x01\x00\x00\x00\x01" + body


def frames(dice: random.Random) -> bytes:
    """Start HTTP/2, and continue with frames of any kind."""
    some = (b"\0\0\0\4\0\0\0\0\0", _headers_frame(dice), _data_frame(dice), _frame(dice))
    return PREFACE + b"".join(dice.choice(some) for _ in range(dice.randint(0, 6)))


def request(dice: random.Random) -> bytes:
    method = dice.choice(("GET", "POST", "HEAD", "OPTIONS", "PUT", "CONNECT", "TRACE", "G\x00T"))
    version = dice.choice(("HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", ""))
    chosen = [dice.choice(HEADERS) for _ in range(dice.randint(0, 5))]
    lines = [f"{method} {dice.choice(PATHS)} {version}", HEADERS[0], *chosen]
    text = dice.choice(("\r\n", "\r\n", "\n")).join(lines) + "\r\n\r\n"
    body = dice.choice((b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"fffffffffffffffff\r\nx"))
    return text.encode(errors="replace") + body


def _inputs(dice: random.Random) -> Input:
    steps: list[Step] = []
    for _ in range(dice.randint(1, 3)):
        kind = dice.choice(("grpc", "http"))
        which = dice.random()
        if which < 0.15:
            data = dice.randbytes(dice.choice((1, 9, 300, 5_000)))
        elif which < 0.25:
            data = CLIENT_HELLO
        elif which < 0.6:
            data = request(dice)
        else:
            data = frames(dice)
        if dice.random() < 0.3:
            data = data[: dice.randint(0, len(data))]
        if dice.random() < 0.2:
            # The rest comes after a while.
            at = dice.randint(0, min(len(data), 20))
            steps.append((kind, data[:at]))
            data = data[at:]
        steps.append((kind, data))
    return tuple(steps)


async def _talk(served: Served, steps: Input) -> None:
    ports = {"grpc": served.grpc, "http": served.http}
    open_ones: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
    try:
        for kind, data in steps:
            if kind not in open_ones:
                open_ones[kind] = await asyncio.open_connection("127.0.0.1", ports[kind])
            _, writer = open_ones[kind]
            with suppress(ConnectionError):
                writer.write(data)
                await asyncio.wait_for(writer.drain(), HANG_S)
            await asyncio.sleep(PAUSE_S)
        for kind, (reader, _) in open_ones.items():
            await listen(kind, reader)
    finally:
        for _, writer in open_ones.values():
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def listen(kind: str, reader: asyncio.StreamReader) -> bytes:
    """Read the answer; an invalid client need not get one, nor be disconnected at once."""
    said = b""
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(LISTEN_S):
            while more := await reader.read(65_536):
                said += more
    if SECRET_OF_A_FOLDER in said:
        raise FoundError(f"escape: {kind} answers with a file of this machine")
    if kind == "http" and said.startswith(b"HTTP/1.1 500"):
        raise FoundError(f"crash: {said[:300]!r}")
    return said


@contextmanager
def _open(_: Path) -> Iterator[Take]:
    with talking(_talk) as take:
        yield take


RAW = Surface(
    name="bytes",
    promise="no answer 500, no file of the machine, no bug logged; the server serves on",
    make=_inputs,
    open=_open,
)
