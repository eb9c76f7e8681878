"""The default store: one SQLite file in a directory owned by one rdzvd.

It uses a write-ahead log and `synchronous=FULL`, so an acknowledged commit survives a power
failure. `sqlite_connection` contains the thread and the commits, `sqlite_statements` the
statements, `sqlite_directory` the lock, `sqlite_file` the file and its tables, and `sqlite_mark`
the count of commits beside it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from functools import partial
from pathlib import Path

from rdzv.core.model import Membership
from rdzv.errors import InvalidRequestError
from rdzv.stores.base import HISTORY_ROWS, Page, Record, Stored, check_document
from rdzv.stores.sqlite_connection import Connection
from rdzv.stores.sqlite_directory import MOUNTINFO, claim_directory, share_directory
from rdzv.stores.sqlite_statements import Survey, Tables


class SqliteStore:
    """Memberships, history, documents and leadership in `DIR/rdzv.db`. Use `open` or `look`."""

    def __init__(self, directory: Path, history_rows: int) -> None:
        self._directory = directory
        self._history_rows = history_rows
        self._locked = ExitStack()
        """Resources to release when the file is closed."""
        self._used_by = ""
        self.connection = Connection(directory / "rdzv.db")
        self._tables = Tables(self.connection, history_rows)

    @classmethod
    async def open(
        cls, directory: Path, history_rows: int = HISTORY_ROWS, mountinfo: Path = MOUNTINFO
    ) -> SqliteStore:
        """Open the data directory, creating it if needed, and lock it against other servers.

        If a file is refused, not a single byte of it is changed.

        Raises:
            InvalidRequestError: the directory cannot be used, is in use, or is on a network
                file system.
            RendezvousStateError: its data is damaged, or was written by another version of rdzvd or
                another program.

        """
        lock = claim_directory(directory, mountinfo)
        store = cls(directory, history_rows)
        store._locked.callback(os.close, lock)
        return await store._begun(store.connection.open)

    @classmethod
    async def look(cls, directory: Path, history_rows: int = HISTORY_ROWS) -> SqliteStore:
        """Open a data directory read-only, even while a server is using it. All writes are refused.

        Nothing is changed. No server can start on the directory until the store is closed.

        Raises:
            InvalidRequestError: the directory cannot be read.
            RendezvousStateError: it has no data that this rdzvd can read, or the data is damaged.

        """
        store = cls(directory, history_rows)
        try:
            lock, store._used_by = share_directory(directory)
            if lock is not None:
                store._locked.callback(os.close, lock)
            return await store._begun(
                partial(store.connection.open_to_read, beside_server=bool(store._used_by))
            )
        except OSError as error:
            raise InvalidRequestError(
                f"data directory {directory} cannot be read: {error.strerror or error}; look at "
                "it as the user that runs rdzvd"
            ) from error

    async def _begun(self, begin: Callable[[], None]) -> SqliteStore:
        try:
            await self.connection.call(begin)
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def place(self) -> str:
        return f"{self._directory} (sqlite)"

    async def load(self, rdzv_id: str) -> Stored | None:
        return await self.connection.call(self._tables.load, rdzv_id)

    async def compare_and_swap(
        self,
        rdzv_id: str,
        membership: Membership,
        revision: int,
        records: Sequence[Record] = (),
    ) -> int:
        return await self.connection.write(
            partial(self._tables.swap, rdzv_id, membership, revision, records)
        )

    async def delete(self, rdzv_id: str, revision: int) -> None:
        await self.connection.write(partial(self._tables.delete, rdzv_id, revision))

    async def list(self) -> tuple[str, ...]:
        return await self.connection.call(self._tables.names)

    async def pages(self) -> AsyncGenerator[Page, None]:
        after = ""
        while page := await self.connection.call(self._tables.page, after):
            yield page
            after = page[-1][0]

    async def append(self, records: Sequence[Record]) -> None:
        await self.connection.write(partial(self._tables.append, records))

    async def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        return await self.connection.call(
            self._tables.history, rdzv_id, min(limit, self._history_rows)
        )

    async def load_document(self, name: str) -> tuple[bytes, int] | None:
        return await self.connection.call(self._tables.load_document, name)

    async def swap_document(self, name: str, data: bytes, revision: int) -> int:
        check_document(name, data)
        return await self.connection.write(
            partial(self._tables.swap_document, name, data, revision)
        )

    async def list_documents(self) -> tuple[str, ...]:
        return await self.connection.call(self._tables.document_names)

    async def take_over(self, at_least: int = 0) -> int:
        return await self.connection.write(partial(self._tables.take_over, at_least))

    def all_or_nothing(self) -> AbstractAsyncContextManager[None]:
        """Commit all writes of the body at once. If the body fails, none of them is written."""
        return self.connection.all_or_nothing()

    async def survey(self) -> Survey:
        """Read the whole file, and return its contents and any faults."""
        return await self.connection.call(self._tables.survey, self._used_by)

    async def close(self) -> None:
        if await self.connection.close():
            self._locked.close()
