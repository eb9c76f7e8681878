"""Values of etcd's API: keys, conditions and operations of a transaction, changes of a watch."""

from __future__ import annotations

from rdzv.stores.base import StoreRefusedError
from rdzv.structs import struct


@struct(frozen=True)
class KeyValue:
    """One key as it was read. `lease` is 0 if nothing limits its life."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int


@struct(frozen=True)
class Created:
    """Holds if the key was created at this revision; 0: if it is not there."""

    key: bytes
    revision: int


@struct(frozen=True)
class Modified:
    """Holds if the key was last written at this revision; 0: if it is not there."""

    key: bytes
    revision: int


@struct(frozen=True)
class Get:
    """Read one key."""

    key: bytes


@struct(frozen=True)
class Put:
    """Write one key. `lease` limits its life; None leaves the lease that it has."""

    key: bytes
    value: bytes
    lease: int | None = 0


@struct(frozen=True)
class Delete:
    """Delete one key, or all from it to below `end`."""

    key: bytes
    end: bytes = b""


Operation = Get | Put | Delete


@struct(frozen=True)
class TxnResult:
    """The result of a transaction. `found` has one entry for each `Get` that was executed."""

    succeeded: bool
    revision: int
    """Of the key space once it was done: the mod_revision of everything that it wrote."""
    found: tuple[KeyValue | None, ...]


@struct(frozen=True)
class Change:
    """A change of a watched key: `kv` as it is now, None if it was deleted."""

    kv: KeyValue | None
    revision: int


class CompactedError(StoreRefusedError):
    """The revisions that a watch asked for are gone: read anew, and watch from there."""
