"""Processes that a dead runner has left behind are found by the mark of its workers."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from rdzv.agent.handover import leaked_processes
from rdzv.agent.handover.leaked_processes import kill_leaked, mark_of
from rdzv.agent.runner.processes import RLIMIT_LOCKS, new_mark


@contextmanager
def started(mark: int | None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in its own session, with this mark and a child that inherits it."""
    command = ["/bin/sh", "-c", "read x; sleep 1000 & echo; exec sleep 1000"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, env={}, start_new_session=True, bufsize=0, **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    if mark is not None:
        resource.prlimit(process.pid, RLIMIT_LOCKS, (mark, resource.RLIM_INFINITY))
    process.stdin.write(b"\n")
    try:
        process.stdout.readline()
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
def test_only_those_of_this_runner_are_killed(caplog: pytest.LogCaptureFixture) -> None:
    mine, other = mark_of(Path("/run/a1.sock")), mark_of(Path("/run/a12.sock"))
    with ExitStack() as stack:
        first, second = (stack.enter_context(started(new_mark(mine))) for _ in range(2))
        others = [
            stack.enter_context(started(mark)) for mark in (new_mark(other), 0, 1 << 20, None)
        ]
        # Each, and what it has started.
        assert kill_leaked(mine) == 4
        assert (first.wait(), second.wait()) == (-9, -9)
        assert [process.poll() for process in others] == [None] * 4
        assert kill_leaked(mine) == 0
    assert caplog.text.count("killed 4 processes left by a dead runner") == 1


def test_whoever_asks_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is itself a job's worker does not count itself as leaked."""
    with started(new_mark("b2")) as process:
        monkeypatch.setattr(os, "getpid", lambda: process.pid)
        assert kill_leaked("b2") == 1
        assert process.poll() is None


@pytest.mark.slow
def test_one_that_survives_is_waited_for_no_longer_than_it_may_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leaked_processes.signal, "pidfd_send_signal", lambda *_: None)
    with started(new_mark("c3")) as process:
        assert kill_leaked("c3", timeout_s=0.1) == 2
        assert (
            f"2 processes left by a dead runner survived SIGKILL: pid {process.pid}," in caplog.text
        )
        assert "killed" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("call", ["pidfd_open", "listdir"])
def test_what_can_not_be_looked_at_counts_as_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """At its limit of descriptors, an agent does not assume that workers it cannot see are gone."""

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with started(new_mark("d4")) as process:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(OSError, match="Too many open files"):
                kill_leaked("d4", timeout_s=0.05)
        assert caplog.text == ""
        assert kill_leaked("d4") == 2
        assert process.wait() == -9
