"""One job's driver with a fake runner and a fake link, which record what they are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.agent.agent_counts import NodeCounts
from rdzv.agent.core import commands
from rdzv.agent.core.model import JobTerms
from rdzv.agent.job import job_driver
from rdzv.agent.job.job_driver import JobDriver
from rdzv.agent.launch.launch import Launch, Output
from rdzv.agent.runner import requests
from rdzv.agent.runner.requests import WorkerSpec
from rdzv.agent.runner_link.runner_link import RunnerHello, RunnerLink
from rdzv.core.model import Assignment, Cause, RoundEnd, Settings, SnapshotMark
from rdzv.messages import RoundOver, SnapshotWatermark
from rdzv.v1 import rdzv_pb2 as pb

PATIENCE_S = 100.0
LINE = Assignment("job-7", "r1", 0, 0, 1, 0, 1, 0, 1, "127.0.0.1", 1, False, 0, 0)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def is_alive(pid: int) -> bool:
    """Return whether a process runs, rather than being a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def round_over(round_: int = 0) -> RoundOver:
    """Return what ends a round for want of another node."""
    end = RoundEnd(Cause.NODE_LOST, "n2 is lost", broken=True, keep=False)
    return RoundOver("job-7", "r1", round_, end)


class FakeRunner:
    """Records requests, and keeps what it is given for the next agent; `tell` makes an event."""

    pid = 77

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.workers: list[WorkerSpec] = []
        """The workers that it was last asked to start."""
        self.tell: Any = None
        self.deaf_to: set[str] = set()
        """The requests at which its agent dies."""
        self.keeps: dict[str, str] = {}
        self.last_round: int | None = None
        self.store_hosts: set[int] = set()
        self.served: list[tuple[float, float]] = []
        self.held_for: list[int | None] = []
        """The limits with which each agent has asked it to hold snapshots."""
        self.announced: list[tuple[SnapshotMark, SnapshotMark | None]] = []
        self.closes = 0
        self.survives = 0
        """How often its processes survive SIGKILL."""

    def link(self, on_event: Any) -> FakeRunner:
        self.tell = on_event
        return self

    @property
    def hello(self) -> RunnerHello:
        workers, hosts = {0: 100, 1: 101}, frozenset(self.store_hosts)
        return RunnerHello(self.pid, self.last_round, workers, hosts, kept=self.keeps)

    def ask(self, request: object) -> None:
        match request:
            case requests.HoldSnapshots():
                self.held_for.append(request.limit_bytes)
            case requests.Serve():
                self.served.append((request.orphan_timeout_s, request.grace_s))
            case requests.Keep():
                self.keeps[request.name] = request.value
            case requests.KeepZygote():
                self.asked.append(("zygote", request.after_import))
            case requests.BeginZygote():
                self.asked.append(("begin",))
            case requests.StopStoreHost() | commands.StopStoreHost():
                if "stop" not in self.deaf_to:
                    self.store_hosts.discard(request.round)
            case commands.StopWorkers():
                if "stop" not in self.deaf_to:
                    self.asked.append(("stop", request.round, request.signum, request.grace_ms))
            case SnapshotWatermark():
                self.announced.append((request.mark, request.given_up))
            case _:
                raise AssertionError(request)

    def start_workers(self, round_: int, workers: list[WorkerSpec], *_: Any) -> None:
        if "start" not in self.deaf_to:
            self.last_round, self.workers = round_, workers
            self.asked.append(("start", round_, len(workers)))

    def start_store_host(self, round_: int, *_: Any) -> None:
        self.store_hosts.add(round_)

    async def let_go(self, _: float) -> None:
        self.asked.append(("let go",))

    async def close(self, _: float) -> None:
        self.closes += 1
        if self.closes <= self.survives:
            raise TimeoutError


class FakeLink:
    """Records what an agent says to the server."""

    orphan_timeout_ms = 15_000
    encrypts = False
    address, host_name = "10.0.0.5", ""

    def __init__(self) -> None:
        self.said: list[pb.NodeMessage] = []
        self.jobs: list[JobDriver] = []
        self.log_reader = SimpleNamespace(serve=lambda *_: None)
        self.counts = NodeCounts()

    def add(self, job: JobDriver) -> None:
        self.jobs.append(job)

    def say(self, message: pb.NodeMessage) -> None:
        self.said.append(message)

    async def say_after_all(self, message: pb.NodeMessage) -> None:
        self.said.append(message)

    def bodies(self) -> list[str | None]:
        return [message.WhichOneof("body") for message in self.said]

    def of(self, body: str) -> list[Any]:
        """Return the messages of one kind."""
        return [getattr(one, body) for one in self.said if one.HasField(body)]  # type: ignore[arg-type]


def a_launch(folder: Path, job: JobTerms | None = None) -> Launch:
    """Return the launch of a shell without arguments, whose files are in a folder."""
    job = job or JobTerms("job-7", "n1", Settings(1, 1), local_world_size=1)
    to_files = dict.fromkeys(range(job.local_world_size), 3)
    return Launch(
        job,
        "sh",
        no_python=True,
        local_addr="127.0.0.1",
        environ={"PATH": "/usr/bin:/bin", "OWN": "1"},
        chdir=folder,
        progress_dir=folder,
        output=Output(redirects=to_files, run_dir=folder / "run"),
    )


def use_runner(monkeypatch: pytest.MonkeyPatch, runner: FakeRunner) -> None:
    """Let drivers start this runner, on a node without torch."""

    async def spawn(on_event: Any) -> FakeRunner:
        return runner.link(on_event)

    async def no_torch(*_: Any) -> bool:
        return False

    monkeypatch.setattr(RunnerLink, "spawn", spawn)
    monkeypatch.setattr(job_driver, "become_subreaper", lambda: None)
    monkeypatch.setattr(job_driver, "has_torch", no_torch)
