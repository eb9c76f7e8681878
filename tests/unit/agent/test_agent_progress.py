"""A worker's progress file is read tolerantly, and reported once a second."""

from __future__ import annotations

import asyncio
import contextlib
import doctest
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import pytest

from rdzv.agent.observers import progress_files
from rdzv.agent.observers.progress_files import WINDOW_MS, ProgressFiles, WorkerPace, read_step
from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.model import Assignment
from rdzv.messages import Progress
from rdzv.runtime.clock import monotonic_ms
from rdzv.structs import replace

pytestmark = pytest.mark.slow

DEADLINE_S = 100.0
ROOT = Path(__file__).parents[3]


def line(round_: int = 3, nodes: int = 2) -> Assignment:
    return Assignment("job-7", "feed", round_, 1, nodes, 4, 8, 4, 8, "h", 1, True, 0, 3)


# ---------------------------------------------------------------------- what a file says


@pytest.mark.quick
@pytest.mark.parametrize(
    ("content", "step"),
    [
        (b"0", 0),
        (b"1204", 1204),
        (b"1204\n", 1204),
        (b"%20d\n" % 1204, 1204),
        (b"00000000000000001204", 1204),
        (b"\t 7 \r\n", 7),
        (b"%d" % (2**64 - 1), 2**64 - 1),
        (b"", None),
        (b" \n", None),
    ],
)
def test_a_step_is_a_decimal_number(content: bytes, step: int | None) -> None:
    assert read_step(content) == step


@pytest.mark.quick
@pytest.mark.parametrize(
    "content",
    [
        *(b"-1", b"1.5", b"1e3", b"0x10", b"+1", b"1_000", b"12 13", b"step 7", b"\0", b"nan"),
        *(b"%d" % 2**64, b"1" * 65, b"1" + b" " * 64, "²".encode(), "٣".encode(), b"\xff\xfe"),
    ],
)
def test_anything_else_is_no_step(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"is not a step; write a decimal number"):
        read_step(content)


def test_the_examples_hold() -> None:
    assert doctest.testmod(progress_files).failed == 0


# ---------------------------------------------------------------------- rates


def pace(*seen: tuple[int, int]) -> WorkerPace:
    found = WorkerPace()
    for at_ms, step in seen:
        found = found.after(step, at_ms)
    return found


@pytest.mark.quick
@pytest.mark.parametrize(
    ("seen", "rate"),
    [
        ([], 0.0),
        ([(0, 5)], 0.0),
        ([(0, 5), (2_000, 25)], 10.0),
        ([(0, 0), (1_000, 10), (2_000, 40)], 20.0),
        # Steps older than the window do not count ...
        ([(0, 0), (10_000, 1_000), (70_000, 1_060)], 1.0),
        # ... unless the last step took longer than the window.
        ([(0, 0), (1_000, 100), (501_000, 105)], 0.01),
        # A step that goes back starts a new window.
        ([(0, 0), (1_000, 100), (2_000, 40)], 0.0),
        ([(0, 0), (1_000, 100), (2_000, 40), (4_000, 50)], 5.0),
        # A clock that stands still causes no division by zero.
        ([(7, 0), (7, 3)], 3_000.0),
    ],
)
def test_a_rate_is_that_of_the_window(seen: Iterable[tuple[int, int]], rate: float) -> None:
    assert pace(*seen).rate == rate


def test_no_more_is_kept_than_the_window_has() -> None:
    found = pace(*((number * 1_000, number) for number in range(1_000)))
    assert len(found.seen) == WINDOW_MS // 1_000 + 1
    assert (found.step, found.at_ms, found.rate) == (999, 999_000, 1.0)


# ---------------------------------------------------------------------- the files


class Desk:
    """Two workers' files, and the reports made of them."""

    def __init__(self, now_ms: Callable[[], int] = monotonic_ms) -> None:
        self.said: list[Progress] = []
        self.new = asyncio.Event()
        self.files = ProgressFiles(self.hear, now_ms=now_ms)

    def hear(self, report: Progress) -> None:
        self.said.append(report)
        self.new.set()

    def path(self, local_rank: int) -> Path:
        return Path(self.files.file(local_rank))

    async def expect(self, **steps: int) -> Progress:
        """Wait until these are the steps, by RANK."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for report in reversed(self.said):
                    if {f"r{one.rank}": one.step for one in report.ranks} == steps:
                        return report
                self.new.clear()
                await self.new.wait()


@pytest.fixture(name="desk")
async def _desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(progress_files, "INTERVAL_MS", 1)
    made = Desk()
    yield made
    made.files.close()
    assert not os.listdir(tmp_path)  # noqa: PTH208


def report_step(step: int) -> None:
    """Write a step in the documented way, which users paste into training scripts."""
    text = (ROOT / "docs" / "progress.md").read_text()
    source = text.split("```python\n")[1].split("```")[0]
    scope = {"os": os, "contextlib": contextlib}
    exec(source, scope)
    scope["report_step"](step)  # type: ignore[operator]


async def test_the_function_to_paste_is_understood(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_step(1)
    desk.files.open_round(line(), 2)
    monkeypatch.setenv("RDZV_PROGRESS_FILE", desk.files.file(1))
    for step in (7, 1_204, 3):
        report_step(step)
        report = await desk.expect(r5=step)
        assert (report.run, report.round) == ("feed", 3)
    monkeypatch.setenv("RDZV_PROGRESS_FILE", "")
    report_step(8)
    monkeypatch.setenv("RDZV_PROGRESS_FILE", "/nowhere/at/all")
    report_step(9)


@pytest.mark.quick
async def test_the_furthest_step_is_the_highest_of_all_workers(desk: Desk) -> None:
    desk.files.open_round(line(), 2)
    assert desk.files.furthest() is None
    desk.path(0).write_text("120")
    await desk.expect(r4=120)
    desk.path(0).write_text("  3")
    await desk.expect(r4=3)
    assert desk.files.furthest() == 120
    desk.path(1).write_text("121")
    # The last line is seen, though it may not have been read before.
    assert desk.files.furthest() == 121
    desk.files.close_round()
    desk.files.open_round(line(4), 2)
    assert desk.files.furthest() is None


async def test_a_file_may_be_replaced_and_be_written_anew(desk: Desk) -> None:
    desk.files.open_round(line(), 2)
    for step in range(3):
        temporary = desk.path(0).with_name("new")
        temporary.write_text(f"{step}\n")
        with desk.path(0).open():  # Another reader has the old file open, so it outlives its name.
            temporary.replace(desk.path(0))
            await desk.expect(r4=step)
    desk.path(0).unlink()
    desk.path(0).write_text("11")
    await desk.expect(r4=11)
    desk.path(1).write_text("5")
    assert (await desk.expect(r4=11, r5=5)).ranks[1].rate is None


async def test_the_last_word_is_said_again_with_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_files, "INTERVAL_MS", 1)
    now_ms = 1_000_000
    desk = Desk(lambda: now_ms)
    with contextlib.closing(desk.files):
        desk.files.open_round(line(), 2)
        desk.files.say_again()
        assert not desk.said
        desk.path(0).write_text("5")
        await desk.expect(r4=5)
        for later_ms in (0, 1_234, 3_600_000):
            desk.said.clear()
            now_ms = 1_000_000 + later_ms
            desk.files.say_again()
            (report,) = desk.said
            assert report.ranks == (RankProgress(4, 5, later_ms, None),)


async def test_nothing_is_said_while_the_step_stays(desk: Desk) -> None:
    desk.files.open_round(line(), 2)
    desk.path(0).write_text("5")
    await desk.expect(r4=5)
    desk.said.clear()
    desk.path(0).write_text(" 5 ")
    desk.path(0).write_text("")
    desk.path(1).write_text("6")
    await desk.expect(r4=5, r5=6)
    assert len(desk.said) == 1


@pytest.mark.quick
async def test_garbage_warns_once_and_no_more(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    desk.files.open_round(line(), 2)
    desk.path(0).write_text("5")
    await desk.expect(r4=5)
    for step in (1, 2, 3):
        desk.path(0).write_text("five")
        desk.path(1).write_text(str(step))
        await desk.expect(r4=5, r5=step)
    assert caplog.text.count("the progress of RANK 4 from ") == 1
    assert "b'five' is not a step; write a decimal number" in caplog.text
    desk.path(0).write_text("6")
    await desk.expect(r4=6, r5=3)


async def test_a_folder_in_its_place_is_warned(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.files.open_round(line(), 2)
    desk.path(0).unlink()
    desk.path(0).mkdir()
    for step in (1, 2):  # A reader of the second file has read the folder before.
        desk.path(1).write_text(str(step))
        await desk.expect(r5=step)
    assert "the progress of RANK 4 from " in caplog.text


async def test_a_new_round_begins_with_nothing(desk: Desk) -> None:
    desk.files.open_round(line(3), 2)
    old = desk.path(0)
    old.write_text("5")
    await desk.expect(r4=5)
    desk.files.close_round()
    assert desk.files.file(0) == ""
    desk.said.clear()
    desk.files.say_again()
    desk.files.open_round(line(4), 2)
    assert (desk.path(0), old.read_text()) == (old, "")
    desk.files.say_again()
    assert not desk.said
    desk.path(1).write_text("1")
    assert (await desk.expect(r5=1)).round == 4


async def test_a_worker_that_is_kept_goes_on_with_the_file_that_it_has(desk: Desk) -> None:
    desk.files.open_round(line(3), 2)
    kept, new = desk.path(0), desk.path(1)
    with kept.open("r+") as held:
        held.write("5")
        held.flush()
        new.write_text("5")
        desk.files.close_round()
        desk.files.open_round(replace(line(4), kept=(0,)), 2)
        assert (desk.path(0), kept.read_text()) == (kept, "5")
        assert new.read_text() == ""
        held.seek(0)
        held.write("6")
        held.flush()
        assert (await desk.expect(r4=6)).round == 4


@pytest.mark.parametrize(("nodes", "least_ms"), [(2, 1_000), (500, 1_000), (5_000, 10_000)])
async def test_however_often_it_is_written_it_is_said_once_in_a_while(
    nodes: int, least_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(lambda: 50_000)
    delays: list[float] = []
    call_later = asyncio.get_running_loop().call_later

    def note(delay: float, *rest: object) -> asyncio.TimerHandle:
        delays.append(delay)
        return call_later(0, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", note)
    try:
        desk.files.open_round(line(nodes=nodes), 1)
        for step in (1, 2):
            desk.path(0).write_text(f"{step:3}")
            await desk.expect(r4=step)
    finally:
        desk.files.close()
    assert delays[0] == 0
    assert set(delays[1:]) == {least_ms / 1_000}


@pytest.mark.quick
async def test_without_a_place_workers_run_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    desk = Desk()
    desk.files.open_round(line(), 2)
    assert (desk.files.file(0), desk.files.file(1)) == ("", "")
    desk.files.say_again()
    desk.files.close_round()
    desk.files.close()
    assert "cannot create progress files (" in caplog.text


@pytest.mark.quick
def test_what_is_said_becomes_a_message() -> None:
    from rdzv.agent.server_link import encoding

    report = Progress("job-7", "feed", 3, (RankProgress(4, 1_204, 300, 14.25),))
    said = encoding.report(report, "job-7", 0).progress
    assert (said.rdzv_id, said.run, said.round) == ("job-7", "feed", 3)
    (one,) = said.ranks
    assert (one.rank, one.step, one.age_ms, one.rate) == (4, 1_204, 300, 14.25)
