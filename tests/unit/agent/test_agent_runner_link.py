"""The agent's hold on a runner: what it says is handled in order, and forgotten only after that."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rdzv.agent.runner.channel import Channel
from rdzv.agent.runner_link import (
    Hello,
    RunnerEvent,
    RunnerExited,
    RunnerLink,
    WorkerExited,
    WorkersGone,
)

PATIENCE_S = 100.0
EXITED = {"round": 0, "local_rank": 0, "pid": 9, "exit_code": 1, "signal": None, "age_ms": 0}


class Story:
    """A runner that is made up, and an agent that takes its time over each exit of a worker."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.runner = Channel(theirs)
        self.process = subprocess.Popen(["sleep", "600"])
        self.heard: list[RunnerEvent] = []
        self.handling: list[asyncio.Future[None]] = []
        hello = Hello(self.process.pid, 0, 0, {0: 9}, frozenset(), zygote=False, kept={})
        self.link = RunnerLink(None, Channel(ours), self.take, hello)

    def take(self, event: RunnerEvent) -> asyncio.Future[None] | None:
        self.heard.append(event)
        if not isinstance(event, WorkerExited):
            return None
        self.handling.append(asyncio.get_running_loop().create_future())
        return self.handling[-1]

    def say(self, kind: str, number: int, **about: Any) -> None:
        self.runner.send({"type": kind, "number": number, **about})

    def may_forget(self) -> list[Any]:
        """Return what the runner was told that it may forget."""
        told = []
        with contextlib.suppress(BlockingIOError, EOFError):
            self.runner.receive()
        while (message := self.runner.next_message()) is not None:
            told.append(message["number"])
        return told

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
async def s() -> AsyncIterator[Story]:
    made = Story()
    yield made
    made.end()
    for handling in made.handling:
        if not handling.done():
            handling.set_result(None)
    await made.until(lambda: RunnerExited(None) in made.heard)
    made.runner.close()


async def test_an_event_waits_until_the_one_before_was_handled(s: Story) -> None:
    s.say("exited", 1, **EXITED)
    s.say("gone", 2, round=0)
    await s.until(lambda: s.heard)
    await asyncio.sleep(0.01)
    assert [type(event) for event in s.heard] == [WorkerExited]
    # An agent that died now would be told of it again.
    assert s.may_forget() == []
    s.handling[0].set_result(None)
    await s.until(lambda: WorkersGone(0) in s.heard)
    assert s.may_forget() == [2]


async def test_the_runners_own_end_comes_after_all_that_it_has_said(s: Story) -> None:
    s.say("exited", 1, **EXITED)
    s.say("gone", 2, round=0)
    await s.until(lambda: s.heard)
    s.end()
    await asyncio.sleep(0.05)
    assert [type(event) for event in s.heard] == [WorkerExited]
    s.handling[0].set_result(None)
    await s.until(lambda: len(s.heard) == 3)
    assert s.heard[1:] == [WorkersGone(0), RunnerExited(None)]
