"""What a fork of the zygote, which is the job's own process, can make the runner keep for it."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.agent.runner import runner

MANY = 40
FDS_EACH = 16


class Told:
    """A runner with one fork that knows what to be, and the fork's end of their link."""

    def __init__(self) -> None:
        self._agent, agents = socket.socketpair()
        control, self._zygote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = control
        self.runner = runner.Runner(runner.Channel(agents))
        zygote: Any = SimpleNamespace(control=control, asked={})
        self.runner._ask_for(zygote, [None])
        _, (fd,), _, _ = socket.recv_fds(self._zygote, 1 << 16, 1)
        self.fork_end = socket.socket(fileno=fd)
        ((self.fork,),) = zygote.asked.values()
        self.fork.told = True
        self.runner._watch(self.fork.link.fileno(), lambda: None)

    def serve(self) -> None:
        self.runner._serve_link(self.fork)

    @property
    def is_open(self) -> bool:
        return bool(self.fork.link.fileno() >= 0)

    def close(self) -> None:
        self.runner._close_link(self.fork)
        for one in (self.fork_end, self._agent, self._control, self._zygote):
            one.close()
        self.runner.close()


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    yield made
    made.close()


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_runner_that_is_closed_leaves_no_descriptor() -> None:
    before = open_fds()
    Told().close()
    assert open_fds() == before


def test_descriptors_that_a_fork_sends_do_not_pile_up(told: Told) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    frame = struct.pack(">I", 1_000) + b"x" * MANY
    before = open_fds()
    for byte in frame[:MANY]:
        socket.send_fds(told.fork_end, [bytes([byte])], [nothing] * FDS_EACH)
        told.serve()
    assert told.is_open, "its frame is not complete"
    assert open_fds() == before
    os.close(nothing)


def test_the_frame_of_a_fork_is_short_or_its_link_is_closed(told: Told) -> None:
    told.fork_end.sendall(struct.pack(">I", runner.MAX_ANSWER_BYTES + 1) + b"x")
    told.serve()
    assert not told.is_open


def test_a_frame_of_the_agent_may_be_longer_and_bring_a_descriptor() -> None:
    ours, theirs = socket.socketpair()
    agent, heard = runner.Channel(ours), runner.Channel(theirs)
    fd = os.open(os.devnull, os.O_RDONLY)
    agent.send({"text": "x" * 2 * runner.MAX_ANSWER_BYTES}, fd)
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
