"""Reads what torch has recorded of a worker's collectives, and reduces it to what is compared.

Pure. The record is the JSON of torch's flight recorder: the latest collectives of all groups (2,000
by default), and how far each group is. Sequence numbers begin anew when a group is made again under
the same name; then only the newest of them counts.
"""

from __future__ import annotations

import msgspec

from rdzv.core.collectives import DEFAULT_GROUP, Collective, GroupRecord
from rdzv.structs import struct

ENTRIES = 64
"""The most collectives of one group that one rank keeps."""
ENTRIES_OF_ALL_RANKS = 4_096
"""The most that all ranks of a group keep together; of very many ranks, only the last few."""
LEAST_ENTRIES = 4
MAX_GROUPS = 32
MAX_TEXT_CHARS = 120


class _Entry(msgspec.Struct, frozen=True):
    pg_id: int = 0
    process_group: tuple[str, str] = ("", "")
    collective_seq_id: int = 0
    profiling_name: str = ""
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    time_created_ns: int = 0
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
    """What one worker has recorded."""

    groups: tuple[GroupRecord, ...]
    completed: int
    """A number that grows with each collective that is completed."""

    @property
    def waits(self) -> bool:
        """Whether the worker waits in a collective."""
        return any(group.pending is not None for group in self.groups)


def entries_for(world_size: int) -> int:
    """Return how many collectives of one group each of `world_size` ranks keeps.

    >>> entries_for(8), entries_for(256), entries_for(100_000)
    (64, 16, 4)
    """
    return min(max(ENTRIES_OF_ALL_RANKS // max(world_size, 1), LEAST_ENTRIES), ENTRIES)


def read_record(text: bytes, now_ns: int, entries: int = ENTRIES) -> FlightRecord:
    """Read a record; of each group, keep the last `entries` and the first that is not done.

    `now_ns` is the present time of the clock that has stamped the entries.

    Raises:
        ValueError: it cannot be read.

    """
    try:
        trace = _DECODER.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"torch's record of its collectives cannot be read: {error}") from error
    newest: dict[str, int] = {}
    for entry in trace.entries:
        name = entry.process_group[0]
        newest[name] = max(newest.get(name, 0), entry.pg_id)
    of_group: dict[str, list[_Entry]] = {"0": []}
    for entry in trace.entries:
        name = entry.process_group[0]
        if not entry.is_p2p and entry.pg_id == newest[name]:
            of_group.setdefault(name, []).append(entry)
    groups = [_group(name, of, now_ns, entries) for name, of in of_group.items()]
    completed = sum(max(one.last_completed_collective, 0) for one in trace.pg_status.values())
    return FlightRecord(tuple(groups[:MAX_GROUPS]), completed)


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


def _collective(entry: _Entry, now_ns: int) -> Collective:
    return Collective(
        sequence=entry.collective_seq_id,
        operation=entry.profiling_name.partition(":")[2][:MAX_TEXT_CHARS] or entry.profiling_name,
        sizes=_sizes(entry),
        done=_done(entry),
        age_ms=max((now_ns - entry.time_created_ns) // 1_000_000, 0),
    )


def _done(entry: _Entry) -> bool:
    """Return whether a collective is completed: gloo's stay `scheduled`, and are retired then."""
    if entry.profiling_name.startswith("nccl:"):
        # One that is retired, and not completed, has timed out.
        return entry.state == "completed"
    return entry.retired or entry.state == "completed"


def _sizes(entry: _Entry) -> str:
    """Describe the input.

    >>> _sizes(_Entry(input_sizes=[[2, 3], [4]], input_dtypes=["Float", "Float"]))
    '[2, 3] [4] Float'
    """
    shapes = " ".join(map(str, entry.input_sizes))
    kinds = " ".join(dict.fromkeys(entry.input_dtypes))
    return f"{shapes} {kinds}".strip()[:MAX_TEXT_CHARS]
