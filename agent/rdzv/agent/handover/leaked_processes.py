"""Processes that a dead runner leaked: they descend from no agent of this node any more.

A runner is a child subreaper, so no process escapes it while it lives; if it dies, its agent
inherits what it had. But the parent of a runner that was adopted is init: so is then that of
whatever a worker had started itself, and such a process may hold a GPU for ever. What tells whose
it is is the environment that it was started with. All descendants of a worker have it, except
processes deliberately started with a different value; systemd stops those with the unit.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from rdzv.core.words import counted

log = logging.getLogger("rdzv.agent")

RUNNER = "RDZV_RUNNER"
"""The variable that all processes of a job have: which runner they belong to."""

SWEEP_TIMEOUT_S = 2.0
"""How long they may take to be gone: one may be in the kernel."""
_LOOK_AGAIN_S = 0.02
_LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors by which it is this process, or the machine, that lacks something."""


def mark_of(socket: Path) -> str:
    """Return what marks the processes of the runner that listens there; no other ever will."""
    return socket.stem


def kill_strays(mark: str, timeout_s: float = SWEEP_TIMEOUT_S) -> int:
    """Kill all processes with a dead runner's mark, and wait until they are gone.

    Returns how many there were. Blocks for some milliseconds. A process that forks meanwhile passes
    the mark on; its child is found at the next look.

    Raises:
        OSError: at the timeout a process cannot be looked at, so it may be one of them.

    """
    deadline, killed = time.monotonic() + timeout_s, set[int]()
    while True:
        found, unseen = _kill_marked(f"{RUNNER}={mark}".encode())
        killed.update(found)
        late = time.monotonic() >= deadline
        if unseen is not None and late:
            raise unseen
        if not found and unseen is None:
            if killed:
                log.warning("killed %s of a dead runner", counted(len(killed), "stray"))
            break
        if late:
            log.error(
                "SIGKILL does not end %s of a dead runner: pid %s",
                counted(len(found), "stray"),
                ", ".join(map(str, found)),
            )
            break
        time.sleep(_LOOK_AGAIN_S)
    return len(killed)


def _kill_marked(wanted: bytes) -> tuple[list[int], OSError | None]:
    """Kill each process with this in its environment; return them, and why one was not seen."""
    found, unseen = [], None
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208
    except OSError as error:
        return [], error
    for pid in pids:
        try:
            if pid != os.getpid() and _kill_if_marked(pid, wanted):
                found.append(pid)
        except OSError as error:
            # Else it is gone, or another user's, or has made its environment unreadable.
            if error.errno in _LACKING:
                unseen = error
    return found, unseen


def _kill_if_marked(pid: int, wanted: bytes) -> bool:
    # Pinned first, for the number may pass to another process.
    pidfd = os.pidfd_open(pid)
    try:
        if wanted not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return False
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return True
    finally:
        os.close(pidfd)
