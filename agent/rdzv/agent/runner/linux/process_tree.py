"""The processes below this one: listed, signalled, killed and reaped."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

from .libc import PR_SET_CHILD_SUBREAPER, prctl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

SWEEP_INTERVAL_S = 0.25
"""The interval at which a kill is repeated until nothing is left. Exits are noticed at once."""

_LOOK_AGAIN_S = 0.02


def become_subreaper() -> None:
    """Make this process the parent of every descendant whose own parent dies."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def sweep_descendants(except_pids: Collection[int] = (), timeout_s: float = 2.0) -> list[int]:
    """Kill every descendant of this process, and wait until all are gone; blocks for milliseconds.

    Spares the children `except_pids` and their descendants. Reaps every child that it kills, so no
    other code can wait for their statuses. Returns the processes that are left at the timeout: none
    can outrun this, but one may be stuck in the kernel. Only in a subreaper does it find processes
    whose parents are dead.

    Raises:
        OSError: at the timeout the children cannot be listed, so some may be left.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        late = time.monotonic() > deadline
        try:
            left = kill_descendants(except_pids)
            if left and not late:
                _wait_for_exit(left[0], SWEEP_INTERVAL_S)
            reap(pid for pid in children_of(os.getpid()) if pid not in except_pids)
        except OSError:
            if late:
                raise
            time.sleep(_LOOK_AGAIN_S)
        else:
            if late or not left:
                return left


def kill_descendants(except_pids: Collection[int] = ()) -> list[int]:
    """Send SIGKILL to every descendant of this process, parents first; return their pids.

    Children of processes that fork meanwhile may be missed, as may those whose parents cannot be
    inspected. A caller that repeats this at each exit of a child of this process finds them: their
    parents have been killed, so they become children of this process.

    Raises:
        OSError: the children cannot be listed, so some may be left.
    """
    found = descendants_of(children_of(os.getpid()), except_pids)
    family = {os.getpid(), *found}
    for pid in found:
        signal_relative(pid, signal.SIGKILL, family)
    return found


def descendants_of(children: Iterable[int], except_pids: Collection[int] = ()) -> list[int]:
    """List these processes and their descendants, parents before children; zombies count.

    Leaves out those in `except_pids` with all their descendants, and the descendants of a process
    that cannot be inspected.
    """
    found = [pid for pid in children if pid not in except_pids]
    for pid in found:
        with suppress(OSError):
            found += children_of(pid)  # This loop visits the added ones, too.
    return found


def children_of(pid: int) -> list[int]:
    """List the children of a process, zombies included; none if it is gone.

    Exact for the calling process, if it has one thread: nothing else reaps its children. For other
    processes, some children may be missing while their siblings exit.

    Raises:
        OSError: it cannot be inspected, so it may have any number of children.
    """
    children: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with suppress(FileNotFoundError, ProcessLookupError):
                children += map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split())
    return children


class OwnChildren:
    """Lists the children of this process, which has one thread, without a new descriptor."""

    def __init__(self) -> None:
        path = f"/proc/self/task/{os.getpid()}/children"
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def pids(self) -> list[int]:
        """List the children, including zombies. Raises `OSError` if that is impossible now."""
        listed = b""
        while part := os.pread(self._fd, 1 << 16, len(listed)):
            listed += part
        return [int(pid) for pid in listed.split()]

    def close(self) -> None:
        """Close the list."""
        os.close(self._fd)


def signal_group(leader: int, signum: int) -> None:
    """Signal the process group of a child that was forked to lead one and is not yet reaped.

    Until the child leads its group, no process is in a group with that number.
    """
    with suppress(OSError):
        try:
            os.killpg(leader, signum)
        except ProcessLookupError:
            os.kill(leader, signum)


def signal_relative(pid: int, signum: int, family: Collection[int]) -> None:
    """Signal a process if its parent is in `family`; do nothing if it is gone.

    The pid may have been reused since it was read. The pidfd pins one process, and only then is its
    parent looked up: that of an unrelated process is not in the family.
    """
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            if _parent_of(pid) in family:
                signal.pidfd_send_signal(pidfd, signum)
        finally:
            os.close(pidfd)


def session_of(pid: int) -> int | None:
    """Return the leader of a process's session; None if the process is gone."""
    try:
        return int(_stat_of(pid)[3])
    except (OSError, LookupError, ValueError):
        return None


def has_variable(pid: int, name: str, value: str) -> bool:
    """Return whether a process was started with an environment variable; False if it is gone."""
    try:
        # Reading would block on a process that waits for a hung file system.
        if _stat_of(pid)[0] == b"D":
            return False
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except (OSError, LookupError):
        return False
    return f"{name}={value}".encode() in environ.split(b"\0")


def reap(pids: Iterable[int]) -> None:
    """Reap any of these children that have exited."""
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _parent_of(pid: int) -> int:
    return int(_stat_of(pid)[1])


def _stat_of(pid: int) -> list[bytes]:
    """Return a process's state, parent, process group, session, and so on."""
    # The command is in parentheses and may contain any character.
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def _wait_for_exit(pid: int, timeout_s: float) -> None:
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(timeout_s * 1000)
        finally:
            os.close(pidfd)
