"""Detects that the main thread is waiting for an operation that gloo has lost.

When a connection fails, gloo (torch 2.13) forgets the operation that it has begun to send or
receive, yet waits for it until the group's timeout: in the backward pass, in a broadcast of
buffers, or while a group is being destroyed. `cutting` makes that rare. Nothing in the process can
end the wait, so it is reported to the runner, which then need not wait for `--keep-timeout`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

LOST_AFTER_S = 1.0
"""How long the main thread must have been idle. A collective that is cut ends within 0.1 s."""

_WAITS_IN = (
    *("/torch/autograd/", "/torch/distributed/", "/torch/nn/parallel/"),
    "/rdzv/worker/groups.py",
)
"""Path fragments that identify the innermost frame when the main thread is waiting for gloo."""


class LostWait:
    """Checks the main thread repeatedly, from another thread, after a round has been cut."""

    def __init__(self) -> None:
        self._used: tuple[str, str] | None = None
        self._since_s = 0.0

    def place(self) -> str:
        """Return where the main thread waits in vain, as FILE:LINE, or "" if it does not.

        With CUDA it is always empty, because waiting for a backward pass uses no CPU time, either.
        """
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return ""
        used, now_s = cpu_ticks(), time.monotonic()
        if used != self._used:
            self._used, self._since_s = used, now_s
        if now_s - self._since_s < LOST_AFTER_S:
            return ""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None:
            return ""
        file = frame.f_code.co_filename
        return f"{file}:{frame.f_lineno}" if any(part in file for part in _WAITS_IN) else ""


def cpu_ticks() -> tuple[str, str]:
    """Return the main thread's CPU time in kernel ticks, usually of 10 ms each."""
    pid = os.getpid()
    stat = Path(f"/proc/{pid}/task/{pid}/stat").read_text()
    fields = stat.rpartition(")")[2].split()
    return fields[11], fields[12]
