"""Another process's TCP connections, as listed in /proc."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    Endpoint = tuple[str, int]
    """A host name or address, and a port."""

_IPV4_IN_IPV6 = bytes(10) + b"\xff\xff"

_LIVE = ("01", "02")
"""The states of connections that are established or being established."""


def live_connection(pid: int, endpoints: Collection[Endpoint]) -> Endpoint | None:
    """Return one of `endpoints` to which a process has a live TCP connection, or None.

    A connection that either side has shut down is not live. A host name matches any of its
    addresses.

    Raises:
        OSError: the process cannot be inspected.
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
    """Yield remote end, local end and inode of each connection in a process's network namespace."""
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
    """Parse a port and a hexadecimal address made of words in this machine's byte order."""
    host, _, port = text.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    return _text(struct.pack(f"={len(words)}I", *words)), int(port, 16)


def _address(host: str) -> str | None:
    """Return an address in its canonical form, or None for a host name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError, ValueError):
            return _text(socket.inet_pton(family, host))
    return None


def _text(packed: bytes) -> str:
    if packed.startswith(_IPV4_IN_IPV6) and len(packed) == 16:
        packed = packed[12:]
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
