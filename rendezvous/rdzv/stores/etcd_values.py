"""Values of etcd's API: keys, conditions and operations of a transaction, changes of a watch."""

from __future__ import annotations

from rdzv.stores.base import StoreRefusedError
from rdzv.structs import struct


@struct(frozen=True)
class KeyValue:
    """One key as read. `lease` is 0 if the key has no lease."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int


@struct(frozen=True)
class Created:
    """Holds if the key was created at this revision; with 0, if the key does not exist."""

    key: bytes
    revision: int


@struct(frozen=True)
class Modified:
    """Holds if the key was last written at this revision; with 0, if the key does not exist."""

    key: bytes
    revision: int


@struct(frozen=True)
class Leased:
    """Holds if the key has this lease."""

    key: bytes
    lease: int


@struct(frozen=True)
class Get:
    """Read one key."""

    key: bytes


@struct(frozen=True)
class Put:
    """Write one key and attach it to `lease`; 0 means no lease, None keeps the current one."""

    key: bytes
    value: bytes
    lease: int | None = 0


@struct(frozen=True)
class Delete:
    """Delete one key, or all keys from it to below `end`."""

    key: bytes
    end: bytes = b""


Condition = Created | Modified | Leased
Operation = Get | Put | Delete


@struct(frozen=True)
class TxnResult:
    """The result of a transaction. `found` has one entry for each `Get` that was executed."""

    succeeded: bool
    revision: int
    """The revision of the key space afterwards: the mod_revision of everything it wrote."""
    found: tuple[KeyValue | None, ...]


@struct(frozen=True)
class Change:
    """A change of a watched key: `kv` is its new state, None if it was deleted."""

    kv: KeyValue | None
    revision: int


class CompactedError(StoreRefusedError):
    """The revisions that a watch asked for are gone: read the key again and watch from there."""
