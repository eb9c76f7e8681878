"""Processes: this one's descendants, marks by which they are found, and TCP connections."""

from __future__ import annotations

import itertools
import os
import resource
import select
import signal
import socket
import struct
import time
import zlib
from contextlib import suppress
from pathlib import Path

from .system import PR_SET_CHILD_SUBREAPER, prctl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    Endpoint = tuple[str, int]

SWEEP_INTERVAL_S = 0.25
"""How often a kill is repeated until no process remains. Exits are detected at once."""

_LOOK_AGAIN_S = 0.02
_marks = itertools.count(1)


def become_subreaper() -> None:
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def sweep_descendants(timeout_s: float = 2.0) -> list[int]:
    """Kill every descendant of this process and wait until they are gone. Blocks for milliseconds.

    Reaps every child that it kills, so no other code can wait for their statuses. Returns the
    processes that remain at the timeout: none can outrun the kill, but one may be stuck in the
    kernel. Processes whose parents are dead are found only if this process is a subreaper. Raises
    `OSError` if the children cannot be listed at the timeout, so some may remain.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        late = time.monotonic() > deadline
        try:
            left = kill_descendants()
            if left and not late:
                _wait_for_exit(left[0], SWEEP_INTERVAL_S)
            reap(children_of(os.getpid()))
        except OSError:
            if late:
                raise
            time.sleep(_LOOK_AGAIN_S)
        else:
            if late or not left:
                return left


def kill_descendants(except_pids: Collection[int] = ()) -> list[int]:
    """Send SIGKILL to every descendant of this process, parents first. Returns their pids.

    Children of processes that are forking at that moment may be missed, as may children of
    processes that cannot be inspected. A caller that repeats this whenever a child of this process
    exits will find them: once their parents have been killed, they become children of this process.
    Raises `OSError` if the children cannot be listed, so some may remain.
    """
    found = list_descendants(except_pids)
    family = {os.getpid(), *found}
    for pid in found:
        signal_relative(pid, signal.SIGKILL, family)
    return found


def kill_below(pid: int, except_pids: Collection[int] = ()) -> list[int]:
    """Send SIGKILL to every descendant of another process. Returns those that have not ended.

    Repeat it until it returns none. That process need not reap them, nor do anything else. Raises
    `OSError` if its children cannot be listed, so some may remain.
    """
    found = descendants_of(children_of(pid), except_pids)
    family = {pid, *found}
    for one in found:
        signal_relative(one, signal.SIGKILL, family)
    return [one for one in found if not _has_ended(one)]


def list_descendants(except_pids: Collection[int] = ()) -> list[int]:
    return descendants_of(children_of(os.getpid()), except_pids)


def descendants_of(children: Iterable[int], except_pids: Collection[int] = ()) -> list[int]:
    """List these processes and their descendants, zombies included, parents before children.

    Leaves out the processes in `except_pids` with all their descendants, and the descendants of
    processes that cannot be inspected.
    """
    found = [pid for pid in children if pid not in except_pids]
    for pid in found:
        with suppress(OSError):
            found += children_of(pid)  # This loop also visits the added ones.
    return found


def children_of(pid: int) -> list[int]:
    """List the children of a process, including zombies. Returns an empty list if it is gone.

    The list is exact for the calling process if it is single-threaded, because nothing else reaps
    its children. For other processes, some children may be missing while their siblings exit.
    Raises `OSError` if the process cannot be inspected, so it may have any number of children.
    """
    children: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with suppress(FileNotFoundError, ProcessLookupError):
                children += map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split())
    return children


class OwnChildren:
    """Lists the children of this single-threaded process, using a descriptor opened once."""

    def __init__(self) -> None:
        path = f"/proc/self/task/{os.getpid()}/children"
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def pids(self) -> list[int]:
        listed = b""
        while part := os.pread(self._fd, 1 << 16, len(listed)):
            listed += part
        return [int(pid) for pid in listed.split()]

    def close(self) -> None:
        os.close(self._fd)


def signal_child(pid: int, signum: int) -> None:
    """Signal a child that has not been reaped, and none of the processes that it has started."""
    with suppress(OSError):
        os.kill(pid, signum)


def signal_relative(pid: int, signum: int, family: Collection[int]) -> None:
    """Signal a process if its parent is in `family`. Does nothing if the process is gone.

    The pid may have been reused since it was read. A pidfd pins the process before its parent is
    looked up, and an unrelated process does not have a parent in the family.
    """
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            if _parent_of(pid) in family:
                signal.pidfd_send_signal(pidfd, signum)
        finally:
            os.close(pidfd)


def runs_program(pid: int, name: str) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) == name  # noqa: PTH115, PTH119
    except OSError:
        return False


def session_of(pid: int) -> int | None:
    try:
        return int(_stat_of(pid)[3])
    except (OSError, LookupError, ValueError):
        return None


RLIMIT_LOCKS = 10
"""A resource limit that no Linux since 2.4.24 enforces. Its value serves as a mark."""


def new_mark(family: str) -> int:
    """Return a mark for a process and its descendants, which belong to a named family."""
    return zlib.crc32(family.encode()) << 20 | next(_marks) & 0xFFFFF


def is_of_family(mark: int | None, family: str) -> bool:
    return mark is not None and mark >> 20 == zlib.crc32(family.encode())


def set_own_mark(mark: int) -> None:
    with suppress(OSError, ValueError):
        resource.setrlimit(RLIMIT_LOCKS, (mark, resource.getrlimit(RLIMIT_LOCKS)[1]))


def mark_of(pid: int) -> int | None:
    """Return the mark that a process was given or has inherited, or None if it has none or is dead.

    Only the kernel is asked: reading a process's memory, such as its environment, would block for
    as long as a job likes, if it has mapped a file of its own making there. Raises `OSError` if the
    process is gone, or there is a lack of resources.
    """
    if _stat_of(pid)[0] in (b"Z", b"X"):
        return None
    for line in Path(f"/proc/{pid}/limits").read_bytes().splitlines():
        if line.startswith(b"Max file locks"):
            soft = line.split()[3]
            return int(soft) if soft.isdigit() else None
    return None


def reap(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _has_ended(pid: int) -> bool:
    """Return whether a process is gone, or a zombie none of whose threads runs on."""
    try:
        stat = _stat_of(pid)
        return stat[0] in b"ZX" and int(stat[17]) <= 1
    except (OSError, LookupError):
        return True


def _parent_of(pid: int) -> int:
    return int(_stat_of(pid)[1])


def _stat_of(pid: int) -> list[bytes]:
    """Return a process's state, parent, process group, session, and further fields."""
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


# ---------------------------------------------------------------------- TCP connections

_IPV4_IN_IPV6 = bytes(10) + b"\xff\xff"

_LIVE = ("01", "02")


def live_connection(pid: int, endpoints: Collection[Endpoint]) -> Endpoint | None:
    """Return one of `endpoints` to which a process has a live TCP connection, or None.

    A connection that either side has shut down is not live. A host name matches any of its
    addresses. Raises `OSError` if the process cannot be inspected.
    """
    inodes = _socket_inodes(pid)
    if not inodes or not endpoints:
        return None
    wanted = [(_address(host), port) for host, port in endpoints]
    for remote, local, inode in _live(pid):
        if inode not in inodes:
            continue
        # RANK 0's worker may host the store; the endpoint is then the local end.
        for end in (remote, local):
            if any(end[1] == port and host in (None, end[0]) for host, port in wanted):
                return end
    return None


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
        try:
            target = str(Path(f"/proc/{pid}/fd/{fd}").readlink())
        except FileNotFoundError:
            continue  # It has since closed this one.
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def _live(pid: int) -> Iterator[tuple[Endpoint, Endpoint, str]]:
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_bytes().decode().splitlines()[1:]
        except FileNotFoundError:
            if not Path(f"/proc/{pid}").exists() or table == "tcp":
                raise
            continue  # The kernel has no IPv6.
        for line in lines:
            fields = line.split()
            if fields[3] in _LIVE:
                yield _endpoint(fields[2]), _endpoint(fields[1]), fields[9]


def _endpoint(text: str) -> Endpoint:
    host, _, port = text.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    return _text(struct.pack(f"={len(words)}I", *words)), int(port, 16)


def _address(host: str) -> str | None:
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError, ValueError):
            return _text(socket.inet_pton(family, host))
    return None


def _text(packed: bytes) -> str:
    if packed.startswith(_IPV4_IN_IPV6) and len(packed) == 16:
        packed = packed[12:]
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
