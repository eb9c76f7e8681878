"""A runner whose processes are the test's own, and which records its events."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

from rdzv.agent.runner.channel import Channel
from rdzv.agent.runner.child_exits import Children
from rdzv.agent.runner.runner import Runner


class NoChildren(Children):
    """Processes that exist only as numbers; none is ever started."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner.loop)
        self.begun: list[str] = []
        """The names of those that were to be started."""
        self.taken: dict[int, Any] = {}

    def start(self, name: str, *_: Any, **__: Any) -> Any:
        self.begun.append(name)
        raise BlockingIOError(11, "no more processes")

    def take(self, pid: int, on_exit: Any, *, spared: bool) -> Any:
        self.taken[pid] = FakeChild(pid, on_exit, spared=spared)
        return self.taken[pid]


class FakeChild:
    """A process of which only its number exists."""

    failure = ""

    def __init__(self, pid: int, on_exit: Any, *, spared: bool) -> None:
        self.pid, self.on_exit, self.spared = pid, on_exit, spared
        self.kills = 0

    def kill(self) -> None:
        self.kills += 1

    def reap(self, code: int) -> None:
        self.on_exit(self, code)


class FakeRunner(Runner):
    """The parts of a runner, each of which a test may replace."""

    children: Any
    forks: Any
    slots: Any
    workers: Any

    def __init__(self) -> None:
        ours, self._agents_end = socket.socketpair()
        super().__init__(Channel(ours))
        self._own = self.children
        self.children = NoChildren(self)
        self.events: list[tuple[str, dict[str, Any]]] = []
        agent: Any = self.agent
        agent.emit = agent.tell = lambda kind, **fields: self.events.append((kind, fields))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    def turn(self, timeout_s: float = 0.0) -> None:
        """Call what is readable."""
        for call in self.loop.wait(timeout_s):
            call()

    def pass_time(self, now: float) -> None:
        """Call what is due at that time."""
        for call in self.loop.due(now):
            call()

    def close(self) -> None:
        """Close all that was opened, and stop listening for exits."""
        self._own.close()
        super().close()
        self._agents_end.close()
        if (listened := signal.set_wakeup_fd(-1)) >= 0:
            os.close(listened)  # Its other end is closed: later tests' children would tell it.
