"""The process that writes snapshots to disk: what is told when it ends or fails to start."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.agent.runner.snapshot_writers import SnapshotWriters

REQUEST = {"lineage": 0, "step": 40, "series": "a", "argv": ["write"], "env": {}}


class Runner:
    """The parts of a runner that writers use; no process can be started."""

    hears_of_snapshots = True

    def __init__(self) -> None:
        self.fds = [os.memfd_create("slot")]
        self.pinned: list[Any] = []
        self.told: list[dict[str, Any]] = []

    def copies_of(self, _mark: object) -> list[int]:
        return self.fds

    def pin(self, mark: Any) -> None:
        self.pinned.append(mark)

    def start(self, *_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def tell(self, name: str, **what: Any) -> None:
        self.told.append({"type": name, **what})


def test_a_writer_that_cannot_start_is_told_with_its_reason() -> None:
    """And pins nothing: workers would skip saves for a process that is not there."""
    runner = Runner()
    writers = SnapshotWriters(runner, runner, runner)  # type: ignore[arg-type]
    writers.write(REQUEST)
    (told,) = runner.told
    assert (told["type"], told["step"]) == ("snapshots_written", 40)
    assert told["reason"] == "Resource temporarily unavailable"
    assert runner.pinned == []
    assert not os.path.exists(f"/proc/self/fd/{runner.fds[0]}")  # noqa: PTH110


@pytest.mark.parametrize(
    ("code", "failure", "reason"),
    [
        (0, "", ""),
        (1, "", "its writer ended with exit code 1; its stderr says why"),
        (-1, "", "its writer ended with signal 1"),
        (-9, "", "its writer ended with signal 9"),
        (127, "no such account", "no such account"),
    ],
)
def test_the_end_of_a_writer_is_told_with_its_reason(code: int, failure: str, reason: str) -> None:
    ends: list[Callable[[Any, int], None]] = []

    class Starting(Runner):
        def start(self, _what: str, _program: Any, end: Any, **_: Any) -> None:  # type: ignore[override]
            ends.append(end)

    runner = Starting()
    writers = SnapshotWriters(runner, runner, runner)  # type: ignore[arg-type]
    writers.write(REQUEST)
    assert (runner.told, len(runner.pinned)) == ([], 1)
    (end,) = ends
    end(SimpleNamespace(failure=failure), code)
    assert [said["reason"] for said in runner.told] == [reason]
    assert runner.pinned[-1] is None
