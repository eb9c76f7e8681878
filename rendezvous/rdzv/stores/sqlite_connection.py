"""One SQLite file, used by a single thread. Waiting writes share a commit.

Each commit is counted in the file and in a separate file next to it (`sqlite_file`).
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rdzv.errors import (
    InvalidRequestError,
    RendezvousConnectionError,
    RendezvousError,
    StoreRefusedError,
)
from rdzv.stores.base import RevisionConflictError
from rdzv.stores.sqlite_file import (
    MarkFile,
    StoreMark,
    connect,
    count_commit,
    counted,
    foreign,
    has_data,
    identify,
    looking,
    lost_commits,
    mapped,
    prepare,
    read_mark,
)

log = logging.getLogger("rdzv.stores")

_MOST_AT_ONCE = 256
"""The maximum number of writes in one commit. More would not be faster, and the first write would
have to wait for the last."""
MOST_WAITING = 65_536
"""The maximum number of writes that may wait for a commit, which is far more than one per job."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Write:
    apply: Callable[[], Any]
    answer: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None

    def run(self) -> None:
        """Write inside a transaction.

        A lost race writes nothing and does not affect other writes.
        """
        self.result, self.error = None, None
        try:
            self.result = self.apply()
        except RevisionConflictError as error:
            self.error = error


class Connection:
    """The connection to one file, and its thread. The `async` methods are for the event loop."""

    db: sqlite3.Connection
    """The SQLite connection, used only by the thread, inside `call` and `write`."""
    mark: StoreMark
    """The number of commits in the file. Set when the file is opened for writing."""

    def __init__(self, path: Path, on_rollback: Callable[[], None] = lambda: None) -> None:
        """Call `on_rollback` in the thread after a transaction has been rolled back."""
        self.path = path
        self.lost = ""
        """A description of the commits that the file has lost. Set only if it is opened read-only.
        """
        self._on_rollback = on_rollback
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sqlite")
        self._opened = ExitStack()
        self._closed = False
        self._waiting: deque[_Write] = deque()
        self._whole = False
        """Whether a transaction that spans many writes is open."""
        self._changes = 0
        """The connection's change counter when the transaction began."""

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function that writes nothing in the thread, without a transaction of its own."""
        self._check_open()

        def call() -> T:
            with self.reading():
                return function()

        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def write(self, apply: Callable[[], T]) -> T:
        """Run a function in the thread within a transaction, and return once it is committed.

        Raises:
            StoreRefusedError: too many writes are waiting, or the store is closed.
            RevisionConflictError: raised by `apply`; other writes in the commit are unaffected.
            RendezvousConnectionError: the commit may or may not have happened.

        """
        self._check_open()
        if len(self._waiting) >= MOST_WAITING:
            raise StoreRefusedError(f"{self.path}: {MOST_WAITING} writes wait already; try again")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._waiting.append(_Write(apply, answer))
        # Whichever of these runs first commits all waiting writes.
        self._thread.submit(self._commit_waiting, loop)
        return await answer

    @asynccontextmanager
    async def all_or_nothing(self) -> AsyncIterator[None]:
        await self.call(self._begin_whole)
        try:
            yield
        except BaseException:
            await self.call(self._drop_whole)
            raise
        await self.call(self._commit_whole)

    async def close(self) -> bool:
        """Wait for calls in progress and close the file. Return False if it was already closed."""
        if self._closed:
            return False
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._opened.close)
        self._thread.shutdown()
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreRefusedError("the store is closed: this server is stopping")

    # ---------------------------------------------------- in the thread

    def open(self) -> None:
        prepare(self.path)
        with self.reading():
            self.db = self._opened.enter_context(closing(connect(self.path, "rw")))
            mode = self.db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            self.db.execute("PRAGMA synchronous = FULL")
        if mode != "wal":
            raise InvalidRequestError(
                f"{self.path} can have no write-ahead log on this file system; give a directory "
                "on a local disk with --data-dir"
            )
        with mapped(self.path):
            self.mark = counted(self.db)
            self._mark_file = MarkFile(self.path, self._opened)
            self._mark_file.write(self.mark)

    def open_to_read(self, *, beside_server: bool) -> None:
        """Open the file read-only. With `beside_server`, a server may currently be using it."""
        if not has_data(self.path):
            raise InvalidRequestError(f"{self.path} holds no data yet; rdzvd will create it")
        # The mark is read before the file because a server may be writing to both.
        mark = read_mark(self.path)
        # While a server is using the file, SQLite must use the server's own files; otherwise it
        # must create none.
        opened = closing(connect(self.path, "ro")) if beside_server else looking(self.path)
        with self.reading():
            self.db = self._opened.enter_context(opened)
            identify(self.db, self.path)
            self.lost = lost_commits(mark, counted(self.db))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Map SQLite's exceptions in a block that writes nothing."""
        try:
            yield
        except sqlite3.Error as error:
            raise foreign(self.path, error) from error

    def _commit_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MOST_AT_ONCE))]
        if not batch:
            return
        try:
            self._commit(batch)
        except BaseException as error:
            # Otherwise the error would be lost, and callers would hold their jobs' locks forever.
            log.exception(
                "writing to %s failed because of a bug in rdzvd; please report it", self.path
            )
            unknown = RendezvousConnectionError(
                f"{self.path}: it is unknown whether the writes happened: {error!r}"
            )
            _fail([write for write in batch if write.error is None], unknown)
        loop.call_soon_threadsafe(_answer, batch)

    def _commit(self, batch: Sequence[_Write]) -> None:
        """Write a batch in one transaction. Until COMMIT begins, every failure is definite."""
        try:
            if not self._whole:
                self._begin()
        except RendezvousError as error:
            _fail(batch, error)
            return
        try:
            with self.reading():
                for write in batch:
                    write.run()
        except Exception as error:
            _fail(batch, error)
            if self._whole:
                return
            self._rollback()
            if len(batch) > 1:
                # One of the writes made the batch fail; writing each one separately shows which.
                for write in batch:
                    self._commit([write])
            return
        try:
            if not self._whole:
                self._end()
        except RendezvousError as error:
            # A race lost inside the batch remains lost, whatever the outcome of the commit.
            _fail([write for write in batch if write.error is None], error)

    def _begin_whole(self) -> None:
        self._begin()
        self._whole = True

    def _drop_whole(self) -> None:
        self._whole = False
        self._rollback()

    def _commit_whole(self) -> None:
        self._whole = False
        self._end()

    def _begin(self) -> None:
        with self.reading():
            if self.db.in_transaction:
                # An earlier rollback failed.
                self.db.rollback()
            self.db.execute("BEGIN IMMEDIATE")
            self._changes = self.db.total_changes

    def _end(self) -> None:
        number = self.mark.number
        try:
            if self.db.total_changes != self._changes:
                number = count_commit(self.db)
        except sqlite3.Error as error:
            self._rollback()
            raise foreign(self.path, error) from error
        try:
            self.db.execute("COMMIT")
        except sqlite3.Error as error:
            self._rollback()
            if getattr(error, "sqlite_errorname", "") == "SQLITE_FULL":
                # The frame that would make the transaction valid is written last, so it is missing.
                raise foreign(self.path, error) from error
            raise RendezvousConnectionError(
                f"{self.path}: the commit failed and may have happened: {error}"
            ) from error
        if number != self.mark.number:
            self._record_commit(number)

    def _record_commit(self, number: int) -> None:
        """Write the commit's number to the mark file before any caller learns of the commit."""
        self.mark = StoreMark(self.mark.store, number)
        try:
            self._mark_file.write(self.mark)
        except OSError as error:
            # The commit has happened; only its record next to the file is missing.
            log.warning("cannot write the commit count to a file next to %s: %s", self.path, error)

    def _rollback(self) -> None:
        """Roll back. If that fails, retry before the next transaction."""
        self._on_rollback()
        if self.db.in_transaction:
            try:
                self.db.rollback()
            except sqlite3.Error as error:
                log.error("%s: cannot roll back a failed transaction: %s", self.path, error)


def _fail(batch: Sequence[_Write], error: Exception) -> None:
    for write in batch:
        write.error = error


def _answer(batch: Sequence[_Write]) -> None:
    for write in batch:
        if write.answer.done():
            continue  # Its caller was cancelled.
        if write.error is not None:
            write.answer.set_exception(write.error)
        else:
            write.answer.set_result(write.result)
