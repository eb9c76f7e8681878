"""History as data: the fields of each event, in the store, on the wire and in documents.

An event's *fields* are a JSON object. Most of them are those of the core's event. Some core events
contain a whole round, traceback or list of nodes; for these, this module defines what history
keeps, so that history rows are small however large the job is. Fields added by a later version are
kept and passed on, as are events with unknown names.

A row may contain a sentence instead. It is shown unchanged and never parsed: it may quote a worker,
so it cannot be trusted.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from rdzv.core import events
from rdzv.core.kept_ranks import kept_workers
from rdzv.core.model import Cause, Result, Round
from rdzv.core.words import LISTED
from rdzv.structs import struct
from rdzv.transport.wire import convert


@struct(frozen=True)
class Worker:
    """One worker of a round."""

    node_id: str
    rank: int
    local_rank: int


@struct(frozen=True)
class Place:
    """The place of one node in a round. Its ranks start at `rank_first`."""

    node_id: str
    rank_first: int
    local_world_size: int


@struct(frozen=True)
class WorkerFailed:
    """A worker failed."""

    round: int
    node_id: str
    rank: int
    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    message: str
    age_ms: int = 0
    suspect: bool = False
    """Whether one of its collectives failed, which may be due to another failure."""


@struct(frozen=True)
class NotKept:
    """Workers that could have been kept but are new.

    `ranks` lists the first few of the `workers`.
    """

    why: str
    """A code, which is the name of a `WhyNew`."""
    workers: int
    ranks: tuple[int, ...]


@struct(frozen=True)
class RoundCompleted:
    """A round is complete. `participants` lists the first few of its `nodes`.

    `kept` is the number of its workers that took part in the previous round. RANK `source` heals
    the others, at `resume_step`. New workers load `loaded_step` from snapshots in memory;
    `not_loaded` says why none are loaded although some exist.
    """

    round: int
    nodes: int
    world_size: int
    participants: tuple[Place, ...]
    master_addr: str
    master_port: int
    enough_ms: int = 0
    """The time for which enough nodes had been ready."""
    kept: int = 0
    source: int | None = None
    resume_step: int | None = None
    not_kept: tuple[NotKept, ...] = ()
    loaded_step: int | None = None
    not_loaded: str = ""


@struct(frozen=True)
class RoundAdopted:
    """A round unknown to the server is continued as reported by its nodes."""

    round: int
    nodes: int


@struct(frozen=True)
class RoundEnded:
    """A round has ended. If a fence had killed its workers, they had been dead for `dead_ms`."""

    round: int
    cause: Cause
    reason: str
    broken: bool
    """Whether the collectives broke."""
    dead_ms: int = 0
    cause_node_id: str = ""
    """The node that the cause refers to. Empty if it is unknown, or if the cause refers to no node
    or to several."""


@struct(frozen=True)
class RoundSettled:
    """All nodes have stopped, and the end of the round is charged to this cause.

    `max_restarts` is None if each node's own agent counts restarts.
    """

    round: int
    cause: Cause
    reason: str
    restarts: int
    max_restarts: int | None
    root_cause: Worker | None
    cause_node_id: str = ""
    """The node that the cause refers to, as in `RoundEnded`."""
    step: int | None = None


@struct(frozen=True)
class NodesPlaced:
    """The server has chosen nodes for a submitted run.

    `node_ids` lists the first few of `nodes`.
    """

    nodes: int
    node_ids: tuple[str, ...]
    was_queued: bool = False
    """Whether the run had no nodes before, or None if unknown."""


@struct(frozen=True)
class NodesWithdrawn:
    """Nodes were withdrawn from a submitted run. `node_ids` is as in `NodesPlaced`."""

    nodes: int
    node_ids: tuple[str, ...]
    reason: str


@struct(frozen=True)
class RunEnded:
    """The run has been closed and forms no more rounds."""

    run: str
    result: Result
    reason: str


Kept = (
    events.SmallEvent
    | WorkerFailed
    | RoundCompleted
    | RoundAdopted
    | RoundEnded
    | RoundSettled
    | NodesPlaced
    | NodesWithdrawn
    | RunEnded
)

KINDS: Mapping[str, type] = {kind.__name__: kind for kind in typing.get_args(Kept)}

Fields = dict[str, Any]

_encoder = msgspec.json.Encoder()


def kept(event: events.Event) -> Kept:
    match event:
        case events.WorkerFailed(failure=failure):
            return convert(WorkerFailed, failure, round=event.round, age_ms=event.age_ms)
        case events.RoundCompleted(round=round_):
            return _completed(round_, event)
        case events.RoundAdopted(round=round_):
            return RoundAdopted(round_.number, len(round_.participants))
        case events.RoundEnded(end=end):
            return convert(RoundEnded, end, round=event.round, dead_ms=event.dead_ms)
        case events.RoundSettled():
            return convert(RoundSettled, event)
        case events.NodesPlaced(node_ids=names):
            return convert(NodesPlaced, event, nodes=len(names), node_ids=names[:LISTED])
        case events.NodesWithdrawn(node_ids=names):
            return convert(NodesWithdrawn, event, nodes=len(names), node_ids=names[:LISTED])
        case events.RunEnded(ended=ended):
            return convert(RunEnded, ended, run=event.run)
        case _:
            return event


def _completed(round_: Round, event: events.RoundCompleted) -> RoundCompleted:
    places = tuple(
        Place(p.node_id, p.rank_first, p.offer.local_world_size)
        for p in round_.participants[:LISTED]
    )
    return convert(
        RoundCompleted,
        round_,
        round=round_.number,
        nodes=len(round_.participants),
        participants=places,
        enough_ms=event.enough_ms,
        kept=kept_workers(round_),
        not_kept=tuple(
            NotKept(one.why.value, len(one.ranks), one.ranks[:LISTED]) for one in event.not_kept
        ),
        loaded_step=round_.snapshot.step if round_.snapshot and round_.snapshot_loads else None,
        not_loaded=event.not_loaded.value if event.not_loaded else "",
    )


def written(event: events.Event) -> str:
    return _encoder.encode(kept(event)).decode()


def fields_in(data: str) -> Fields | None:
    """Read an event's fields, or return None if `data` is a sentence instead."""
    if not data.startswith("{"):
        return None
    try:
        found = msgspec.json.decode(data, type=Fields)
        return found if _fits(found) else None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def text_of(fields: Fields | None) -> str:
    """Return the text that `fields_in` reads."""
    return "" if fields is None else msgspec.json.encode(fields).decode()


def _fits(value: object) -> bool:
    """Return whether all integers are small enough to be calculated with and printed."""
    if isinstance(value, dict):
        return all(map(_fits, value.values()))
    if isinstance(value, list):
        return all(map(_fits, value))
    return not isinstance(value, int) or abs(value) < 1 << 64


def read(name: str, fields: Fields | None) -> Kept | None:
    if fields is None or (kind := KINDS.get(name)) is None:
        return None
    try:
        found: Kept = msgspec.convert(fields, kind)
    except msgspec.ValidationError:
        return None
    return found
