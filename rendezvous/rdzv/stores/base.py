"""The contract of every store, and the errors that a store may raise.

An error is *definite* if it is certain that nothing was written. It is *indefinite* if something
may have been written, in which case the caller reads the data back before deciding again. When in
doubt, a store raises the indefinite error, which is a plain `RendezvousConnectionError`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from rdzv.core.model import Membership
from rdzv.errors import (
    InvalidRequestError,
    LimitExceededError,
    RendezvousError,
    RendezvousStateError,
    StoreRefusedError,
)
from rdzv.structs import struct

HISTORY_ROWS = 10_000
"""The number of history rows kept for each job: enough for months of a stable job, at about 200
bytes per row."""

DOCUMENT_BYTES = 1024 * 1024
"""The maximum size of a document, and thus of a write; etcd accepts 1.5 MiB at once."""


class DeposedError(StoreRefusedError):
    """This server does not lead, or no longer leads. Nothing was or will be written.

    The store remains unusable for the rest of this server's term; the next term opens another
    store.
    """


class RevisionConflictError(RendezvousError):
    """Another writer changed this job or document after it was loaded; nothing was written."""

    code = "RevisionConflictError"
    grpc_status = "ABORTED"


@struct(frozen=True)
class Stored:
    """A membership as read from the store, and the revision that the next write must specify."""

    membership: Membership
    revision: int


Read = Stored | RendezvousStateError
"""A job as last written, or the reason why it cannot be read."""

Page = Sequence[tuple[str, Read]]
"""Jobs by name."""


def read(stored: Callable[[], Stored]) -> Read:
    """Return a decoded job, or the error that says why it cannot be read."""
    try:
        return stored()
    except RendezvousStateError as error:
        return error


@struct(frozen=True)
class Record:
    """One row of a job's history: an event's name and data."""

    unix_ms: int
    rdzv_id: str
    run: str
    name: str
    data: str
    """The event's fields as a JSON object, or a sentence in audit rows. No store interprets it."""


def check_document(name: str, data: bytes) -> None:
    """Refuse a document that no store accepts. Names are chosen by rdzvd, never by users.

    Raises:
        InvalidRequestError: the name is not valid.
        LimitExceededError: the document is too large.

    """
    if not re.fullmatch("[a-z-]+", name):
        raise InvalidRequestError(
            f"{name!r} is not the name of a document; give one of lower-case letters and -"
        )
    if len(data) > DOCUMENT_BYTES:
        raise LimitExceededError(
            f"document {name} would have {len(data)} bytes, and a store takes {DOCUMENT_BYTES}; "
            "nothing was written. Remove from it what is no longer needed"
        )


class Store(Protocol):
    """Memberships by rdzv_id, their history, documents, and the leadership number.

    A document is a small value that does not belong to any job and has its own revision.
    """

    @property
    def place(self) -> str:
        """A human-readable description of where the data is, such as `/var/lib/rdzv (sqlite)`."""
        ...

    async def load(self, rdzv_id: str) -> Stored | None:
        """Return a job as last written, or None if it was never written.

        Raises:
            RendezvousStateError: the job exists but cannot be read; it is left unchanged.

        """
        ...

    async def compare_and_swap(
        self,
        rdzv_id: str,
        membership: Membership,
        revision: int,
        records: Sequence[Record] = (),
    ) -> int:
        """Write a membership and its records in one commit, and return the new revision.

        If the only change is that nodes have succeeded, the cost does not depend on the job's size.
        `revision` is the loaded one, or 0 if the job must not exist yet. Once this returns, the
        commit survives every crash that the store itself survives.

        Raises:
            RevisionConflictError: the job has another revision; nothing was written.
            StoreRefusedError: nothing was written.
            RendezvousConnectionError: the data may have been written.

        """
        ...

    async def delete(self, rdzv_id: str, revision: int) -> None:
        """Delete a job and its history in one commit.

        `revision` is the loaded one. A missing job has revision 0, and deleting it has no effect.

        Raises:
            RevisionConflictError: the job has another revision; nothing was deleted.
            StoreRefusedError: nothing was deleted.
            RendezvousConnectionError: the data may have been deleted.

        """
        ...

    async def list(self) -> tuple[str, ...]:
        """Return the rdzv_ids of all stored jobs, in order."""
        ...

    def pages(self) -> AsyncGenerator[Page, None]:
        """Yield all stored jobs in pages, because reading them one by one is far more expensive.

        A job that is written in the meantime appears in its old or new state, or not at all.
        """
        ...

    async def append(self, records: Sequence[Record]) -> None:
        """Write records on their own, without a membership."""
        ...

    async def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        """Return the newest records of a job, at most `limit`, oldest first.

        A store keeps a limited number of records for each job and deletes the oldest.
        """
        ...

    async def load_document(self, name: str) -> tuple[bytes, int] | None:
        """Return a document and its revision, or None if it was never written."""
        ...

    async def swap_document(self, name: str, data: bytes, revision: int) -> int:
        """Write a document and return its new revision.

        `revision` is the loaded one, or 0 if the document must not exist yet.

        Raises:
            InvalidRequestError: the name is not valid.
            LimitExceededError: the document exceeds `DOCUMENT_BYTES`; nothing was written.
            RevisionConflictError: the document has another revision; nothing was written.
            StoreRefusedError: nothing was written.
            RendezvousConnectionError: the document may have been written.

        """
        ...

    async def list_documents(self) -> tuple[str, ...]:
        """Return the names of all documents, in order."""
        ...

    async def take_over(self, at_least: int = 0) -> int:
        """Return a leadership number above all that this store has issued, and at least `at_least`.

        The number is written before it is returned.
        """
        ...

    async def close(self) -> None:
        """Wait for calls in progress and release the data. Later calls are refused."""
        ...
