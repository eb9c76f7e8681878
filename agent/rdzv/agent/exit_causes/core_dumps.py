"""Finds a worker's core dump.

Source: core(5) of the Linux manual pages.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from pathlib import Path

from rdzv.agent.inventory.resources import read_text
from rdzv.agent.system.accounts import Identity, acting_as

DUMPING = (
    *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGQUIT, signal.SIGSEGV),
    *(signal.SIGSYS, signal.SIGTRAP, signal.SIGXCPU, signal.SIGXFSZ),
)
"""Signals whose default action is to dump core."""

RECENT_S = 60.0
"""The age above which a file may be another process's dump."""

KERNEL = Path("/proc/sys/kernel")


def find_core_dump(
    pid: int,
    signum: int,
    folder: Path | None,
    identity: Identity | None = None,
    kernel: Path = KERNEL,
) -> str:
    """Describe where a dead worker's core dump is, or return "" if none can be found.

    `folder` is the worker's working folder, or None for the agent's own. The worker's account must
    be able to see the file.
    """
    if signum not in DUMPING:
        return ""
    pattern = read_text(kernel / "core_pattern").strip()
    if pattern.startswith("|"):
        program = pattern[1:].split(" ")[0]
        if program.endswith("/systemd-coredump"):
            return f"its core dump: coredumpctl info {pid}"
        return f"its core dump was piped to {program}" if program else ""
    if "%p" not in pattern and read_text(kernel / "core_uses_pid").strip() != "0":
        pattern += ".%p"
    names = {"%p": str(pid), "%P": str(pid), "%s": str(signum), "%h": os.uname().nodename}
    names["%%"] = "%"
    name = re.sub("%.", lambda found: names.get(found[0], "*"), pattern)
    with acting_as(identity):
        found = _recent((folder or Path()) / name)
    return f"its core dump: {found}" if found is not None else ""


def _recent(pattern: Path) -> Path | None:
    """Return the newest matching regular file if it is recent, or None."""
    try:
        place = pattern.absolute()
        found = [(path.lstat(), path) for path in place.parent.glob(place.name)]
    except (OSError, ValueError):
        return None
    files = [(about.st_mtime, path) for about, path in found if stat.S_ISREG(about.st_mode)]
    written, path = max(files, default=(0.0, None))
    return path if time.time() - written <= RECENT_S else None
