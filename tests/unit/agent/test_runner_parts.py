"""Parts of the runner by themselves: signals, the alarm, failed starts, the socket for agents."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rdzv.agent.runner.agent_link import AgentLink
from rdzv.agent.runner.children import Child, Children
from rdzv.agent.runner.fence import Fence
from rdzv.agent.runner.linux.boottime import Alarm
from rdzv.agent.runner.linux.descriptors import short_path
from rdzv.agent.runner.linux.libc import libc
from rdzv.agent.runner.linux.process_tree import signal_relative
from rdzv.agent.runner.loop import Loop
from rdzv.agent.runner.next_agent import NextAgent
from rdzv.agent.runner.warm_forks import WarmForks
from rdzv.agent.runner.workers import Workers


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def agent(loop: Loop) -> AgentLink:
    return AgentLink(loop, lambda _request: None, lambda _was_in_charge: None)


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_relative_is_signalled_and_leaves_no_descriptor() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        before = open_fds()
        signal_relative(child.pid, signal.SIGTERM, {1})
        assert child.poll() is None
        signal_relative(child.pid, signal.SIGTERM, {os.getpid()})
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

    with closing(Alarm()) as alarm, monkeypatch.context() as patch:
        patch.setattr(libc, "timerfd_settime", settime)
        alarm.set(at_ms)
    assert heard == [told]


class NoChildren(Children):
    """Children of which none can be forked."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self.begun: list[str] = []

    def start(self, name: str, *_: Any, **__: Any) -> Child:
        self.begun.append(name)
        raise OSError(errno.EAGAIN, "no more processes")


def test_after_one_that_cannot_be_started_no_further_worker_is(
    loop: Loop, agent: AgentLink
) -> None:
    with closing(NoChildren(loop)) as children, closing(Fence(agent)) as fence:
        workers = Workers(loop, children, agent, fence, WarmForks(loop, children, agent))
        both = [{"local_rank": rank, "argv": ["true"], "env": {}} for rank in (0, 1)]
        workers.start({"round": 3, "workers": both})
        assert children.begun == ["round 3: the worker of local_rank 0"]


@pytest.mark.parametrize(
    ("code", "rests"), [(errno.EMFILE, True), (errno.EAGAIN, False), (errno.ECONNABORTED, False)]
)
def test_a_socket_that_cannot_be_served_is_left_alone_for_a_while(
    loop: Loop,
    agent: AgentLink,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    rests: bool,
) -> None:
    """It could be read all the while, and the runner would spin."""

    def accept(_: socket.socket) -> None:
        raise OSError(code, os.strerror(code))

    path = tmp_path / "s"
    waiting = NextAgent(loop, agent, dict, lambda _grace_s: None)
    waiting.serve({"socket": str(path), "orphan_timeout_s": 9.0, "grace_s": 9.0})
    with closing(waiting), socket.socket(socket.AF_UNIX) as client, monkeypatch.context() as patch:
        with short_path(path) as short:
            client.connect(short)
        patch.setattr(socket.socket, "accept", accept)
        [call] = loop.wait(0)
        call()
        assert (not list(loop.wait(0))) == rests
        assert any(at is not None for at in waiting.wake_times()) == rests
