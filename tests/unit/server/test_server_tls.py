"""The server's certificate: refused before anything is bound, renewed while it serves."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from aiohttp import ClientError, ClientSession, TCPConnector, web
from tls_files import Files, put

from rdzv.errors import InvalidRequestError
from rdzv.server.security.tls import Tls, quiet_handshakes
from rdzv.structs import replace
from rdzv.transport.channels import Credentials

pytestmark = pytest.mark.slow


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "certs")


def fingerprint(port: int, credentials: Credentials) -> bytes:
    """Return the certificate that is presented at a port, whatever it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    assert credentials.cert is not None
    context.load_cert_chain(credentials.cert, credentials.key)
    with (
        socket.create_connection(("127.0.0.1", port), 60) as plain,
        context.wrap_socket(plain) as connection,
    ):
        found = connection.getpeercert(binary_form=True)
    assert found is not None
    return found


def of(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


@asynccontextmanager
async def both(tls: Tls) -> AsyncIterator[tuple[int, int]]:
    """Serve gRPC and HTTP; yield the two ports."""

    async def held(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x\n")
            await asyncio.sleep(0.02)

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    port = server.add_secure_port("127.0.0.1:0", tls.grpc_credentials(asks=True))
    await server.start()
    app = web.Application()
    app.add_routes([web.get("/held", held)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls.http).start()
        yield port, runner.addresses[0][1]
    finally:
        await runner.cleanup()
        await server.stop(None)


async def test_a_renewed_certificate_is_shown_to_whoever_connects_next(files: Files) -> None:
    client = files.client("alice", "read")
    tls = Tls(files.server())
    async with both(tls) as ports:
        first = of(files.folder / "server.crt")
        for port in ports:
            assert await asyncio.to_thread(fingerprint, port, client) == first
        files.renew_server()
        second = of(files.folder / "server.crt")
        assert second != first
        for port in ports:
            assert await asyncio.to_thread(fingerprint, port, client) == second


async def test_what_is_connected_stays_when_certificates_are_renewed(
    files: Files, tmp_path: Path
) -> None:
    """Also a caller that would no longer be admitted."""
    client = files.client("alice", "read")
    context = ssl.create_default_context(cafile=files.ca)
    assert client.cert is not None
    context.load_cert_chain(client.cert, client.key)
    async with (
        both(Tls(files.server())) as (_, port),
        ClientSession(connector=TCPConnector(ssl=context)) as session,
        session.get(f"https://127.0.0.1:{port}/held") as held,
    ):
        await held.content.readline()
        for name in ("ca.crt", "server.crt", "server.key"):
            put(Files(tmp_path / name).folder / name, files.folder / name)
        others = Files(tmp_path / "others")
        for name in ("ca.crt", "server.crt", "server.key"):
            put(others.folder / name, files.folder / name)
        with pytest.raises(OSError):
            await asyncio.to_thread(fingerprint_and_read, port, client)
        shown = others.client("bob", "read")
        assert await asyncio.to_thread(fingerprint, port, shown) == of(others.folder / "server.crt")
        for _ in range(3):
            assert await held.content.readline() == b"x\n"


def fingerprint_and_read(port: int, credentials: Credentials) -> None:
    """Connect and read: with TLS 1.3 a refusal comes after the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    assert credentials.cert is not None
    context.load_cert_chain(credentials.cert, credentials.key)
    with (
        socket.create_connection(("127.0.0.1", port), 60) as plain,
        context.wrap_socket(plain) as connection,
    ):
        connection.sendall(b"GET /held HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        if not connection.recv(1):
            raise ConnectionResetError("it was closed")


async def test_a_broken_pair_is_not_taken_and_said_once(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = files.client("alice", "read")
    tls = Tls(files.server())
    good = of(files.folder / "server.crt")
    async with both(tls) as ports:
        put(Files(tmp_path / "others").folder / "server.crt", files.folder / "server.crt")
        for port in (*ports, *ports):
            assert await asyncio.to_thread(fingerprint, port, client) == good
        said = [r for r in caplog.records if "does not belong to the certificate" in r.message]
        assert len(said) == 1
        assert "keep using the old ones" in said[0].message
        # The other half of it comes a moment later.
        put(tmp_path / "others" / "server.key", files.folder / "server.key")
        put(tmp_path / "others" / "ca.crt", files.folder / "ca.crt")
        now = of(tmp_path / "others" / "server.crt")
        theirs = Files(tmp_path / "mine").client("x", "read")
        for port in ports:
            assert await asyncio.to_thread(fingerprint, port, theirs) == now


@pytest.mark.quick
def test_files_that_can_not_be_used_are_refused_at_the_start(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = files.server()
    (files.folder / "server.crt").rename(files.folder / "away")
    with pytest.raises(InvalidRequestError, match=r"server\.crt: No such file"):
        Tls(good)
    files.expire_server(monkeypatch)
    with pytest.raises(InvalidRequestError, match="it expired on"):
        Tls(good)
    files.renew_server()
    files.ca.write_text("")
    with pytest.raises(InvalidRequestError, match=r"client CA .* cannot be used"):
        Tls(good)


def test_a_key_that_others_can_read_and_an_end_that_is_near_are_warned_of(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    Tls(files.server())
    assert not caplog.records
    (files.folder / "server.key").chmod(0o644)
    files.authority.server(("h",), 3, replace=True)
    (files.folder / "server.key").chmod(0o640)
    Tls(files.server())
    said = [record.message for record in caplog.records]
    assert "is readable by users other than its owner (mode 0640); run chmod 600 on it" in said[0]
    assert "of h, valid until" in said[1]


def test_a_key_that_only_its_group_lets_us_read_is_not_warned_of(
    files: Files, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like those of a Kubernetes secret, or of root with mode 0640."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    (files.folder / "server.key").chmod(0o640)
    Tls(files.server())
    assert not caplog.records
    (files.folder / "server.key").chmod(0o644)
    Tls(files.server())
    assert "is readable by users other than its owner" in caplog.messages[0]


def test_files_that_are_gone_leave_what_there_was(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Tls(files.server())
    shown = tls.shown
    (files.folder / "server.crt").unlink()
    tls.refresh()
    tls.refresh()
    assert tls.shown is shown
    assert len(caplog.records) == 1


async def test_http_may_leave_open_whether_a_caller_has_a_certificate(files: Files) -> None:
    anybody = ssl.create_default_context(cafile=files.ca)
    strangers = ssl.create_default_context(cafile=files.ca)
    other = Files(files.folder.with_name("others")).client("mallory", "admin")
    assert other.cert is not None
    strangers.load_cert_chain(other.cert, other.key)
    for context, requires, fails in (
        (anybody, True, True),
        (anybody, False, False),
        # A certificate that is presented has to be valid all the same.
        (strangers, False, True),
    ):
        tls = Tls(replace(files.server(), http_client_auth="require" if requires else "accept"))
        async with both(tls) as (_, port), ClientSession() as session:
            url = f"https://127.0.0.1:{port}/held"
            if fails:
                with pytest.raises(ClientError):
                    async with session.get(url, ssl=context) as held:
                        await held.content.readline()
                continue
            async with session.get(url, ssl=context) as held:
                assert await held.content.readline() == b"x\n"


def test_a_hello_whose_name_is_no_text_is_refused_without_a_traceback(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    quiet_handshakes.cache_clear()
    quiet_handshakes()
    said = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client = context.wrap_bio(ssl.MemoryBIO(), said, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    hello = ssl.MemoryBIO()
    hello.write(said.read().replace(b"localhost", b"localh\xffst"))
    server = Tls(files.server()).http.wrap_bio(hello, ssl.MemoryBIO(), server_side=True)
    with pytest.raises(ssl.SSLError):
        server.do_handshake()
    assert heard == []
    sys.unraisablehook(SimpleNamespace(exc_value=KeyError(), object=b""))  # type: ignore[arg-type]
    assert len(heard) == 1, "others are told as ever"
    quiet_handshakes.cache_clear()
