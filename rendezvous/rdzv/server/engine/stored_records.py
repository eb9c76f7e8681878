"""A key-value record in the store whose stored value stays known even after a failed write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from rdzv.errors import RendezvousConnectionError, RendezvousStateError, StoreRefusedError
from rdzv.server.engine.store_access import StoreAccess
from rdzv.stores.base import RevisionConflictError

T = TypeVar("T")


class KeyValueRecord(Generic[T]):
    """A record: the value as last read or written, and the revision that the next write replaces.

    A writer holds its own lock from reading the value to the end of `swap`. After a failed write,
    `value` is the stored value again:

    * `RevisionConflictError`: another writer was first. The record is read again, and the caller
      retries.
    * `RendezvousConnectionError`: the new value may have been written. The record is read again.
    * Any other error: nothing was written, and the known value is still correct.

    If reading the record again also fails, `known` reads it first, and the old revision prevents a
    write from overwriting it.
    """

    def __init__(self, store: StoreAccess, name: str, read: Callable[[bytes], T]) -> None:
        """Use `read` to decode the stored bytes; a record that was never written reads as `{}`."""
        self._store = store
        self._name = name
        self._read = read
        self.value = read(b"{}")
        self.revision = 0
        self._sure = False

    async def load(self) -> None:
        """Read the stored value and its revision.

        Raises:
            RendezvousConnectionError: the store is unavailable.
            RendezvousStateError: the stored value cannot be read.

        """
        self._sure = False
        stored = await self._store.load_document(self._name)
        data, revision = stored if stored is not None else (b"{}", 0)
        try:
            value = self._read(data)
        except msgspec.DecodeError as error:
            raise unreadable(self._name, error) from error
        self.value, self.revision, self._sure = value, revision, True

    async def known(self) -> T:
        """Return the value; if it is unknown or in doubt, `load` it first, with the same errors."""
        if not self._sure:
            await self.load()
        return self.value

    async def swap(self, value: T, data: bytes) -> None:
        """Store `data`, the encoded form of `value`, and then update the known value.

        Raises:
            StoreRefusedError: another writer was first, or the store accepts no writes; retry.
            RendezvousConnectionError: the value may have been stored; retry.
            RendezvousError: the value was not stored.

        """
        try:
            self.revision = await self._store.swap_document(self._name, data, self.revision)
        except RevisionConflictError as error:
            await self.load()
            raise StoreRefusedError(f"{error}; try again") from error
        except RendezvousConnectionError:
            await self.load()
            raise
        self.value = value


def unreadable(name: str, error: Exception) -> RendezvousStateError:
    """Return the error for a record that cannot be decoded, including the remedy."""
    return RendezvousStateError(
        f"the record {name} cannot be read: {error}; it was left untouched. Restore it from a "
        "backup"
    )
