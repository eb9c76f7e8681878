"""Notices of a preemption, from a file that appears and from a command that prints one.

The commands are real. Nothing here asserts how long something takes: a story waits for the expected
event, and an event that must not come is followed by one that does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rdzv.agent.inventory import preemption as module
from rdzv.agent.inventory.preemption import Preemption, reporting_preemptions
from tests.support.agent_jobs import PATIENCE_S, is_alive, until

pytestmark = pytest.mark.slow


class Notices:
    """The notices that the node has received."""

    def __init__(self) -> None:
        self._given: asyncio.Queue[tuple[int, str]] = asyncio.Queue()

    def give(self, left_ms: int, why: str) -> None:
        self._given.put_nowait((left_ms, why))

    async def next(self) -> tuple[int, str]:
        async with asyncio.timeout(PATIENCE_S):
            return await self._given.get()

    @property
    def none(self) -> bool:
        return self._given.empty()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.01)


@asynccontextmanager
async def watched(
    file: Path | None = None, command: tuple[str, ...] = ()
) -> AsyncIterator[Notices]:
    notices = Notices()
    async with reporting_preemptions(Preemption(file, command, deadline_ms=7_000), notices.give):
        yield notices


def sh(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


# ------------------------------------------------------------------ a file


async def test_a_file_that_appears_says_how_much_time_is_left(tmp_path: Path) -> None:
    file = tmp_path / "preempted"
    async with watched(file) as notices:
        new = tmp_path / "new"
        new.write_text("120\nby the cloud\n")
        assert notices.none
        new.rename(file)
        assert await notices.next() == (120_000, f"preempted ({file})")
        # And less, as it comes nearer.
        file.write_text("5")
        assert (await notices.next())[0] == 5_000


@pytest.mark.quick
@pytest.mark.parametrize("text", ["", "terminate at noon"])
async def test_a_file_that_says_no_seconds_leaves_the_usual_time(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "preempted"
    file.write_text(f"{text}\n" if text else "")
    with caplog.at_level(logging.WARNING, "rdzv.agent"):
        async with watched(file) as notices:
            assert (await notices.next())[0] == 7_000
    warned = f"'{text}' is not a number of seconds; using the default time" in caplog.text
    assert warned is bool(text)


async def test_a_file_that_is_half_written_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "preempted"
    texts = [None, "", "30 s"]

    async def look(*_: object) -> str | None:
        return texts.pop(0) if len(texts) > 1 else texts[0]

    monkeypatch.setattr(module, "in_thread", look)
    async with watched(file) as notices:
        assert (await notices.next())[0] == 30_000


@pytest.mark.quick
async def test_a_file_whose_folder_comes_later(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    async with watched(folder / "preempted") as notices:
        folder.mkdir()
        (folder / "preempted").write_text("3")
        assert (await notices.next())[0] == 3_000


# ------------------------------------------------------------------ a command


async def test_a_command_gives_notice_by_exiting_with_0(tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = f"while ! test -e {go}; do sleep 0.01; done; echo 90; echo and more"
    async with watched(command=sh(script)) as notices:
        assert notices.none
        go.touch()
        assert await notices.next() == (90_000, "preemption reported by sh")


async def test_a_command_that_fails_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "BACKOFF_FIRST_S", 0.001)
    tries = tmp_path / "tries"
    script = f"echo x >> {tries}; test $(wc -l < {tries}) -ge 4 || exit 7"
    with caplog.at_level(logging.WARNING, "rdzv.agent"):
        async with watched(command=sh(script)) as notices:
            assert (await notices.next())[0] == 7_000
    assert tries.read_text() == "x\n" * 4
    # The same notice is reported once.
    assert caplog.text.count("`preemption.command` (sh) exited with 7; restarting it") == 1


async def test_a_command_that_can_not_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "BACKOFF_FIRST_S", 0.001)
    monkeypatch.setattr(module, "BACKOFF_MAX_S", 0.01)
    program = tmp_path / "watch"
    with caplog.at_level(logging.WARNING, "rdzv.agent"):
        async with watched(command=(str(program),)) as notices:
            await until(lambda: "cannot be started" in caplog.text)
            new = tmp_path / "new"
            new.write_text("#!/bin/sh\necho 11\n")
            new.chmod(0o755)
            new.rename(program)
            assert (await notices.next())[0] == 11_000
    assert "cannot be started: No such file or directory" in caplog.text


async def test_what_a_command_leaves_behind_does_not_hold_up_the_notice(tmp_path: Path) -> None:
    async with watched(command=sh("sleep 600 & echo 5")) as notices:
        assert (await notices.next())[0] == 5_000


async def test_at_the_end_the_command_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 600 & echo $! > {pids}.new; mv {pids}.new {pids}; wait"
    async with watched(command=sh(script)) as notices:
        await until(pids.exists)
    assert notices.none
    pid = int(pids.read_text())
    await until(lambda: not is_alive(pid))


@pytest.mark.quick
async def test_without_either_nothing_is_watched() -> None:
    async with watched() as notices:
        await asyncio.sleep(0)
    assert notices.none
