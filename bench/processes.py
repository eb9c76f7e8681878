"""Processes that a benchmark starts: they end when it does, however it ends."""

from __future__ import annotations

import ctypes
import json
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rdzv.client import parse_endpoint

BIN = Path(sys.executable).parent
CALLER = "crowd"
"""The name in the certificate of simulated nodes."""
READY_S = 60.0


def guard() -> Callable[[], None] | None:
    """Return what a child runs between fork and exec, to be killed when the benchmark is.

    Nothing where there are several threads: it would be unsafe, and the end of the thread that
    starts the child would end the child.
    """
    return _die_with_parent if threading.active_count() == 1 else None


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_libc: Any = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used, in it and in the kernel for it."""
    # What clock_getcpuclockid(3) returns: /proc/PID/stat counts in hundredths of a second.
    return time.clock_gettime(~pid << 3 | 2)


def resident_bytes(pid: int) -> int:
    """Return the memory that a process holds now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no memory any more")


def certified(folder: Path) -> list[str]:
    """Make the certificates of a server and a crowd; return the server's options."""
    certs = [str(BIN / "rdzvctl"), "certs"]
    for made in (["init", "--server=localhost"], ["client", CALLER, "--role=submit"]):
        subprocess.run([*certs, *made, f"--dir={folder}"], check=True, stdout=subprocess.DEVNULL)
    files = {"cert": "server.crt", "key": "server.key", "client-ca": "ca.crt"}
    return [f"--tls-{name}={folder / file}" for name, file in files.items()]


class Rdzvd:
    """One server; it can be killed and restarted in the same place."""

    def __init__(self, address: str, options: Sequence[str], log: Path) -> None:
        self.endpoint = parse_endpoint(address)
        self._command = [str(BIN / "rdzvd"), f"--listen={address}", *options]
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """Its pid, while it runs."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it; return when it says that it is ready.

        Raises:
            RuntimeError: it does not; the message has the last that it wrote.

        """
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=guard(),  # noqa: PLW1509
            )
        assert self._process.stdout is not None
        if not (readline(self._process, READY_S) or "").startswith("rdzvd ready"):
            said = self._log.read_text().splitlines() or ["nothing"]
            self.kill()
            raise RuntimeError(f"rdzvd did not start; it wrote: {said[-1]}")

    def wrote(self, text: str) -> int:
        """Return how many lines of its log have a text."""
        return sum(text in line for line in self._log.read_text().splitlines())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it, if it runs."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self.gone()

    def gone(self) -> None:
        """Wait for its end, after a signal."""
        assert self._process is not None
        self._process.wait(READY_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None


class Asked:
    """A child process that answers each JSON line with one of its own. Created by `running`."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        self._process = process
        self._name = name

    @classmethod
    @contextmanager
    def running(cls, program: Path, *arguments: str) -> Iterator[Asked]:
        """Run a program of this folder until the body ends."""
        command = [sys.executable, str(program), *arguments]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=guard(),  # noqa: PLW1509
        ) as process:
            try:
                yield cls(process, program.name)
            finally:
                process.kill()

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._process.pid

    def ask(self, timeout_s: float, **what: object) -> dict[str, Any]:
        """Have something done; this process does nothing meanwhile.

        Raises:
            TimeoutError: there is no answer in time, or the child says that it waited too long.
            RuntimeError: the child has ended; why, it wrote to stderr.

        """
        self.tell(**what)
        return self.answer(timeout_s)

    def tell(self, **what: object) -> None:
        """Ask for something, and go on."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the next answer; it raises what `ask` does."""
        line = readline(self._process, timeout_s)
        if line is None:
            raise TimeoutError(f"no answer of {self._name} within {timeout_s:g} s")
        if not line:
            raise RuntimeError(f"{self._name} has ended with {self._process.wait(READY_S)}")
        found: dict[str, Any] = json.loads(line)
        if why := found.get("failed"):
            raise TimeoutError(str(why))
        return found


def readline(process: subprocess.Popen[str], timeout_s: float) -> str | None:
    """Return the next line that a child writes, empty if it has ended; None if none in time.

    For a child that writes one line at a time and no more before it is asked.
    """
    assert process.stdout is not None
    poller = select.poll()
    poller.register(process.stdout, select.POLLIN | select.POLLHUP)
    if not poller.poll(timeout_s * 1000):
        return None
    return process.stdout.readline()
