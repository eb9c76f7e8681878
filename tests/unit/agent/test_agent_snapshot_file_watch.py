"""A round has moved the job on if the snapshot file differs from the end of the round before."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rdzv.agent.observers import snapshot_file_watch
from rdzv.agent.observers.snapshot_file_watch import Sight, SnapshotFileWatch, look

DEADLINE_S = 100.0
SEEN = (1, 0, 0)


def rewrite(path: Path) -> None:
    """Write the same data again, like a training that makes no progress; only its time differs."""
    path.write_bytes(path.read_bytes())
    there = path.stat()
    os.utime(path, ns=(there.st_atime_ns, there.st_mtime_ns + 1_000))


def replace_by_another(path: Path) -> None:
    """Save properly: to another file, then renamed, here with exactly the same time."""
    there, other = path.stat(), path.with_name("other")
    other.write_bytes(path.read_bytes() + b"more")
    os.utime(other, ns=(there.st_atime_ns, there.st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize("change", [rewrite, replace_by_another, Path.unlink])
def test_another_file_looks_otherwise(change: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    path.write_bytes(b"state")
    before = look(path)
    assert before == look(path)
    change(path)
    assert look(path) != before


def add_step(folder: Path) -> None:
    (folder / "step_20").mkdir()


def change_deep(folder: Path) -> None:
    rewrite(folder / "step_10" / "rank_0.pt")


def point_elsewhere(folder: Path) -> None:
    (folder / "latest").unlink()
    (folder / "latest").symlink_to("step_10/rank_0.pt")


@pytest.mark.parametrize("change", [add_step, change_deep, point_elsewhere])
def test_so_does_a_folder_with_contents(change: Callable[[Path], object], tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    (folder / "step_10").mkdir(parents=True)
    (folder / "step_10" / "rank_0.pt").write_bytes(b"state")
    (folder / "latest").symlink_to("step_10")
    before = look(folder)
    assert before[1:] == (4, len(b"state") + len("step_10"))
    assert before == look(folder)
    change(folder)
    assert look(folder) != before


def test_a_link_to_the_latest_one_is_followed(tmp_path: Path) -> None:
    for name in ("one", "another"):
        (tmp_path / name).write_text(name)
    link = tmp_path / "latest"
    link.symlink_to("one")
    before = look(link)
    link.unlink()
    link.symlink_to("another")
    assert before[2] == len("one")
    assert look(link)[2] == len("another")


def test_what_is_not_there_is_nothing(tmp_path: Path) -> None:
    assert look(tmp_path / "none") == (0, 0, 0)


def test_no_folder_is_too_large_to_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_file_watch, "MAX_ENTRIES", 5)
    for number in range(20):
        (tmp_path / str(number)).touch()
    assert look(tmp_path)[1] == 5


# ------------------------------------------------------------------ round by round


async def began(seen: SnapshotFileWatch) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await seen.begin_round()


async def ended(seen: SnapshotFileWatch) -> bool:
    async with asyncio.timeout(DEADLINE_S):
        return await seen.has_changed()


@pytest.mark.slow
async def test_each_round_is_compared_with_the_end_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    path.write_text("of an earlier run")
    seen = SnapshotFileWatch(path)
    found = []
    for text in (None, "1", None, "22", None):
        await began(seen)
        if text is not None:
            path.write_text(text)
        found.append(await ended(seen))
    assert found == [False, True, False, True, False]


async def test_the_first_snapshot_of_all_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    seen = SnapshotFileWatch(path)
    await began(seen)
    assert not await ended(seen)
    await began(seen)
    path.touch()
    assert await ended(seen)


def test_without_a_path_nothing_is_looked_at_and_nothing_waits() -> None:
    """Not even an event loop is needed."""
    seen = SnapshotFileWatch(None)
    for asked, found in ((seen.begin_round(), None), (seen.has_changed(), False)):
        with pytest.raises(StopIteration) as ended:
            asked.send(None)
        assert ended.value.value is found


async def test_what_can_not_be_seen_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    sights: list[Sight | OSError] = [
        *(SEEN, PermissionError(13, "Permission denied"), SEEN, SEEN),
        *(OSError(5, "Input/output error"), SEEN),
    ]

    def fake(path: Path) -> Sight:
        seen = sights.pop(0)
        if isinstance(seen, OSError):
            raise seen
        return seen

    seen = SnapshotFileWatch(Path("/data"), fake)
    await began(seen)
    assert [await ended(seen) for _ in range(5)] == [True, True, False, True, True]
    assert [record.getMessage() for record in caplog.records] == [
        "cannot examine --snapshot=/data (Permission denied); counting that as progress"
    ]


async def test_an_agent_that_did_not_see_the_begin_says_nothing_of_changes() -> None:
    seen = SnapshotFileWatch(Path("/data"), lambda path: SEEN)
    assert await ended(seen)
    assert not await ended(seen)


@pytest.mark.slow
async def test_a_file_server_that_does_not_answer_holds_up_nobody_for_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshot_file_watch, "TIMEOUT_S", 0.05)
    answers = threading.Event()

    def hang(path: Path) -> Sight:
        answers.wait(DEADLINE_S)
        return SEEN

    seen = SnapshotFileWatch(Path("/data"), hang)
    await began(seen)
    assert await ended(seen)
    assert "no answer within" in caplog.text
    # While the first examination hangs, there is no other.
    assert sum(thread.name == "aside" for thread in threading.enumerate()) == 1
    answers.set()
    while any(thread.name == "aside" for thread in threading.enumerate()):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    # A late answer belongs to no round.
    assert await ended(seen)
    assert not await ended(seen)
