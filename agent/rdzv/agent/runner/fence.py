"""The fence: a time on the `boottime_ms` clock after which no worker survives, whatever happens.

The agent may be stopped or hang. It renews the fence as long as there is proof that the server is
receiving this node's messages. A round requested after the fence starts no workers. Until the first
`renew_fence`, there is no fence.

The runner may hang, too. So another process, the guard, knows the time of the fence, and shares
nothing with the runner but a pipe that it reads. If any worker may be left `GUARD_LATE_MS` after
the fence, it kills everything below the runner.
"""

from __future__ import annotations

import os
import select
import struct
import time
from contextlib import suppress

from .descriptors import write_warning
from .processes import kill_below
from .spawn import own_program
from .system import Alarm, boottime_ms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .child_exits import Child
    from .requests import RenewFence
    from .runner import Runner

GUARD_LATE_MS = 400
"""The runner's own time to kill. The server keeps a fenced node's seat for 1 s after the fence."""

_GUARD_KILLS_S = 5.0
_LOOK_AGAIN_S = 0.02
_TIME = struct.Struct("q")


class Fence:
    """The time of the fence, an alarm that goes off at that time, and the guard."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._at_ms = 0
        # Created in advance, so that a fence never fails for lack of a descriptor.
        self._alarm = Alarm()
        self._guard: Child | None = None
        self._guard_fd: int | None = None
        self._guarded_ms: int | None = None

    def watch(self) -> None:
        self._runner.loop.watch(self._alarm.fileno(), self.check)

    def renew(self, request: RenewFence) -> None:
        self._at_ms = max(request.fence_at_ms, self._at_ms)
        self._start_guard()
        self.check()

    def check(self) -> None:
        held, parked = self._runner.workers.round, self._runner.workers.parked
        is_over = held.fenced if held is not None else not parked
        if is_over or not self._at_ms:
            self._alarm.set(None)
        elif boottime_ms() < self._at_ms:
            self._alarm.set(self._at_ms)
            self._tell_guard(self._at_ms)
        else:
            self._alarm.set(None)
            if held is None:
                parked.end_all(0)
            else:
                held.fenced = True
                held.keep_none()
                held.kill_at = time.monotonic()
                # Reported before any worker's exit, so that no exit is mistaken for a failure.
                self._runner.agent.emit("fenced", round=held.number, at_ms=boottime_ms())

    def rest(self) -> None:
        """Tell the guard if there is no worker, so that it has nothing to kill at the fence."""
        if self._runner.workers.round is None and not self._runner.workers.parked:
            self._tell_guard(None)

    def close(self) -> None:
        self._alarm.close()
        self._end_guard()

    # ------------------------------------------------------------------ the guard

    def _start_guard(self) -> None:
        if self._guard_fd is not None:
            return
        try:
            read_end, self._guard_fd = os.pipe2(os.O_CLOEXEC)
            try:
                os.set_blocking(self._guard_fd, False)
                program = own_program("--guard", read_end)
                self._guard = self._runner.children.start(
                    "the guard of the fence", program, self._note_guards_exit, spared=True
                )
            finally:
                os.close(read_end)
        except OSError as error:
            self._end_guard()
            write_warning(f"nothing guards the fence but this runner, pid {os.getpid()}: {error}")

    def _tell_guard(self, at_ms: int | None) -> None:
        if self._guard_fd is None or at_ms == self._guarded_ms:
            return
        self._guarded_ms = at_ms
        try:
            os.write(self._guard_fd, _TIME.pack(at_ms or 0))
        except OSError:  # It is gone, or does not read. The next renewal starts another.
            self._end_guard()

    def _end_guard(self) -> None:
        if self._guard_fd is not None:
            os.close(self._guard_fd)
            self._guard_fd = self._guarded_ms = None
        if self._guard is not None:
            with suppress(OSError):
                self._guard.kill()

    def _note_guards_exit(self, child: Child, _code: int) -> None:
        if child is self._guard:
            self._guard = None
            self._end_guard()


def guard(fd: int) -> None:
    """Run as the guard of the process that has started this one, until it closes its pipe."""
    runner, alarm = os.getppid(), Alarm()
    while True:
        ready, _, _ = select.select([fd, alarm.fileno()], [], [])
        if fd in ready:
            if not (times := os.read(fd, 512 * _TIME.size)):
                return
            (at_ms,) = _TIME.unpack(times[-_TIME.size :])
            alarm.set(at_ms + GUARD_LATE_MS if at_ms else None)
        else:
            alarm.set(None)
            _kill_all(runner)


def _kill_all(runner: int) -> None:
    until = time.monotonic() + _GUARD_KILLS_S
    has_logged = False
    while time.monotonic() < until:
        with suppress(OSError):
            if not kill_below(runner, {os.getpid()}):
                return
            if not has_logged:
                has_logged = True
                write_warning(
                    f"runner pid {runner} has not killed all at the fence; its guard does"
                )
        time.sleep(_LOOK_AGAIN_S)
