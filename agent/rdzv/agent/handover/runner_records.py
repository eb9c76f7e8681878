"""Runners of the previous agent that this one has not adopted. They will end, but not at once.

A runner that cannot be adopted ends no later than its orphan timeout, unless a process is stuck in
the kernel. Until then its GPUs must not be given to other jobs. So each runner is recorded in the
state directory, and the next agent starts no job before the runners recorded there have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path

log = logging.getLogger("rdzv.agent")

TELL_EVERY_S = 10.0
"""The interval between log lines about runners that are still running."""


class RunnerRecords:
    """Records this agent's runners for the next agent."""

    def __init__(self, state_dir: Path, proc: Path = Path("/proc")) -> None:
        self._folder = state_dir / "runners"
        self._proc = proc
        self._own: set[int] = set()

    def note(self, pid: int) -> None:
        """Record a runner: a new one before it starts any workers, or an adopted one."""
        self._own.add(pid)
        try:
            self._folder.mkdir(exist_ok=True)
            (self._folder / str(pid)).write_text(self._started_at(pid), encoding="ascii")
        except OSError as error:
            log.warning("cannot record runner pid %d for the next agent: %s", pid, error)

    def forget(self, pid: int) -> None:
        self._own.discard(pid)
        with contextlib.suppress(OSError):
            (self._folder / str(pid)).unlink()

    async def former_gone(self) -> None:
        """Wait until the previous agent's runners, except adopted ones, have ended."""
        for path in self._former():
            pid = int(path.name)
            while (process := self._open(path)) is not None:
                log.warning("waiting for runner pid %d of the previous agent to end", pid)
                await _exited(process, TELL_EVERY_S)
            self.forget(pid)

    def _former(self) -> list[Path]:
        try:
            found = [path for path in self._folder.iterdir() if path.name.isdecimal()]
        except OSError:
            return []
        return [path for path in found if int(path.name) not in self._own]

    def _open(self, path: Path) -> int | None:
        """Return a pidfd for the recorded process, or None if the process has ended."""
        try:
            process = os.pidfd_open(int(path.name))
        except OSError:
            return None
        # Checked only now, because another process may have reused the pid.
        if self._is_it(path):
            return process
        os.close(process)
        return None

    def _is_it(self, path: Path) -> bool:
        try:
            return path.read_text(encoding="ascii") == self._started_at(int(path.name))
        except (OSError, ValueError):
            return False

    def _started_at(self, pid: int) -> str:
        """Return a process's start time since boot, together with the boot's id."""
        # The command is in parentheses and may contain any character.
        fields = (self._proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        state, started = fields[0], fields[19]
        if state in (b"Z", b"X"):
            raise ProcessLookupError(f"pid {pid} has ended")
        boot = (self._proc / "sys" / "kernel" / "random" / "boot_id").read_text(encoding="ascii")
        return f"{started.decode()} {boot.strip()}"


async def _exited(process: int, within_s: float) -> None:
    """Wait for a process to end, for at most `within_s`, and close its pidfd."""
    loop, exited = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process, exited.set)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await exited.wait()
    finally:
        loop.remove_reader(process)
        os.close(process)
