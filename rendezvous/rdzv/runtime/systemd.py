"""Messages between a service and systemd: readiness, watchdog, and planned restarts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

log = logging.getLogger("rdzv.runtime.systemd")

ASK_TIMEOUT_S = 5.0

WATCHDOG_BEATS = 3
"""The number of keep-alives sent in each watchdog interval."""


def notify(*lines: str) -> bool:
    """Send lines such as "READY=1" to systemd if it is listening; return whether they were sent.

    This never blocks, and it fails silently, because a service must not depend on its supervisor.
    """
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return False
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as systemd,
    ):
        # An @ stands for the NUL that starts an abstract address.
        systemd.connect("\0" + path[1:] if path[0] == "@" else path)
        systemd.send("\n".join(lines).encode())
        return True
    return False


def reloading() -> str:
    """Return the lines that announce a reload, whose end is announced by READY=1."""
    return f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}"


# ---------------------------------------------------------------------- the watchdog


def watchdog_s() -> float:
    """Return systemd's watchdog timeout for this process, or 0 if it has none."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    try:
        return int(os.environ.get("WATCHDOG_USEC", "0")) / 1_000_000
    except ValueError:
        return 0.0


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Send keep-alives from this event loop while the body runs, if systemd expects them.

    If the loop hangs, the keep-alives stop and systemd kills the process.
    """
    if not (after_s := watchdog_s()):
        yield
        return
    beats = asyncio.get_running_loop().create_task(_beat(after_s / WATCHDOG_BEATS))
    try:
        yield
    finally:
        beats.cancel()


async def _beat(every_s: float) -> None:
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(every_s)


# ---------------------------------------------------------------------- planned jobs


def queued_job(cgroups: Path = Path("/proc/self/cgroup")) -> str:
    """Return the job that systemd has queued for this process's unit, such as "stop" or "restart".

    Return "" if no job is queued, if this process is not a service, or if systemd cannot be
    queried. Blocks for up to `ASK_TIMEOUT_S`.
    """
    try:
        unit, of_user = unit_of(cgroups.read_text(errors="replace"))
    except OSError:
        return ""
    if not unit or not os.environ.get("NOTIFY_SOCKET"):
        return ""
    command = ["systemctl", *(["--user"] if of_user else []), "list-jobs"]
    command += ["--full", "--plain", "--no-legend", "--no-pager"]
    try:
        listed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip()
        log.warning("cannot get the queued systemd job for %s: %s", unit, reason)
        return ""
    return job_of(unit, listed.stdout.splitlines())


def unit_of(cgroups: str) -> tuple[str, bool]:
    """Return the service named in /proc/PID/cgroup, and whether it is a user service.

    >>> unit_of("0::/system.slice/rdzv-agent.service/sub")
    ('rdzv-agent.service', False)
    >>> unit_of("0::/user.slice/user-1.slice/user@1.service/app.slice/mine.service")
    ('mine.service', True)
    >>> unit_of("0::/user.slice/user-1.slice/session-2.scope")
    ('', False)
    """
    for line in cgroups.splitlines():
        if re.match("0::|[0-9]+:name=systemd:", line):
            services = [part for part in line.split("/") if part.endswith(".service")]
            if services:
                return services[-1], len(services) > 1 and services[-2].startswith("user@")
    return "", False


def job_of(unit: str, lines: Iterable[str]) -> str:
    """Return the type of a unit's job in the output of `list-jobs`, or "" if there is none.

    >>> job_of("b.service", ["12 a.service stop waiting", "13 b.service restart running"])
    'restart'
    >>> job_of("b.service", ["No jobs running."])
    ''
    """
    for line in lines:
        words = line.split()
        if len(words) == 4 and words[1] == unit:
            return words[2]
    return ""
