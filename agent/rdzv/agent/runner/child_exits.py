"""How an exit is noticed: `Children` holds a pidfd of every child, and reaps it when it exits.

A child is held from fork to exit, whether forked by the runner itself or by the zygote.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from functools import partial

from .channel import RECEIVE_BYTES
from .linux.descriptors import close_fd, write_line
from .linux.process_tree import OwnChildren, descendants_of, reap, signal_relative
from .loop import PAUSE_S
from .spawn import fork_into

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .loop import Loop
    from .spawn import Program

START_SLOW_S = 10.0
"""After this time, a child that does not run its program is reported on stderr."""


class Launch:
    """A child from its fork until it runs its program, or exits without having run it."""

    def __init__(self, name: str, fd: int, on_run: Callable[[Child], None] | None) -> None:
        self.name = name
        """Its future role, as shown to the user."""
        self.fd = fd
        """The descriptor on which it reports its steps; at end of file it runs its program or is
        gone.
        """
        self.on_run = on_run
        self.slow_at: float | None = time.monotonic() + START_SLOW_S
        self._report = bytearray()

    def read(self) -> bool:
        """Read the child's reports; return whether they are complete."""
        try:
            while data := os.read(self.fd, RECEIVE_BYTES):
                self._report += data
        except BlockingIOError:
            return False
        return True

    @property
    def doing(self) -> str:
        """The last step that it began."""
        return self._report.rpartition(b"\0")[0].rpartition(b"\0")[2].decode(errors="replace")

    @property
    def failure(self) -> str:
        """The reason why its program cannot run; "" if there is none."""
        return self._report.rpartition(b"\0")[2].decode(errors="replace")


class Child:
    """A child of the runner, until it is reaped. Made by `Children`."""

    def __init__(
        self,
        pid: int,
        on_exit: Callable[[Child, int], None],
        *,
        spared: bool,
        launch: Launch | None = None,
    ) -> None:
        self.pid = pid
        self.on_exit = on_exit
        """Called with the child's exit code, which is negative for a signal."""
        self.spared = spared
        """Whether it survives the end of a round."""
        self.launch = launch
        self.pidfd: int | None = None
        """None if only SIGCHLD announces its exit."""
        self._exit_code: int | None = None

    @property
    def failure(self) -> str:
        """The reason why its program never ran; "" if there is none."""
        return "" if self.launch is None else self.launch.failure

    def poll(self) -> int | None:
        """Reap it if it has exited; return its exit code, negative for a signal, or None."""
        if self._exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code

    def kill(self) -> None:
        """Send SIGKILL, unless it has been reaped."""
        if self._exit_code is None:
            os.kill(self.pid, signal.SIGKILL)


class Children:
    """The runner's children: started here, watched, and reaped when they exit."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._own = OwnChildren()
        self._children: dict[int, Child] = {}
        self._launching: list[Child] = []
        self._sigchld: socket.socket | None = None
        """Readable once a child has exited."""
        self._reap_again_at: float | None = None

    def listen(self) -> None:
        """Receive SIGCHLD from now on."""
        self._sigchld = _sigchld_socket()
        self._loop.watch(self._sigchld.fileno(), self._read_sigchld)

    def close(self) -> None:
        """Close everything opened at the start."""
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
        """Fork a child to run a program, without waiting for the child.

        `on_run` is called once it runs, and also if it was killed before. Raises `OSError` if the
        fork fails.
        """
        fd, reports = os.pipe2(os.O_CLOEXEC)
        launch = Launch(name, fd, on_run)
        try:
            os.set_blocking(fd, False)
            child = Child(0, on_exit, spared=spared, launch=launch)
            self._loop.watch(fd, partial(self._read_launch, child))
            child.pid = fork_into(program, reports)
        except OSError:
            self._loop.close_watched(fd)
            raise
        finally:
            os.close(reports)
        self._launching.append(child)
        self._watch_exit(child)
        return child

    def take(self, pid: int, on_exit: Callable[[Child, int], None], *, spared: bool) -> Child:
        """Watch a child that the zygote has forked; `ProcessLookupError` if there is none."""
        if pid in self._children or pid not in self._own.pids():
            raise ProcessLookupError("it died before it ran anything")
        child = Child(pid, on_exit, spared=spared)
        self._watch_exit(child)
        return child

    def launching(self) -> set[int]:
        """Return the pids of children that do not run their programs yet."""
        return {child.pid for child in self._launching}

    def _read_launch(self, child: Child) -> None:
        launch = child.launch
        assert launch is not None
        if not launch.read():
            return
        self._launching.remove(child)
        self._loop.close_watched(launch.fd)
        if not launch.failure and launch.on_run is not None:
            launch.on_run(child)

    # ------------------------------------------------------------------ exits

    def _watch_exit(self, child: Child) -> None:
        self._children[child.pid] = child
        # epoll returns pidfds in the order of the exits, so the first failure comes first. Only
        # children without a pidfd lose that order.
        with suppress(OSError):
            child.pidfd = os.pidfd_open(child.pid)
            try:
                self._loop.watch(child.pidfd, partial(self._notice_exit, child))
            except OSError:
                close_fd(child.pidfd)
                child.pidfd = None

    def _notice_exit(self, child: Child) -> None:
        assert child.pidfd is not None
        self._loop.close_watched(child.pidfd)  # It would stay readable.
        child.pidfd = None
        self._reap_child(child)

    def _reap_child(self, child: Child) -> None:
        code = child.poll()
        if code is None:
            return  # A debugger sees it first; SIGCHLD comes when the debugger detaches.
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
        """Reap exited children without a pidfd, which only SIGCHLD announces."""
        self._reap_again_at = None
        for child in [child for child in self._children.values() if child.pidfd is None]:
            self._reap_child(child)
        try:
            reap(pid for pid in self._own.pids() if pid not in self._children)
        except OSError:
            self.reap_again()

    def reap_again(self) -> None:
        """Schedule a check for exits, because a call that may have handled one has failed."""
        self._reap_again_at = time.monotonic() + PAUSE_S

    # ------------------------------------------------------------------ time

    def wake_times(self) -> Iterator[float | None]:
        """Yield the times at which `do_due` has something to do."""
        yield self._reap_again_at
        for child in self._launching:
            assert child.launch is not None
            yield child.launch.slow_at

    def do_due(self, now: float) -> None:
        """Check for exits again, and report children that start slowly."""
        if self._reap_again_at is not None and now >= self._reap_again_at:
            self._reap_unwatched()
        for child in self._launching:
            launch = child.launch
            if launch is not None and launch.slow_at is not None and now >= launch.slow_at:
                launch.slow_at = None
                write_line(
                    f"{launch.name}, pid {child.pid}, has not started after "
                    f"{START_SLOW_S:g} s; it is still at: "
                    f"{launch.doing or 'running the program'}"
                )

    # ------------------------------------------------------------------ killing

    def descendants(self) -> list[int]:
        """List descendants of this process, except spared children and theirs; or `OSError`."""
        return descendants_of(self._own.pids(), self._spared())

    def known(self) -> list[int]:
        """List children that are not spared, as far as known without asking the kernel."""
        return sorted(self._children.keys() - self._spared())

    def kill(self, stays: Callable[[int], bool] | None = None) -> list[int]:
        """Send SIGKILL to all descendants of this process, except spared children; list them.

        Children for which `stays` is true stay, with all their descendants. Only the children
        decide whether anything is left: a descendant becomes a child as soon as its parents are
        dead. Raises `OSError` if the children cannot be listed, so some may be left.
        """
        spared = self._spared()
        left = [pid for pid in self._own.pids() if pid not in spared]
        return self._kill(left if stays is None else [pid for pid in left if not stays(pid)])

    def kill_family(self, owns: Callable[[int], bool]) -> list[int]:
        """Send SIGKILL to everything that a dead worker left behind; list it.

        `owns` tells which of the children that were not started here are its descendants. Raises
        `OSError` if the children cannot be listed.
        """
        strangers = [pid for pid in self._own.pids() if pid not in self._children]
        return self._kill([pid for pid in strangers if owns(pid)])

    def is_known(self, pid: int) -> bool:
        """Return whether this child was started here, or by the zygote on request."""
        return pid in self._children

    def _kill(self, left: list[int]) -> list[int]:
        for pid in left:
            # It has not been reaped, so the pid is still its own.
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        below = descendants_of(left)[len(left) :]
        family = {*left, *below}
        for pid in below:
            signal_relative(pid, signal.SIGKILL, family)
        return left + below

    def _spared(self) -> set[int]:
        if self._loop.shutting_down:
            return set()
        return {child.pid for child in self._children.values() if child.spared}


def exit_fields(code: int) -> dict[str, int | None]:
    """Split an exit code, which is negative for a signal, into exit code and signal."""
    if code < 0:
        return {"exit_code": None, "signal": -code}
    return {"exit_code": code, "signal": None}


def _sigchld_socket() -> socket.socket:
    """Return a socket that is readable after a child of this process has exited."""
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return receiver
