"""File watches: a file on a file server that hangs does not keep others from being watched."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rdzv.agent.system.file_watches import Watches
from rdzv.agent.system.inotify import EVENT, IN_MODIFY, IN_Q_OVERFLOW, Inotify, fired_watches
from rdzv.agent.system.side_thread import in_thread

PATIENCE_S = 100.0


@dataclass(eq=False)
class Source:
    path: Path
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    watch: int | None = None
    identity: None = None

    def wake(self) -> None:
        self.woken.set()


@pytest.mark.slow
async def test_a_file_that_hangs_keeps_no_other_from_being_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watches, answers, asked = Watches(asyncio.get_running_loop()), threading.Event(), []
    real = Inotify.add_watch

    def add(inotify: Inotify, path: Path, mask: int) -> int:
        if path == far.path:
            asked.append(path)
            answers.wait(PATIENCE_S)
        return real(inotify, path, mask)

    monkeypatch.setattr(Inotify, "add_watch", add)
    far, near = Source(tmp_path / "far"), Source(tmp_path / "near")
    for source in (far, near):
        source.path.touch()
    arming = asyncio.create_task(in_thread(watches.arm, far))
    async with asyncio.timeout(PATIENCE_S):
        while not asked:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        watches.arm(near)
        near.path.write_text("x")
        await near.woken.wait()
        # A change made while the watch was being set up is not missed.
        far.path.write_text("x")
        answers.set()
        await arming
        await far.woken.wait()
    watches.close()


def test_events_that_inotify_lost_are_noticed() -> None:
    changed, lost = EVENT.pack(3, IN_MODIFY, 0, 4) + b"log\0", EVENT.pack(-1, IN_Q_OVERFLOW, 0, 0)
    assert fired_watches(changed + changed) == [3, 3]
    assert fired_watches(changed + lost) is None


async def test_lost_events_wake_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watches, read = Watches(asyncio.get_running_loop()), Inotify.read
    monkeypatch.setattr(Inotify, "read", lambda inotify: [read(inotify), None][1])
    sources = [Source(tmp_path / name) for name in ("a", "b")]
    for source in sources:
        source.path.touch()
        watches.arm(source)
    sources[0].path.write_text("x")
    async with asyncio.timeout(PATIENCE_S):
        for source in sources:
            await source.woken.wait()
    watches.close()
