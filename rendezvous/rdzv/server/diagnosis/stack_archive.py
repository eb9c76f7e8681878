"""Keeps the stacks of the latest hangs across restarts of the server.

The stacks of each hang form one key-value record in one of a fixed number of slots, so that the
total size is bounded. A job that has used its share of the slots replaces its own oldest record;
otherwise, if no slot is free, the oldest record of all jobs is replaced. Nothing depends on the
records: a record that cannot be read is logged and overwritten.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import msgspec

from rdzv.core.evidence.stacks import CollectedStacks
from rdzv.server.engine.store_access import KeyValueRecord, StoreAccess
from rdzv.stores.base import DOCUMENT_BYTES
from rdzv.structs import replace, struct

log = logging.getLogger("rdzv.stacks")

PLACES = tuple(f"stacks-{letter}" for letter in "abcdefghijklmnop")
"""The names of the records. Each record takes at most `STACK_BYTES` plus the JSON
overhead."""
PLACES_OF_JOB = 4


class _Document(msgspec.Struct, frozen=True):
    report: CollectedStacks | None = None


@struct(frozen=True)
class _Place:
    name: str
    rdzv_id: str = ""
    run: str = ""
    round: int = 0
    at_ms: int = 0


class StackArchive:
    """The stacks that a server keeps. They are read from the store on first use."""

    def __init__(self, store: StoreAccess) -> None:
        self._store = store
        self._documents = {
            name: KeyValueRecord(store, name, partial(_read, name)) for name in PLACES
        }
        self._lock = asyncio.Lock()

    async def keep(self, report: CollectedStacks) -> None:
        """Store stacks; each round keeps only its latest."""
        async with self._lock:
            place = _place_for(report, await self._known())
            await self._write(place, report)

    async def rounds(self, rdzv_id: str, run: str) -> tuple[int, ...]:
        async with self._lock:
            known = (await self._known()).values()
            found = {p.round for p in known if (p.rdzv_id, p.run) == (rdzv_id, run)}
            return tuple(sorted(found))

    async def find(self, rdzv_id: str, run: str, round_: int) -> CollectedStacks | None:
        async with self._lock:
            for place in (await self._known()).values():
                if (place.rdzv_id, place.run, place.round) == (rdzv_id, run, round_):
                    stored = await self._store.load_document(place.name)
                    return None if stored is None else _decoded(place.name, stored[0])
        return None

    async def forget(self, rdzv_id: str) -> None:
        async with self._lock:
            for place in tuple((await self._known()).values()):
                if place.rdzv_id == rdzv_id:
                    await self._write(place, None)

    async def _known(self) -> dict[str, _Place]:
        return {name: await document.known() for name, document in self._documents.items()}

    async def _write(self, place: _Place, report: CollectedStacks | None) -> None:
        document = self._documents[place.name]
        await document.swap(_described(place.name, report), _encoded(report))


def _read(name: str, data: bytes) -> _Place:
    return _described(name, _decoded(name, data))


def _described(name: str, report: CollectedStacks | None) -> _Place:
    if report is None:
        return _Place(name)
    return _Place(name, report.rdzv_id, report.run, report.round, report.at_ms)


def _encoded(report: CollectedStacks | None) -> bytes:
    """Encode a record; if the stacks do not fit, include only the first ones."""
    while True:
        data = msgspec.json.encode(_Document(report))
        if len(data) <= DOCUMENT_BYTES or report is None or not report.stacks:
            return data
        kept = report.stacks[: len(report.stacks) // 2]
        left_out = report.left_out + len(report.stacks) - len(kept)
        report = replace(report, stacks=kept, left_out=left_out)


def _decoded(name: str, data: bytes) -> CollectedStacks | None:
    try:
        return msgspec.json.decode(data, type=_Document).report
    except msgspec.DecodeError as error:
        log.warning("cannot read the record %s (%s); it will be overwritten", name, error)
        return None


def _place_for(report: CollectedStacks, places: dict[str, _Place]) -> _Place:
    own = [place for place in places.values() if place.rdzv_id == report.rdzv_id]
    same = [p for p in own if (p.run, p.round) == (report.run, report.round)]
    if same:
        return same[0]
    if len(own) >= PLACES_OF_JOB:
        return min(own, key=lambda place: place.at_ms)
    return min(places.values(), key=lambda place: (bool(place.rdzv_id), place.at_ms))
