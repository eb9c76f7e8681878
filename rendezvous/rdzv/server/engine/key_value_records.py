"""One document of the store as the leading server knows it, also after a write that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from rdzv.errors import RendezvousConnectionError, RendezvousStateError
from rdzv.server.engine.store_access import StoreAccess
from rdzv.stores.base import RevisionConflictError, StoreRefusedError

T = TypeVar("T")


class Document(Generic[T]):
    """A document: its value as it was read or written last, and the revision to be written over.

    A writer holds a lock of its own from reading the value to the end of `swap`. After a write that
    fails, the value is what is stored:

    * `RevisionConflictError`: somebody else has written it. It is read anew, and to be tried again.
    * `RendezvousConnectionError`: perhaps it was written. It is read anew.
    * Any other: nothing was written, and what was known still holds.

    Where it cannot be read anew either, the revision keeps the next write from overwriting what is
    there, and `known` reads it first.
    """

    def __init__(self, store: StoreAccess, name: str, read: Callable[[bytes], T]) -> None:
        """`read` makes a value of what is stored; one that was never written reads as `{}`."""
        self._store = store
        self._name = name
        self._read = read
        self.value = read(b"{}")
        self.revision = 0
        self._sure = False

    async def load(self) -> None:
        """Learn what is stored.

        Raises:
            RendezvousConnectionError: the store is away.
            RendezvousStateError: what is stored cannot be read.

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
        """Return the value; if it is not known, or in doubt, read it first. Raises as `load`."""
        if not self._sure:
            await self.load()
        return self.value

    async def swap(self, value: T, data: bytes) -> None:
        """Store `data`, and only then replace the value by `value`, which it encodes.

        Raises:
            StoreRefusedError: somebody else has written it, or nothing could be; to be repeated.
            RendezvousConnectionError: perhaps it is stored; to be repeated.
            RendezvousError: it is not stored.

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
    """Return the error that a document cannot be read, with the remedy."""
    return RendezvousStateError(
        f"the document {name} cannot be read: {error}; it was left untouched. Restore it from a "
        "backup"
    )
