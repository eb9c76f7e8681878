"""Finds this process's TCP connections by their addresses, and shuts them down."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Collection, Iterator, Mapping

Address = tuple[str, int]


def stop_reading(addresses: Collection[Address], held: dict[int, socket.socket]) -> None:
    """Shut down for reading each connection with one of these addresses at either end.

    Its owner reads the end of the stream at once. A duplicate of each connection is stored in
    `held`, by inode, so that the peer notices nothing before `let_go`, even if the owner closes the
    connection. If no descriptors are left for duplicates, the connections are shut down all the
    same.
    """
    for _, connection in _connections(addresses):
        inode = os.fstat(connection.fileno()).st_ino
        if inode in held:
            continue
        with contextlib.suppress(OSError):
            held[inode] = duplicate(connection)
        with contextlib.suppress(OSError):  # It has ended on its own.
            connection.shutdown(socket.SHUT_RD)


def let_go(held: dict[int, socket.socket], but: Collection[int] = ()) -> None:
    """Close the held connections; shut down all but `but` (inodes) for every holder."""
    for inode, connection in held.items():
        if inode not in but:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    held.clear()


def duplicates(
    addresses: Collection[Address], but: Collection[int] = ()
) -> dict[int, socket.socket]:
    """Return duplicates of the connections with one of these addresses, by inode, except `but`.

    The caller must close them. Connections that no descriptor is left for are omitted.
    """
    found = {}
    for _, connection in _connections(addresses):
        inode = os.fstat(connection.fileno()).st_ino
        if inode not in but and inode not in found:
            with contextlib.suppress(OSError):
                found[inode] = duplicate(connection)
    return found


def inodes(addresses: Collection[Address]) -> dict[int, int]:
    found = {}
    for fd, connection in _connections(addresses):
        found[fd] = os.fstat(connection.fileno()).st_ino
    return found


def any_ended(connections: Mapping[int, int]) -> bool:
    """Return whether either end has closed any of these connections, which `inodes` returned."""
    ends = select.poll()
    try:
        for fd, inode in connections.items():
            if os.fstat(fd).st_ino != inode:
                return True  # It was closed, and its descriptor's number is used again.
            ends.register(fd, select.POLLRDHUP)
    except OSError:
        return True
    return bool(ends.poll(0))


def drop_in_child(addresses: Collection[Address]) -> None:
    """Close these connections in a forked child without their peers noticing.

    If a child kept them open, a dead worker's peers would keep waiting for the end of the stream.
    Each descriptor is replaced with /dev/null, so that its number is not reused for another file,
    which torch's objects in the child might then close.
    """
    found = [fd for fd, _ in _connections(addresses)]
    if not found:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in found:
        os.dup2(null, fd, inheritable=False)
    os.close(null)


def knock(address: Address, greeting: bytes, timeout_s: float = 0.2) -> None:
    """Connect, send a greeting and reset the connection, ignoring errors."""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout_s) as caller:
        caller.sendall(greeting)
        # The other side then reads an error, not the end of the stream.
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


def resolve(host: str, port: int) -> set[Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {plain(entry[4]) for entry in found}


def plain(address: tuple[object, ...]) -> Address:
    """Return the host and port of a socket address, with IPv4-mapped addresses as IPv4.

    >>> plain(("::ffff:10.0.0.5", 29500, 0, 0))
    ('10.0.0.5', 29500)
    """
    host = str(address[0])
    if host.startswith("::ffff:") and "." in host:
        host = host[len("::ffff:") :]
    return host.partition("%")[0], int(str(address[1]))


def duplicate(connection: socket.socket) -> socket.socket:
    """Return a duplicate without socket.dup(), which would make both sockets blocking."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def _connections(addresses: Collection[Address]) -> Iterator[tuple[int, socket.socket]]:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # Another thread has closed it.
        with duplicate:
            if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if duplicate.type != socket.SOCK_STREAM:
                continue
            try:
                ends = {plain(duplicate.getsockname()), plain(duplicate.getpeername())}
            except OSError:
                continue  # It is listening, or no longer connected.
            if not ends.isdisjoint(addresses):
                yield int(name), duplicate
