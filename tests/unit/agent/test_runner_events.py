"""A runner that was killed counts as gone only once nothing that it has left can live."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.agent import runner_link
from rdzv.agent.core.events import RunnerExited, RunnerLost, WorkerResumed
from rdzv.agent.job import from_runner
from rdzv.agent.job.from_runner import RunnerEvents

QUIET = SimpleNamespace(runner_said=lambda _: None)


@pytest.mark.parametrize("is_unwatched", [True, False])
def test_workers_without_a_watchdog_are_watched_for_hangs(is_unwatched: bool) -> None:
    happened: list[object] = []
    job: Any = SimpleNamespace(
        post=happened.append,
        decisions=SimpleNamespace(guard=lambda handle, event: handle(event)),
        observers=SimpleNamespace(watch_for_hangs=lambda: happened.append("watched")),
        counts=QUIET,
        starts=QUIET,
    )
    resumed = WorkerResumed(4, 1, is_unwatched)
    assert RunnerEvents(job, None).hear(resumed) is None
    assert happened == ["watched"] * is_unwatched + [resumed]


@pytest.mark.parametrize(
    ("exit_code", "how"),
    [
        (-9, "was killed by SIGKILL"),
        (3, "ended unexpectedly with exit code 3"),
        # An adopted runner is another process's child.
        (None, "ended unexpectedly"),
    ],
)
async def test_the_end_of_a_runner_is_told_once_its_processes_are_killed(
    exit_code: int | None,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    happened: list[object] = []

    async def sweep_orphans() -> None:
        happened.append("swept")
        if len(happened) == 1:
            raise OSError(errno.EMFILE, "Too many open files")

    def start(work: Coroutine[Any, Any, None], _name: str) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    monkeypatch.setattr(runner_link, "sweep_orphans", sweep_orphans)
    monkeypatch.setattr(from_runner, "SWEEP_AGAIN_S", 0.0)
    job: Any = SimpleNamespace(
        rdzv_id="job-7",
        tasks=SimpleNamespace(start=start),
        post=happened.append,
        ended=asyncio.get_running_loop().create_future(),
        disk=SimpleNamespace(note_runner_gone=lambda: None),
        counts=QUIET,
    )
    ended = RunnerEvents(job, None).hear(RunnerExited(exit_code))
    assert ended is not None
    await ended
    lost = RunnerLost(f"its runner {how}, and its workers with it")
    assert happened == ["swept", "swept", lost]
    assert "cannot search for processes left behind by the job's dead runner" in caplog.text
