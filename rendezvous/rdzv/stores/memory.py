"""A store that is lost when its process ends, for tests and for `--standalone`."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from rdzv.core.model import Membership
from rdzv.errors import StoreRefusedError
from rdzv.stores import codec
from rdzv.stores.base import (
    HISTORY_ROWS,
    Page,
    Record,
    RevisionConflictError,
    Stored,
    check_document,
    read,
)


class MemoryStore:
    """Keeps encoded memberships in a dict, so that reads return exactly what was written."""

    def __init__(self, history_rows: int = HISTORY_ROWS) -> None:
        self._history_rows = history_rows
        self.jobs: dict[str, tuple[bytes, int]] = {}
        """Each job's encoded membership, and its revision."""
        self.successes: dict[str, list[bytes]] = {}
        """The nodes that have succeeded since each job's membership was encoded."""
        self._written: dict[str, Membership] = {}
        self.records: dict[str, deque[Record]] = {}
        self.documents: dict[str, tuple[bytes, int]] = {}
        """Each document's content and revision."""
        self._leadership = 0
        self._closed = False

    @property
    def place(self) -> str:
        return "memory"

    async def load(self, rdzv_id: str) -> Stored | None:
        self._check_open()
        if (held := self.jobs.get(rdzv_id)) is None:
            return None
        return self._decoded(rdzv_id, *held)

    async def compare_and_swap(
        self,
        rdzv_id: str,
        membership: Membership,
        revision: int,
        records: Sequence[Record] = (),
    ) -> int:
        self._check_revision(f"job {rdzv_id}", self.jobs.get(rdzv_id), revision)
        later = codec.later_successes(self._written.get(rdzv_id), membership)
        if later:
            self.jobs[rdzv_id] = (self.jobs[rdzv_id][0], revision + 1)
            self.successes.setdefault(rdzv_id, []).append(codec.encode_nodes(later))
        else:
            self.jobs[rdzv_id] = (codec.encode(membership), revision + 1)
            self.successes.pop(rdzv_id, None)
        if codec.may_have_more(membership):
            self._written[rdzv_id] = membership
        else:
            self._written.pop(rdzv_id, None)
        self._record(records)
        return revision + 1

    async def delete(self, rdzv_id: str, revision: int) -> None:
        self._check_revision(f"job {rdzv_id}", self.jobs.get(rdzv_id), revision)
        if revision:
            del self.jobs[rdzv_id]
            self.successes.pop(rdzv_id, None)
            self._written.pop(rdzv_id, None)
            self.records.pop(rdzv_id, None)

    async def list(self) -> tuple[str, ...]:
        self._check_open()
        return tuple(sorted(self.jobs))

    async def pages(self) -> AsyncGenerator[Page, None]:
        self._check_open()
        page = [
            (name, read(partial(self._decoded, name, *held)))
            for name, held in sorted(self.jobs.items())
        ]
        if page:
            yield page

    async def append(self, records: Sequence[Record]) -> None:
        self._check_open()
        self._record(records)

    async def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        self._check_open()
        rows = tuple(self.records.get(rdzv_id, ()))
        return rows[max(len(rows) - limit, 0) :]

    async def load_document(self, name: str) -> tuple[bytes, int] | None:
        self._check_open()
        return self.documents.get(name)

    async def swap_document(self, name: str, data: bytes, revision: int) -> int:
        check_document(name, data)
        self._check_revision(f"document {name}", self.documents.get(name), revision)
        self.documents[name] = (data, revision + 1)
        return revision + 1

    async def list_documents(self) -> tuple[str, ...]:
        self._check_open()
        return tuple(sorted(self.documents))

    async def take_over(self, at_least: int = 0) -> int:
        self._check_open()
        self._leadership = max(self._leadership + 1, at_least)
        return self._leadership

    async def close(self) -> None:
        self._closed = True

    def _decoded(self, rdzv_id: str, data: bytes, revision: int) -> Stored:
        where = f"job {rdzv_id} in memory"
        membership = codec.decode(data, where)
        later = self.successes.get(rdzv_id, ())
        return Stored(codec.with_successes(membership, later, where), revision)

    def _record(self, records: Sequence[Record]) -> None:
        for record in records:
            rows = self.records.setdefault(record.rdzv_id, deque(maxlen=self._history_rows))
            rows.append(record)

    def _check_revision(self, what: str, held: tuple[bytes, int] | None, revision: int) -> None:
        self._check_open()
        _, number = held or (b"", 0)
        if number != revision:
            raise RevisionConflictError(
                f"{what} has revision {number}, not {revision}: another server has written it"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise StoreRefusedError("the store is closed: this server is stopping")
