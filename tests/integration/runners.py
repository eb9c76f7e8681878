"""A runner with real processes, and helpers to inspect them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self, TypeVar

from waiting import pause_s

from rdzv.agent import job_programs, runner
from rdzv.agent.core.events import RunnerEvent, WorkersGone, WorkerStarted
from rdzv.agent.runner.requests import StopWorkers, WorkerSpec
from rdzv.agent.runner_link.runner_link import RunnerLink

RUNNER = Path(runner.__file__).with_name("__main__.py")
"""The program."""
STORE_HOST = Path(job_programs.__file__).with_name("store_host.py")

PATIENCE_S = 90.0
FOR_EVER_MS = 3_600_000

E = TypeVar("E", bound=RunnerEvent)


async def until(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait for a state outside this process, which sends no event."""
    loop = asyncio.get_running_loop()
    since_s = loop.time()
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(pause_s(loop.time() - since_s))


def marked(mark: str) -> list[int]:
    """List the processes that carry a mark; zombies have lost theirs."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                environ = (process / "environ").read_bytes()
            except OSError:
                continue
            if mark.encode() in environ:
                found.append(int(process.name))
    return found


def state_of(pid: int) -> str:
    """Return the state letter of a process, "" if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


class Node:
    """A runner and its events."""

    link: RunnerLink
    patience_s = PATIENCE_S

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"RDZV_TEST_MARK={uuid.uuid4()}"
        self.env = {"PATH": os.environ["PATH"], **dict([self.mark.split("=")])}
        self.events: list[RunnerEvent] = []
        self._news = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Start the runner; at the end it is gone, with everything that it has started."""
        self.link = await RunnerLink.spawn(self.hear)
        yield self
        await self.link.close(PATIENCE_S)
        assert marked(self.mark) == []
        assert state_of(self.link.pid) == ""

    def hear(self, event: RunnerEvent) -> None:
        self.events.append(event)
        self._news.set()

    async def heard(self, kind: type[E], **fields: object) -> E:
        """Wait for the first event of a kind with these fields."""
        async with asyncio.timeout(self.patience_s):
            while True:
                self._news.clear()
                for event in self.events:
                    if isinstance(event, kind) and all(
                        getattr(event, name) == value for name, value in fields.items()
                    ):
                        return event
                await self._news.wait()

    def spec(self, *argv: str | Path, local_rank: int = 0) -> WorkerSpec:
        return WorkerSpec(local_rank, tuple(map(str, argv)), self.env, None, None, None)

    def python(self, code: str, local_rank: int = 0) -> WorkerSpec:
        return self.spec(sys.executable, "-S", "-c", code, local_rank=local_rank)

    async def start(self, number: int, *workers: WorkerSpec) -> list[int]:
        """Start workers; return their pids."""
        self.link.start_workers(number, workers)
        return [
            (await self.heard(WorkerStarted, round=number, local_rank=worker.local_rank)).pid
            for worker in workers
        ]

    async def stop(self, number: int, grace_ms: int = FOR_EVER_MS) -> None:
        self.link.ask(StopWorkers(number, grace_ms, signal.SIGTERM))
        await self.heard(WorkersGone, round=number)

    def start_store_host(self, number: int, python: str = sys.executable) -> int:
        """Start a store host; return its port."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.link.start_store_host(number, listening, python, self.env)
            port: int = listening.getsockname()[1]
            return port
