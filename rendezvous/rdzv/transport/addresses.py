"""This machine's identity and addresses, and the listening socket for a node's c10d store.

All programs that join as a node use it. Nothing here waits for a name service: the caller resolves
names and passes in the addresses.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

AddressInfo: TypeAlias = Sequence[tuple[Any, Any, int, str, tuple[Any, ...]]]
"""The result of `getaddrinfo`."""


def machine_id() -> str:
    """Return an id for this machine and network namespace; equal ids mean a shared loopback."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = socket.gethostname()
    try:
        namespace = str(Path("/proc/self/ns/net").readlink())
    except OSError:
        namespace = ""
    return f"{boot_id}/{namespace}"


def address_towards(found: AddressInfo) -> str:
    """Return this node's own address on the route to another node, or "" if there is no route.

    `found` contains the other node's datagram addresses. The result is the local address of a
    connected socket; nothing is sent.
    """
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def leads_beyond_loopback(found: AddressInfo) -> bool:
    """Return whether other machines can reach any of these addresses."""
    return any(not is_loopback(str(address[0])) for *_, address in found)


def is_loopback(address: str) -> bool:
    """Return whether an address is reachable only from this machine.

    >>> [is_loopback(a) for a in ("127.0.0.1", "::1", "localhost", "10.0.0.5", "n1")]
    [True, True, True, False, False]
    """
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


BACKLOG = (1 << 16) - 1
"""The listen backlog, as long as the kernel allows (somaxconn)."""


def listen_at(host: str, port: int) -> socket.socket:
    """Listen as torchrun's store does: on `host` if it is loopback, or on all addresses otherwise.

    Names are not resolved, because a host's own name may resolve to loopback on that host.

    Raises:
        OSError: the port is taken, or may not be bound.

    """
    family, address = _bind_address(host, port)
    return socket.create_server(
        address, family=family, dualstack_ipv6=address[0] == "::", backlog=BACKLOG
    )


def _reserve_at(host: str, port: int) -> socket.socket:
    """Bind like `listen_at`, without listening."""
    family, address = _bind_address(host, port)
    reserved = socket.socket(family)
    try:
        if address[0] == "::":
            reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        reserved.bind(address)
    except OSError:
        reserved.close()
        raise
    return reserved


def _bind_address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return `host` if it is loopback, or otherwise all addresses, of both families if possible."""
    if is_loopback(host):
        return socket.AF_INET6 if ":" in host else socket.AF_INET, (host, port)
    if socket.has_dualstack_ipv6():
        return socket.AF_INET6, ("::", port)
    return socket.AF_INET, ("0.0.0.0", port)


class StoreSocket:
    """The socket that a node keeps ready for the c10d store of its next round.

    If it `listens`, clients may connect as soon as the port is announced, and the store host serves
    them once it is up. Otherwise RANK 0 serves at the port once the socket is closed. Clients that
    come earlier are refused and try again, whereas a connection to a listening socket would be
    reset when that is closed. A port is never offered twice, so no client of an old round can reach
    a newer store.
    """

    def __init__(self, *, loopback_only: bool, listens: bool = True) -> None:
        self._host = "127.0.0.1" if loopback_only else ""
        self._bind_at = listen_at if listens else _reserve_at
        self._socket: socket.socket | None = None
        self._offered: set[int] = set()

    @property
    def port(self) -> int:
        """The port of the held socket. If no socket is held, a new one is bound.

        Raises:
            OSError: no port can be bound.

        """
        if self._socket is None:
            self._socket = self._bind_new()
            self._offered.add(_port_of(self._socket))
        return _port_of(self._socket)

    def take(self) -> socket.socket | None:
        """Hand over the socket to the caller, which must close it."""
        taken, self._socket = self._socket, None
        return taken

    def release(self) -> None:
        """Close the held socket, freeing its port."""
        taken = self.take()
        if taken is not None:
            taken.close()

    def _bind_new(self) -> socket.socket:
        rejected: list[socket.socket] = []
        try:
            while True:
                candidate = self._bind()
                if _port_of(candidate) not in self._offered:
                    return candidate
                rejected.append(candidate)
        finally:
            for held in rejected:
                held.close()

    def _bind(self) -> socket.socket:
        return self._bind_at(self._host, 0)


def _port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])
