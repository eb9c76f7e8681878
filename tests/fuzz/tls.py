"""Bytes at the ports with TLS: no TLS, damaged handshakes, and callers without credentials.

A step is sent at once to one of three ports: gRPC's, gRPC's for callers with a token, and HTTP's;
steps to the same port use one connection. After `grpc:none` and similar a handshake is made first,
with those credentials, and the bytes are sent through it.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rdzv.ctl.authority import Authority
from tests.fuzz import raw
from tests.fuzz.server import JOB, Guard, Served, talking
from tests.fuzz.surface import HANG_S, FoundError, Input, Step, Surface, Take

PORTS = ("grpc", "tokens", "http")
WHO = ("none", "stranger", "old")
"""A client without a certificate; one with another CA's; one limited to TLS 1.2."""
KINDS = (0x14, 0x15, 0x16, 0x17, 0x18, 0xFF)
"""Types of TLS records; the last does not exist."""

_memory = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_memory.check_hostname = False
_memory.verify_mode = ssl.CERT_NONE


def _hello() -> bytes:
    """Return the beginning of a valid handshake."""
    out = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        _memory.wrap_bio(ssl.MemoryBIO(), out, server_hostname="localhost").do_handshake()
    return out.read()


def _record(dice: random.Random) -> bytes:
    """Make a record whose type, version and length may be wrong."""
    body = dice.randbytes(dice.choice((0, 1, 2, 40, 600)))
    length = len(body) if dice.random() < 0.7 else dice.choice((0, 1, 2**14 + 257, 2**16 - 1))
    version = dice.choice((b"\x03\x01", b"\x03\x03", b"\x03\x04", b"\x00\x02"))
    return bytes((dice.choice(KINDS),)) + version + length.to_bytes(2, "big") + body


def _damaged(dice: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        # The lengths are at the beginning.
        at = dice.randrange(min(len(found), dice.choice((12, 80, len(found)))))
        found[at] = dice.choice((0, 1, 0x7F, 0xFF, dice.randrange(256)))
    return bytes(found)


def _outside(dice: random.Random) -> bytes:
    """Make bytes to send in place of a handshake."""
    which = dice.random()
    if which < 0.2:
        return raw.request(dice)
    if which < 0.3:
        return raw.PREFACE + dice.randbytes(20)
    if which < 0.5:
        return b"".join(_record(dice) for _ in range(dice.randint(1, 4)))
    hello = _hello()
    if which < 0.65:
        return hello[: dice.randrange(len(hello))]
    if which < 0.9:
        return _damaged(dice, hello)
    # It begins correctly, and continues otherwise.
    return hello + dice.choice((hello, _record(dice), dice.randbytes(300)))


def _inputs(dice: random.Random) -> Input:
    steps: list[Step] = []
    for _ in range(dice.randint(1, 3)):
        port = dice.choice(PORTS)
        if dice.random() < 0.6:
            steps.append((port, _outside(dice)))
        else:
            inside = raw.request(dice) if port == "http" else raw.frames(dice)
            steps.append((f"{port}:{dice.choice(WHO)}", inside))
    return tuple(steps)


class _Callers:
    """The TLS contexts of the clients, by name."""

    def __init__(self, folder: Path) -> None:
        others = Authority.make(folder, 30, replace=False)
        made = others.caller("client", "mallory", ("admin",), 20, replace=False)
        self.contexts = {who: self._context() for who in WHO}
        self.contexts["stranger"].load_cert_chain(made.cert, made.key)
        self.contexts["old"].maximum_version = ssl.TLSVersion.TLSv1_2

    @staticmethod
    def _context() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2", "http/1.1"])
        return context

    async def talk(self, served: Served, steps: Input) -> None:
        ports = {"grpc": served.grpc, "tokens": served.for_tokens, "http": served.http}
        open_ones: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        try:
            for kind, data in steps:
                port, _, who = kind.partition(":")
                if kind not in open_ones:
                    context = self.contexts.get(who)
                    # Most invalid clients are not admitted.
                    with suppress(OSError):
                        async with asyncio.timeout(HANG_S):
                            open_ones[kind] = await asyncio.open_connection(
                                "127.0.0.1", ports[port], ssl=context
                            )
                if kind in open_ones:
                    await _send(open_ones[kind][1], data)
            for kind, (reader, _) in open_ones.items():
                said = await raw.listen(kind.partition(":")[0], reader)
                if JOB.encode() in said:
                    raise FoundError(f"escape: {kind} is told of a job")
        finally:
            for _, writer in open_ones.values():
                # A refused client was disconnected in another way.
                writer.transport.abort()
                with suppress(OSError):
                    await writer.wait_closed()


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(OSError):
        writer.write(data)
        await asyncio.wait_for(writer.drain(), HANG_S)
    await asyncio.sleep(raw.PAUSE_S)


@contextmanager
def _open(folder: Path) -> Iterator[Take]:
    callers = _Callers(folder / "others")
    with talking(callers.talk, Guard.CERTIFICATES, folder / "own") as take:
        yield take


TLS = Surface(
    name="tls",
    promise="who has no certificate learns of nothing, no bug logged; the server serves on",
    make=_inputs,
    open=_open,
)
