"""The proxy with which other tests break links works as documented."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from tcp_proxy import TcpProxy, proxy_to

PATIENCE_S = 100.0


@pytest.fixture(name="server")
def _server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE_S)
        yield listening


@pytest.fixture(name="proxy")
def _proxy(server: socket.socket) -> Iterator[TcpProxy]:
    with proxy_to(*server.getsockname()) as proxy:
        yield proxy


def connect(proxy: TcpProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S)


def accept(server: socket.socket) -> socket.socket:
    accepted, _ = server.accept()
    accepted.settimeout(PATIENCE_S)
    return accepted


def is_silent(sock: socket.socket, for_s: float = 0.3) -> bool:
    sock.settimeout(for_s)
    try:
        sock.recv(1)
    except TimeoutError:
        return True
    finally:
        sock.settimeout(PATIENCE_S)
    return False


def test_a_black_hole_holds_everything_back_until_the_link_is_restored(
    proxy: TcpProxy, server: socket.socket
) -> None:
    with connect(proxy) as near, accept(server) as far:
        proxy.black_hole()
        near.sendall(b"ping")
        far.sendall(b"pong")
        assert is_silent(far)
        assert is_silent(near)
        with connect(proxy) as late:
            late.sendall(b"late")
            assert is_silent(late)
            proxy.restore()
            assert far.recv(100) == b"ping"
            assert near.recv(100) == b"pong"
            with accept(server) as third:
                assert third.recv(100) == b"late"


def test_a_cut_resets_what_there_is_and_what_comes_until_the_link_is_restored(
    proxy: TcpProxy, server: socket.socket
) -> None:
    with connect(proxy) as near, accept(server) as far:
        assert proxy.connections == 1
        proxy.cut()
        for end in (near, far):
            with pytest.raises(ConnectionResetError):
                end.recv(1)
    with pytest.raises(ConnectionResetError), connect(proxy) as refused:
        if refused.recv(1) == b"":
            raise ConnectionResetError
    proxy.restore()
    with connect(proxy) as near, accept(server) as far:
        near.sendall(b"ping")
        assert far.recv(100) == b"ping"
