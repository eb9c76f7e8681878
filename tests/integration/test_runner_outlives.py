"""A runner outlives its agent: it reports what happened to the next one, and leaves nothing.

The agent here is the test itself, at the other end of the socket; it dies by closing it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from runners import PATIENCE_S, Node, marked, state_of, until

from rdzv.agent.core.events import (
    Fenced,
    RunnerEvent,
    RunnerExited,
    ServeFailed,
    StoreHostExited,
    WorkerExited,
    WorkersGone,
    WorkerStarted,
)
from rdzv.agent.runner.descriptors import short_path
from rdzv.agent.runner.requests import Keep, RenewFence, Serve, StopWorkers
from rdzv.agent.runner.spawn import drop_oom_protection
from rdzv.agent.runner.system import boottime_ms
from rdzv.agent.runner_link import found_runner, runner_link
from rdzv.agent.runner_link.found_runner import FoundRunner, NotAdoptableError
from rdzv.agent.runner_link.runner_link import StartedRunner

LONG_S = 600.0
SAYS_BYE = """
import pathlib, signal, sys
def bye(*_):
    pathlib.Path({bye!r}).touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, bye)
pathlib.Path({ready!r}).touch()
while True:
    signal.pause()
"""


class Orphanage(Node):
    """A runner whose agent comes and goes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # Longer than a socket's address may be.
        self.path = folder / ("deep" * 30) / "runner.sock"
        self.path.parent.mkdir()
        self.process: subprocess.Popen[bytes] | None = None
        self.dies = False
        """Whether its agent dies of the next event."""

    def hear(self, event: RunnerEvent) -> None:
        if self.dies:
            raise RuntimeError("the agent dies")
        super().hear(event)

    def spawn(self) -> None:
        """Start the runner."""
        started = StartedRunner()
        self.process = started.process
        self.link = started.link(self.hear)

    async def begin(self, orphan_timeout_s: float = LONG_S, grace_s: float = LONG_S) -> None:
        self.spawn()
        self.link.ask(Serve(str(self.path), orphan_timeout_s, grace_s))
        await until(self._listens)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client, suppress(OSError):
            with short_path(self.path) as short:
                client.connect(short)
            return True
        return False

    async def lose_agent(self) -> None:
        """Disconnect, as an agent does that dies: nothing more is received of what was sent."""
        await self.link.let_go(PATIENCE_S)

    async def find(self) -> FoundRunner:
        found = await FoundRunner.meet(self.path)
        assert found is not None
        return found

    async def adopt(self) -> FoundRunner:
        """Connect as a new agent, which has received nothing yet."""
        self.events.clear()
        found = await self.find()
        found.adopt()
        self.link = found.link(self.hear)
        return found

    async def gone(self) -> None:
        await until(lambda: state_of(self.link.pid) in ("", "Z"))


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Orphanage]:
    node = Orphanage(tmp_path)
    yield node
    await node.link.close(PATIENCE_S)
    if node.process is not None:
        await asyncio.to_thread(node.process.wait, PATIENCE_S)
    assert marked(node.mark) == []
    assert not node.path.exists()


async def test_workers_live_on_and_the_next_agent_finds_what_was_kept(node: Orphanage) -> None:
    await node.begin()
    node.link.ask(Keep("state", "one"))
    node.link.ask(Keep("state", "two"))
    (pid,) = await node.start(3, node.spec("sleep", "1000"))
    await node.lose_agent()
    found = await node.adopt()
    assert state_of(pid) not in ("", "Z")
    hello = found.hello
    assert (hello.last_round, dict(hello.workers)) == (3, {0: pid})
    assert hello.kept == {"state": "two"}
    # And it obeys.
    node.link.ask(StopWorkers(3, 60_000, signal.SIGTERM))
    assert (await node.heard(WorkerExited)).signal == signal.SIGTERM
    await node.heard(WorkersGone, round=3)


async def test_an_exit_that_nobody_has_heard_is_told_with_its_age(node: Orphanage) -> None:
    await node.begin()
    (pid,) = await node.start(0, node.spec("sleep", "1000"))
    await node.lose_agent()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: state_of(pid) == "")
    died = time.monotonic()
    await asyncio.sleep(0.1)  # So that there is an age to report.
    before_ms = (time.monotonic() - died) * 1000
    await node.adopt()
    exited = await node.heard(WorkerExited)
    assert (exited.pid, exited.signal) == (pid, signal.SIGKILL)
    assert exited.age_ms >= before_ms


async def test_what_was_handled_is_not_told_again_and_what_was_not_is(node: Orphanage) -> None:
    """The agent dies of the event it receives: the next one receives it, too."""
    await node.begin()
    _, pid = await node.start(
        0, node.spec("true", local_rank=0), node.spec("sleep", "1000", local_rank=1)
    )
    await node.heard(WorkerExited, local_rank=0)
    # An acknowledgement is on its way before anything else is.
    node.dies = True
    os.kill(pid, signal.SIGKILL)
    loop = asyncio.get_running_loop()
    died = asyncio.Event()
    loop.set_exception_handler(lambda *_: died.set())
    async with asyncio.timeout(PATIENCE_S):
        await died.wait()
    loop.set_exception_handler(None)
    await node.lose_agent()
    node.dies = False
    await node.adopt()
    exited = await node.heard(WorkerExited)
    assert (exited.local_rank, exited.signal) == (1, signal.SIGKILL)
    assert node.events == [exited]


async def test_a_store_host_lives_on_and_its_end_is_told(node: Orphanage) -> None:
    await node.begin()
    (node.folder / "host.py").write_text("import time; time.sleep(1000)")
    fake = node.folder / "python"
    fake.write_text(f"#!/bin/sh\nexec {sys.executable} {node.folder}/host.py\n")
    fake.chmod(0o755)
    node.start_store_host(5, str(fake))
    node.link.start_workers(5, [node.spec("sleep", "1000")])
    await node.heard(WorkerStarted)
    await node.lose_agent()
    found = await node.adopt()
    assert found.hello.store_hosts == {5}
    await node.lose_agent()
    node.events.clear()
    await until(lambda: _with_host(node))  # Its interpreter may just be starting.
    (host,) = _with_host(node)
    os.kill(host, signal.SIGKILL)
    await until(lambda: state_of(host) == "")
    await node.adopt()
    assert (await node.heard(StoreHostExited)).round == 5


def _with_host(node: Orphanage) -> list[int]:
    """List the store hosts of a node, by their command lines."""
    return [pid for pid in marked(node.mark) if b"host.py" in _command(pid)]


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def test_a_second_agent_is_refused_while_there_is_one(
    node: Orphanage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.begin()
    with pytest.raises(NotAdoptableError, match=r"already has an agent and refuses pid"):
        await FoundRunner.meet(node.path, timeout_s=2.0)
    # The first is not disturbed by that.
    await node.start(0, node.spec("sleep", "1000"))


async def test_an_agent_that_does_not_know_its_version_leaves_it_and_its_time_runs_on(
    node: Orphanage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.begin(orphan_timeout_s=3.0)
    (pid,) = await node.start(0, node.spec("sleep", "1000"))
    await node.lose_agent()
    monkeypatch.setattr(found_runner, "PROTOCOL_VERSION", 0)
    with pytest.raises(
        NotAdoptableError, match=r"speaks version \d+ of the runner's protocol, and"
    ):
        await node.find()
    await node.gone()
    assert state_of(pid) == ""


async def test_who_only_looks_does_not_stop_the_clock_and_commands_nothing(
    node: Orphanage,
) -> None:
    await node.begin(orphan_timeout_s=3.0)
    (pid,) = await node.start(0, node.spec("sleep", "1000"))
    await node.lose_agent()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as looking:
        with short_path(node.path) as short:
            looking.connect(short)
        request = json.dumps({"type": "stop_workers", "round": 0, "signum": 9, "grace_ms": 0})
        looking.sendall(struct.pack(">I", len(request)) + request.encode())
        looking.settimeout(PATIENCE_S)
        said = b""
        while b"was not adopted" not in said:
            said += looking.recv(65536)
        assert state_of(pid) not in ("", "Z")
        await node.gone()
    assert state_of(pid) == ""


async def test_without_an_agent_in_time_workers_are_stopped_in_order(node: Orphanage) -> None:
    await node.begin(orphan_timeout_s=0.2)
    ready, bye = node.folder / "ready", node.folder / "bye"
    script = SAYS_BYE.format(ready=str(ready), bye=str(bye))
    await node.start(0, node.python(script))
    await until(ready.exists)
    await node.lose_agent()
    await node.gone()
    assert bye.exists()


async def test_the_fence_holds_without_an_agent(node: Orphanage) -> None:
    await node.begin()
    (pid,) = await node.start(0, node.spec("sleep", "1000"))
    node.link.ask(RenewFence(boottime_ms() + 200))
    await node.lose_agent()
    await until(lambda: state_of(pid) == "")
    await node.adopt()
    await node.heard(Fenced, round=0)
    await node.heard(WorkersGone, round=0)


HIDES = "setsid env -i sleep 1000 & echo $! > {file}; exec sleep 1000"
"""A worker with a child that has left its session and its environment."""


async def hide(node: Orphanage) -> tuple[int, int]:
    """Start a worker that hides a child. Return the pids of both."""
    file = node.folder / "hidden"
    (pid,) = await node.start(0, node.spec("/bin/sh", "-c", HIDES.format(file=file)))
    await until(lambda: file.exists() and file.read_text())
    return pid, int(file.read_text())


async def handles_requests(node: Orphanage) -> None:
    """Wait until the runner has handled all requests."""
    node.link.ask(StopWorkers(-1, 0, signal.SIGTERM))
    await node.heard(WorkersGone, round=-1)


def is_alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


async def test_the_fence_holds_even_if_the_runner_hangs(node: Orphanage) -> None:
    await node.begin()
    pids = await hide(node)
    node.link.ask(RenewFence(boottime_ms() + 500))
    await handles_requests(node)
    os.kill(node.link.pid, signal.SIGSTOP)
    await until(lambda: not any(map(is_alive, pids)), 10.0)
    assert state_of(node.link.pid) == "T"
    os.kill(node.link.pid, signal.SIGCONT)
    await node.heard(Fenced, round=0)
    await node.heard(WorkersGone, round=0)


async def test_a_runner_that_hangs_is_killed_with_all_that_it_has_started(
    node: Orphanage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its agent is not its parent, so that its orphans go to init."""
    await node.begin()
    pids = await hide(node)
    await node.lose_agent()
    monkeypatch.setattr(runner_link, "PING_S", 0.1)
    await node.adopt()
    await handles_requests(node)
    os.kill(node.link.pid, signal.SIGSTOP)
    await node.heard(RunnerExited)
    assert not any(map(is_alive, pids))
    node.path.unlink()


async def test_a_socket_that_can_not_be_made_is_said_and_the_runner_ends_with_its_agent(
    node: Orphanage,
) -> None:
    node.spawn()
    node.link.ask(Serve(str(node.folder / "nowhere" / "runner.sock"), LONG_S, LONG_S))
    assert "No such file" in (await node.heard(ServeFailed)).reason
    (pid,) = await node.start(0, node.spec("sleep", "1000"))
    await node.lose_agent()
    await node.gone()
    assert state_of(pid) == ""


async def test_its_socket_is_for_its_user_alone(node: Orphanage) -> None:
    await node.begin()
    assert node.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("before", "after"), [("-500", "0"), ("0", "0"), ("300", "300")])
def test_workers_are_not_spared_by_the_oom_killer_as_their_agent_is(
    tmp_path: Path, before: str, after: str
) -> None:
    score = tmp_path / "oom_score_adj"
    score.write_text(f"{before}\n")
    drop_oom_protection(score)
    assert score.read_text().strip() == after
