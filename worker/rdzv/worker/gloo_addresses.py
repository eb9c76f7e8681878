"""The addresses that gloo's ranks publish in a round's store, and a store that records them."""

from __future__ import annotations

import functools
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .tcp import Address, plain

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

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


def recording_store(inner: Store, published: Published, refuse: Callable[[], None]) -> Store:
    """Return a store that forwards every call to `inner` and records addresses in `published`.

    `refuse` is called before each operation, and raises once the round is cut, so that no new group
    can be created. The store must live as long as the groups that use it, because torch calls into
    it.
    """
    store: Store = _store_class()(inner, published, refuse)
    return store


@functools.cache
def _store_class() -> Any:
    # The base class is torch's, and this module must be importable without torch.
    from torch._C._distributed_c10d import Store

    class RecordingStore(Store):
        def __init__(self, inner: Store, published: Published, refuse: Callable[[], None]) -> None:
            super().__init__()
            self._inner = inner
            self._published = published
            self._refuse = refuse

        def set(self, key: str, value: Any) -> None:
            self._refuse()
            self._published.note(_as_bytes(value), own=True)
            self._inner.set(key, value)

        def get(self, key: str) -> bytes:
            self._refuse()
            value = self._inner.get(key)
            self._published.note(value, own=False)
            return value

        def multi_get(self, keys: list[str]) -> list[bytes]:
            self._refuse()
            values = self._inner.multi_get(keys)
            for value in values:
                self._published.note(value, own=False)
            return values

        def multi_set(self, keys: list[str], values: Any) -> None:
            self._refuse()
            for value in values:
                self._published.note(_as_bytes(value), own=True)
            self._inner.multi_set(keys, values)  # type: ignore[attr-defined]

        def has_extended_api(self) -> bool:
            return True

        def clone(self) -> Any:
            return type(self)(
                self._inner.clone(),  # type: ignore[attr-defined]
                self._published,
                self._refuse,
            )

    for name in (
        *("add", "append", "check", "compare_set", "delete_key", "num_keys", "wait"),
        *("queue_push", "queue_pop", "queue_len", "list_keys", "set_timeout"),
    ):
        if hasattr(Store, name):
            setattr(RecordingStore, name, _forwarded(name))
    return RecordingStore


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        self._refuse()
        return getattr(self._inner, name)(*args)

    method.__name__ = name
    return method


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
