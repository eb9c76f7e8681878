"""Descriptors, and the Unix sockets that the runner and agent listen on. Nothing here blocks."""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    _Cmsg = tuple[int, int, bytes]


def close_fds(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


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


class SentDescriptorError(OSError):
    """Raised if a job has sent a descriptor where none belongs."""


_DRAIN_BYTES = 64 << 10


def receive_data(sock: socket.socket, size: int, ancillary: int = 0) -> tuple[bytes, list[_Cmsg]]:
    """Receive data that a job may have sent, and up to `ancillary` bytes of credentials.

    Whoever takes a descriptor out of a socket's queue, or drops it, may have to close it, and a job
    decides how long that takes: a TCP socket with SO_LINGER and a peer that never reads, a file of
    its own file system. So everything is looked at in the queue, and a message with a descriptor
    stays there. (A pipe carries none, but a writer that waits for a page of its own file system
    keeps the pipe locked, and blocks even a reader that does not wait.)

    Raises:
        SentDescriptorError: the next message has a descriptor; use `close_job_socket`.
        OSError: as recvmsg does.
    """
    # Otherwise an urgent byte is dropped unseen, together with its descriptor.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
    data, _, flags, _ = sock.recvmsg(size, ancillary, socket.MSG_PEEK)
    if flags & socket.MSG_CTRUNC:
        raise SentDescriptorError("the peer has sent a descriptor")
    # At least 1, which removes a datagram without data.
    data, found, _, _ = sock.recvmsg(max(len(data), 1), ancillary)
    return data, found


def close_job_socket(sock: socket.socket) -> None:
    """Close a Unix stream or datagram socket to which a job may have sent descriptors.

    If any are left in its queue, a process of its own closes them, for which nobody waits.
    """
    try:
        sock.shutdown(socket.SHUT_RDWR)  # From now on, nothing more can be sent to it.
        sock.setblocking(False)
        stream = sock.type == socket.SOCK_STREAM
        while receive_data(sock, _DRAIN_BYTES)[0] or not stream:
            pass
    except SentDescriptorError:
        _close_elsewhere(sock)
    except OSError:
        pass  # Nothing is left, or it is closed.
    sock.close()


def close_shared(sock: socket.socket) -> None:
    """Close a TCP socket that a job may also hold, and may have told to linger when it is closed.

    A job that still holds it can still change that, but then this does not really close it.
    """
    with sock, suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("2i", 0, 0))


def _close_elsewhere(sock: socket.socket) -> None:
    """Close a socket that another process still holds, which exits after that, if it can.

    If it exited before, this process would be the last one to hold the socket.
    """
    command = (sys.executable, "-I", "-S", "-c", "import os; os.read(1, 1)")
    pipe: tuple[int, ...] = ()
    try:
        pipe = os.pipe()
        held = [(os.POSIX_SPAWN_DUP2, fd, n) for n, fd in enumerate((sock.fileno(), pipe[0]))]
        os.posix_spawn(command[0], command, {}, file_actions=held)
        sock.close()
    except OSError:
        sock.detach()  # Left open: closing it here could block.
    finally:
        close_fds(pipe)


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


def write_warning(text: str) -> None:
    """Write a warning to stderr unless that would block. Never raises `OSError`."""
    with suppress(OSError):
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if poll.poll(0) == [(2, select.POLLOUT)]:
            line = f"rdzv: warning: {text}".encode(errors="backslashreplace")
            os.write(2, line[: select.PIPE_BUF - 1] + b"\n")
