"""Finds the rank that the others are waiting for, using torch's records of collectives.

This module is pure. Torch numbers the collectives of each process group in the same way on every
rank. In a round that hangs, some ranks wait in a collective that cannot finish because other ranks
have not entered it, have entered it with another operation or other sizes, or are waiting in
another group. Only records of one round are compared, because the next round reuses the groups'
names with new numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated

from rdzv.bounds import Elapsed, First, Part
from rdzv.core.words import duration, ranks_text
from rdzv.structs import replace, struct

MIN_WAIT_MS = 2_000
"""Ranks are queried one after another, so a shorter wait may only be apparent."""
DEFAULT_GROUP = "default_pg"
"""Torch's name for the group of all ranks."""
MAX_DETAILS = 8
MAX_SENTENCE_CHARS = 600

KINDS = (
    *("absent", "other_operation", "other_sizes", "other_order", "unfinished"),
    *("exited", "stopped", "traced", "uninterruptible", "dead", "loader", "gil_held"),
)
"""All kinds of causes, for metrics."""

FINISHED = "0"
"""The state of a worker that has exited with 0."""

_HELD = {"T": "stopped", "t": "traced", "D": "uninterruptible", "Z": "dead"}
_WORDS = {
    "exited": ("exited with 0", "exited with 0"),
    "stopped": ("is stopped by a signal", "are stopped by a signal"),
    "traced": ("is held by a debugger", "are held by a debugger"),
    "uninterruptible": (
        "is uninterruptible in the kernel (D state)",
        "are uninterruptible in the kernel (D state)",
    ),
    "dead": ("is dead, and not reaped", "are dead, and not reaped"),
    "loader": ("waits for its data loader", "wait for their data loaders"),
    "gil_held": ("holds the interpreter's lock (GIL)", "hold their interpreters' locks (GIL)"),
}
_OWN_SIZES = ("all_to_all", "alltoall", "gather", "scatter", "send", "recv", "coalesced")
"""Substrings of the names of operations in which ranks may pass different sizes."""
_SAME_SIZES = ("all_gather", "allgather", "reduce_scatter")
"""Exceptions: operations whose names contain such a substring but whose sizes must be equal."""


@struct(frozen=True)
class CollectiveRecord:
    """One collective that a worker has entered. `sizes` gives the shapes and types of its input."""

    sequence: int
    operation: Part
    sizes: Part = ""
    done: bool = False
    age_ms: Elapsed = 0


@struct(frozen=True)
class GroupRecord:
    """The latest collectives of one worker in one process group, oldest first.

    `entered` is the sequence number of the last collective that it has entered. `latest` always
    includes the first one that is not done.
    """

    group: Part
    description: Part = ""
    entered: int = 0
    latest: Annotated[tuple[CollectiveRecord, ...], First(64)] = ()
    members: Annotated[tuple[int, ...], First(4_096)] = ()
    """The RANKs in the group; empty if unknown, or if the worker does not wait in it."""

    @property
    def pending(self) -> CollectiveRecord | None:
        return next((one for one in self.latest if not one.done), None)

    def at(self, sequence: int) -> CollectiveRecord | None:
        return next((one for one in self.latest if one.sequence == sequence), None)

    @property
    def name(self) -> str:
        if self.description == DEFAULT_GROUP:
            return "the default group"
        shown = self.description if self.description not in ("", "undefined") else self.group
        return f"group {shown}"


@struct(frozen=True)
class Evidence:
    """Everything known about one rank of a round that may hang."""

    rank: int
    records: tuple[GroupRecord, ...] | None = None
    """The rank's records, or None if it has none or could not send them."""
    state: str = ""
    """The state of the rank's process, as in /proc, or `FINISHED`."""
    exited_ms: int | None = None
    """How long ago it exited, if it has `FINISHED` and that is known."""
    busy: str = ""
    """`loader` or `gil_held`, if the rank's stack shows this."""
    where: str = ""
    in_collective: bool | None = None
    """Whether the rank's stack shows it inside torch.distributed, or None if unknown."""


@struct(frozen=True)
class HangCause:
    """The workers that the rest of a round is waiting for, according to the records of collectives.

    `sentence` is for people; `details` contains a line for each process group that is waiting.
    """

    kind: str
    ranks: tuple[int, ...]
    """The workers that the others are waiting for, or empty if either side may be at fault."""
    group: str
    """The process group of the collective in which the others are waiting."""
    sequence: int
    operation: str
    waiting: tuple[int, ...]
    waiting_ms: int
    sentence: str
    details: tuple[str, ...] = ()

    @property
    def finds(self) -> bool:
        """Whether ranks are missing or differ, so that the collective cannot end."""
        return bool(self.ranks) or self.kind != "unfinished"


@struct(frozen=True)
class _Wait:
    name: str
    group: str
    sequence: int
    operation: str
    waiting_ms: int
    pending: Mapping[int, CollectiveRecord]
    """The collective in which each rank is waiting, by rank."""
    absent: frozenset[int]
    """The ranks that have not entered the collective in which others of the group are waiting."""
    gone: frozenset[int]
    """The ranks of the group that have exited with 0, having entered that collective or not."""
    unknown: frozenset[int]
    """The other ranks of the group that have no record."""
    entered: Mapping[int, CollectiveRecord]
    """Each rank's record of the first collective in which any rank is waiting, by rank."""
    whole: bool
    """Whether the group contains all ranks of the round."""
    closed: bool
    """Whether all ranks of the group are known."""

    @property
    def place(self) -> str:
        return f"{self.operation} #{self.sequence} of {self.name}"


def compare(evidence: Iterable[Evidence], world_size: int = 0) -> HangCause | None:
    """Return the cause for which ranks of a round are waiting, or None if the records show none.

    Waits shorter than `MIN_WAIT_MS` are ignored. The result is the first of these causes that
    applies: ranks that have entered another operation or other sizes than most; ranks that have
    exited with 0; ranks that have not entered a collective in which others are waiting, and are not
    waiting in any themselves; ranks that wait for each other in different groups; ranks without a
    record where all others have entered; ranks still in a collective that others have left. Nothing
    is known of the ranks below `world_size` that have no evidence.
    """
    known = {rank: Evidence(rank) for rank in range(world_size)}
    known |= {one.rank: one for one in evidence}
    waits = [wait for wait in _waits(known) if wait.waiting_ms >= MIN_WAIT_MS]
    if not waits:
        return None
    found = _mismatch(waits) or _missing(waits, known) or _other_order(waits)
    found = found or _unfinished(waits[0])
    details = tuple(_detail(wait) for wait in waits[:MAX_DETAILS])
    return replace(found, sentence=found.sentence[:MAX_SENTENCE_CHARS], details=details)


def _waits(known: Mapping[int, Evidence]) -> list[_Wait]:
    groups: dict[str, dict[int, GroupRecord]] = {}
    for rank, one in known.items():
        for record in one.records or ():
            groups.setdefault(record.group, {})[rank] = record
    found = [_wait(records, known) for records in groups.values()]
    return sorted(filter(None, found), key=lambda wait: (-len(wait.pending), wait.group))


def _wait(records: Mapping[int, GroupRecord], known: Mapping[int, Evidence]) -> _Wait | None:
    pending = {rank: one for rank, r in records.items() if (one := r.pending) is not None}
    if not pending:
        return None
    some = next(iter(records.values()))
    whole = some.description == DEFAULT_GROUP
    # A rank that has never entered one of the group's collectives has no record of the group.
    named = (rank for record in records.values() for rank in record.members if rank in known)
    members = frozenset(known if whole else named)
    closed = bool(members)
    members |= records.keys()
    entered = {
        rank: records[rank].entered if rank in records else 0
        for rank in members
        if known[rank].records is not None
    }
    latest = max(one.sequence for one in pending.values())
    absent = {rank for rank, last in entered.items() if rank not in pending and last < latest}
    reached = min((entered[rank] for rank in absent), default=0)
    first = min(one.sequence for one in pending.values() if one.sequence > reached)
    at_first = [one for one in pending.values() if one.sequence == first]
    gone = {rank for rank in members if known[rank].state == FINISHED}
    return _Wait(
        name=some.name,
        group=some.group,
        sequence=first,
        operation=at_first[0].operation,
        waiting_ms=max(one.age_ms for one in at_first),
        pending=dict(sorted(pending.items())),
        absent=frozenset(absent),
        gone=frozenset(gone),
        unknown=frozenset(members - entered.keys() - gone),
        entered={rank: one for rank, r in sorted(records.items()) if (one := r.at(first))},
        whole=whole,
        closed=closed,
    )


# ---------------------------------------------------------------------- possible causes


def _mismatch(waits: Iterable[_Wait]) -> HangCause | None:
    for wait in waits:
        operations = _sides({rank: one.operation for rank, one in wait.entered.items()})
        if len(operations) > 1:
            return _differing(wait, "other_operation", operations)
        # If a rank is missing, the collective cannot finish, whatever the sizes.
        if not (wait.absent or wait.gone) and _equal_sizes(wait.operation):
            sizes = _sides({rank: one.sizes for rank, one in wait.entered.items()})
            if len(sizes) > 1:
                return _differing(wait, "other_sizes", sizes)
    return None


def _sides(of: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    sides: dict[str, list[int]] = {}
    for rank, what in of.items():
        sides.setdefault(what, []).append(rank)
    return sorted(sides.items(), key=lambda side: (-len(side[1]), side[1]))


def _equal_sizes(operation: str) -> bool:
    """Return whether an operation requires the same sizes from all ranks.

    >>> [_equal_sizes(one) for one in ("all_reduce", "all_gather", "all_to_all", "gather")]
    [True, True, False, False]
    """
    return any(part in operation for part in _SAME_SIZES) or not any(
        part in operation for part in _OWN_SIZES
    )


def _differing(wait: _Wait, kind: str, sides: Sequence[tuple[str, list[int]]]) -> HangCause:
    (most, many), others = sides[0], sides[1:]
    odd = [rank for _, ranks in others for rank in ranks]
    clear = len(many) > len(others[0][1])
    if kind == "other_operation":
        differences = "; ".join(f"{_ranks(ranks, 'has')} entered {what}" for what, ranks in others)
        place = f"as #{wait.sequence} of {wait.name}"
        sentence = f"{differences} {place}, where {_ranks(many, 'has')} entered {most}"
    else:
        differences = "; ".join(
            f"{_ranks(ranks, 'has')} {what or 'no tensor'}" for what, ranks in others
        )
        sentence = (
            f"in {wait.place} {differences}, where {_ranks(many, 'has')} {most or 'no tensor'}"
        )
    waiting = [rank for rank in wait.pending if rank in many] if clear else list(wait.pending)
    if not clear:
        most = ""
    return _cause(wait, kind, odd if clear else (), f"{sentence}; {_waited(wait)}", waiting, most)


def _missing(waits: Sequence[_Wait], known: Mapping[int, Evidence]) -> HangCause | None:
    """Find ranks that others are waiting for in a collective and that wait in none themselves."""
    if gone := {rank for wait in waits for rank in wait.gone}:
        return _of_missing([wait for wait in waits if wait.gone], known, gone)
    absent = {rank for wait in waits for rank in wait.absent}
    somewhere = {rank for wait in waits for rank in wait.pending}
    unknown = {rank for wait in waits for rank in wait.unknown}
    unproven = {rank for rank, one in known.items() if one.records is None}
    if all(wait.closed for wait in waits):
        unproven = unknown
    held = {rank for rank in absent | unproven if known[rank].state in _HELD}
    idle = absent - somewhere
    # A rank whose stack is inside torch.distributed is also waiting, even without a pending record.
    idle = {rank for rank in idle if not known[rank].in_collective} or idle
    found = held or idle
    if not found and unknown and (not absent or absent <= somewhere):
        found = {rank for rank in unknown if known[rank].in_collective is False}
        found = found or (unknown if len(unknown) == 1 else set())
    if not found:
        return None
    return _of_missing(waits, known, found)


def _of_missing(
    waits: Sequence[_Wait], known: Mapping[int, Evidence], found: Collection[int]
) -> HangCause:
    kinds = {rank: _kind(known[rank]) for rank in found}
    # If one of several ranks is held, that explains the others.
    kind = min(kinds.values(), key=lambda one: (one == "absent", one not in _HELD.values(), one))
    ranks = sorted(rank for rank in found if kinds[rank] == kind)
    seen = [wait for wait in waits if (wait.absent | wait.gone | wait.unknown) & set(ranks)]
    wait = (seen or [one for one in waits if one.whole] or list(waits))[0]
    parts = []
    if kind != "absent":
        where = known[ranks[0]].where if kind in ("loader", "gil_held") else ""
        one, several = _WORDS[kind]
        parts.append((one if len(ranks) == 1 else several) + (f" ({where})" if where else ""))
    if kind == "exited":
        ago_ms = [ms for rank in ranks if (ms := known[rank].exited_ms) is not None]
        parts[0] += f", {duration(max(ago_ms))} before" if ago_ms else ""
    elif wait.absent & set(ranks):
        parts.append(f"{_has(ranks)} not entered {wait.place}")
    elif kind == "absent":
        parts.append(f"{_has(ranks)} no record, and all others have entered {wait.place}")
    sentence = f"RANK {ranks_text(ranks)} {' and '.join(parts)}"
    waiting = [rank for rank in wait.pending if rank not in ranks]
    since = _waited(wait, waiting)
    if wait.place not in sentence:
        since = since.replace("in it", f"in {wait.place}", 1)
    return _cause(wait, kind, ranks, f"{sentence}; {since}", waiting)


def _kind(one: Evidence) -> str:
    if one.state == FINISHED:
        return "exited"
    return _HELD.get(one.state, one.busy or "absent")


def _other_order(waits: Sequence[_Wait]) -> HangCause | None:
    """Find ranks that are missing from one group because they are waiting in another."""
    most = next((wait for wait in waits if wait.absent), None)
    if most is None:
        return None
    ranks = sorted(most.absent)
    elsewhere = next((w for w in waits if w is not most and w.pending.keys() & most.absent), None)
    if elsewhere is None:
        return None
    clear = len(ranks) < len(most.pending)
    sentence = (
        f"{_ranks(ranks, 'wait')} in {elsewhere.place}, and {_has(ranks)} not entered "
        f"{most.place}: these groups are entered in different orders; {_waited(most)}"
    )
    return _cause(most, "other_order", ranks if clear else (), sentence, list(most.pending))


def _unfinished(wait: _Wait) -> HangCause:
    latest = max(one.sequence for one in wait.pending.values())
    behind = [rank for rank, one in wait.pending.items() if one.sequence < latest]
    if behind and len(behind) < len(wait.pending) - len(behind):
        ahead = [rank for rank in wait.pending if rank not in behind]
        sentence = f"{_ranks(behind, 'is')} still in {wait.place}, which others have left"
        return _cause(wait, "unfinished", behind, sentence, ahead)
    missing = "no rank is missing" if wait.closed else "whose other members are not known"
    if wait.unknown:
        missing = f"no information about RANK {ranks_text(wait.unknown)}"
    sentence = (
        f"{_ranks(wait.pending, 'has')} entered {wait.place}, {missing}, and it has not ended for "
        f"{wait.waiting_ms // 1000} s"
    )
    return _cause(wait, "unfinished", (), sentence, list(wait.pending))


# ---------------------------------------------------------------------- sentences


def _cause(
    wait: _Wait,
    kind: str,
    ranks: Iterable[int],
    sentence: str,
    waiting: Iterable[int],
    operation: str = "",
) -> HangCause:
    return HangCause(
        kind=kind,
        ranks=tuple(ranks),
        group=wait.group,
        sequence=wait.sequence,
        operation=operation if kind == "other_operation" and operation else wait.operation,
        waiting=tuple(waiting),
        waiting_ms=wait.waiting_ms,
        sentence=sentence,
    )


def _waited(wait: _Wait, waiting: Collection[int] | None = None) -> str:
    ranks = wait.pending if waiting is None else waiting
    return f"{_ranks(ranks, 'has')} waited in it for {wait.waiting_ms // 1000} s"


def _detail(wait: _Wait) -> str:
    parts = []
    places: dict[tuple[int, str, str], list[int]] = {}
    for rank, one in wait.pending.items():
        places.setdefault((one.sequence, one.operation, one.sizes), []).append(rank)
    for (sequence, operation, sizes), ranks in sorted(places.items()):
        sized = f" {sizes}" if sizes else ""
        parts.append(f"{_ranks(ranks, 'wait')} in {operation} #{sequence}{sized}")
    if wait.absent:
        parts.append(f"{_ranks(wait.absent, 'has')} not entered #{wait.sequence}")
    return f"{wait.name}: {'; '.join(parts)}"[:MAX_SENTENCE_CHARS]


_PLURAL = {"has": "have", "is": "are", "waits": "wait"}


def _ranks(ranks: Collection[int], verb: str) -> str:
    """Format ranks, followed by the matching form of a verb.

    >>> _ranks([3], "wait"), _ranks([0, 1], "has")
    ('RANK 3 waits', 'RANK 0-1 have')
    """
    one = {"wait": "waits"}.get(verb, verb)
    return f"RANK {ranks_text(ranks)} {one if len(ranks) == 1 else _PLURAL[one]}"


def _has(ranks: Collection[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
