"""What a fork of the zygote, which is the job's own process, can make the runner keep for it."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
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


def test_a_relative_is_signalled_and_leaves_no_descriptor() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        before = open_fds()
        runner.signal_relative(child.pid, signal.SIGTERM, {1})
        assert child.poll() is None
        runner.signal_relative(child.pid, signal.SIGTERM, {os.getpid()})
        assert child.wait() == -signal.SIGTERM
        assert open_fds() == before


@pytest.mark.parametrize(
    ("at_ms", "told"), [(None, (0, 0, 0, 0)), (12_345, (0, 0, 12, 345_000_000))]
)
def test_an_alarm_is_set_to_its_millisecond_and_rings_once(
    at_ms: int | None, told: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = []

    def settime(fd: int, flags: int, spec: Any, old: None) -> int:
        heard.append(tuple(getattr(spec._obj, name) for name, _ in spec._obj._fields_))
        return 0

    with closing(runner._Alarm()) as alarm, monkeypatch.context() as patch:
        patch.setattr(runner._libc, "timerfd_settime", settime)
        alarm.set(at_ms)
    assert heard == [told]


def test_after_one_that_can_not_be_started_no_further_worker_is(told: Told) -> None:
    begun = []

    def fail(started: Any, spec: Any) -> None:
        begun.append(spec.local_rank)
        started.kill_at = time.monotonic()

    told.runner._start_worker = fail  # type: ignore[method-assign]
    told.runner._start_cold(runner._Round(3), [SimpleNamespace(local_rank=n) for n in (0, 1)])  # type: ignore[misc]
    assert begun == [0]


@pytest.mark.parametrize(
    ("code", "rests"), [(errno.EMFILE, True), (errno.EAGAIN, False), (errno.ECONNABORTED, False)]
)
def test_a_socket_that_can_not_be_served_is_left_alone_for_a_while(
    told: Told, tmp_path: Path, code: int, rests: bool
) -> None:
    """It could be read all the while, and the runner would spin."""
    told.runner._serve({"socket": str(tmp_path / "s"), "orphan_timeout_s": 9.0, "grace_s": 9.0})
    served = told.runner._served
    assert served is not None
    real = served.listener

    def accept() -> None:
        raise OSError(code, os.strerror(code))

    served.listener = SimpleNamespace(fileno=real.fileno, accept=accept, close=real.close)  # type: ignore[assignment]
    told.runner._attempt(told.runner._meet_agent)
    assert (real.fileno() not in told.runner._selector.get_map()) == rests
    assert (told.runner._accept_again_at is not None) == rests
    assert not told.runner._told_error


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
