"""The process that writes snapshots to disk: what is told when it ends or fails to start."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.agent.runner.loop import Loop
from rdzv.agent.runner.requests import StateMark, WriteSnapshots
from rdzv.agent.runner.snapshot_writers import SnapshotWriters

MARK = StateMark(0, 40, "a", 1)
REQUEST = WriteSnapshots(MARK, ("write",), {})


class Runner:
    """The parts of a runner that writers use; no process can be started."""

    hears_of_snapshots = True

    def __init__(self) -> None:
        self.fds = [os.memfd_create("slot")]
        self.has_memory = self.has_zygote = False
        self.wanted: list[Any] = []
        self.pinned: list[Any] = []
        self.told: list[dict[str, Any]] = []

    def writers(self, loop: Loop | None = None) -> SnapshotWriters:
        parts = dict.fromkeys(("children", "agent", "slots", "forks"), self)
        return SnapshotWriters(SimpleNamespace(loop=loop or Loop(), **parts))  # type: ignore[arg-type]

    def copies_of(self, _mark: object) -> list[int]:
        return self.fds

    def has_imported(self, *_: object) -> bool:
        return self.has_zygote

    def want(self, starts: Any) -> None:
        self.wanted += starts

    def has_memory_for_copies(self, fds: Any) -> bool:
        assert list(fds) == self.fds
        return self.has_memory

    def pin(self, mark: Any) -> None:
        self.pinned.append(mark)

    def start(self, *_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def tell(self, name: str, **what: Any) -> None:
        self.told.append({"type": name, **what})


@pytest.mark.parametrize("has_memory", [False, True])
def test_a_writer_that_cannot_start_is_told_with_its_reason(has_memory: bool) -> None:
    """And pins nothing: workers would skip saves for a process that is not there."""
    runner = Runner()
    runner.has_memory = has_memory
    writers = runner.writers()
    writers.write(REQUEST)
    (told,) = runner.told
    assert (told["type"], told["mark"]["step"]) == ("snapshots_written", 40)
    assert told["reason"] == "Resource temporarily unavailable"
    assert not any(runner.pinned)
    assert not os.path.exists(f"/proc/self/fd/{runner.fds[0]}")  # noqa: PTH110


class Starting(Runner):
    """A runner whose writers get descriptors, as a forked process does."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[Any, list[int], Callable[[Any, int], None]]] = []

    def start(self, _what: str, program: Any, end: Any, **_: Any) -> None:  # type: ignore[override]
        self.started.append((program, [os.dup(fd) for fd in program.pass_fds], end))


def test_a_step_may_be_overwritten_once_the_writer_has_copied_it() -> None:
    runner, loop = Starting(), Loop()
    writers = runner.writers(loop)

    def write(*, has_memory: bool) -> tuple[list[int], Callable[[Any, int], None]]:
        runner.fds, runner.has_memory = [os.memfd_create("slot")], has_memory
        runner.told.clear()
        writers.write(REQUEST)
        program, fds, end = runner.started[-1]
        assert ("RDZV_SNAPSHOT_COPIED" in program.env) == has_memory
        turn()
        assert runner.pinned[-1] == MARK
        return fds, end

    def turn() -> None:
        for call in loop.wait(0):
            call()

    for said in (b"", b"whatever"):  # It is a process of the job.
        (slot, link), end = write(has_memory=True)
        assert stat.S_ISSOCK(os.fstat(link).st_mode), "a job holds the lock of a pipe as it likes"
        os.write(link, said)
        os.close(link)
        turn()
        assert runner.pinned[-1] is None and not runner.told
        turn()
        end(SimpleNamespace(failure=""), 0)
        assert [one["mark"]["step"] for one in runner.told] == [40]
        os.close(slot)
        # Without memory for a copy, it stays pinned until the end.
        (slot,), end = write(has_memory=False)
        os.close(slot)
        turn()
        assert runner.pinned[-1] == MARK
        end(SimpleNamespace(failure=""), 0)
        assert runner.pinned[-1] is None
    loop.close()


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
    runner = Starting()
    writers = runner.writers()
    writers.write(REQUEST)
    assert (runner.told, len(runner.pinned)) == ([], 1)
    (_, fds, end) = runner.started[0]
    os.close(fds[0])
    end(SimpleNamespace(failure=failure), code)
    assert [said["reason"] for said in runner.told] == [reason]
    assert runner.pinned[-1] is None


class Forked:
    """A fork, which keeps what it was sent."""

    def __init__(self) -> None:
        self.order: Any = None
        self.fds: list[int] = []

    def send_program(self, _kind: str, order: Any, fds: Any) -> None:
        self.order, self.fds = order, [os.dup(fd) for fd in fds]


@pytest.mark.parametrize("refused", [False, True])
def test_a_writer_is_forked_if_the_zygote_has_torch_and_else_started_cold(refused: bool) -> None:
    runner, loop = Starting(), Loop()
    runner.has_memory = runner.has_zygote = True
    writers = runner.writers(loop)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    writers.write(REQUEST)
    assert not runner.started and runner.pinned[-1]
    (start,) = runner.wanted
    if refused:
        writers.start_cold_instead([start], "the zygote has ended")
        program, fds, end = runner.started[0]
        assert program.env["RDZV_SNAPSHOT_COPIED"] == str(program.pass_fds[-1])
        assert program.argv == ("write", "--mark", "0:40:a", str(program.pass_fds[0]))
    else:
        fork = Forked()
        start.send_order(fork, None)
        assert fork.order["copied"] == "RDZV_SNAPSHOT_COPIED" and len(fork.fds) == 2
        assert fork.order["argv"] == ("write", "--mark", "0:40:a")
        start.take_running(None)
        fds, end = fork.fds, start.take_exit
    assert runner.pinned[-1]
    for fd in fds:
        os.close(fd)
    for call in loop.wait(0):
        call()
    assert runner.pinned[-1] is None and not runner.told
    end(SimpleNamespace(failure=""), 0)
    assert [one["reason"] for one in runner.told] == [""]
    assert len(os.listdir("/proc/self/fd")) < before  # noqa: PTH208
    loop.close()
