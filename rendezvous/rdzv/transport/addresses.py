"""This machine's identity and addresses, and the listening socket for a node's c10d store.

All programs that join as a node use it. What resolves names may block for as long as the name
service lets it.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rdzv.errors import RendezvousConnectionError
from rdzv.transport.endpoints import Endpoint, is_link_local, is_loopback

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

    The result is the local address of a connected datagram socket; nothing is sent.
    """
    for family, _, _, _, address in found:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def own_address(server: Endpoint) -> str:
    """Return this node's own address on its connection to a server, or else on the route there.

    gRPC does not say over which of the server's addresses it is connected, so this looks at the
    process's own sockets.
    """
    found = _addresses_of(server.host, server.port)
    peers = {(_plain(address[0]), address[1]) for *_, address in found}
    ends = {_plain(own[0]) for peer, own in _connections() if (_plain(peer[0]), peer[1]) in peers}
    address = _plain(address_towards(found))
    if ends and address not in ends:
        address = min(ends)
    why = "" if found else "no such host name"
    if found and not address:
        why = "there is no route"
    if is_link_local(address):
        why = f"{address} is link-local, which other machines cannot use"
    if why:
        raise unknown_address(server, why)
    return address


def unknown_address(server: Endpoint, why: str) -> RendezvousConnectionError:
    return RendezvousConnectionError(
        f"cannot determine this node's address towards {server}: {why}; if it stays so, give "
        "--local-addr=ADDRESS"
    )


def _addresses_of(host: str, port: int | None) -> AddressInfo:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []


def _connections() -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    """Yield both ends of each IP connection of this process, the other end first."""
    try:
        descriptors = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    except OSError:
        return
    for descriptor in descriptors:
        try:
            one = socket.socket(fileno=descriptor)
        except OSError:
            continue  # It is no socket, or is closed by now.
        try:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                yield one.getpeername()[:2], one.getsockname()[:2]
        except OSError:
            continue
        finally:
            one.detach()


def _plain(address: str) -> str:
    try:
        mapped = getattr(ipaddress.ip_address(address), "ipv4_mapped", None)
    except ValueError:
        return address
    return address if mapped is None else str(mapped)


GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
RDMA_DEVICES = Path("/sys/class/infiniband")
_SIOCGIFCONF = 0x8912
_IFREQ = 40 if struct.calcsize("P") == 8 else 32


def socket_interfaces(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which gloo and NCCL use the interface that has this address.

    gloo otherwise binds the address of the machine's own name, which may be loopback or on another
    network. NCCL otherwise sends data over all interfaces. So it gets one only if it has no choice,
    or if its data goes over RDMA and only its set-up over sockets. If `environ` already has one of
    the variables, or no interface has the address, the result is empty.
    """
    if environ.get(GLOO_INTERFACE) or environ.get(NCCL_INTERFACE) or is_loopback(address):
        return {}
    names = interfaces()
    own = names.get(_plain(address))
    if own is None:
        return {}
    variables = {GLOO_INTERFACE: own}
    others = {name for at, name in names.items() if name != own and not is_loopback(at)}
    rdma = (
        environ.get("NCCL_IB_DISABLE", "0") == "0"
        and RDMA_DEVICES.is_dir()
        and any(RDMA_DEVICES.iterdir())
    )
    if rdma or not others:
        variables[NCCL_INTERFACE] = f"={own}"
    return variables


def missing_interfaces(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each of gloo's and NCCL's variables that names no interface."""
    present = [name for _, name in socket.if_nameindex()]
    missing: list[str] = []
    for variable in (GLOO_INTERFACE, NCCL_INTERFACE):
        given = environ.get(variable, "")
        names = [name.removeprefix("=") for name in given.split(",") if name]
        # NCCL takes prefixes, and with "^" all others.
        if names and not given.startswith("^"):
            matches = any(one.startswith(name) for name in names for one in present)
            if not matches:
                missing.append(
                    f"{variable}={given}: this machine has no such interface, so workers cannot "
                    f"connect; it has {', '.join(present)}; correct it, or leave it out"
                )
    return missing


def interfaces() -> dict[str, str]:
    """Return the names of this machine's interfaces, by address; without link-local addresses."""
    found: dict[str, str] = {}
    answer = array.array("B", bytes(_IFREQ * 1_024))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iP", len(answer), answer.buffer_info()[0])
        size = struct.unpack("iP", fcntl.ioctl(probe, _SIOCGIFCONF, request))[0]
    for start in range(0, size, _IFREQ):
        entry = answer[start : start + _IFREQ].tobytes()
        name = entry[:16].partition(b"\0")[0].decode(errors="replace")
        found[socket.inet_ntoa(entry[20:24])] = name
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        digits, *_, name = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if not address.is_link_local:
            found[str(address)] = name
    return found


def leads_beyond_loopback(found: AddressInfo) -> bool:
    return any(not is_loopback(str(address[0])) for *_, address in found)


def reachable_host_name(address: str) -> str:
    """Return the name by which other machines reach this one, if its address is loopback.

    The result is empty if the address is not loopback, or the name leads to loopback alone.
    """
    if not is_loopback(address):
        return ""
    name = socket.gethostname()
    return name if leads_beyond_loopback(_addresses_of(name, None)) else ""


BACKLOG = (1 << 16) - 1
"""The listen backlog, as long as the kernel allows (somaxconn)."""


def listen_at(host: str, port: int) -> socket.socket:
    """Listen as torchrun's store does: on `host` if it is loopback, or on all addresses otherwise.

    Names are not resolved, because a host's own name may resolve to loopback on that host.
    """
    family, address = _bind_address(host, port)
    return socket.create_server(
        address, family=family, dualstack_ipv6=address[0] == "::", backlog=BACKLOG
    )


def _reserve_at(host: str, port: int) -> socket.socket:
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

    def confine(self, *, loopback_only: bool) -> None:
        """Bind on loopback only, or on all addresses; close a socket that is bound otherwise."""
        host = "127.0.0.1" if loopback_only else ""
        if host != self._host:
            self.release()
            self._host = host

    @property
    def port(self) -> int:
        """The port of the held socket. If no socket is held, a new one is bound."""
        if self._socket is None:
            self._socket = self._bind_new()
            self._offered.add(_port_of(self._socket))
        return _port_of(self._socket)

    def take(self) -> socket.socket | None:
        """Hand over the socket to the caller, which must close it."""
        taken, self._socket = self._socket, None
        return taken

    def release(self) -> None:
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
