"""One server's store: every call to it, whether it is available, and its key-value records.

The `Engine` in `decide_persist_publish` decides what is written and when.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from rdzv import errors
from rdzv.core import commands
from rdzv.core.model import Membership
from rdzv.core.words import counted, duration
from rdzv.runtime.clock import Timer
from rdzv.stores.base import Read, Record, RevisionConflictError, Store, Stored

if TYPE_CHECKING:
    from rdzv.server.driver import Driver

log = logging.getLogger("rdzv.jobs")

T = TypeVar("T")

PROBE = "store-probe"
"""The name of the key-value record written to test whether the store accepts writes again."""
STORE_RETRY_MS = 1_000
"""How often a store that is away is tried again."""
MOST_NAMED = 4
FRESH_RETRIES = 3
"""If a command is not repeated within this many retry intervals, its node is gone and the command
is no longer waiting."""


class StoreAccess:
    """One server's access to its store. The methods raise the same errors as those of `Store`."""

    def __init__(self, driver: Driver, store: Store) -> None:
        self.store = store
        self._driver = driver
        self._clock = driver.clock
        self._timer = Timer(driver.clock, lambda _: self._look())
        self._stopped = False
        self._since_ms: int | None = None
        self._why = ""
        self.unwritable = False
        """Whether a write has failed and none has succeeded since; reads do not count."""
        self._waiting: dict[str, dict[str, int]] = {}
        """The waiting commands in words, each with the time when it was last tried, by rdzv_id."""

    async def _ask(self, answer: Awaitable[T], *, writes: bool = False) -> T:
        began_ms = self._clock.now_ms()
        try:
            result = await answer
        except errors.RendezvousConnectionError as error:
            operation = "write" if writes else "read"
            self._driver.metrics.counts.add("rdzv_store_errors_total", operation)
            self.failed(error, began_ms, writes=writes)
            raise
        self._answered(writes=writes)
        return result

    async def take_over(self) -> int:
        # The number is based on the clock, so that it never goes back if the store is lost or
        # restored.
        at_least = self._clock.now_ms() // 1000
        return await self._ask(self.store.take_over(at_least), writes=True)

    async def load(self, rdzv_id: str) -> Stored | None:
        return await self._ask(self.store.load(rdzv_id))

    async def each(self) -> AsyncGenerator[tuple[str, Read], None]:
        async with aclosing(self.store.pages()) as pages:
            while (page := await self._ask(anext(pages, None))) is not None:
                for found in page:
                    yield found

    async def compare_and_swap(
        self, rdzv_id: str, membership: Membership, revision: int, rows: Sequence[Record]
    ) -> int:
        swapped = self.store.compare_and_swap(rdzv_id, membership, revision, rows)
        return await self._ask(swapped, writes=True)

    async def delete(self, rdzv_id: str, revision: int) -> None:
        await self._ask(self.store.delete(rdzv_id, revision), writes=True)

    async def append(self, rows: Sequence[Record]) -> None:
        await self._ask(self.store.append(rows), writes=True)

    async def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        return await self._ask(self.store.history(rdzv_id, limit))

    async def load_document(self, name: str) -> tuple[bytes, int] | None:
        return await self._ask(self.store.load_document(name))

    async def swap_document(self, name: str, data: bytes, revision: int) -> int:
        return await self._ask(self.store.swap_document(name, data, revision), writes=True)

    async def backup(self, leadership: int) -> AsyncIterator[bytes]:
        from rdzv.stores import backup

        header = backup.BackupHeader(self.store.place, leadership, self._clock.now_ms())
        async for line in backup.lines(self.store, header):
            yield line

    # ---------------------------------------------------------------- while the store is away

    def failed(self, error: errors.RendezvousError, began_ms: int, *, writes: bool) -> None:
        """Record the failure of a call that began at `began_ms`; log only the first failure."""
        self.unwritable |= writes
        known, self._why = self._why, str(error)
        if self._since_ms is None:
            self._since_ms = began_ms
            log.error("the store is away: %s; workers continue, nothing new is decided", error)
            if not self._stopped:
                self._timer.arm_by(self._clock.now_ms() + STORE_RETRY_MS)
        if known != self._why:
            self._show()

    def _answered(self, *, writes: bool) -> None:
        """Record a successful call; after a failed write, only a write counts."""
        self.unwritable &= not writes
        if self._since_ms is None or self.unwritable:
            return
        log.warning("the store is back after %.1f s", self.away_ms / 1000)
        self._since_ms, self._why = None, ""
        self._waiting.clear()
        self._timer.cancel()
        self._show()

    def _show(self) -> None:
        """Wake the watchers of all jobs, which start or stop waiting for the store."""
        for state in self._driver.jobs.states:
            self._driver.watchers.job_changed(state.membership.rdzv_id)
        self._driver.watchers.nodes_changed()

    def stop(self) -> None:
        self._stopped = True
        self._timer.cancel()

    def _look(self) -> None:
        if self._since_ms is None:
            return
        self._timer.arm(self._clock.now_ms() + STORE_RETRY_MS)
        for rdzv_id in [name for name in self._waiting if not self.waiting(name)]:
            del self._waiting[rdzv_id]
        if not self._waiting:
            self._driver.tasks.start(self._probe())

    async def _probe(self) -> None:
        with contextlib.suppress(errors.RendezvousError):
            found = await self.load_document(PROBE)
            if self.unwritable:
                await self.swap_document(PROBE, b"", found[1] if found is not None else 0)

    # ---------------------------------------------------------------- what waits for it

    def waits(self, rdzv_id: str, command: commands.Command) -> None:
        if words := _words(command):
            waiting = self._waiting.setdefault(rdzv_id, {})
            known = words in waiting
            waiting[words] = self._clock.now_ms()
            if not known:
                self._driver.watchers.job_changed(rdzv_id)

    def decided(self, rdzv_id: str, command: commands.Command) -> None:
        if (waiting := self._waiting.get(rdzv_id)) is not None:
            waiting.pop(_words(command), None)
            if not waiting:
                del self._waiting[rdzv_id]

    def waiting(self, rdzv_id: str) -> tuple[str, ...]:
        since_ms = self._clock.now_ms() - FRESH_RETRIES * STORE_RETRY_MS
        return tuple(
            words for words, at_ms in self._waiting.get(rdzv_id, {}).items() if at_ms >= since_ms
        )

    @property
    def away_ms(self) -> int:
        return 0 if self._since_ms is None else max(self._clock.now_ms() - self._since_ms, 1)

    @property
    def trouble(self) -> str:
        """Why the store is unavailable and for how long, for operators; empty if it is available.

        The sentence also names the waiting commands of all jobs.
        """
        return self._sentence(
            [f"{words} ({rdzv_id})" for rdzv_id in self._waiting for words in self.waiting(rdzv_id)]
        )

    def trouble_of(self, rdzv_id: str) -> str:
        return self._sentence(self.waiting(rdzv_id))

    def _sentence(self, waiting: Sequence[str]) -> str:
        if self._since_ms is None:
            return ""
        text = (
            f"the store has been away for {duration(self.away_ms)} ({self._why}); "
            "workers continue, nothing new is decided"
        )
        if waiting:
            text += f"; not stored yet: {', '.join(waiting[:MOST_NAMED])}"
        if (more := len(waiting) - MOST_NAMED) > 0:
            text += f" and {counted(more, 'more decision')}"
        return text


_WORDS: dict[type, str] = {
    commands.Join: "{} joins",
    commands.Resume: "{} returns with its workers",
    commands.Fail: "workers of {} have failed",
    commands.Succeed: "workers of {} have succeeded",
    commands.Leave: "{} leaves",
    commands.MarkLost: "{} is lost",
    commands.MarkAway: "{} is away",
    commands.MarkBack: "{} is back",
    commands.ReportStuck: "workers of {} survive SIGKILL",
    commands.ReportStoreHost: "the store host on {} has failed",
    commands.Decline: "{} declines",
    commands.Place: "the nodes that it is placed on",
    commands.Withdraw: "the nodes that it is placed on",
    commands.Tick: "timers",
}
"""Commands that may wait for the store. The callers of all others do not wait."""


def _words(command: commands.Command) -> str:
    return _WORDS.get(type(command), "").format(getattr(command, "node_id", ""))


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
        """Store `data`, the encoded form of `value`, and then update the known value."""
        try:
            self.revision = await self._store.swap_document(self._name, data, self.revision)
        except RevisionConflictError as error:
            await self.load()
            raise errors.StoreRefusedError(f"{error}; try again") from error
        except errors.RendezvousConnectionError:
            await self.load()
            raise
        self.value = value


def unreadable(name: str, error: Exception) -> errors.RendezvousStateError:
    return errors.RendezvousStateError(
        f"the record {name} cannot be read: {error}; it was left untouched. Restore it from a "
        "backup"
    )
