"""The connections of workers that have ended: held for a while, by a process of their own."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from rdzv.agent.runner.held_connections import HELD_S, HeldConnections
from rdzv.agent.runner.spawn import Program
from tests.support.fake_runner import FakeRunner
from tests.support.lingering import LINGER_S, lingering

pytestmark = pytest.mark.slow


class Children:
    """Starts programs, and says that one has ended when the test says so."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self.on_exit: list[Callable[[Any, int], None]] = []

    def start(
        self, _name: str, program: Program, on_exit: Callable[[Any, int], None], *, spared: bool
    ) -> Any:
        assert spared, "it outlives the rounds"
        self.on_exit.append(on_exit)
        self.started.append(subprocess.Popen(program.argv, pass_fds=tuple(program.pass_fds)))
        return self.started[-1]

    def close(self) -> None:
        pass


@pytest.fixture
def runner() -> Iterator[FakeRunner]:
    made = FakeRunner()
    made.children.close()
    children = Children()
    made.children = children
    yield made
    for process in children.started:
        process.kill()
        process.wait()
    children.on_exit[-1](children.started[-1], -9)
    made.close()


@pytest.fixture
def children(runner: FakeRunner) -> Children:
    return runner.children  # type: ignore[no-any-return]


@pytest.fixture
def held(runner: FakeRunner) -> HeldConnections:
    return runner.connections


def fill(queue: socket.socket) -> socket.socket:
    """Give a queue the only copy of one end of a connection. Return the other end."""
    ours, peer = socket.socketpair()
    with ours:
        socket.send_fds(queue, [b"0"], [ours.fileno()])
    return peer


def is_open(peer: socket.socket, within_s: float = 0.0) -> bool:
    return not select.select([peer], [], [], within_s)[0]


def test_a_queue_holds_its_connections_until_it_is_closed(held: HeldConnections) -> None:
    first, theirs = held.add()
    second, others = held.add()
    with theirs, others:
        peers = [fill(theirs) for _ in range(3)]
        other = fill(others)
    held.close(first)
    for peer in peers:
        assert not is_open(peer, 10.0)
        peer.close()
    assert is_open(other)
    held.close(second)
    assert not is_open(other, 10.0)
    other.close()


def test_connections_outlive_their_worker(runner: FakeRunner, held: HeldConnections) -> None:
    queue, theirs = held.add()
    with theirs, fill(theirs) as peer:
        before = time.monotonic()
        held.close_later(queue)
        runner.pass_time(before + HELD_S - 0.001)
        assert is_open(peer)
        runner.pass_time(time.monotonic() + HELD_S)
        assert not is_open(peer, 10.0)


def test_a_slow_close_keeps_nobody(held: HeldConnections, children: Children) -> None:
    queue, theirs = held.add()
    sent, peer = lingering()
    with theirs, peer:
        socket.send_fds(theirs, [b"0"], [sent.fileno()])
        sent.close()
        begun = time.monotonic()
        theirs.close()
        held.close(queue)
        # The process hangs now; each further queue waits for it, until another takes its place.
        while len(children.started) == 1:
            add_if_possible(held)
            assert time.monotonic() - begun < LINGER_S / 2
        assert children.started[0].wait(10.0) == -signal.SIGKILL
        number, again = held.add()
        with again, fill(again) as other:
            held.close(number)
            assert not is_open(other, 10.0)
    assert len(children.started) == 2


def add_if_possible(held: HeldConnections) -> None:
    with suppress(OSError):
        held.add()[1].close()


def test_a_process_that_was_killed_is_replaced(held: HeldConnections, children: Children) -> None:
    _, theirs = held.add()
    (process,) = children.started
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with theirs, pytest.raises(BrokenPipeError):
        theirs.send(b"0")
    children.on_exit[0](process, -9)
    number, theirs = held.add()
    with theirs, fill(theirs) as peer:
        assert is_open(peer)
        children.on_exit[0](process, -9)  # The former one's end is not this one's.
        held.close(number)
        assert not is_open(peer, 10.0)
    assert len(children.started) == 2
