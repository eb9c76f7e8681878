"""Each system call of the runner fails, with each error: it lives, reports, and never lies.

Also with real limits: a runner that has no descriptor left.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import resource
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from runners import FOR_EVER_MS, PATIENCE_S, RUNNER, Node, marked, state_of, until

from rdzv.agent.core.events import (
    Fenced,
    RunnerEvent,
    RunnerExited,
    RunnerRefused,
    StartFailed,
    StoreHostExited,
    WorkerExited,
    WorkersGone,
)
from rdzv.agent.runner.channel import Channel
from rdzv.agent.runner.requests import (
    NotifyWorkers,
    RenewFence,
    Serve,
    StopWorkers,
    WorkerSpec,
    ZygoteSpec,
)
from rdzv.agent.runner.spawn import NOT_STARTED
from rdzv.agent.runner.system import boottime_ms
from rdzv.agent.runner_link.found_runner import FoundRunner, NotAdoptableError
from rdzv.agent.runner_link.runner_link import RunnerLink

SCRIPTS = Path(__file__).with_name("runner_scripts")
CALLS = (SCRIPTS / "failing.txt").read_text().split()
ERRORS = (errno.EMFILE, errno.ENOMEM, errno.EINTR, errno.ESRCH)
GONE = {("socket.recv_fds", errno.ESRCH), ("socket.send_fds", errno.ESRCH)}
"""Errors of a socket whose peer is gone."""


def errors_of(call: str) -> list[int]:
    return [code for code in ERRORS if (call, code) not in GONE]


FAILING_S = 0.15
"""How long a call fails: long enough to see that something does not happen meanwhile."""


class Strained(Node):
    """A runner that lacks something, with workers that carry their own mark."""

    patience_s = 60.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.socket = folder / "runner.sock"
        self._uuid = uuid.uuid4()
        self.untrue: list[str] = []
        self._rounds = 0

    def hear(self, event: RunnerEvent) -> None:
        if isinstance(event, WorkersGone) and (left := marked(self.mark_of(event.round))):
            self.untrue.append(f"{event}, but {left} are there")
        super().hear(event)

    def mark_of(self, number: int) -> str:
        return f"RDZV_TEST_WORKER={self._uuid}.{number}."

    def worker(self, *argv: str | Path, local_rank: int = 0) -> WorkerSpec:
        spec = self.spec(*argv, local_rank=local_rank)
        return replace(spec, env={**spec.env, **dict([self.mark_of(self._rounds).split("=")])})

    def family(self) -> WorkerSpec:
        """A worker that leaves behind four processes, which ignore SIGTERM."""
        folder = self.folder / f"family{self._rounds}"
        folder.mkdir()
        return self.worker(sys.executable, "-S", SCRIPTS / "tree.py", folder, "stay")

    async def start_family(self) -> int:
        self._rounds += 1
        await self.start(self._rounds, self.family())
        await until((self.folder / f"family{self._rounds}" / "ready").exists)
        return self._rounds

    def zygote(self) -> ZygoteSpec:
        argv = (sys.executable, "-u", str(SCRIPTS / "tree.py"))
        return ZygoteSpec(argv, self.env, None, ("json",), wait_s=1.0)

    async def start_short(self) -> int:
        """Start a warm and a cold worker that exit at once, if they start at all."""
        self._rounds += 1
        folder = self.folder / f"family{self._rounds}"
        folder.mkdir()
        argv = (sys.executable, "-u", SCRIPTS / "tree.py", folder, "leave")
        self.link.ask(self.zygote())
        warm = replace(self.worker(*argv), warm=True)
        self.link.start_workers(self._rounds, [warm, self.worker("true", local_rank=1)])
        return self._rounds

    async def end_of_start(self, number: int) -> None:
        """Wait until the round has begun and its workers are over, or it could not be started."""
        async with asyncio.timeout(self.patience_s):
            while True:
                self._news.clear()
                mine = [event for event in self.events if getattr(event, "round", -1) == number]
                ended = sum(isinstance(event, WorkerExited) for event in mine)
                if ended == 2 or any(isinstance(event, StartFailed) for event in mine):
                    return
                await self._news.wait()

    def is_alive(self) -> bool:
        return state_of(self.link.pid) not in ("", "Z")

    async def connect(self) -> str:
        """Connect to the runner as one agent too many; return why it is refused."""
        try:
            found = await FoundRunner.meet(self.socket, FAILING_S)
        except NotAdoptableError as error:
            return str(error)
        assert found is not None
        found.leave()
        return ""


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Strained]:
    node = Strained(tmp_path)
    yield node
    await node.link.close(10)
    assert node.untrue == []
    assert marked(node.mark) == []


class Switch:
    """Makes a call of the runner fail."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(64))
        self.path = path
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 64)

    @contextmanager
    def failing(self, call: str, code: int) -> Iterator[None]:
        text = f"{call}:{code}".encode()
        self._memory[:] = text.ljust(64, b"\0")
        try:
            yield
        finally:
            self._memory[:] = bytes(64)


def start_failing_runner(node: Strained, switch: Switch) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        script = SCRIPTS / "failing.py"
        fd = str(theirs.fileno())
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", script, RUNNER.parent, fd, switch.path],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    node.link = RunnerLink(process, Channel(ours), node.hear)


@pytest.mark.parametrize(
    ("call", "codes"),
    [
        *((call, [errors_of(call)[number % 3]]) for number, call in enumerate(CALLS)),
        *(pytest.param(call, errors_of(call), marks=pytest.mark.campaign) for call in CALLS),
    ],
)
async def test_whatever_call_fails_the_runner_lives_and_says_no_untruth(
    node: Strained, call: str, codes: list[int]
) -> None:
    switch = Switch(node.folder / "switch")
    start_failing_runner(node, switch)
    node.link.ask(Serve(str(node.socket), 600.0, 600.0))
    await until(node.socket.exists)
    for code in codes:
        running = await node.start_family()
        with switch.failing(call, code):
            node.link.ask(RenewFence(boottime_ms() + FOR_EVER_MS))
            node.start_store_host(running, "/bin/cat")
            node.link.ask(NotifyWorkers(running, signal.SIGTERM))
            await node.connect()
            node.link.ask(StopWorkers(running, 0, signal.SIGTERM))
            await asyncio.sleep(FAILING_S)
        assert node.is_alive(), errno.errorcode[code]
        await node.heard(WorkersGone, round=running)
        with switch.failing(call, code):
            short = await node.start_short()
            await asyncio.sleep(FAILING_S)
        await node.end_of_start(short)
        node.link.ask(StopWorkers(short, 0, signal.SIGTERM))
        await node.heard(WorkersGone, round=short)
        assert node.is_alive(), errno.errorcode[code]
        assert node.untrue == []
    node.patience_s = PATIENCE_S
    await until_refused(node)
    last = await node.start_short()
    await node.heard(WorkerExited, round=last, local_rank=0, exit_code=0)
    await node.heard(WorkerExited, round=last, local_rank=1, exit_code=0)
    await node.stop(last)


async def until_refused(node: Strained) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while "has an agent" not in await node.connect():
            pass


@contextmanager
def without_descriptors(pid: int) -> Iterator[None]:
    """Prevent a process from opening anything more, for a while."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # It may have been told to end.
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


async def test_at_the_limit_of_descriptors_a_round_ends_and_none_begins_beside_it(
    node: Strained,
) -> None:
    node.link = await RunnerLink.spawn(node.hear)
    running = await node.start_family()
    with without_descriptors(node.link.pid):
        node.link.ask(StopWorkers(running, 0, signal.SIGTERM))
        await node.heard(WorkersGone, round=running)
        assert marked(node.mark_of(running)) == []
        short = await node.start_short()
        failed = await node.heard(StartFailed, round=short)
        assert "cannot be forked: Too many open files" in failed.reason
        await node.heard(WorkersGone, round=short)
    assert await node.start_family() == short + 1


async def test_at_the_limit_of_descriptors_a_store_host_fails_to_start(node: Strained) -> None:
    """Its socket is lost on the way; the request is as good as any, however long it is."""
    node.env |= {f"LONG_{index}": "x" * 100_000 for index in range(8)}
    node.link = await RunnerLink.spawn(node.hear)
    await node.start_family()
    with without_descriptors(node.link.pid):
        node.start_store_host(1)
        exited = await node.heard(StoreHostExited, round=1)
        assert exited.exit_code == NOT_STARTED
    assert not any(isinstance(event, RunnerRefused) for event in node.events)
    node.start_store_host(2, "/bin/false")
    assert (await node.heard(StoreHostExited, round=2)).exit_code == 1


async def test_a_round_goes_on_at_the_limit_of_descriptors(node: Strained) -> None:
    """Exits are noticed without a pidfd, and the fence needs none either."""
    node.link = await RunnerLink.spawn(node.hear)
    number = await node.start_family()
    with without_descriptors(node.link.pid):
        node.link.ask(RenewFence(boottime_ms() + 100))
        await node.heard(Fenced, round=number)
        await node.heard(WorkersGone, round=number)


async def test_a_runner_at_the_limit_of_descriptors_ends_in_order(node: Strained) -> None:
    node.link = await RunnerLink.spawn(node.hear)
    number = await node.start_family()
    with without_descriptors(node.link.pid):
        node.link.kill()
        assert (await node.heard(RunnerExited)).exit_code == 0
    assert marked(node.mark_of(number)) == []
