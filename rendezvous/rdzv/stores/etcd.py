"""The store for replicated servers, which keeps its data in an etcd v3 cluster.

Below the prefix, `jobs/ID` contains a membership, `successes/ID/...` the nodes that have succeeded
since it was written, `history/ID/...` a job's history records, `documents/NAME` a document,
`leadership` the number of the latest takeover, and `leader` the current leader. Every write is one
transaction, on the condition that the leader key is the one created by this server's term. Once
another server leads, nothing that this one sends is written, however late it arrives.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
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
    read,
)
from rdzv.stores.election_session import Fence, read_leader, with_leadership
from rdzv.stores.etcd_client import MAX_OPERATIONS, EtcdClient
from rdzv.stores.etcd_wire import KeyValue, delete, found_by, get, modified, put
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

_SLOW_BYTES = 64 * 1024
"""Larger stored values are inflated in a thread, ..."""

_SLOW_PARTICIPANTS = 256
"""... and memberships with more participants are deflated in one."""

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


class EtcdStore:
    """Memberships, history, documents and leadership in etcd, for one term of one server.

    `fence` is the result of `Election.campaign`; without a fence, the store is read-only. The
    client belongs to the caller. A revision is the mod_revision of a key: it only increases, in
    steps of any size, and is never reused, even if the key is deleted in between.
    """

    def __init__(
        self, client: EtcdClient, fence: Fence | None = None, history_rows: int = HISTORY_ROWS
    ) -> None:
        self._client = client
        self._fence = fence
        self._prefix = client.config.prefix
        self._history_rows = history_rows
        self._closed = False
        self._batches = 0
        """The number of history keys written in this term. Together with the term, it orders them.
        """
        self._unpruned: dict[str, int] = {}
        """The number of rows written for each job since its history was last pruned."""
        self._held: dict[str, _Held] = {}
        """What is in etcd of jobs of which some nodes have succeeded."""

    @property
    def place(self) -> str:
        return self._client.config.place

    async def load(self, rdzv_id: str) -> Stored | None:
        self._check_open()
        if (found := await self._read(rdzv_id)) is None:
            return None
        stored, held = found
        known = self._held.get(rdzv_id)
        if held.later and (known is None or known.revision < held.revision):
            self._held[rdzv_id] = held
        return stored

    async def _read(self, rdzv_id: str) -> tuple[Stored, _Held] | None:
        kv, revision = await self._client.get(self._job_key(rdzv_id))
        if kv is None:
            return None
        where = f"job {rdzv_id} in {self.place}"
        if len(kv.value) < _SLOW_BYTES:
            membership = _decode(kv.value, where)
        else:
            membership = await asyncio.to_thread(_decode, kv.value, where)
        later: list[KeyValue] = []
        if codec.may_have_more(membership):
            folder = _below(self._successes_folder(rdzv_id))
            pages = self._client.scan(*folder, page=KEYS_PER_PAGE, revision=revision)
            async with aclosing(pages):
                async for page in pages:
                    later += page
            membership = codec.with_successes(membership, [kv.value for kv in later], where)
        held = _Held(kv.mod_revision, len(later), later[-1].mod_revision if later else 0)
        return Stored(membership, held.revision), held

    async def compare_and_swap(
        self,
        rdzv_id: str,
        membership: Membership,
        revision: int,
        records: Sequence[Record] = (),
    ) -> int:
        """Write a membership and its records in one commit, and return the new revision.

        Raises:
            DeposedError: this server is no longer the leader; nothing was written.
            RevisionConflictError: the job has another revision; nothing was written.
            StoreRefusedError: nothing was written.
            RendezvousConnectionError: the data may have been written, or may still be: the write
                may be in progress when it is read back, so that it or the next write is a conflict.

        """
        fence = self._check_fence()
        held = self._held_at(rdzv_id, revision)
        later = codec.later_successes(held.written, membership)
        job: tuple[pb.RequestOp, ...]
        if later:
            job = (put(self._success_key(rdzv_id, held.later), codec.encode_nodes(later)),)
        else:
            job = (put(self._job_key(rdzv_id), await self._encoded(membership)),)
            if held.later:
                job += (delete(*_below(self._successes_folder(rdzv_id))),)
        plan = await self._plan(fence, records)
        # History that exceeds the transaction is written before it, because no guarantee depends on
        # history.
        *before, history = plan.transactions(MAX_OPERATIONS - len(job))
        for operations in before:
            await self._write(fence, operations)
        written = await self._swap_job(fence, rdzv_id, held, (*job, *history))
        self._held.pop(rdzv_id, None)
        if later:
            self._held[rdzv_id] = _Held(held.base, held.later + 1, written, membership)
        elif codec.may_have_more(membership):
            self._held[rdzv_id] = _Held(written, written=membership)
        self._account(plan)
        return written

    async def delete(self, rdzv_id: str, revision: int) -> None:
        """Delete a job and its history in one commit. Raises the errors of `compare_and_swap`."""
        fence = self._check_fence()
        held = self._held_at(rdzv_id, revision)
        operations = (
            delete(self._job_key(rdzv_id)),
            delete(*_below(self._successes_folder(rdzv_id))),
            delete(*_below(self._history_folder(rdzv_id))),
        )
        await self._swap_job(fence, rdzv_id, held, operations if revision else ())
        self._held.pop(rdzv_id, None)
        self._unpruned.pop(rdzv_id, None)

    async def list(self) -> tuple[str, ...]:
        return await self._names(f"{self._prefix}/jobs/")

    async def pages(self) -> AsyncGenerator[Page, None]:
        self._check_open()
        folder = f"{self._prefix}/jobs/"
        async with aclosing(self._client.scan(*_below(folder), page=JOBS_PER_PAGE)) as pages:
            async for page in pages:
                if sum(len(kv.value) for kv in page) < _SLOW_BYTES:
                    jobs = self._page(folder, page)
                else:
                    jobs = await asyncio.to_thread(self._page, folder, page)
                yield [job for name, found in jobs if (job := await self._whole(name, found))]

    def _page(self, folder: str, page: Iterable[KeyValue]) -> Page:
        named = ((unquote(kv.key.decode().removeprefix(folder)), kv) for kv in page)
        return [(name, read(partial(self._decoded, name, kv))) for name, kv in named]

    def _decoded(self, rdzv_id: str, kv: KeyValue) -> Stored:
        return Stored(_decode(kv.value, f"job {rdzv_id} in {self.place}"), kv.mod_revision)

    async def _whole(self, rdzv_id: str, found: Read) -> tuple[str, Read] | None:
        """Return a job of a page, read once more if it may have later successes."""
        if isinstance(found, RendezvousStateError) or not codec.may_have_more(found.membership):
            return rdzv_id, found
        try:
            again = await self._read(rdzv_id)
        except RendezvousStateError as error:
            return rdzv_id, error
        return (rdzv_id, again[0]) if again else None

    async def append(self, records: Sequence[Record]) -> None:
        """Write records on their own, without a membership.

        A large number takes several commits.
        """
        fence = self._check_fence()
        plan = await self._plan(fence, records)
        for operations in plan.transactions(MAX_OPERATIONS):
            if operations:
                await self._write(fence, operations)
        self._account(plan)

    async def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        self._check_open()
        wanted = min(limit, self._history_rows)
        newest_first: list[Record] = []
        pages = self._client.scan(
            *_below(self._history_folder(rdzv_id)),
            newest_first=True,
            page=max(min(BATCHES_PER_PAGE, wanted), 1),
        )
        async with aclosing(pages):
            async for page in pages:
                for kv in page:
                    newest_first += reversed(self._records(rdzv_id, kv))
                if len(newest_first) >= wanted:
                    break
        return tuple(reversed(newest_first[: max(wanted, 0)]))

    async def load_document(self, name: str) -> tuple[bytes, int] | None:
        self._check_open()
        kv, _ = await self._client.get(self._document_key(name))
        return (kv.value, kv.mod_revision) if kv else None

    async def swap_document(self, name: str, data: bytes, revision: int) -> int:
        check_document(name, data)
        fence = self._check_fence()
        key = self._document_key(name)
        unchanged = (modified(key, revision),)
        return await self._swap(fence, f"document {name}", key, unchanged, (put(key, data),))

    async def list_documents(self) -> tuple[str, ...]:
        return await self._names(f"{self._prefix}/documents/")

    async def take_over(self, at_least: int = 0) -> int:
        """Return a leadership number above all that this store has issued, and at least `at_least`.

        The number is written in one commit with the leader key, so that all servers see both.

        Raises:
            DeposedError: this server is no longer the leader; nothing was written.

        """
        fence = self._check_fence()
        key = f"{self._prefix}/leadership".encode()
        while True:
            held, _ = await self._client.get(key)
            leader, _ = await self._client.get(fence.key)
            if leader is None or not fence.matches(leader):
                raise self._deposed(leader)
            number = max(self._number(held) + 1, at_least)
            done = await self._client.txn(
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

    async def _names(self, folder: str) -> tuple[str, ...]:
        self._check_open()
        names: list[str] = []
        pages = self._client.scan(*_below(folder), keys_only=True, page=KEYS_PER_PAGE)
        async with aclosing(pages):
            async for page in pages:
                names += (unquote(kv.key.decode().removeprefix(folder)) for kv in page)
        return tuple(sorted(names))

    # ---------------------------------------------------------------- writing

    def _held_at(self, rdzv_id: str, revision: int) -> _Held:
        held = self._held.get(rdzv_id)
        return held if held and held.revision == revision else _Held(revision)

    async def _swap_job(
        self, fence: Fence, rdzv_id: str, held: _Held, operations: Sequence[pb.RequestOp]
    ) -> int:
        key = self._job_key(rdzv_id)
        unchanged = (modified(key, held.base), modified(self._success_key(rdzv_id, held.later), 0))
        return await self._swap(fence, f"job {rdzv_id}", key, unchanged, operations)

    async def _swap(
        self,
        fence: Fence,
        what: str,
        key: bytes,
        unchanged: Sequence[pb.Compare],
        operations: Sequence[pb.RequestOp],
    ) -> int:
        """Apply operations if this server leads and nothing has changed; return the revision."""
        done = await self._client.txn(
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

    async def _encoded(self, membership: Membership) -> bytes:
        if membership.round is None or len(membership.round.participants) < _SLOW_PARTICIPANTS:
            return _encode(membership)
        # Deflating a large job takes longer than the event loop may be blocked.
        return await asyncio.to_thread(_encode, membership)

    async def _write(self, fence: Fence, operations: Sequence[pb.RequestOp]) -> None:
        done = await self._client.txn(fence.conditions, operations, (get(fence.key),))
        if not done.succeeded:
            raise self._deposed(*found_by(done))

    def _refused(self, done: pb.TxnResponse, fence: Fence) -> KeyValue | None:
        """Return the key after a failed transaction; raise an error if the fence made it fail."""
        leader, held = found_by(done)
        if not fence.matches(leader):
            raise self._deposed(leader)
        return held

    def _deposed(self, leader: KeyValue | None) -> DeposedError:
        by = read_leader(leader) if leader else None
        now = "nobody leads now" if by is None or by.deposed else f"{by.address} leads now"
        return DeposedError(
            f"{self.place}: this server no longer leads, {now}; nothing was written"
        )

    def _check_fence(self) -> Fence:
        self._check_open()
        if self._fence is None:
            raise DeposedError(f"{self.place}: this server does not lead, and only reads")
        return self._fence

    def _check_open(self) -> None:
        if self._closed:
            raise StoreRefusedError("the store is closed: this server is stopping")

    # ---------------------------------------------------------------- history

    async def _plan(self, fence: Fence, records: Sequence[Record]) -> _Plan:
        """Plan how records are written, and which rows are deleted to make room for them."""
        by_job: defaultdict[str, list[Record]] = defaultdict(list)
        for record in records:
            by_job[record.rdzv_id].append(record)
        plan = _Plan()
        for rdzv_id, rows in by_job.items():
            folder = self._history_folder(rdzv_id)
            # A job not yet written to in this term may already exceed its limit.
            unpruned = self._unpruned.get(rdzv_id, self._history_rows) + len(rows)
            if unpruned > self._history_rows // 10:
                plan.operations += await self._pruning(folder, len(rows))
                unpruned = len(rows)
            plan.unpruned[rdzv_id] = unpruned
            for batch in in_batches(rows):
                self._batches += 1
                name = f"{folder}{fence.create_revision:016x}{self._batches:012x}-{len(batch)}"
                text = msgspec.json.encode([(r.unix_ms, r.run, r.name, r.data) for r in batch])
                plan.operations.append(put(name.encode(), codec.pack(text)))
        return plan

    def _account(self, plan: _Plan) -> None:
        """Record the row counts of a plan once it has been written."""
        self._unpruned |= plan.unpruned

    async def _pruning(self, folder: str, rows: int) -> tuple[pb.RequestOp, ...]:
        """Return the deletions needed to make room for `rows` new rows."""
        start, end = _below(folder)
        pages = self._client.scan(start, end, keys_only=True, newest_first=True, page=KEYS_PER_PAGE)
        async with aclosing(pages):
            async for page in pages:
                for kv in page:
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


class _Plan:
    """Operations that write history, and the row counts that result."""

    def __init__(self) -> None:
        self.operations: list[pb.RequestOp] = []
        self.unpruned: dict[str, int] = {}

    def transactions(self, room: int) -> list[list[pb.RequestOp]]:
        """Return the operations in order, in the fewest transactions possible but at least one."""
        size = 0
        transactions: list[list[pb.RequestOp]] = [[]]
        for operation in self.operations:
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


def _below(folder: str) -> tuple[bytes, bytes]:
    """Return the range of all keys below a folder whose name ends in a slash."""
    return folder.encode(), folder[:-1].encode() + b"0"


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


def _encode(membership: Membership) -> bytes:
    return codec.pack(codec.encode(membership))


def _decode(data: bytes, where: str) -> Membership:
    return codec.decode(codec.unpack(data, where), where)
