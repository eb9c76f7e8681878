"""What a dead runner has left behind that descends from no agent of this node any more.

A runner is a child subreaper, so nobody escapes it while it lives; if it dies, its agent inherits
what it had. But the parent of a runner that was adopted is init: so is then that of whatever a
worker had started itself, and such a process may hold a GPU for ever. What tells whose it is is the
environment that it was started with. A worker's whole family has that, but for who was started
with another one on purpose; those end with the unit.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rdzv.core.words import counted

log = logging.getLogger("rdzv.agent")

RUNNER = "RDZV_RUNNER"
"""The variable that all processes of a job have: which runner they belong to."""

SWEEP_TIMEOUT_S = 2.0
"""How long they may take to be gone: one may be in the kernel."""
_LOOK_AGAIN_S = 0.05


def mark_of(socket: Path) -> str:
    """Return what marks the processes of the runner that listens there; no other ever will."""
    return socket.stem


def kill_strays(mark: str, timeout_s: float = SWEEP_TIMEOUT_S) -> int:
    """Kill all processes with a dead runner's mark, and wait until they are gone.

    Returns how many there were. Blocks for some milliseconds. Who forks meanwhile passes the mark
    on, and is found when it is looked again.
    """
    deadline, killed = time.monotonic() + timeout_s, set[int]()
    while found := list(_marked(mark)):
        try:
            for pid, pidfd in found:
                killed.add(pid)
                with suppress(OSError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                log.error(
                    "SIGKILL does not end %s of a dead runner: pid %s",
                    counted(len(found), "stray"),
                    ", ".join(str(pid) for pid, _ in found),
                )
                break
            gone = select.poll()
            gone.register(found[0][1], select.POLLIN)
            gone.poll(1000 * min(left_s, _LOOK_AGAIN_S))
        finally:
            for _, pidfd in found:
                os.close(pidfd)
    else:
        if killed:
            log.warning("killed %s of a dead runner", counted(len(killed), "stray"))
    return len(killed)


def _marked(mark: str) -> Iterator[tuple[int, int]]:
    """Yield pid and pidfd of each process with a mark; the caller closes the pidfd."""
    wanted = f"{RUNNER}={mark}".encode()
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal() or int(path.name) == os.getpid():
            continue
        with suppress(OSError):
            # Pinned first, for the number may pass to another process.
            pidfd = os.pidfd_open(int(path.name))
            try:
                is_it = wanted in (path / "environ").read_bytes().split(b"\0")
            except OSError:
                is_it = False
            if is_it:
                yield int(path.name), pidfd
            else:
                os.close(pidfd)
