"""Runs the demo's processes and reads their output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


def command_of(module: str, *args: str) -> list[str]:
    return [sys.executable, "-P", "-m", module, *args]


def environment(python: str) -> dict[str, str]:
    """Return the environment for the demo's programs: the caller's without RDZV_* and PET_*."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RDZV_", "PET_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python}


class DemoProgram:
    """One of the demo's processes, in a session of its own; its output is appended to a file."""

    def __init__(
        self, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._read_bytes = output.tell()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environ,
            )

    def next(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        with self.log.open("rb") as output:
            output.seek(self._read_bytes)
            while (line := output.readline()).endswith(b"\n"):
                self._read_bytes += len(line)
                if match := pattern.search(line.decode(errors="backslashreplace").rstrip()):
                    return match
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
        self.process.wait()

    def stop(self, timeout_s: float) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill_all()


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                for child in map(int, (task / "children").read_text().split()):
                    found += [child, *descendants(child)]
    return found


def environ_of(pid: int) -> dict[bytes, bytes]:
    with suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)
    return {}
