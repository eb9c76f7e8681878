"""One server's calls to its store. Each call records whether the store responded.

The `Engine` in `decide_persist_publish` decides what is written and when.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from rdzv.core.model import Membership
from rdzv.errors import RendezvousConnectionError, RendezvousError
from rdzv.runtime.clock import Clock
from rdzv.runtime.tasks import Tasks
from rdzv.server.engine.store_availability import StoreState
from rdzv.server.telemetry.metrics_interface import Meter
from rdzv.stores.base import Read, Record, Store, Stored

T = TypeVar("T")

PROBE = "store-probe"
"""The name of the key-value record written to test whether the store accepts writes again."""


class StoreAccess:
    """One server's access to its store. The methods raise the same errors as those of `Store`."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        tasks: Tasks,
        meter: Meter,
        on_change: Callable[[str | None], None],
    ) -> None:
        self.store = store
        self._clock = clock
        self._meter = meter
        self.state = StoreState(clock, on_change, lambda: tasks.start(self._probe()))

    async def _ask(self, answer: Awaitable[T], *, writes: bool = False) -> T:
        """Await the store's answer, and record whether the store responded."""
        began_ms = self._clock.now_ms()
        try:
            result = await answer
        except RendezvousConnectionError as error:
            self._meter.store_failed(writes=writes)
            self.state.failed(error, began_ms, writes=writes)
            raise
        self.state.answered(writes=writes)
        return result

    async def _probe(self) -> None:
        """Try a read, and if the last write failed, a write as well."""
        with contextlib.suppress(RendezvousError):
            found = await self._ask(self.store.load_document(PROBE))
            if self.state.unwritable:
                revision = found[1] if found is not None else 0
                await self.swap_document(PROBE, b"", revision)

    async def take_over(self) -> int:
        """Become the leader: store a new leadership number and return it."""
        # The number is based on the clock, so that it never goes back if the store is lost or
        # restored.
        at_least = self._clock.now_ms() // 1000
        return await self._ask(self.store.take_over(at_least), writes=True)

    # ---------------------------------------------------------------- jobs

    async def load(self, rdzv_id: str) -> Stored | None:
        """Return a stored job, or None if it is not in the store."""
        return await self._ask(self.store.load(rdzv_id))

    async def each(self) -> AsyncGenerator[tuple[str, Read], None]:
        """Yield the rdzv_id of every stored job, with the job or the error from reading it."""
        async with aclosing(self.store.pages()) as pages:
            while (page := await self._ask(anext(pages, None))) is not None:
                for found in page:
                    yield found

    async def compare_and_swap(
        self, rdzv_id: str, membership: Membership, revision: int, rows: Sequence[Record]
    ) -> int:
        """Replace a job at this revision and append history rows; return the new revision."""
        swapped = self.store.compare_and_swap(rdzv_id, membership, revision, rows)
        return await self._ask(swapped, writes=True)

    async def delete(self, rdzv_id: str, revision: int) -> None:
        """Delete a job at this revision together with its history."""
        await self._ask(self.store.delete(rdzv_id, revision), writes=True)

    async def append(self, rows: Sequence[Record]) -> None:
        """Store history rows in a separate commit."""
        await self._ask(self.store.append(rows), writes=True)

    async def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        """Return the newest `limit` rows of the history stored under a name, oldest first."""
        return await self._ask(self.store.history(rdzv_id, limit))

    # ---------------------------------------------------------------- key-value records, and backup

    async def load_document(self, name: str) -> tuple[bytes, int] | None:
        """Return a key-value record and its revision, or None if it was never written."""
        return await self._ask(self.store.load_document(name))

    async def swap_document(self, name: str, data: bytes, revision: int) -> int:
        """Replace a key-value record at this revision, and return the new revision."""
        return await self._ask(self.store.swap_document(name, data, revision), writes=True)

    async def backup(self, leadership: int) -> AsyncIterator[bytes]:
        """Yield the store's contents as the lines of a backup file that `rdzvd --restore` reads.

        Raises:
            RendezvousError: the store cannot be read completely; discard the lines yielded so far.

        """
        from rdzv.stores import backup

        header = backup.Header(self.store.place, leadership, self._clock.now_ms())
        async for line in backup.lines(self.store, header):
            yield line
