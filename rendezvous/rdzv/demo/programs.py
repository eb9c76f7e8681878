"""Runs the demo's processes and collects their output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SERVER = "rdzv.server"
NODE = "rdzv.agent.run"
OPERATOR = "rdzv.ctl"


def command_of(module: str, *args: str) -> list[str]:
    """Return the command that runs one of this installation's programs as a module."""
    return [sys.executable, "-P", "-m", module, *args]


def environment(python: str) -> dict[str, str]:
    """Return the environment for the demo's programs: the caller's without RDZV_* and PET_*."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RDZV_", "PET_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python}


@dataclass
class Line:
    """One line of a process's output, and when it was written."""

    at_s: float
    text: str


@dataclass
class Program:
    """One of the demo's processes and its output."""

    name: str
    process: subprocess.Popen[str]
    lines: list[Line] = field(default_factory=list)
    written: threading.Condition = field(default_factory=threading.Condition)
    reader: threading.Thread | None = None

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], environ: dict[str, str], log: Path
    ) -> Program:
        """Start a program in its own session, keeping its output and also appending it to `log`."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
            start_new_session=True,
            env=environ,
        )
        program = cls(name, process)
        program.reader = threading.Thread(target=program._read, args=(log,), daemon=True)
        program.reader.start()
        return program

    def _read(self, log: Path) -> None:
        assert self.process.stdout is not None
        with log.open("a") as file, self.process.stdout as output:
            for text in output:
                file.write(text)
                file.flush()
                with self.written:
                    self.lines.append(Line(time.monotonic(), text.rstrip("\n")))
                    self.written.notify_all()

    def find(self, pattern: re.Pattern[str], after_s: float) -> tuple[Line, re.Match[str]] | None:
        """Return the first line written after `after_s` that matches, along with its match."""
        for line in self.lines:
            if line.at_s > after_s and (match := pattern.search(line.text)):
                return line, match
        return None

    def ended(self) -> bool:
        return self.process.poll() is not None

    def workers(self) -> list[int]:
        return [pid for pid in descendants(self.process.pid) if b"RANK" in environ_of(pid)]

    def kill_all(self) -> None:
        """Kill the program and everything it has started before any of them can send a message."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._join()

    def stop(self, timeout_s: float) -> None:
        """Send SIGTERM to the program, and kill it if it has not exited after `timeout_s`."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(timeout_s)
            self._join()
        except subprocess.TimeoutExpired:
            self.kill_all()

    def _join(self) -> None:
        self.process.wait()
        if self.reader is not None:
            self.reader.join(5)  # A process outside the tree may be holding the pipe open.


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                for child in map(int, (task / "children").read_text().split()):
                    found += [child, *descendants(child)]
    return found


def environ_of(pid: int) -> dict[bytes, bytes]:
    """Return the environment with which a process was started."""
    with suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)
    return {}
