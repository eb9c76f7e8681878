"""The TCP connections of this process, found by their addresses and shut down."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator

Address = tuple[str, int]


def stop_reading(addresses: Collection[Address], held: dict[int, socket.socket]) -> None:
    """Have every connection with one of these addresses at either end read its end, at once.

    Nothing else is touched. A duplicate of each is put into `held`, by its inode, so that the peer
    does not hear of it before `let_go`, not even when the connection's owner closes it.
    """
    for _, connection in _connections(addresses):
        inode = os.fstat(connection.fileno()).st_ino
        if inode in held:
            continue
        # socket.dup() would make the connection block, and its owner's thread with it.
        held[inode] = socket.socket(fileno=os.dup(connection.fileno()))
        with contextlib.suppress(OSError):  # It has ended by itself.
            connection.shutdown(socket.SHUT_RD)


def let_go(held: dict[int, socket.socket]) -> None:
    """End the connections that are held, in both directions."""
    for connection in held.values():
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    held.clear()


def drop_in_child(addresses: Collection[Address]) -> None:
    """Let go of those connections in a forked child, without a word to their peers.

    A child that held them open would keep the peers of a dead worker waiting for the end of the
    stream. Each descriptor then stands for /dev/null, so that its number is not used for another
    file, which torch's objects in the child might close.
    """
    found = [fd for fd, _ in _connections(addresses)]
    if not found:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in found:
        os.dup2(null, fd, inheritable=False)
    os.close(null)


def knock(address: Address, greeting: bytes, timeout_s: float = 0.2) -> None:
    """Connect, send a greeting and break the connection off; errors are ignored."""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout_s) as caller:
        caller.sendall(greeting)
        # The end comes as an error at the other side, and not as a regular one.
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


def resolve(host: str, port: int) -> set[Address]:
    """Return all addresses that a host's name stands for; none if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {plain(entry[4]) for entry in found}


def plain(address: tuple[object, ...]) -> Address:
    """Return host and port of a socket's address; an IPv4 address in its own form.

    >>> plain(("::ffff:10.0.0.5", 29500, 0, 0))
    ('10.0.0.5', 29500)
    """
    host = str(address[0])
    if host.startswith("::ffff:") and "." in host:
        host = host[len("::ffff:") :]
    return host.partition("%")[0], int(str(address[1]))


def _connections(addresses: Collection[Address]) -> Iterator[tuple[int, socket.socket]]:
    """Yield the connections with one of these addresses, as duplicates that are closed here."""
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
                continue  # It listens, or is not connected any more.
            if not ends.isdisjoint(addresses):
                yield int(name), duplicate
