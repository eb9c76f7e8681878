"""A node's snapshots are reported at once, and then not too often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rdzv.agent.job import reports_to_server
from rdzv.agent.job.reports_to_server import SnapshotReports
from rdzv.core.model import Snapshot, SnapshotMark
from rdzv.messages import SnapshotsHeld


def say(step: int) -> SnapshotsHeld:
    return SnapshotsHeld("job-7", "run-1", (Snapshot(0, SnapshotMark(0, step, "a")),))


class Loop:
    """A loop whose timers the test runs."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, after_s: float, call: Callable[..., None], *args: object) -> object:
        entry = (after_s, lambda: call(*args))
        self.due.append(entry)
        loop = self

        class Handle:
            def cancel(self) -> None:
                loop.due.remove(entry)

        return Handle()

    def run_due(self) -> None:
        due, self.due = self.due, []
        for _, call in due:
            call()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    loop = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    return loop


def test_only_the_latest_of_several_is_sent(loop: Loop) -> None:
    sent: list[SnapshotsHeld] = []
    reports = SnapshotReports(sent.append)
    for step in (10, 20, 30):
        reports.report(say(step), nodes=2)
    assert sent == [say(10)]
    assert [after_s for after_s, _ in loop.due] == [reports_to_server.EVERY_LEAST_S]
    loop.run_due()
    assert sent == [say(10), say(30)]
    loop.run_due()
    assert loop.due == []
    reports.report(say(40), nodes=1_000)
    assert sent[-1] == say(40)
    assert [after_s for after_s, _ in loop.due] == [1_000 * reports_to_server.EVERY_PER_NODE_S]


def test_nothing_is_sent_after_the_end(loop: Loop) -> None:
    sent: list[SnapshotsHeld] = []
    reports = SnapshotReports(sent.append)
    reports.report(say(10), nodes=2)
    reports.report(say(20), nodes=2)
    reports.close()
    reports.close()
    assert (sent, loop.due) == ([say(10)], [])
