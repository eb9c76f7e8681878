"""How exits are detected: `Children` holds a pidfd for every child, and reaps exited children.

A child is tracked from fork to exit, whether it was forked by the runner or by the zygote.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from functools import partial

from .channel import MAX_JOB_FRAME_BYTES, RECEIVE_BYTES, Link
from .descriptors import write_warning
from .loop import PAUSE_S
from .processes import (
    OwnChildren,
    descendants_of,
    reap,
    runs_program,
    signal_child,
    signal_relative,
)
from .spawn import fork_into

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .killing import HelpersTime
    from .loop import Loop
    from .runner import Runner
    from .spawn import Program

START_SLOW_S = 10.0
"""The time after which a child that is not yet running its program is reported on stderr."""

SHM_MANAGER = "torch_shm_manager"
"""Torch's program that removes a process's files in /dev/shm, two seconds after the process and all
that it has forked have ended. It touches nothing else, so it may run on beside the next round.
"""

SHM_MANAGER_S = 8.0
"""How long it may take for that."""


class Child:
    """A child of the runner that has not been reaped. Created by `Children`."""

    def __init__(
        self,
        pid: int,
        on_exit: Callable[[Child, int], None],
        *,
        spared: bool,
        on_run: Callable[[Child], None] | None = None,
    ) -> None:
        self.pid = pid
        self.on_exit = on_exit
        """Called with the child's exit code, which is negative if a signal killed the child."""
        self.on_run = on_run
        self.spared = spared
        self.pidfd: int | None = None
        """A pidfd for the child, or None if only SIGCHLD announces its exit."""
        self._exit_code: int | None = None
        self._report = bytearray()

    def read_report(self, fd: int) -> bool:
        """Read the steps that the child reports. Returns whether it has reported all of them.

        At end of file, the child is running its program or has exited.
        """
        try:
            while data := os.read(fd, RECEIVE_BYTES):
                self._report += data
        except BlockingIOError:
            return False
        return True

    @property
    def doing(self) -> str:
        """The last step that the child began before it ran its program."""
        return self._report.rpartition(b"\0")[0].rpartition(b"\0")[2].decode(errors="replace")

    @property
    def failure(self) -> str:
        """The reason why the child's program never ran, or an empty string if it did."""
        return self._report.rpartition(b"\0")[2].decode(errors="replace")

    def poll(self) -> int | None:
        """Reap the child if it has exited.

        Returns its exit code, which is negative for a signal, or None if it is still running.
        """
        if self._exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code

    def kill(self) -> None:
        if self._exit_code is None:
            os.kill(self.pid, signal.SIGKILL)


class Children:
    """Starts, watches and reaps the runner's children."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._own = OwnChildren()
        self._children: dict[int, Child] = {}
        self._launching: dict[Child, int] = {}
        self._sigchld: socket.socket | None = None
        self._cleaners: dict[int, bool] = {}
        """Inherited processes that run `SHM_MANAGER`, by pid, and whether they have time for it."""

    def listen(self) -> None:
        self._sigchld = _sigchld_socket()
        self._loop.watch(self._sigchld.fileno(), self._read_sigchld)

    def close(self) -> None:
        self._own.close()
        if self._sigchld is not None:
            self._sigchld.close()

    # ------------------------------------------------------------------ starting

    def start(
        self,
        name: str,
        program: Program,
        on_exit: Callable[[Child, int], None],
        *,
        on_run: Callable[[Child], None] | None = None,
        spared: bool = False,
    ) -> Child:
        """Fork a child that runs a program, without waiting for the program to start.

        `name` describes it to the user. `on_run` is called once the program is running, and also if
        the child was killed before that. Raises `OSError` if the fork fails.
        """
        fd, reports = os.pipe2(os.O_CLOEXEC)
        try:
            os.set_blocking(fd, False)
            child = Child(0, on_exit, spared=spared, on_run=on_run)
            self._loop.watch(fd, partial(self._read_launch, child))
            child.pid = fork_into(program, reports)
        except OSError:
            self._loop.close_watched(fd)
            raise
        finally:
            os.close(reports)
        self._launching[child] = fd
        self._loop.call_at(time.monotonic() + START_SLOW_S, partial(self._warn_slow, name, child))
        self._watch_exit(child)
        return child

    def take(self, pid: int, on_exit: Callable[[Child, int], None], *, spared: bool) -> Child:
        """Watch a child forked by the zygote. Raises `ProcessLookupError` if it does not exist."""
        if pid in self._children or pid not in self._own.pids():
            raise ProcessLookupError("it died before it ran anything")
        child = Child(pid, on_exit, spared=spared)
        self._watch_exit(child)
        return child

    def launching(self) -> set[int]:
        return {child.pid for child in self._launching}

    def _read_launch(self, child: Child) -> None:
        if child.read_report(self._launching[child]):
            self._loop.close_watched(self._launching.pop(child))
            if not child.failure and child.on_run is not None:
                child.on_run(child)

    def _warn_slow(self, name: str, child: Child) -> None:
        if child in self._launching:
            write_warning(
                f"{name} (pid {child.pid}) has not started after {START_SLOW_S:g} s; "
                f"it is still at: {child.doing or 'running the program'}"
            )

    # ------------------------------------------------------------------ exits

    def _watch_exit(self, child: Child) -> None:
        self._children[child.pid] = child
        # epoll returns pidfds in the order of the exits, so the first failure is handled first.
        # Only children without a pidfd lose that order.
        with suppress(OSError):
            child.pidfd = os.pidfd_open(child.pid)
            try:
                self._loop.watch(child.pidfd, partial(self._notice_exit, child))
            except OSError:
                os.close(child.pidfd)
                child.pidfd = None

    def _notice_exit(self, child: Child) -> None:
        assert child.pidfd is not None
        self._loop.close_watched(child.pidfd)  # It would remain readable.
        child.pidfd = None
        self._reap_child(child)

    def _reap_child(self, child: Child) -> None:
        code = child.poll()
        if code is None:
            return  # A debugger sees the exit first; SIGCHLD arrives when it detaches.
        if child in self._launching:
            self._read_launch(child)
        del self._children[child.pid]
        child.on_exit(child, code)

    def _read_sigchld(self) -> None:
        assert self._sigchld is not None
        with suppress(BlockingIOError):
            self._sigchld.recv(4096)
        self._reap_unwatched()

    def _reap_unwatched(self) -> None:
        self._loop.call_at(None, self._reap_unwatched)
        for child in [child for child in self._children.values() if child.pidfd is None]:
            self._reap_child(child)
        try:
            reap(pid for pid in self._own.pids() if pid not in self._children)
            for pid in self._cleaners.keys() - self._own.pids():
                del self._cleaners[pid]
        except OSError:
            self.reap_again()

    def reap_again(self) -> None:
        """Schedule another check for exits, because a call that may have handled one failed."""
        self._loop.call_at(time.monotonic() + PAUSE_S, self._reap_unwatched)

    # ------------------------------------------------------------------ killing

    def known(self) -> list[int]:
        return sorted(self._children.keys() - self._spared())

    def is_known(self, pid: int) -> bool:
        """Return whether this child was started here, or by the zygote at the runner's request."""
        return pid in self._children

    def kill(
        self, stays: Callable[[int], bool] | None = None, helpers: HelpersTime | None = None
    ) -> list[int]:
        """Send SIGKILL to this process's descendants, except spared children. Returns their pids.

        Children for which `stays` returns true survive, with all their descendants. With `helpers`,
        what workers have started is killed after them, and after this time. Looking at the
        children is enough to tell whether any process remains, because a descendant becomes a child
        as soon as its parents die. Raises `OSError` if the children cannot be listed, in which case
        some may remain.
        """
        spared = self._spared()
        left = [pid for pid in self._own.pids() if pid not in spared]
        if stays is not None:
            left = [pid for pid in left if not stays(pid)]
        return self._kill(left, helpers)

    def kill_family(
        self, owns: Callable[[int], bool], helpers: HelpersTime | None = None
    ) -> list[int]:
        """Send SIGKILL to all processes that a dead worker left behind. Returns their pids.

        `owns` tells which of the children that were not started here descend from the worker. With
        `helpers`, they are killed after this time. Raises `OSError` if the children cannot be
        listed.
        """
        strangers = [pid for pid in self._own.pids() if pid not in self._children]
        return self._kill([pid for pid in strangers if owns(pid)], helpers)

    def _kill(self, left: list[int], helpers: HelpersTime | None) -> list[int]:
        left = [pid for pid in left if not self._is_cleaning(pid)]
        workers = [pid for pid in left if pid in self._children]
        if helpers is not None and left and not workers and helpers.goes_on(left):
            return left
        # None of them has been reaped, so the pids are still their own.
        for pid in left if helpers is None else workers or left:
            signal_child(pid, signal.SIGKILL)
        if helpers is not None and workers:
            return left
        below = descendants_of(left)[len(left) :]
        family = {*left, *below}
        for pid in below:
            if not runs_program(pid, SHM_MANAGER):  # It is inherited soon.
                signal_relative(pid, signal.SIGKILL, family)
        return left + below

    def _spared(self) -> set[int]:
        if self._loop.shutting_down:
            return set()
        return {child.pid for child in self._children.values() if child.spared}

    def cleaning(self) -> bool:
        return any(self._cleaners.values())

    def _is_cleaning(self, pid: int) -> bool:
        if pid in self._children:
            return False
        if pid not in self._cleaners and runs_program(pid, SHM_MANAGER):
            self._cleaners[pid] = True
            self._loop.call_at(time.monotonic() + SHM_MANAGER_S, partial(self._end_cleaner, pid))
        return self._cleaners.get(pid, False)

    def _end_cleaner(self, pid: int) -> None:
        if pid in self._cleaners:
            self._cleaners[pid] = False
            signal_child(pid, signal.SIGKILL)


def start_linked(
    runner: Runner,
    name: str,
    program_of: Callable[[int], Program],
    on_exit: Callable[[Child, int], None],
    on_message: Callable[[Mapping[str, object]], None],
    on_end: Callable[[Exception], None],
    max_bytes: int = MAX_JOB_FRAME_BYTES,
) -> tuple[Child, Link]:
    """Start a spared child whose program is made of the descriptor of its end of a link.

    Raises `OSError` if that fails.
    """
    ours, theirs = socket.socketpair()
    link = Link(runner.loop, ours, on_message, on_end, max_bytes)
    try:
        with theirs:
            link.watch()
            return runner.children.start(
                name, program_of(theirs.fileno()), on_exit, spared=True
            ), link
    except OSError:
        link.close()
        raise


def exit_fields(code: int) -> dict[str, int | None]:
    if code < 0:
        return {"exit_code": None, "signal": -code}
    return {"exit_code": code, "signal": None}


def _sigchld_socket() -> socket.socket:
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return receiver
