"""Values of etcd's API: keys, conditions and operations of transactions, and changes in watches."""

from __future__ import annotations

from rdzv.errors import StoreRefusedError
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
    """Holds if the key was created at the given revision or, with 0, if it does not exist."""

    key: bytes
    revision: int


@struct(frozen=True)
class Modified:
    """Holds if the key was last written at the given revision or, with 0, if it does not exist."""

    key: bytes
    revision: int


@struct(frozen=True)
class Leased:
    """Holds if the key is attached to the given lease."""

    key: bytes
    lease: int


@struct(frozen=True)
class Get:
    """Read one key."""

    key: bytes


@struct(frozen=True)
class Put:
    """Write one key and attach it to `lease`; 0 means no lease, and None keeps the current one."""

    key: bytes
    value: bytes
    lease: int | None = 0


@struct(frozen=True)
class Delete:
    """Delete one key, or all keys from it up to but not including `end`."""

    key: bytes
    end: bytes = b""


Condition = Created | Modified | Leased
Operation = Get | Put | Delete


@struct(frozen=True)
class TxnResult:
    """The result of a transaction. `found` has one entry for each `Get` that was executed."""

    succeeded: bool
    revision: int
    """The revision of the key space afterwards, which is the mod_revision of everything written."""
    found: tuple[KeyValue | None, ...]


@struct(frozen=True)
class Change:
    """A change to a watched key. `kv` is its new state, or None if it was deleted."""

    kv: KeyValue | None
    revision: int


class CompactedError(StoreRefusedError):
    """The revisions requested by a watch are gone; read the key again and watch from there."""
