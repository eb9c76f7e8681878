"""Makes restarts warm: `WarmRestarts` starts the zygote once workers have imported torch.

The first round is cold. Its workers report over a socket when they have imported torch, and which
of the variables that torch reads on import had been changed by the script (torch_watch.py). A
zygote would not see such a change, so workers then stay cold, as they do after a warm worker has
crashed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import time
from dataclasses import replace

from .channel import RECEIVE_BYTES
from .descriptors import SentDescriptorError, close_job_socket, receive_data
from .spawn import reason_of
from .zygote_process import ZYGOTE_HOOK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from .child_exits import Child
    from .loop import Loop
    from .spawn import Program
    from .zygote_process import ZygoteProcess

WATCH_HOOK = ZYGOTE_HOOK.with_name("watch_hook")
"""A folder whose `sitecustomize` makes an interpreter report its import of torch."""

SETTLE_S = 10.0
"""How long after the first import of torch the CPUs are left to the other workers' imports."""

YOUNG_S = 60.0
"""The age of a job up to which its restarts without a zygote are explained. Later ones are usual:
its workers do not import torch.
"""

CRASH_WITHIN_S = 10.0
"""The time after its start within which a warm worker's crash is blamed on the fork."""

CRASHES = (
    *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
    *(signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP),
)
"""Signals that a process causes itself. Other signals are sent to it, and reveal nothing about the
fork.
"""

MAX_REPORTS_PER_WORKER = 64
"""The maximum number of reports per worker, after which no more are received. A worker's forks may
also send reports.
"""

_CREDENTIALS = struct.Struct("3i")
"""The kernel's `struct ucred`: pid, uid, gid."""


class WarmRestarts:
    """Watches the workers of a job that should have warm restarts."""

    def __init__(self, loop: Loop, zygote: ZygoteProcess) -> None:
        self._loop = loop
        self._zygote = zygote
        self._socket: socket.socket | None = None
        self._address = ""
        self._workers = 0
        self._reports_left = 0
        self._imported: set[int] = set()
        """The pids of the processes that have imported torch in this round."""
        self._start_at: float | None = None
        self._rounds = 0
        self._since = 0.0
        """When the first round began here."""

    @property
    def cold_because(self) -> str:
        """Why a restart so soon is cold, or an empty string if the reason is another."""
        age_s = time.monotonic() - self._since
        if self._rounds < 2 or age_s >= YOUNG_S or not self._wanted or self._zygote.begun:
            return ""
        return (
            f"this job began {age_s:.0f} s ago on this node; restarts are warm once its workers, "
            "and then the zygote, have imported torch"
        )

    @property
    def _wanted(self) -> bool:
        spec = self._zygote.spec
        return spec is not None and spec.after_import and not self._zygote.given_up

    @property
    def report_to(self) -> str | None:
        """The abstract address to which workers report, or None if they should not."""
        return self._address if self._socket is not None else None

    def close(self) -> None:
        """Stop receiving reports."""
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            close_job_socket(self._socket)
            self._socket = None

    def begin_round(self, workers: int) -> None:
        """Start receiving reports from a new round's workers."""
        if not self._wanted:
            return
        self._rounds += 1
        if self._rounds == 1:
            self._since = time.monotonic()
        self._workers = workers
        self._imported.clear()
        self._reports_left = MAX_REPORTS_PER_WORKER * workers
        try:
            if self._socket is None:
                self._listen()
        except OSError as error:
            self._give_up(f"its workers cannot be watched: {reason_of(error)}")

    def _listen(self) -> None:
        # Uses an abstract address, because scripts could see an inherited descriptor.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._address = f"rdzv-torch-{os.urandom(16).hex()}"
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(f"\0{self._address}")
        self._loop.watch(self._socket.fileno(), self._read)

    def watched(self, program: Program) -> Program:
        """Return a program that reports its import of torch, if such reports are wanted."""
        if self._socket is None:
            return program
        path = program.env.get("PYTHONPATH")
        env = {
            **program.env,
            "PYTHONPATH": os.pathsep.join([str(WATCH_HOOK), *([path] if path else [])]),
            "RDZV_TORCH_WATCH": self._address if path is None else f"{self._address}:{path}",
        }
        return replace(program, env=env)

    def note_exit(self, child: Child, code: int, started_at: float) -> None:
        """Give up warm restarts if this exit suggests that a warm worker was broken by the fork."""
        age_s = time.monotonic() - started_at
        if self._wanted and -code in CRASHES and age_s < CRASH_WITHIN_S:
            name = signal.Signals(-code).name
            self._give_up(
                f"a warm worker, pid {child.pid}, died of {name} {age_s:.1f} s after its start"
            )

    def wake_times(self) -> Iterator[float | None]:
        yield self._start_at

    def do_due(self, now: float) -> None:
        if self._start_at is not None and now >= self._start_at:
            self._start_at = None
            if self._wanted and not self._loop.shutting_down:
                self._zygote.begin()

    # ------------------------------------------------------------------ reports

    def _read(self) -> None:
        """Receive a report. The worker is the user's own process and may send anything."""
        assert self._socket is not None
        try:
            data, ancillary = receive_data(
                self._socket, RECEIVE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
            )
        except BlockingIOError:
            return
        except SentDescriptorError:
            self.close()  # Nothing can be received after it.
            return
        self._reports_left -= 1
        try:
            pid, uid, _ = _CREDENTIALS.unpack(ancillary[0][2])
            changed = [str(name) for name in json.loads(data)["changed"]]
        except (ValueError, TypeError, LookupError, RecursionError, struct.error):
            pass
        else:
            if uid == self._uid:  # Any account can see the address.
                self._take_report(pid, changed)
        if self._reports_left <= 0:
            self.close()

    @property
    def _uid(self) -> int:
        spec = self._zygote.spec
        identity = None if spec is None else spec.identity
        return os.getuid() if identity is None else identity.uid

    def _take_report(self, pid: int, changed: list[str]) -> None:
        if changed:
            names = ", ".join(f"{name!r:.70}" for name in changed[:8])
            self._give_up(
                f"the script changes {names} before it imports torch, which a fork has "
                "already imported; set it for the launch to have warm restarts"
            )
            return
        self._imported.add(pid)
        if self._zygote.begun:
            return
        now = time.monotonic()
        if len(self._imported) >= self._workers:
            self._start_at = now
        elif self._start_at is None:
            self._start_at = now + SETTLE_S

    def _give_up(self, reason: str) -> None:
        self._start_at = None
        self.close()
        self._zygote.give_up_for_good(reason)
