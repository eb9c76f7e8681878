"""status --watch on a real terminal: it fits, does not flicker, and restores the terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator

import control_samples
import pytest
from fake_control import serving
from watch_control import HISTORY, WatchControl

from rdzv.ctl import live
from rdzv.errors import UnknownJobError
from rdzv.v1 import rdzv_pb2 as pb


class Terminal:
    """rdzvctl on the test's own terminal."""

    def __init__(self, words: list[str], **env: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        base = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rdzv.ctl", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**base, "TERM": "xterm", "NO_COLOR": "1", **env},
            start_new_session=True,
        )
        os.close(theirs)
        self.output = ""

    def read_until(self, text: str) -> None:
        while text not in self.output:
            chunk = os.read(self._ours, 65_536)
            assert chunk, self.output
            self.output += chunk.decode()

    def close(self) -> int:
        """Read the rest, and return the exit code."""
        try:
            while chunk := os.read(self._ours, 65_536):
                self.output += chunk.decode()
        except OSError:
            pass  # Linux reports so that the other side has closed.
        os.close(self._ours)
        return self.process.wait(100)


@pytest.fixture
def control() -> WatchControl:
    return WatchControl()


@pytest.fixture
def server(control: WatchControl, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(control) as endpoint:
        monkeypatch.setenv("RDZV_SERVER", endpoint)
        yield endpoint
        control.go_on.set()


ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"


def test_a_job_is_watched_to_its_end(control: WatchControl, server: str) -> None:
    control.pushed = [control_samples.joining(), control_samples.failed()]
    control.jobs["gpt-small"] = control_samples.joining()
    control.history = [
        pb.Event(unix_ms=event.unix_ms, run=event.run or "", name=event.name, text=event.text)
        for event in HISTORY
    ]
    terminal = Terminal(["status", "gpt-small", "--watch"])
    terminal.read_until("round 2 complete")
    terminal.read_until(live.FOOTER)
    control.go_on.set()
    assert terminal.close() == 0
    before, _, rest = terminal.output.partition(ENTER)
    drawn, _, after = rest.partition(LEAVE)
    assert before == ""
    # Each screen overwrites the last without clearing it first, and never has a line too many.
    assert "\x1b[2J" not in drawn
    screens = drawn.split("\x1b[H")[1:]
    assert all(one.count("\r\n") <= 23 and one.endswith("\x1b[J") for one in screens)
    assert "gives up in" in screens[0]
    assert "\x1b" not in after
    assert after.startswith("gpt-small  failed")
    assert control_samples.TRACEBACK.splitlines()[-1] in after


def test_ctrl_c_leaves_the_terminal_as_it_was(control: WatchControl, server: str) -> None:
    control.pushed = [control_samples.running(), control_samples.failed()]
    control.jobs["gpt-small"] = control_samples.running()
    terminal = Terminal(["status", "gpt-small", "-w"])
    terminal.read_until(live.FOOTER)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.close() == 130
    assert LEAVE in terminal.output
    assert "Traceback" not in terminal.output


def test_an_error_leaves_the_terminal_as_it_was(control: WatchControl, server: str) -> None:
    control.error = UnknownJobError("no job gpt-small is known here")
    terminal = Terminal(["status", "gpt-small", "-w"])
    assert terminal.close() == 1
    assert "no job gpt-small is known here" in terminal.output
    assert ENTER not in terminal.output


def test_a_terminal_that_can_not_is_not_drawn_on(control: WatchControl, server: str) -> None:
    control.pushed = [control_samples.running(), control_samples.failed()]
    terminal = Terminal(["status", "gpt-small", "-w"], TERM="dumb")
    terminal.read_until("gpt-small  running")
    control.go_on.set()
    assert terminal.close() == 0
    assert "\x1b" not in terminal.output
    assert "gpt-small  failed" in terminal.output
