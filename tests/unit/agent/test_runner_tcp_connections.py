"""The TCP connections of a process: where they lead, and which are live."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rdzv.agent.runner.processes import live_connection


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as closing:
        yield closing


def connected(stack: ExitStack, family: socket.AddressFamily, host: str) -> socket.socket:
    """Return a connection of this process to its own listener, whose other end stays open."""
    listener = stack.enter_context(socket.create_server((host, 0), family=family))
    client = stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
    stack.enter_context(listener.accept()[0])
    return client


def live(*endpoints: tuple[str, int]) -> tuple[str, int] | None:
    return live_connection(os.getpid(), endpoints)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_a_connection_is_live_until_it_is_shut_down(
    stack: ExitStack, family: socket.AddressFamily, host: str
) -> None:
    if family is socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("there is no IPv6 here")
    client = connected(stack, family, host)
    port = client.getpeername()[1]
    assert live((host, port)) == (host, port)
    assert live(("localhost", port)) == (host, port)
    assert live(("192.0.2.1", port), (host, port + 1)) is None
    client.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + 10
    while live((host, port)) is not None:  # The other end, also in this process, notices it later.
        assert time.monotonic() < deadline


@pytest.mark.slow
def test_an_address_of_ipv4_in_ipv6_is_the_same(stack: ExitStack) -> None:
    client = connected(stack, socket.AF_INET, "127.0.0.1")
    port = client.getpeername()[1]
    assert live(("::ffff:127.0.0.1", port)) == ("127.0.0.1", port)
    if not socket.has_dualstack_ipv6():
        pytest.skip("there is no IPv6 here")
    both = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    stack.enter_context(both)
    visitor = stack.enter_context(socket.create_connection(("127.0.0.1", both.getsockname()[1])))
    accepted = stack.enter_context(both.accept()[0])
    # The kernel lists this one among those of IPv6, which are all read for an address not found.
    assert accepted.getpeername()[0] == "::ffff:127.0.0.1"
    assert live(("192.0.2.1", visitor.getsockname()[1])) is None


def test_another_process_is_looked_at_and_one_that_is_gone_is_an_error() -> None:
    assert live_connection(os.getppid(), [("127.0.0.1", 9)]) is None
    with pytest.raises(OSError, match="No such file"):
        live_connection(4_000_000, [("127.0.0.1", 9)])
