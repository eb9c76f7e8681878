"""The addresses that gloo's ranks publish in a round's store."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field

from .tcp import Address, plain

_STORAGE_BYTES = 128
"""Size of `struct sockaddr_storage`, with which an address begins."""


@dataclass
class Published:
    """The addresses of all of a round's groups, recorded as they pass through the store."""

    addresses: set[Address] = field(default_factory=set)
    own: list[tuple[Address, list[bytes]]] = field(default_factory=list)
    """The addresses at which this rank listens, each with the ids that its peers send."""

    def note(self, value: bytes, *, own: bool) -> None:
        """Record a value from the store if it is one of gloo's."""
        found = parse(value)
        if found is None:
            return
        address, ids = found
        if own:
            self.own.append((address, ids))
        self.addresses.add(address)


def parse(value: bytes) -> tuple[Address, list[bytes]] | None:
    """Parse a value that a rank has published: its address, and an 8-byte id for each peer.

    The format is the host name and a `sockaddr_storage` followed by a number, each preceded by its
    8-byte length, and then the ids. Returns None for any other value.
    """
    try:
        (name_bytes,) = struct.unpack_from("<Q", value)
        (address_bytes,) = struct.unpack_from("<Q", value, 8 + name_bytes)
        if address_bytes != _STORAGE_BYTES + 8:
            return None
        start = 16 + name_bytes
        (family,) = struct.unpack_from("<H", value, start)
        (port,) = struct.unpack_from(">H", value, start + 2)
    except (struct.error, OverflowError):
        return None
    rest = value[start + address_bytes :]
    if port == 0 or len(rest) % 8:
        return None
    if family == socket.AF_INET:
        host = socket.inet_ntop(family, value[start + 4 : start + 8])
    elif family == socket.AF_INET6:
        host = socket.inet_ntop(family, value[start + 8 : start + 24])
    else:
        return None
    return plain((host, port)), [rest[i : i + 8] for i in range(0, len(rest), 8)]
