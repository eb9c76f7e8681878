"""Backups: the entire contents of a store, as lines of JSON that any kind of store can restore.

A backup consists of a header, the documents, every job followed by its history, and a trailer with
counts and the SHA-256 of all preceding bytes. This makes it readable for people, and a file that
was truncated, modified or assembled by hand is detected. Each job and each document reflects one
commit, but they do not all reflect the same moment.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from typing import BinaryIO, Protocol, runtime_checkable

import msgspec

from rdzv.core.model import Membership
from rdzv.errors import (
    InvalidRequestError,
    LimitExceededError,
    RendezvousConnectionError,
    RendezvousStateError,
)
from rdzv.stores import codec
from rdzv.stores.base import Record, Store, Stored, check_document
from rdzv.structs import struct

FORMAT = 3
"""Incremented whenever another version would misread a file or silently drop part of it. Others are
refused."""

_EVERY_ROW = 2**31 - 1
_MOST_READS = 10
"""The maximum number of attempts to read a job that keeps changing."""
_MOST_LINE_BYTES = 64 * 1024 * 1024
"""The maximum length of a line, far above the membership of the largest job. A file that is not a
backup may not contain any line ends."""
_ROWS_AT_ONCE = 100
"""The number of history rows restored in one commit, because some stores limit their transactions.
"""


class BackupHeader(msgspec.Struct, frozen=True, tag_field="kind", tag="backup"):
    """The first line: where the data was stored, which server wrote the backup, and when."""

    source: str
    leadership: int
    """The leadership number of the server that wrote the backup; a restored store issues higher
    numbers."""
    unix_ms: int
    format: int = FORMAT


class DocumentLine(msgspec.Struct, frozen=True, tag_field="kind", tag="document"):
    """One document, with its bytes in base64 because a store does not interpret them."""

    name: str
    data: bytes


class BackupJobLine(msgspec.Struct, frozen=True, tag_field="kind", tag="job"):
    """One job as encoded by `codec`."""

    rdzv_id: str
    stored: msgspec.Raw


class EventLine(msgspec.Struct, frozen=True, tag_field="kind", tag="event"):
    """One row of the preceding job's history."""

    record: Record


class Trailer(msgspec.Struct, frozen=True, tag_field="kind", tag="end"):
    """The last line, with counts and the hash of all lines before it."""

    jobs: int
    events: int
    documents: int
    sha256: str


@struct(frozen=True)
class Summary:
    """A summary of a complete, unmodified file."""

    header: BackupHeader
    trailer: Trailer


@runtime_checkable
class AllOrNothing(Protocol):
    """A store that can combine many writes in one commit."""

    def all_or_nothing(self) -> AbstractAsyncContextManager[None]:
        """Commit all writes of the body at once. If the body fails, none of them is written."""
        ...


class _AnyLine(msgspec.Struct, frozen=True):
    """The header fields common to all versions."""

    kind: str
    format: int


_Line = BackupHeader | DocumentLine | BackupJobLine | EventLine | Trailer
_encoder = msgspec.json.Encoder()
_line_decoder: msgspec.json.Decoder[_Line] = msgspec.json.Decoder(_Line)
_any_decoder = msgspec.json.Decoder(_AnyLine)


def _trailer(passed: Counter[type[_Line]], digest: hashlib._Hash) -> Trailer:
    jobs, events, documents = passed[BackupJobLine], passed[EventLine], passed[DocumentLine]
    return Trailer(jobs, events, documents, digest.hexdigest())


# ------------------------------------------------------------------------------------ writing


async def lines(store: Store, header: BackupHeader) -> AsyncIterator[bytes]:
    """Yield the lines of a backup, including their line ends.

    Only one job at a time is held in memory. The backup contains only committed data, without
    history that is still waiting for a commit.
    """
    passed, digest = Counter[type[_Line]](), hashlib.sha256()
    async for line in _contents(store, header):
        data = written_line(line)
        passed[type(line)] += 1
        digest.update(data)
        yield data
    yield written_line(_trailer(passed, digest))


async def _contents(store: Store, header: BackupHeader) -> AsyncIterator[_Line]:
    yield header
    for name in await store.list_documents():
        if held := await store.load_document(name):
            yield DocumentLine(name, held[0])
    for rdzv_id in await store.list():
        if (found := await _read(store, rdzv_id)) is not None:
            stored, rows = found
            yield BackupJobLine(rdzv_id, msgspec.Raw(codec.encode(stored.membership)))
            for row in rows:
                yield EventLine(row)


def written_line(line: _Line) -> bytes:
    return _encoder.encode(line) + b"\n"


async def _read(store: Store, rdzv_id: str) -> tuple[Stored, tuple[Record, ...]] | None:
    """Read a job and its history as of one commit, or return None if it has since been deleted."""
    before = await store.load(rdzv_id)
    for _ in range(_MOST_READS):
        rows = await store.history(rdzv_id, _EVERY_ROW)
        after = await store.load(rdzv_id)
        if after is None:
            return None
        if before is not None and before.revision == after.revision:
            return after, rows
        before = after
    raise RendezvousConnectionError(
        f"job {rdzv_id} changes faster than it can be read; make the backup again in a moment"
    )


# ------------------------------------------------------------------------------------ reading


def verify(file: BinaryIO, name: str) -> Summary:
    """Read a backup to its end, job by job, and return a summary. `name` is used in errors."""
    header: BackupHeader | None = None
    trailer: Trailer | None = None
    for line in _lines_of(file, name):
        match line:
            case BackupHeader():
                header = line
            case DocumentLine():
                _check_document(line, name)
            case BackupJobLine():
                _membership(line, name)
            case Trailer():
                trailer = line
    assert header is not None and trailer is not None, "_lines_of refuses a file without them"
    return Summary(header, trailer)


def _lines_of(file: BinaryIO, name: str) -> Iterator[_Line]:
    """Yield the lines of a backup, checking their order, number and hash."""
    passed, digest = Counter[type[_Line]](), hashlib.sha256()
    jobs, documents, job = set[str](), set[str](), ""
    while not passed[Trailer]:
        data = file.readline(_MOST_LINE_BYTES)
        if not passed:
            _check_version(data, name)
        elif not data.endswith(b"\n"):
            raise _refused(name, "it ends too early: it was cut", "take the whole file")
        line = read_line(data, name)
        match line:
            case DocumentLine():
                if line.name in documents:
                    raise _refused(name, f"document {line.name} is in it twice")
                documents.add(line.name)
            case BackupJobLine():
                if line.rdzv_id in jobs:
                    raise _refused(name, f"job {line.rdzv_id} is in it twice")
                job = line.rdzv_id
                jobs.add(job)
            case EventLine():
                of = line.record.rdzv_id
                if not jobs or of != job:
                    raise _refused(name, f"history of job {of} is not below that job")
            case BackupHeader():
                if passed:
                    raise _refused(name, "it holds more than one backup")
            case Trailer():
                if line != _trailer(passed, digest):
                    raise _refused(name, "it was changed: its last line does not match")
        passed[type(line)] += 1
        digest.update(data)
        yield line
    if file.read(1):
        raise _refused(name, "there is data after its last line")


def _check_version(data: bytes, name: str) -> None:
    try:
        found = _any_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = _AnyLine("", 0)
    if found.kind != "backup":
        raise _refused(name, "it is no backup", "give a file that `rdzvctl backup` has written")
    if found.format != FORMAT:
        raise _refused(
            name,
            f"it has format {found.format}, and this rdzvd reads only {FORMAT}",
            "use the rdzvd version that wrote it",
        )


def read_line(data: bytes, name: str) -> _Line:
    """Read one line of the backup file `name`, or raise `RendezvousStateError` if it is damaged."""
    try:
        return _line_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _refused(name, f"a line of it cannot be read: {error}") from error


def _membership(line: BackupJobLine, name: str) -> Membership:
    membership = codec.decode(bytes(line.stored), f"job {line.rdzv_id} in {name}")
    if membership.rdzv_id != line.rdzv_id:
        raise _refused(name, f"job {line.rdzv_id} is named {membership.rdzv_id} in its data")
    return membership


def _check_document(line: DocumentLine, name: str) -> None:
    try:
        check_document(line.name, line.data)
    except (InvalidRequestError, LimitExceededError) as error:
        raise _refused(name, str(error)) from error


def _refused(name: str, reason: str, remedy: str = "take another backup") -> RendezvousStateError:
    return RendezvousStateError(f"{name} cannot be restored: {reason}; {remedy}")


# ------------------------------------------------------------------------------------ restoring


async def restore(store: Store, file: BinaryIO, name: str) -> Summary:
    """Fill an empty store from a backup file that can be read twice, and return a summary.

    The whole file is verified first. If the file or the store is refused, nothing is written. The
    store's leadership numbers continue above that of the server that wrote the file.

    Raises:
        RendezvousStateError: the file is refused.
        InvalidRequestError: the store is not empty.
        RendezvousConnectionError: the store failed, and may contain part of the file.

    """
    summary = verify(file, name)
    jobs, documents = await store.list(), await store.list_documents()
    if jobs or documents:
        held = f"{len(jobs)} job(s)" if jobs else f"{len(documents)} document(s)"
        raise InvalidRequestError(
            f"{store.place} holds {held} already, and a backup is restored into an "
            "empty store only; move the old data away, or give another place"
        )
    if isinstance(store, AllOrNothing):
        async with store.all_or_nothing():
            await _fill(store, file, name, summary.header)
        return summary
    try:
        await _fill(store, file, name, summary.header)
    except RendezvousConnectionError as error:
        raise RendezvousConnectionError(
            f"{store.place} may hold a part of {name} now: {error}; empty it, and restore again"
        ) from error
    return summary


async def _fill(store: Store, file: BinaryIO, name: str, header: BackupHeader) -> None:
    # This comes first so that leadership numbers never decrease, even if the store is only partly
    # filled.
    await store.take_over(at_least=header.leadership)
    file.seek(0)
    rows: list[Record] = []
    for line in _lines_of(file, name):
        if rows and (len(rows) == _ROWS_AT_ONCE or not isinstance(line, EventLine)):
            await store.append(rows)
            rows = []
        match line:
            case DocumentLine():
                await store.swap_document(line.name, line.data, 0)
            case BackupJobLine():
                await store.compare_and_swap(line.rdzv_id, _membership(line, name), 0)
            case EventLine():
                rows.append(line.record)


def made_at(summary: Summary) -> str:
    """Format the time of a backup for display, such as `2026-05-04 12:00:00 UTC`."""
    made = time.gmtime(summary.header.unix_ms / 1000)
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", made)
