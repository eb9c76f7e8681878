"""Processes that a dead runner has left behind are found by their environment."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rdzv.agent.handover import leaked_processes
from rdzv.agent.handover.leaked_processes import RUNNER, kill_leaked, mark_of


@contextmanager
def started(**environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in its own session, with exactly this environment."""
    process = subprocess.Popen(["/bin/sleep", "1000"], env=environ, start_new_session=True)
    shown = b"".join(f"{name}={value}\0".encode() for name, value in environ.items())
    deadline = time.monotonic() + 100
    try:
        # Popen returns during the exec, a moment before the new environment can be read.
        while Path(f"/proc/{process.pid}/environ").read_bytes() != shown:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_only_those_of_this_runner_are_killed(caplog: pytest.LogCaptureFixture) -> None:
    mine, other = mark_of(Path("/run/a1.sock")), mark_of(Path("/run/a12.sock"))
    with ExitStack() as stack:
        first, second = (stack.enter_context(started(**{RUNNER: mine})) for _ in range(2))
        others = [
            stack.enter_context(started(**environ))
            for environ in ({RUNNER: other}, {f"X{RUNNER}": mine}, {"X": f"{RUNNER}={mine}"}, {})
        ]
        assert kill_leaked(mine) == 2
        assert (first.wait(), second.wait()) == (-9, -9)
        assert [process.poll() for process in others] == [None] * 4
        assert kill_leaked(mine) == 0
    assert caplog.text.count("killed 2 processes left by a dead runner") == 1


def test_whoever_asks_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is itself a job's worker does not count itself as leaked."""
    with started(**{RUNNER: "b2"}) as process:
        monkeypatch.setattr(os, "getpid", lambda: process.pid)
        assert kill_leaked("b2") == 0
        assert process.poll() is None


@pytest.mark.slow
def test_one_that_survives_is_waited_for_no_longer_than_it_may_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leaked_processes.signal, "pidfd_send_signal", lambda *_: None)
    with started(**{RUNNER: "c3"}) as process:
        assert kill_leaked("c3", timeout_s=0.1) == 1
        assert f"1 process left by a dead runner survived SIGKILL: pid {process.pid}" in caplog.text
        assert "killed" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("call", ["pidfd_open", "listdir"])
def test_what_can_not_be_looked_at_counts_as_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """At its limit of descriptors, an agent does not assume that workers it cannot see are gone."""

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with started(**{RUNNER: "d4"}) as process:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(OSError, match="Too many open files"):
                kill_leaked("d4", timeout_s=0.05)
        assert caplog.text == ""
        assert kill_leaked("d4") == 1
        assert process.wait() == -9
