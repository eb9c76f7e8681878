"""How a program connects to rdzvd: what it needs, what it sends, and why it fails."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from tls_files import Files, put

from rdzv.client import ControlClient, Endpoint
from rdzv.errors import InvalidRequestError, RendezvousConnectionError
from rdzv.server.security.tls import Tls
from rdzv.server.settings.server_settings import TlsSettings
from rdzv.transport.channels import PLAIN, Credentials, handshake_trouble
from rdzv.transport.node_stream import error_from_status

pytestmark = pytest.mark.slow

HERE = Endpoint("127.0.0.1", 29_400)
THERE = Endpoint("10.0.0.5", 29_400)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "certs")


# ------------------------------------------------------------------------------------ what it takes


@pytest.mark.quick
def test_without_anything_a_connection_is_plain() -> None:
    assert Credentials.parse({}, {}) == PLAIN
    assert not PLAIN.tls
    assert PLAIN.metadata(THERE) == ()


def test_what_is_given_wins_over_the_environment(files: Files, tmp_path: Path) -> None:
    other = Files(tmp_path / "other")
    environ = {"RDZV_TLS_CA": str(other.ca), "RDZV_TLS_CERT": "", "RDZV_TOKEN": "abc"}
    assert Credentials.parse({}, environ) == Credentials(other.ca, token="abc")
    assert Credentials.parse({"ca": files.ca, "cert": None}, environ).ca == files.ca


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ca": "ca.crt", "cert": "server.crt"}, "one without the other"),
        ({"cert": "server.crt", "key": "server.key"}, "without --tls-ca"),
        ({"ca": "none.crt"}, "none.crt cannot be used: No such file"),
        ({"ca": "ca.crt", "cert": "server.crt", "key": "ca.key"}, "does not belong"),
        ({"token_file": "none"}, "token file .*none cannot be read: No such file"),
        ({"token_file": "empty"}, "is empty"),
        ({"token_file": "ca.crt"}, "holds no valid token"),
    ],
)
def test_what_can_not_be_used_is_refused(files: Files, given: dict[str, str], said: str) -> None:
    (files.folder / "empty").write_text("\n")
    with pytest.raises(InvalidRequestError, match=said):
        Credentials.parse({name: files.folder / path for name, path in given.items()}, {})


@pytest.mark.quick
def test_a_token_is_read_anew_for_each_call(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    credentials = Credentials.parse({"token_file": file}, {"RDZV_TOKEN": "other"})
    assert credentials.metadata(HERE) == (("authorization", "Bearer first"),)
    file.write_text("second\n")
    assert credentials.metadata(HERE) == (("authorization", "Bearer second"),)


def test_a_token_goes_nowhere_where_others_could_read_it(files: Files) -> None:
    with pytest.raises(InvalidRequestError, match=r"not sent to 10\.0\.0\.5:29400: without TLS"):
        Credentials(token="abc").metadata(THERE)
    sent = (("authorization", "Bearer abc"),)
    assert Credentials(token="abc").metadata(HERE) == sent
    assert Credentials(ca=files.ca, token="abc").metadata(THERE) == sent


@pytest.mark.quick
def test_a_token_is_shown_to_nobody() -> None:
    assert "abc" not in repr(Credentials(token="abc"))
    with pytest.raises(InvalidRequestError) as refused:
        Credentials.parse({}, {"RDZV_TOKEN": "secret with spaces"})
    assert "secret" not in str(refused.value)


# ------------------------------------------------------------------------------------ handshakes


@asynccontextmanager
async def served(tls: TlsSettings | None) -> AsyncIterator[Endpoint]:
    """Run a server without services, with or without TLS; it answers calls with UNIMPLEMENTED."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    if tls is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        credentials = Tls(tls).grpc_credentials(asks=tls.client_ca is not None)
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield Endpoint("127.0.0.1", port)
    finally:
        await server.stop(None)


async def ask(server: Endpoint, credentials: Credentials) -> str:
    """Return the outcome of a call: `reached`, or why it was not."""
    async with credentials.aio_channel(server, ()) as channel:
        try:
            await channel.unary_unary("/none/None")(b"", timeout=60)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return "reached"
            trailing = error.trailing_metadata()
            return str(
                error_from_status(error.code(), error.details(), trailing, server, 60, credentials)
            )
    raise AssertionError("nobody has that method")


def pair(credentials: Credentials) -> tuple[Path, Path]:
    assert credentials.cert is not None and credentials.key is not None
    return credentials.cert, credentials.key


def put_pair(new: Credentials, old: Credentials) -> None:
    for path, place in zip(pair(new), pair(old), strict=True):
        put(path, place)


async def test_who_shows_what_is_asked_for_gets_there(files: Files) -> None:
    async with served(files.server()) as server:
        assert await ask(server, files.node("n1")) == "reached"
    async with served(files.server(client_ca=False)) as server:
        assert await ask(server, Credentials(files.ca)) == "reached"


async def test_why_a_server_is_not_trusted(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strangers = Files(tmp_path / "strangers")
    async with served(files.server(client_ca=False)) as server:
        said = await ask(server, Credentials(strangers.ca))
        assert f"its certificate is not signed by the CA in {strangers.ca}" in said
        # While the server presents an expired certificate, the existing connection is kept.
        files.expire_server(monkeypatch)
        assert await ask(server, Credentials(files.ca)) == "reached"
    other_name = Files(tmp_path / "other_name")
    monkeypatch.setattr("rdzv.ctl.authority.OF_THIS_MACHINE", ())
    other_name.renew_server("head.example.org")
    async with served(other_name.server(client_ca=False)) as server:
        said = await ask(server, Credentials(other_name.ca))
        assert "its certificate is not for the name 127.0.0.1" in said


async def test_a_nodes_certificate_is_of_no_use_to_a_false_server(files: Files) -> None:
    async with served(TlsSettings(*pair(files.node("127.0.0.1")))) as server:
        said = await ask(server, Credentials(files.ca))
        assert "cannot reach rdzvd" in said


async def test_why_a_client_is_not_let_in(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = Files(tmp_path / "strangers").client("mallory", "admin")
    expired = files.expired_client("alice", monkeypatch)
    async with served(files.server()) as server:
        said = await ask(server, Credentials(files.ca))
        assert "as a server does if it requires a client certificate; give --tls-cert" in said
        said = await ask(server, Credentials(files.ca, stranger.cert, stranger.key))
        assert "refuses the client certificate" in said
        assert "(of mallory)" in said
        assert "(of alice, which expired on " in await ask(server, expired)


async def test_plain_and_tls_do_not_meet(files: Files) -> None:
    async with served(files.server()) as server:
        said = await ask(server, PLAIN)
        assert (
            "closed the connection at once; if it is not just starting or ending, it may want"
            in said
        )
        assert "TLS: give --tls-ca" in said
    async with served(None) as server:
        assert "it does not speak TLS there" in await ask(server, Credentials(files.ca))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("details", "said"),
    [
        ("Socket closed", None),
        ("failed to connect to all addresses; last error: ...: Connection refused", None),
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired", "its certificate has expired"),
        ("CERTIFICATE_VERIFY_FAILED: certificate is not yet valid", "not valid yet"),
    ],
)
def test_gRPCs_words_are_told_apart(details: str, said: str | None) -> None:  # noqa: N802
    found = handshake_trouble(details, HERE, Credentials(Path("ca.crt")))
    assert (said in found[0] if said and found else found) == (said is not None or None)


async def test_a_certificate_that_was_renewed_is_shown_from_the_next_connection_on(
    files: Files, tmp_path: Path
) -> None:
    stranger = Files(tmp_path / "strangers").node("n1")
    credentials = files.node("n1")
    good = [path.read_bytes() for path in pair(credentials)]
    put_pair(stranger, credentials)
    async with served(files.server()) as server:
        assert "refuses the client" in await ask(server, credentials)
        for path, content in zip(pair(credentials), good, strict=True):
            path.write_bytes(content)
        assert await ask(server, credentials) == "reached"
        # A half-renewed one is refused before it is presented.
        put(pair(stranger)[0], pair(credentials)[0])
        with pytest.raises(InvalidRequestError, match="does not belong"):
            await ask(server, credentials)


async def test_a_client_that_lives_long_takes_the_renewed_certificate(
    files: Files, tmp_path: Path
) -> None:
    credentials = files.node("n1")
    stranger = Files(tmp_path / "strangers").node("n1")
    async with served(files.server()) as server:
        with ControlClient(server, 30, credentials) as client:
            with pytest.raises(RendezvousConnectionError, match="or an older one"):
                await asyncio.to_thread(client.jobs)  # It was reached.
            put_pair(stranger, credentials)
            with pytest.raises(RendezvousConnectionError, match="refuses the client"):
                await asyncio.to_thread(client.jobs)


@pytest.mark.quick
def test_no_token_is_taken_from_what_is_no_file_for_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(os.urandom(8) + b"\xff")
    with pytest.raises(InvalidRequestError, match="it is not text"):
        Credentials.parse({"token_file": file}, {})
