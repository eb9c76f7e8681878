"""Reads torch's record of a worker's collectives, and reduces it to the fields that are compared.

This module is pure. The record is the JSON from torch's flight recorder: the latest collectives of
all groups (2,000 by default), and how far each group is. Sequence numbers start again when a group
is created again under the same name, or reconfigured; only what follows counts.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rdzv.core.evidence.collectives import DEFAULT_GROUP, CollectiveRecord, GroupRecord
from rdzv.structs import struct

ENTRIES = 64
"""The maximum number of one group's collectives that a rank keeps."""
ENTRIES_OF_ALL_RANKS = 4_096
"""The maximum number that all of a group's ranks keep together. With many ranks, each keeps few."""
LEAST_ENTRIES = 4
MAX_RECORDED = 25_000
"""The maximum number of collectives in a record; torch keeps 2,000 unless it is told otherwise."""
MAX_SIZES_BYTES = 64 << 10
"""The maximum length of a collective's sizes; longer ones are not shown."""
MAX_GROUPS = 32
MAX_TEXT_CHARS = 120


class _Entry(msgspec.Struct, frozen=True):
    pg_id: int = 0
    process_group: tuple[str, str] = ("", "")
    collective_seq_id: int = 0
    profiling_name: str = ""
    # Read only where they are shown, since a coalesced collective has thousands.
    input_sizes: msgspec.Raw = msgspec.Raw(b"[]")
    input_dtypes: msgspec.Raw = msgspec.Raw(b"[]")
    time_created_ns: int = 0
    duration_ms: float | None = None
    timeout_ms: int = 0
    state: str = ""
    retired: bool = False
    is_p2p: bool = False


class _Status(msgspec.Struct, frozen=True):
    last_completed_collective: int = 0


class _Trace(msgspec.Struct, frozen=True):
    entries: list[_Entry] = []
    pg_status: dict[str, _Status] = {}


_DECODER = msgspec.json.Decoder(_Trace, strict=False)


@struct(frozen=True)
class FlightRecord:
    """One worker's record."""

    groups: tuple[GroupRecord, ...]
    completed: int
    """A number that grows with each completed collective."""
    timed_out: bool = False
    """Whether it is waiting in a collective for longer than that collective's own timeout."""

    @property
    def waits(self) -> bool:
        return any(group.pending is not None for group in self.groups)

    @property
    def waiting_ms(self) -> int:
        """How long it has been waiting in its oldest pending collective; 0 if it is not waiting."""
        pending = (group.pending for group in self.groups)
        return max((one.age_ms for one in pending if one is not None), default=0)

    @property
    def place(self) -> str:
        """The pending collective of the first group that has one; empty if there is none."""
        pending = ((group, one) for group in self.groups if (one := group.pending) is not None)
        return next((f"{one.operation} #{one.sequence} of {g.name}" for g, one in pending), "")


@struct(frozen=True)
class GroupTimes:
    """When one worker entered a process group's collectives, by sequence number."""

    at_us: Mapping[int, int]
    """On this machine's monotonic clock, or before the collective's end, as negative numbers."""
    recorded_us: Mapping[int, int]
    """When each collective was recorded, on the monotonic clock."""
    by_duration: bool = False
    """Whether `at_us` is relative to the end, which is common to all ranks in a collective."""


def entries_for(world_size: int) -> int:
    return min(max(ENTRIES_OF_ALL_RANKS // max(world_size, 1), LEAST_ENTRIES), ENTRIES)


def read_record(
    text: bytes, now_ns: int, entries: int = ENTRIES, *, failed: bool = False
) -> FlightRecord:
    """Read a record, keeping the last `entries` of each group and the first that is not done.

    `now_ns` is the time of the record on the clock used for the entries' timestamps. With `failed`,
    the worker's latest collective counts as not done, although torch may record its failure as its
    end.
    """
    trace = _decoded(text)
    if failed and trace.entries:
        trace = msgspec.structs.replace(trace, entries=_with_latest_open(trace.entries))
    of_group = {"0": [], **_by_group(trace)}
    groups = [_group(name, of, now_ns, entries) for name, of in of_group.items()]
    completed = sum(max(one.last_completed_collective, 0) for one in trace.pg_status.values())
    timed_out = any(_timed_out(entry, now_ns) for of in of_group.values() for entry in of)
    return FlightRecord(tuple(groups[:MAX_GROUPS]), completed, timed_out)


def read_times(text: bytes, clocks_apart_ns: int) -> dict[str, GroupTimes]:
    """Read when a worker entered its collectives, by process group.

    `clocks_apart_ns` leads to the monotonic clock. NCCL's must have ended, with a duration.
    """
    found = {}
    for name, entries in list(_by_group(_decoded(text)).items())[:MAX_GROUPS]:
        nccl = any(entry.profiling_name.startswith("nccl:") for entry in entries)
        recorded_us = {
            entry.collective_seq_id: (entry.time_created_ns - clocks_apart_ns) // 1_000
            for entry in entries
            if not nccl or (entry.duration_ms is not None and _done(entry))
        }
        at_us = recorded_us
        if nccl:
            durations_ms = {entry.collective_seq_id: entry.duration_ms or 0 for entry in entries}
            at_us = {n: -round(durations_ms[n] * 1_000) for n in recorded_us}
        if recorded_us:
            found[name[:MAX_TEXT_CHARS]] = GroupTimes(at_us, recorded_us, nccl)
    return found


def _decoded(text: bytes) -> _Trace:
    # A job can make the smallest text expensive, and the agent reads it again and again.
    if text.count(b"{") > MAX_RECORDED:
        raise ValueError("its record of collectives is too large to be read in time")
    try:
        return _DECODER.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"cannot read torch's record of its collectives: {error}") from error


def _with_latest_open(entries: list[_Entry]) -> list[_Entry]:
    latest = max(entries, key=lambda entry: entry.time_created_ns)
    opened = msgspec.structs.replace(latest, state="scheduled", retired=False)
    return [opened if entry is latest else entry for entry in entries]


def _by_group(trace: _Trace) -> dict[str, list[_Entry]]:
    newest: dict[str, int] = {}
    for entry in trace.entries:
        name = entry.process_group[0]
        newest[name] = max(newest.get(name, 0), entry.pg_id)
    found: dict[str, list[_Entry]] = {}
    for entry in sorted(trace.entries, key=lambda entry: entry.time_created_ns):
        name = entry.process_group[0]
        if not entry.is_p2p and entry.pg_id == newest[name]:
            of = found.setdefault(name, [])
            if of and entry.collective_seq_id < of[-1].collective_seq_id:
                of.clear()  # The group was reconfigured.
            of.append(entry)
    return found


def _group(name: str, found: list[_Entry], now_ns: int, entries: int) -> GroupRecord:
    if not found:
        return GroupRecord(name, DEFAULT_GROUP)
    found = sorted(found, key=lambda entry: entry.collective_seq_id)
    kept = found[-entries:]
    first_open = next((entry for entry in found if not _done(entry)), None)
    if first_open is not None and first_open not in kept:
        kept = [first_open, *kept[1:]]
    return GroupRecord(
        group=name[:MAX_TEXT_CHARS],
        description=found[-1].process_group[1][:MAX_TEXT_CHARS],
        entered=found[-1].collective_seq_id,
        latest=tuple(_collective(entry, now_ns) for entry in kept),
    )


def _collective(entry: _Entry, now_ns: int) -> CollectiveRecord:
    return CollectiveRecord(
        sequence=entry.collective_seq_id,
        operation=entry.profiling_name.partition(":")[2][:MAX_TEXT_CHARS] or entry.profiling_name,
        sizes=_sizes(entry),
        done=_done(entry),
        age_ms=max((now_ns - entry.time_created_ns) // 1_000_000, 0),
    )


def _done(entry: _Entry) -> bool:
    """Return whether a collective is completed; gloo's stay `scheduled` until they are retired."""
    if entry.profiling_name.startswith("nccl:"):
        # A collective that is retired but not completed has timed out.
        return entry.state == "completed"
    return entry.retired or entry.state == "completed"


def _timed_out(entry: _Entry, now_ns: int) -> bool:
    if _done(entry) or not entry.timeout_ms:
        return False
    return now_ns - entry.time_created_ns >= entry.timeout_ms * 1_000_000


def _sizes(entry: _Entry) -> str:
    """Describe the input.

    >>> raw = msgspec.Raw(b'[[2, 3], [4]]'), msgspec.Raw(b'["Float", "Float"]')
    >>> _sizes(_Entry(input_sizes=raw[0], input_dtypes=raw[1]))
    '[2, 3] [4] Float'
    """
    if max(len(bytes(entry.input_sizes)), len(bytes(entry.input_dtypes))) > MAX_SIZES_BYTES:
        return ""
    try:
        sizes = msgspec.json.decode(entry.input_sizes, type=list[list[int]])
        dtypes = msgspec.json.decode(entry.input_dtypes, type=list[str])
    except msgspec.DecodeError as error:
        raise ValueError(f"cannot read torch's record of its collectives: {error}") from error
    shapes = " ".join(map(str, sizes))
    kinds = " ".join(dict.fromkeys(dtypes))
    return f"{shapes} {kinds}".strip()[:MAX_TEXT_CHARS]
