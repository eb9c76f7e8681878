"""When this node's snapshots are written to disk, and which."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from rdzv.agent.core.events import SnapshotsWritten
from rdzv.agent.job.snapshots import SnapshotsOnDisk
from rdzv.agent.launch.launch import Launch, SnapshotFiles
from rdzv.core.model import SnapshotMark
from tests.unit.agent.test_agent_machine import JOB, line

FOLDER = Path("/data/run7")


class Runner:
    def __init__(self) -> None:
        self.asked: list[tuple[SnapshotMark, list[str]]] = []

    def write_snapshots(self, mark: SnapshotMark, argv: Any, *_: Any) -> None:
        self.asked.append((mark, list(argv)))


def mark(step: int, shards: int = 1) -> SnapshotMark:
    return SnapshotMark(0, step, "a", shards, 2)


def disk(every_s: float = 10) -> SnapshotsOnDisk:
    return SnapshotsOnDisk(Launch(JOB, "train.py", snapshot_files=SnapshotFiles(FOLDER, every_s)))


def written(step: int, reason: str = "") -> SnapshotsWritten:
    return SnapshotsWritten(mark(step), reason)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every_s", "group_rank", "shards", "whole_ms", "steps"),
    [
        # The first of each period; when the first one began is not known.
        (10, 0, 1, [11_000, 19_999, 20_000, 21_000, 45_000, 49_000], [3, 5]),
        # All nodes write their parts of a sharded state, and one a state that all have alike.
        (10, 1, 2, [11_000, 20_000], [2]),
        (10, 1, 1, [11_000, 20_000], []),
        # A mark of which nobody knows since when it is whole, as that of a round.
        (10, 0, 1, [11_000, 0, 19_000], []),
        (0, 0, 1, [11_000, 20_000], []),
    ],
)
async def test_the_first_mark_of_a_period_is_written(
    every_s: float, group_rank: int, shards: int, whole_ms: list[int], steps: list[int]
) -> None:
    found, runner = disk(every_s), Runner()
    a_line = line(group_rank=group_rank)
    for number, at_ms in enumerate(whole_ms, 1):
        found.announced(runner, mark(number, shards), at_ms, a_line)  # type: ignore[arg-type]
        found.note(written(number))
    assert [one.step for one, _ in runner.asked] == steps


async def test_one_is_written_at_a_time_and_the_last_is_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    found, runner = disk(), Runner()
    found.write(runner, mark(10), "run-1")  # type: ignore[arg-type]
    found.write(runner, mark(20), "run-1")  # type: ignore[arg-type]
    last = asyncio.create_task(found.write_last(runner, mark(30), "run-1"))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert [one.step for one, _ in runner.asked] == [10]
    found.note(written(10))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [one.step for one, _ in runner.asked] == [10, 30]
    assert runner.asked[0][1][1:] == [
        *("-m", "rdzv.worker.write_snapshots", str(FOLDER), "--run", "run-1", "--keep", "2")
    ]
    found.note(written(30, "its writer ended with exit code 1"))
    await last
    assert "wrote the snapshot of step 10 to /data/run7" in caplog.text
    assert "step 30 was not written to /data/run7: its writer ended with" in caplog.text
    # What is there already is not written again, and after a failure it is tried again.
    for step in (10, 30):
        found.write(runner, mark(step), "run-1")  # type: ignore[arg-type]
    assert [one.step for one, _ in runner.asked] == [10, 30, 30]


@pytest.mark.parametrize("why", ["no option", "no mark", "its runner dies"])
async def test_nothing_is_waited_for_that_does_not_come(why: str) -> None:
    found, runner = disk(), Runner()
    if why == "no option":
        found = SnapshotsOnDisk(Launch(JOB, "train.py"))
    it = None if why == "no mark" else mark(10)
    last = asyncio.create_task(found.write_last(runner, it, "run-1"))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    if why == "its runner dies":
        found.note_runner_gone()
    async with asyncio.timeout(60):
        await last
