"""The store for replicated servers, which keeps its data in an etcd v3 cluster.

Below the prefix, `jobs/ID` contains a membership, `successes/ID/...` the nodes that have succeeded
since it was written, `history/ID/...` a job's history records, `documents/NAME` a document,
`leadership` the number of the latest takeover, and `leader` the current leader. Every write is one
transaction, on the condition that the leader key is the one created by this server's term. Once
another server leads, nothing that this one sends is written, however late it arrives.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import quote, unquote

import msgspec

from rdzv.core.model import Membership
from rdzv.errors import RendezvousStateError, StoreRefusedError
from rdzv.etcd import etcd_pb2 as pb
from rdzv.stores import codec
from rdzv.stores.base import (
    HISTORY_ROWS,
    DeposedError,
    Page,
    Read,
    Record,
    RevisionConflictError,
    Stored,
    check_document,
)
from rdzv.stores.election_session import FencingToken, read_leader, with_leadership
from rdzv.stores.etcd_client import (
    MAX_OPERATIONS,
    EtcdClient,
    KeyValue,
    below,
    delete,
    found_by,
    get,
    modified,
    put,
)
from rdzv.structs import struct

KEYS_PER_PAGE = 1_000
"""The number of keys in a page that contains no values; names are short."""

JOBS_PER_PAGE = 10
"""The number of jobs in a page. A membership may take 1.5 MiB, and a page must fit into one
response."""

BATCHES_PER_PAGE = 500
"""The number of keys in a page of history, which takes at most about 12 MiB and rarely more than
100 KiB."""

BATCH_BYTES = 24 * 1024
"""The maximum amount of data under one history key, unless a single record is larger."""

_HISTORY_BYTES = 256 * 1024
"""The maximum size of compressed history in one transaction; the membership needs the rest."""

_Rows = list[tuple[int, str, str, str]]
"""Rows of unix_ms, run, name and data; the job is part of the key."""


@struct(frozen=True)
class _Held:
    """What is known to be in etcd of a job: the keys whose revisions together are the job's."""

    base: int
    """The mod_revision of the membership, or 0 if there is none."""
    later: int = 0
    """The number of keys with later successes."""
    newest: int = 0
    """The mod_revision of the last of these keys."""
    written: Membership | None = None
    """The membership, if this term has written it."""

    @property
    def revision(self) -> int:
        return max(self.base, self.newest)


_rows_decoder: msgspec.json.Decoder[_Rows] = msgspec.json.Decoder(_Rows)
_number_decoder = msgspec.json.Decoder(int)

P = ParamSpec("P")
T = TypeVar("T")


def _in_thread(
    call: Callable[Concatenate[EtcdStore, P], T],
) -> Callable[Concatenate[EtcdStore, P], Coroutine[Any, Any, T]]:
    """Return a method for the event loop that makes a blocking call in a thread of the client."""

    async def calling(self: EtcdStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self._check_open()
        return await self._client.run(call, self, *args, **kwargs)

    update_wrapper(calling, call)
    return calling


class EtcdStore:
    """Memberships, history, documents and leadership in etcd, for one term of one server.

    `fence` is the result of `Election.campaign`; without a fence, the store is read-only. The
    client belongs to the caller; its calls, and all that is encoded, are made in its threads. A
    revision is the mod_revision of a key: it only increases, in steps of any size, and is never
    reused, even if the key is deleted in between.
    """

    def __init__(
        self,
        client: EtcdClient,
        fence: FencingToken | None = None,
        history_rows: int = HISTORY_ROWS,
    ) -> None:
        self._client = client
        self._fence = fence
        self._prefix = client.config.prefix
        self._history_rows = history_rows
        self._closed = False
        self._batches = itertools.count(1)
        """The numbers of the history keys of this term. Together with the term, they order them."""
        self._unpruned: dict[str, int] = {}
        """The number of rows written for each job since its history was last pruned."""
        self._held: dict[str, _Held] = {}
        """What is in etcd of jobs of which some nodes have succeeded."""

    @property
    def place(self) -> str:
        return self._client.config.place

    @_in_thread
    def load(self, rdzv_id: str) -> Stored | None:
        if (found := self._read(rdzv_id)) is None:
            return None
        stored, held = found
        known = self._held.get(rdzv_id)
        if held.later and (known is None or known.revision < held.revision):
            self._held[rdzv_id] = held
        return stored

    def _read(self, rdzv_id: str) -> tuple[Stored, _Held] | None:
        kv, revision = self._client.get(self._job_key(rdzv_id))
        if kv is None:
            return None
        where = f"job {rdzv_id} in {self.place}"
        membership = codec.decode(codec.unpack(kv.value, where), where)
        later: list[KeyValue] = []
        if codec.may_have_more(membership):
            folder = below(self._successes_folder(rdzv_id))
            pages = self._client.scan(*folder, page=KEYS_PER_PAGE, revision=revision)
            later = list(itertools.chain.from_iterable(pages))
            membership = codec.with_successes(membership, [kv.value for kv in later], where)
        held = _Held(kv.mod_revision, len(later), later[-1].mod_revision if later else 0)
        return Stored(membership, held.revision), held

    @_in_thread
    def compare_and_swap(
        self,
        rdzv_id: str,
        membership: Membership,
        revision: int,
        records: Sequence[Record] = (),
    ) -> int:
        fence = self._check_fence()
        held = self._held_at(rdzv_id, revision)
        later = codec.later_successes(held.written, membership)
        job: tuple[pb.RequestOp, ...]
        if later:
            job = (put(self._success_key(rdzv_id, held.later), codec.encode_nodes(later)),)
        else:
            job = (put(self._job_key(rdzv_id), codec.pack(codec.encode(membership))),)
            if held.later:
                job += (delete(*below(self._successes_folder(rdzv_id))),)
        rows, unpruned = self._plan(fence, records)
        # History that exceeds the transaction is written before it, because no guarantee depends on
        # history.
        *before, history = _transactions(rows, MAX_OPERATIONS - len(job))
        for operations in before:
            self._write(fence, operations)
        written = self._swap_job(fence, rdzv_id, held, (*job, *history))
        self._held.pop(rdzv_id, None)
        if later:
            self._held[rdzv_id] = _Held(held.base, held.later + 1, written, membership)
        elif codec.may_have_more(membership):
            self._held[rdzv_id] = _Held(written, written=membership)
        self._unpruned |= unpruned
        return written

    @_in_thread
    def delete(self, rdzv_id: str, revision: int) -> None:
        fence = self._check_fence()
        held = self._held_at(rdzv_id, revision)
        operations = (
            delete(self._job_key(rdzv_id)),
            delete(*below(self._successes_folder(rdzv_id))),
            delete(*below(self._history_folder(rdzv_id))),
        )
        self._swap_job(fence, rdzv_id, held, operations if revision else ())
        self._held.pop(rdzv_id, None)
        self._unpruned.pop(rdzv_id, None)

    @_in_thread
    def list(self) -> tuple[str, ...]:
        return self._names(f"{self._prefix}/jobs/")

    async def pages(self) -> AsyncGenerator[Page, None]:
        self._check_open()
        keys = self._client.scan(*below(f"{self._prefix}/jobs/"), page=JOBS_PER_PAGE)
        while (page := await self._client.run(self._page, keys)) is not None:
            yield page

    def _page(self, keys: Iterator[tuple[KeyValue, ...]]) -> Page | None:
        if (page := next(keys, None)) is None:
            return None
        jobs: list[tuple[str, Read]] = []
        for kv in page:
            rdzv_id = unquote(kv.key.decode().removeprefix(f"{self._prefix}/jobs/"))
            where = f"job {rdzv_id} in {self.place}"
            try:
                membership = codec.decode(codec.unpack(kv.value, where), where)
                if not codec.may_have_more(membership):
                    jobs.append((rdzv_id, Stored(membership, kv.mod_revision)))
                elif again := self._read(rdzv_id):
                    jobs.append((rdzv_id, again[0]))
            except RendezvousStateError as error:
                jobs.append((rdzv_id, error))
        return jobs

    @_in_thread
    def append(self, records: Sequence[Record]) -> None:
        fence = self._check_fence()
        rows, unpruned = self._plan(fence, records)
        for operations in _transactions(rows, MAX_OPERATIONS):
            if operations:
                self._write(fence, operations)
        self._unpruned |= unpruned

    @_in_thread
    def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        wanted = min(limit, self._history_rows)
        newest_first: list[Record] = []
        pages = self._client.scan(
            *below(self._history_folder(rdzv_id)),
            newest_first=True,
            page=max(min(BATCHES_PER_PAGE, wanted), 1),
        )
        for page in pages:
            for kv in page:
                newest_first += reversed(self._records(rdzv_id, kv))
            if len(newest_first) >= wanted:
                break
        return tuple(reversed(newest_first[: max(wanted, 0)]))

    @_in_thread
    def load_document(self, name: str) -> tuple[bytes, int] | None:
        kv, _ = self._client.get(self._document_key(name))
        return (kv.value, kv.mod_revision) if kv else None

    @_in_thread
    def swap_document(self, name: str, data: bytes, revision: int) -> int:
        check_document(name, data)
        fence = self._check_fence()
        key = self._document_key(name)
        unchanged = (modified(key, revision),)
        return self._swap(fence, f"document {name}", key, unchanged, (put(key, data),))

    @_in_thread
    def list_documents(self) -> tuple[str, ...]:
        return self._names(f"{self._prefix}/documents/")

    @_in_thread
    def take_over(self, at_least: int = 0) -> int:
        fence = self._check_fence()
        key = f"{self._prefix}/leadership".encode()
        while True:
            held, _ = self._client.get(key)
            leader, _ = self._client.get(fence.key)
            if leader is None or not fence.matches(leader):
                raise self._deposed(leader)
            number = max(self._number(held) + 1, at_least)
            done = self._client.txn(
                (*fence.conditions, modified(key, held.mod_revision if held else 0)),
                (
                    put(key, str(number).encode()),
                    put(fence.key, with_leadership(leader, number), lease=None),
                ),
                (get(fence.key), get(key)),
            )
            if done.succeeded:
                return number
            self._refused(done, fence)

    async def close(self) -> None:
        """Refuse all later calls. The client stays open because it belongs to the caller."""
        self._closed = True

    def _names(self, folder: str) -> tuple[str, ...]:
        pages = self._client.scan(*below(folder), keys_only=True, page=KEYS_PER_PAGE)
        keys = itertools.chain.from_iterable(pages)
        return tuple(sorted(unquote(kv.key.decode().removeprefix(folder)) for kv in keys))

    # ---------------------------------------------------------------- writing

    def _held_at(self, rdzv_id: str, revision: int) -> _Held:
        held = self._held.get(rdzv_id)
        return held if held and held.revision == revision else _Held(revision)

    def _swap_job(
        self, fence: FencingToken, rdzv_id: str, held: _Held, operations: Sequence[pb.RequestOp]
    ) -> int:
        key = self._job_key(rdzv_id)
        unchanged = (modified(key, held.base), modified(self._success_key(rdzv_id, held.later), 0))
        return self._swap(fence, f"job {rdzv_id}", key, unchanged, operations)

    def _swap(
        self,
        fence: FencingToken,
        what: str,
        key: bytes,
        unchanged: Sequence[pb.Compare],
        operations: Sequence[pb.RequestOp],
    ) -> int:
        """Apply operations if this server leads and nothing has changed; return the revision."""
        done = self._client.txn(
            (*fence.conditions, *unchanged), operations, (get(fence.key), get(key))
        )
        if not done.succeeded:
            held = self._refused(done, fence)
            found, named = held.mod_revision if held else 0, unchanged[0].mod_revision
            how = f"revision {found}, not {named}" if found != named else "later successes"
            raise RevisionConflictError(
                f"{what} in {self.place} has {how}: another server has written it"
            )
        return done.header.revision

    def _write(self, fence: FencingToken, operations: Sequence[pb.RequestOp]) -> None:
        done = self._client.txn(fence.conditions, operations, (get(fence.key),))
        if not done.succeeded:
            raise self._deposed(*found_by(done))

    def _refused(self, done: pb.TxnResponse, fence: FencingToken) -> KeyValue | None:
        """Return the key after a failed transaction; raise an error if the fence made it fail."""
        leader, held = found_by(done)
        if not fence.matches(leader):
            raise self._deposed(leader)
        return held

    def _deposed(self, leader: KeyValue | None) -> DeposedError:
        by = read_leader(leader) if leader else None
        now = "no server leads now" if by is None or by.deposed else f"{by.address} leads now"
        return DeposedError(
            f"{self.place}: this server no longer leads, {now}; nothing was written"
        )

    def _check_fence(self) -> FencingToken:
        if self._fence is None:
            raise DeposedError(f"{self.place}: this server does not lead, and only reads")
        return self._fence

    def _check_open(self) -> None:
        if self._closed:
            raise StoreRefusedError("the store is closed: this server is stopping")

    # ---------------------------------------------------------------- history

    def _plan(
        self, fence: FencingToken, records: Sequence[Record]
    ) -> tuple[Sequence[pb.RequestOp], dict[str, int]]:
        """Return the operations that write records and make room for them.

        Also return how many rows of each job will have been written since it was last pruned.
        """
        by_job: defaultdict[str, list[Record]] = defaultdict(list)
        for record in records:
            by_job[record.rdzv_id].append(record)
        operations: list[pb.RequestOp] = []
        unpruned: dict[str, int] = {}
        for rdzv_id, rows in by_job.items():
            folder = self._history_folder(rdzv_id)
            # A job not yet written to in this term may already exceed its limit.
            unpruned[rdzv_id] = self._unpruned.get(rdzv_id, self._history_rows) + len(rows)
            if unpruned[rdzv_id] > self._history_rows // 10:
                operations += self._pruning(folder, len(rows))
                unpruned[rdzv_id] = len(rows)
            for batch in in_batches(rows):
                number = next(self._batches)
                name = f"{folder}{fence.create_revision:016x}{number:012x}-{len(batch)}"
                text = msgspec.json.encode([(r.unix_ms, r.run, r.name, r.data) for r in batch])
                operations.append(put(name.encode(), codec.pack(text)))
        return operations, unpruned

    def _pruning(self, folder: str, rows: int) -> tuple[pb.RequestOp, ...]:
        start, end = below(folder)
        pages = self._client.scan(start, end, keys_only=True, newest_first=True, page=KEYS_PER_PAGE)
        for kv in itertools.chain.from_iterable(pages):
            if rows >= self._history_rows:
                return (delete(start, kv.key + b"\0"),)
            rows += _rows_in(kv.key)
        return ()

    def _records(self, rdzv_id: str, kv: KeyValue) -> tuple[Record, ...]:
        where = f"history of job {rdzv_id} in {self.place}"
        try:
            rows = _rows_decoder.decode(codec.unpack(kv.value, where))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RendezvousStateError(
                f"{where} cannot be read: {error}; it was left untouched. Delete the key "
                f"{kv.key.decode(errors='replace')}"
            ) from error
        return tuple(Record(unix_ms, rdzv_id, run, name, data) for unix_ms, run, name, data in rows)

    # ---------------------------------------------------------------- keys

    def _job_key(self, rdzv_id: str) -> bytes:
        return f"{self._prefix}/jobs/{_quoted(rdzv_id)}".encode()

    def _successes_folder(self, rdzv_id: str) -> str:
        return f"{self._prefix}/successes/{_quoted(rdzv_id)}/"

    def _success_key(self, rdzv_id: str, number: int) -> bytes:
        return f"{self._successes_folder(rdzv_id)}{number:08}".encode()

    def _document_key(self, name: str) -> bytes:
        return f"{self._prefix}/documents/{name}".encode()

    def _history_folder(self, rdzv_id: str) -> str:
        return f"{self._prefix}/history/{_quoted(rdzv_id)}/"

    def _number(self, held: KeyValue | None) -> int:
        try:
            return _number_decoder.decode(held.value) if held else 0
        except msgspec.DecodeError as error:
            raise RendezvousStateError(
                f"leadership in {self.place} cannot be read: {error}; it was left untouched. "
                "Put back a number above all that were given"
            ) from error


def _transactions(operations: Iterable[pb.RequestOp], room: int) -> list[list[pb.RequestOp]]:
    """Return the operations in order, in the fewest transactions possible but at least one."""
    size = 0
    transactions: list[list[pb.RequestOp]] = [[]]
    for operation in operations:
        weight = len(operation.request_put.value)
        if len(transactions[-1]) == room or size + weight > _HISTORY_BYTES:
            transactions.append([])
            size = 0
        transactions[-1].append(operation)
        size += weight
    return transactions


def _quoted(rdzv_id: str) -> str:
    """Encode a name so that no two names share a key and no key is below another."""
    return quote(rdzv_id, safe=":@")


def _rows_in(key: bytes) -> int:
    """Return the number of rows in a history key, which is at the end of its name."""
    rows = key.rpartition(b"-")[2]
    return int(rows) if rows.isdigit() else 1


def in_batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Split records into batches that each fit into one key."""
    batch: list[Record] = []
    size = 0
    for record in records:
        weight = len(record.data.encode()) + len(record.run) + len(record.name) + 64
        if batch and size + weight > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += weight
    if batch:
        yield batch
