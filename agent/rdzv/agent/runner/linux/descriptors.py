"""Descriptors, and the Unix sockets that the runner and agent listen on. Nothing here blocks."""

from __future__ import annotations

import os
import select
import socket
import struct
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


def close_fd(fd: int | None) -> None:
    """Close a descriptor, unless it is None."""
    if fd is not None:
        os.close(fd)


def close_fds(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


@contextmanager
def closed_if_failing(sock: socket.socket) -> Iterator[None]:
    """Close a socket if the `with` block raises an exception."""
    try:
        yield
    except BaseException:
        sock.close()
        raise


def dup_fds(*fds: int) -> tuple[int, ...]:
    """Duplicate all descriptors, or none. Raises `OSError` if that fails."""
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))
    except OSError:
        close_fds(made)
        raise
    return tuple(made)


_PEER = struct.Struct("3i")


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and user id of the process at the other end of a Unix socket.

    On the client's side, that is the process that called listen().
    """
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _ = _PEER.unpack(found)
    return pid, uid


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Provide a short name for a path in an existing folder, since sockets allow only 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen_at(path: Path) -> socket.socket:
    """Listen on a Unix socket that only this user may connect to. May raise `OSError`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        with short_path(path) as short:
            listener.bind(short)
        listener.listen()
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


def write_line(text: str) -> None:
    """Write a line to stderr unless that would block. Never raises `OSError`."""
    with suppress(OSError):
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if poll.poll(0) == [(2, select.POLLOUT)]:
            line = f"rdzv: {text}".encode(errors="backslashreplace")
            os.write(2, line[: select.PIPE_BUF - 1] + b"\n")
