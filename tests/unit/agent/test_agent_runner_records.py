"""The next agent waits for the runners of a killed one, and for nothing else."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdzv.agent.handover import runner_adoption
from rdzv.agent.handover.runner_adoption import RunnerRecords

pytestmark = pytest.mark.slow

PATIENCE_S = 100.0


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    started = subprocess.Popen(["sleep", "60"])
    yield started
    started.kill()
    started.wait()


async def test_who_was_written_down_is_waited_for(
    tmp_path: Path,
    process: "subprocess.Popen[bytes]",
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(runner_adoption, "TELL_EVERY_S", 0.01)
    RunnerRecords(tmp_path).note(process.pid)
    waiting = asyncio.create_task(RunnerRecords(tmp_path).former_gone())
    async with asyncio.timeout(PATIENCE_S):
        while caplog.text.count(f"waiting for runner pid {process.pid}") < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert not waiting.done()
        process.kill()
        # A zombie holds no memory and no GPU any more, whichever process has to reap it.
        await waiting
    assert list((tmp_path / "runners").iterdir()) == []


async def test_who_has_ended_is_not_waited_for(
    tmp_path: Path, process: "subprocess.Popen[bytes]"
) -> None:
    RunnerRecords(tmp_path).note(process.pid)
    process.kill()
    process.wait()
    async with asyncio.timeout(PATIENCE_S):
        await RunnerRecords(tmp_path).former_gone()


async def test_who_was_forgotten_is_not_waited_for(
    tmp_path: Path, process: "subprocess.Popen[bytes]"
) -> None:
    runners = RunnerRecords(tmp_path)
    runners.note(process.pid)
    runners.forget(process.pid)
    runners.forget(process.pid)
    async with asyncio.timeout(PATIENCE_S):
        await RunnerRecords(tmp_path).former_gone()


@pytest.mark.quick
async def test_a_stranger_with_the_same_number_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "runners").mkdir()
    (tmp_path / "runners" / str(os.getpid())).write_text("1 of-another-boot")
    (tmp_path / "runners" / "no number").touch()
    async with asyncio.timeout(PATIENCE_S):
        await RunnerRecords(tmp_path).former_gone()


@pytest.mark.quick
async def test_a_folder_that_can_not_be_written_costs_no_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "runners").touch()
    RunnerRecords(tmp_path).note(os.getpid())
    assert "cannot record runner pid" in caplog.text
    await RunnerRecords(tmp_path).former_gone()
