"""The agent's link to a runner: reports are handled in order, and acknowledged only then."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rdzv import messages
from rdzv.agent.core import commands
from rdzv.agent.core.events import (
    RunnerEvent,
    RunnerExited,
    StoreHostExited,
    WorkerExited,
    WorkersGone,
)
from rdzv.agent.runner import requests
from rdzv.agent.runner.channel import MAX_FRAME_BYTES, Channel
from rdzv.agent.runner.frames import decode
from rdzv.agent.runner.spawn import NOT_STARTED
from rdzv.agent.runner_link import agent_children, runner_link
from rdzv.agent.runner_link.runner_link import RunnerHello, RunnerLink, StartedRunner
from rdzv.core.model import Snapshot, SnapshotMark
from rdzv.core.snapshots import CopySource
from tests.support.lingering import LINGER_S

pytestmark = pytest.mark.slow

PATIENCE_S = 100.0
EXITED = {"round": 0, "local_rank": 0, "pid": 9, "exit_code": 1, "signal": None, "age_ms": 0}
MARK = SnapshotMark(0, 40, "a", 2)
SOURCE = CopySource("n2", "10.0.0.2", 40_000, "secret", (Snapshot(0, MARK, 1, 7, "d", 1),))


class Story:
    """A fake runner, and an agent that takes its time over each exit of a worker."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.runner = Channel(theirs)
        self.process = subprocess.Popen(["sleep", "600"])
        self.heard: list[RunnerEvent] = []
        self.handling: list[asyncio.Future[None]] = []
        hello = RunnerHello(self.process.pid, 0, {0: 9}, frozenset(), kept={})
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
        """Return the acknowledgements that the runner received."""
        told = []
        with contextlib.suppress(BlockingIOError, EOFError):
            self.runner.receive()
        while (message := self.runner.next_message()) is not None:
            if message["type"] == "forget_events":
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


async def test_a_store_host_that_can_not_be_asked_for_has_not_started(s: Story) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        s.link.start_store_host(3, listener, "python", {"LONG": "x" * MAX_FRAME_BYTES})
    await s.until(lambda: s.heard)
    assert s.heard == [StoreHostExited(3, exit_code=NOT_STARTED)]


@pytest.mark.quick
def test_a_runner_not_started_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(subprocess, "Popen", fail)
    before = sorted(Path("/proc/self/fd").iterdir())
    # It holds everything that is not closed.
    with pytest.raises(OSError, match="no memory") as failed:
        StartedRunner()
    assert sorted(Path("/proc/self/fd").iterdir()) == before, failed


def no_process(pid: int) -> int:
    raise ProcessLookupError


@pytest.mark.parametrize(("program", "ends"), [("true", True), ("sleep 600", False)])
async def test_what_a_dead_runner_has_left_may_end_by_itself_for_a_while(
    program: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_children, "HELPERS_S", PATIENCE_S if ends else 0.05)
    killed: list[list[int]] = []

    def kill(_spared: object) -> list[int]:
        killed.append([helper.pid])
        helper.kill()
        helper.wait()
        return []

    def find(_spared: object) -> list[int]:
        """List the helper alone; a process of many tests may have other children."""
        return [helper.pid] if helper.poll() is None else []

    monkeypatch.setattr(agent_children, "kill_descendants", kill)
    monkeypatch.setattr(agent_children, "list_descendants", find)
    with subprocess.Popen(program.split()) as helper:  # noqa: ASYNC220
        await agent_children.sweep_orphans()
        assert helper.poll() is not None
    assert bool(killed) != ends


@pytest.mark.quick
async def test_what_a_dead_runner_has_left_is_killed_until_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_children, "HELPERS_S", 0.0)
    looks: list[list[int]] = [[7, 8], [8], []]
    monkeypatch.setattr(agent_children, "kill_descendants", lambda spared: looks.pop(0))
    monkeypatch.setattr(os, "pidfd_open", no_process)
    await agent_children.sweep_orphans()
    assert looks == []
    assert caplog.messages == []


async def test_runners_are_spared_until_they_end(s: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    spared: list[set[int]] = []
    monkeypatch.setattr(agent_children, "HELPERS_S", 0.0)
    monkeypatch.setattr(agent_children, "kill_descendants", lambda pids: spared.append(pids) or [])
    ours, theirs = socket.socketpair()
    with theirs, subprocess.Popen(["sleep", "600"]) as process:  # noqa: ASYNC220
        heard: list[RunnerEvent] = []
        link = RunnerLink(process, Channel(ours), heard.append)  # type: ignore[arg-type]
        await agent_children.sweep_orphans()
        process.kill()
        await s.until(lambda: heard)
        await agent_children.sweep_orphans()
    assert [link.pid in pids for pids in spared] == [True, False]


@pytest.mark.quick
async def test_another_child_is_spared_until_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    spared: list[set[int]] = []
    monkeypatch.setattr(agent_children, "HELPERS_S", 0.0)
    monkeypatch.setattr(agent_children, "kill_descendants", lambda pids: spared.append(pids) or [])
    agent_children.spare(7)
    await agent_children.sweep_orphans()
    agent_children.spare_no_more(7)
    await agent_children.sweep_orphans()
    assert [7 in pids for pids in spared] == [True, False]


async def test_what_sigkill_does_not_end_is_named_and_waited_for_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_children, "HELPERS_S", 0.0)
    monkeypatch.setattr(agent_children, "kill_descendants", lambda spared: [7, 8])
    monkeypatch.setattr(os, "pidfd_open", no_process)
    await agent_children.sweep_orphans(-1)
    assert caplog.messages == ["processes left by a dead runner survived SIGKILL: pid 7, 8"]


async def test_while_a_child_starts_nobody_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed, loads = [], asyncio.Event()
    monkeypatch.setattr(agent_children, "HELPERS_S", 0.0)
    monkeypatch.setattr(
        agent_children, "kill_descendants", lambda spared: killed.append(spared) or []
    )
    start = asyncio.create_subprocess_exec

    async def start_late(*args: str, **how: Any) -> asyncio.subprocess.Process:
        await loads.wait()
        return await start(*args, **how)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_late)
    starting = asyncio.create_task(agent_children.start_spared("sleep", "600"))
    await asyncio.sleep(0)
    sweep = asyncio.create_task(agent_children.sweep_orphans())
    await asyncio.wait({sweep}, timeout=0.05)
    assert (killed, sweep.done()) == ([], False)
    loads.set()
    async with asyncio.timeout(PATIENCE_S):
        child = await starting
        await sweep
    await agent_children.end_spared(child)
    assert [child.pid in spared for spared in killed] == [True]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (commands.StopWorkers(0, 1_500, None, 2_500, (1,)), requests.StopWorkers),
        (commands.EndKept(1_500, (1,)), requests.EndKept),
        (commands.NotifyWorkers(0, 9_000, "a drain", 15), requests.NotifyWorkers),
        (commands.StopStoreHost(3), requests.StopStoreHost),
        (messages.SnapshotWatermark("job-7", "r1", MARK, 7, MARK), requests.SnapshotWatermark),
        (messages.KeepCopies("job-7", "r1", MARK, (SOURCE,)), requests.KeepCopies),
    ],
)
async def test_a_command_is_a_request_of_the_same_fields(
    s: Story, command: Any, kind: type[Any]
) -> None:
    s.link.ask(command)
    while (message := s.runner.next_message()) is None or message["type"] == "ping":
        s.runner.receive()
    assert message["type"] == requests.type_of(kind)
    request = asdict(decode(kind, message))
    fields = json.loads(msgspec.json.encode(command))
    assert json.loads(json.dumps(request)) == {name: fields[name] for name in request}


async def test_an_event_waits_until_the_one_before_was_handled(s: Story) -> None:
    s.say("exited", 1, **EXITED)
    s.say("gone", 2, round=0)
    await s.until(lambda: s.heard)
    await asyncio.sleep(0.01)
    assert [type(event) for event in s.heard] == [WorkerExited]
    # If the agent died now, its successor would receive it again.
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


class Pinged(Story):
    """A fake runner that is pinged, with a process below it that no environment shows."""

    def __init__(self) -> None:
        script = "setsid env -i sleep 600 & echo $!; exec sleep 600"
        self.process = subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.hidden = int(self.process.stdout.readline())
        self.process.stdout.close()
        ours, theirs = socket.socketpair()
        self.runner = Channel(theirs)
        self.heard, self.handling = [], []
        self.link = RunnerLink(self.process, Channel(ours), self.take)

    def pings(self) -> int:
        """Return the number of pings that have come."""
        with contextlib.suppress(BlockingIOError, EOFError):
            self.runner.receive()
        told = 0
        while self.runner.next_message() is not None:
            told += 1
        return told

    def is_alive(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return False


@pytest.fixture
async def pinged(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pinged]:
    monkeypatch.setattr(runner_link, "PING_S", 0.01)
    made = Pinged()
    yield made
    made.end()
    with contextlib.suppress(ProcessLookupError):
        os.kill(made.hidden, signal.SIGKILL)
    await made.until(lambda: any(isinstance(event, RunnerExited) for event in made.heard))
    made.runner.close()


async def test_a_runner_that_no_longer_answers_is_killed_with_all_below_it(
    pinged: Pinged, caplog: pytest.LogCaptureFixture
) -> None:
    answered = 0
    while answered < 3 * runner_link.MAX_UNANSWERED:
        await pinged.until(pinged.pings)
        pinged.runner.send({"type": "pong"})
        answered += 1
    assert pinged.heard == [] and pinged.is_alive(pinged.hidden)
    await pinged.until(lambda: pinged.heard)
    assert pinged.heard == [RunnerExited(-signal.SIGKILL)]
    assert not pinged.is_alive(pinged.hidden)
    assert "it hangs: no answer for" in caplog.text


async def test_a_runner_that_is_still_starting_is_not_killed(pinged: Pinged) -> None:
    told = 0

    def many() -> bool:
        nonlocal told
        told += pinged.pings()
        return told > 3 * runner_link.MAX_UNANSWERED

    await pinged.until(many)
    assert pinged.heard == []


async def test_a_runner_that_survives_sigkill_is_given_up(
    pinged: Pinged, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner_link, "KILL_TIMEOUT_S", 0.01)
    monkeypatch.setattr(pinged.process, "kill", lambda: None)
    await pinged.until(pinged.pings)
    pinged.runner.send({"type": "pong"})
    await pinged.until(lambda: pinged.heard)
    assert pinged.heard == [RunnerExited(-signal.SIGKILL)]
    assert "survives SIGKILL" in caplog.text
    monkeypatch.undo()


LINGERS = f"""
import socket, struct
out = socket.socket(fileno=1)
out.setblocking(False)
try:
    while True:
        out.send(b"x" * 65536)
except BlockingIOError:
    out.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("2i", 1, {LINGER_S}))
"""


async def test_an_ended_program_with_open_output_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shares the socket, and may tell it to linger; then the last one to close it would wait."""
    start = agent_children.start_spared

    async def late(*args: str, **how: Any) -> asyncio.subprocess.Process:
        process = await start(*args, **how)
        await process.wait()
        return process

    monkeypatch.setattr(agent_children, "start_spared", late)
    begun = time.monotonic()
    code, said, _ = await agent_children.ask_spared(
        sys.executable, "-I", "-S", "-c", LINGERS, timeout_s=PATIENCE_S
    )
    assert code == 0 and said.strip(b"x") == b"" and len(said) > 65536
    assert time.monotonic() - begun < LINGER_S / 2
