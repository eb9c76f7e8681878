"""A fork of the zygote is the job's own process; it cannot make the runner hold much for it."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdzv.agent.runner.channel import Channel
from rdzv.agent.runner.loop import Loop
from rdzv.agent.runner.runner import Runner
from rdzv.agent.runner.warm_forks import MAX_ANSWER_BYTES, Fork


class Told:
    """A fork that has received its order, and its own end of the link."""

    def __init__(self) -> None:
        ours, self.fork_end = socket.socketpair()
        self._loop = Loop()
        self.fork = Fork(self._loop, ours, None, lambda _fork, _answer: None)
        self.fork.send_order({}, ())
        self.fork_end.recv(64)

    def read(self) -> None:
        self.fork.read()

    @property
    def is_open(self) -> bool:
        return self.fork.is_open

    def close(self) -> None:
        self.fork.close()
        self.fork_end.close()
        self._loop.close()


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    yield made
    made.close()


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_runner_that_is_closed_leaves_no_descriptor() -> None:
    before = open_fds()
    ours, theirs = socket.socketpair()
    with theirs:
        Runner(Channel(ours)).close()
    assert open_fds() == before


@pytest.mark.parametrize("is_private", [False, True])
def test_a_fork_with_an_account_of_its_own_gets_nothing_of_the_agents_log(is_private: bool) -> None:
    (ours, fork_end), (own, their) = socket.socketpair(), os.pipe()
    loop = Loop()
    fork = Fork(loop, ours, None, lambda _fork, _answer: None)
    fork.is_private = is_private
    fork.send_order({}, (0, 1, 2, own, their))
    _, fds, *_ = socket.recv_fds(fork_end, 64, 5)
    shown, given = (
        [str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in each]
        for each in (fds, (0, 1, 2, own, their))
    )
    fork.close()
    fork_end.close()
    loop.close()
    for fd in (*fds, own, their):
        os.close(fd)
    if is_private:
        given[1:3] = [os.devnull] * 2
    assert shown == given


def test_a_fork_that_sends_descriptors_has_its_link_closed(told: Told) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    before = open_fds()
    told.fork_end.send(struct.pack(">I", 1_000))
    told.read()
    assert told.is_open, "its frame is not complete"
    socket.send_fds(told.fork_end, [b"x"], [nothing] * 16)
    told.read()
    assert not told.is_open
    assert open_fds() == before - 1
    os.close(nothing)


def test_the_frame_of_a_fork_is_short_or_its_link_is_closed(told: Told) -> None:
    told.fork_end.sendall(struct.pack(">I", MAX_ANSWER_BYTES + 1) + b"x")
    told.read()
    assert not told.is_open


def test_a_frame_of_the_agent_may_be_longer_and_bring_a_descriptor() -> None:
    ours, theirs = socket.socketpair()
    agent, heard = Channel(ours), Channel(theirs)
    fd = os.open(os.devnull, os.O_RDONLY)
    agent.send({"text": "x" * 2 * MAX_ANSWER_BYTES}, fd)
    message = None
    while message is None:
        heard.receive()
        agent.flush()
        message = heard.next_message()
    taken = heard.take_fd()
    assert taken is not None
    os.close(taken)
    agent.close()
    heard.close()
