"""Processes leaked by a dead runner, which no longer descend from any agent on this node.

A runner is a child subreaper, so no process escapes it while it is alive, and if it dies, its agent
inherits its children. But the parent of an adopted runner is init, which then inherits the
processes that a worker had started, and such a process may hold a GPU forever. A worker's mark,
which its descendants inherit, shows which runner it belonged to, unless they have deliberately
changed it; systemd stops those with the unit.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from rdzv.agent.runner.processes import is_of_family
from rdzv.agent.runner.processes import mark_of as mark_of_process
from rdzv.core.words import counted

log = logging.getLogger("rdzv.agent")

RUNNER = "RDZV_RUNNER"
"""The environment variable that identifies the runner to which a job's process belongs."""

SWEEP_TIMEOUT_S = 2.0
"""How long killed processes may take to disappear, as one may be inside the kernel."""
_LOOK_AGAIN_S = 0.02
_LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that indicate a lack of resources in this process or on the machine."""


def mark_of(socket: Path) -> str:
    """Return the mark for processes of the runner at this socket, which is never reused."""
    return socket.stem


def kill_leaked(mark: str, timeout_s: float = SWEEP_TIMEOUT_S) -> int:
    """Kill all processes that have a dead runner's mark, and wait until they are gone.

    Returns the number of processes. Blocks for some milliseconds. A process that forks in the
    meantime passes the mark on, so the next scan finds its child. Raises `OSError` if a process
    that may have the mark cannot be inspected at the timeout.
    """
    deadline, killed = time.monotonic() + timeout_s, set[int]()
    while True:
        found, unseen = _kill_marked(mark)
        killed.update(found)
        late = time.monotonic() >= deadline
        if unseen is not None and late:
            raise unseen
        if not found and unseen is None:
            if killed:
                log.warning("killed %s left by a dead runner", counted(len(killed), "process"))
            break
        if late:
            log.error(
                "%s left by a dead runner survived SIGKILL: pid %s",
                counted(len(found), "process"),
                ", ".join(map(str, found)),
            )
            break
        time.sleep(_LOOK_AGAIN_S)
    return len(killed)


def _kill_marked(wanted: str) -> tuple[list[int], OSError | None]:
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
            # Otherwise it is gone.
            if error.errno in _LACKING:
                unseen = error
    return found, unseen


def _kill_if_marked(pid: int, wanted: str) -> bool:
    # The process is pinned first, because its pid may be reused.
    pidfd = os.pidfd_open(pid)
    try:
        if not is_of_family(mark_of_process(pid), wanted):
            return False
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return True
    finally:
        os.close(pidfd)
