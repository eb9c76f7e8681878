"""The contract of every store, and the errors that it may answer with.

An error is *definite* if nothing was written, for sure, and *indefinite* if perhaps it was: then
the caller reads back before it decides again. When in doubt, a store says indefinite, which is a
plain `RendezvousConnectionError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rdzv.core.model import Membership
from rdzv.errors import RendezvousConnectionError, RendezvousError

HISTORY_ROWS = 10_000
"""Rows of history kept for each job: months of a calm job, at about 200 bytes a row."""


class StoreRefusedError(RendezvousConnectionError):
    """The store failed before it wrote anything; what the caller holds is still true."""

    definite = True


class DeposedError(StoreRefusedError):
    """This server does not lead any more, or never did; nothing was written, nor will be.

    The store stays refused for this server's term: whoever leads again opens another.
    """


class RevisionConflictError(RendezvousError):
    """Somebody else has written this job since it was loaded; nothing was written."""

    code = "RevisionConflictError"
    grpc_status = "ABORTED"


@dataclass(frozen=True, slots=True)
class Stored:
    """A membership as it was read, and the revision that the next write must name."""

    membership: Membership
    revision: int


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a job's history: an event in the words of the log."""

    unix_ms: int
    rdzv_id: str
    run: str
    name: str
    text: str


class Store(Protocol):
    """Memberships by rdzv_id, their history, and the leadership number."""

    @property
    def place(self) -> str:
        """Where the data is, for people: `/var/lib/rdzv (sqlite)`."""
        ...

    async def load(self, rdzv_id: str) -> Stored | None:
        """Return a job as it was last written; None if it never was.

        Raises:
            RendezvousStateError: it is there and can not be read; it is left untouched.

        """
        ...

    async def compare_and_swap(
        self,
        rdzv_id: str,
        membership: Membership,
        revision: int,
        records: Sequence[Record] = (),
    ) -> int:
        """Write a membership and its records in one commit; return the new revision.

        `revision` is the one that was loaded, 0 if the job must not exist yet. When this
        returns, the commit survives a crash as far as the store survives one at all.

        Raises:
            RevisionConflictError: the job has another revision; nothing was written.
            StoreRefusedError: nothing was written.
            RendezvousConnectionError: perhaps it was written.

        """
        ...

    async def list(self) -> tuple[str, ...]:
        """Return the rdzv_ids of all stored jobs, in order."""
        ...

    async def append(self, records: Sequence[Record]) -> None:
        """Write records that no membership carries."""
        ...

    async def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        """Return the newest records of a job, at most `limit`, oldest first.

        A store keeps a bounded number of them for each job and forgets the oldest.
        """
        ...

    async def take_over(self, at_least: int = 0) -> int:
        """Return a leadership number above all that this store has given, and not below `at_least`.

        The number is written before it is returned.
        """
        ...

    async def close(self) -> None:
        """Finish what was begun and let go of the data. Later calls are refused."""
        ...
