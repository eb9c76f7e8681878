"""Quarantines nodes on which workers keep failing, so they get no submitted jobs for a while.

A *strike* is a round that ended through the fault of one node: the root cause was one of its
workers, or its processes survived SIGKILL. After enough strikes within a window, the node is
quarantined. Failures alone do not show whether the node or the job is broken. To prevent a user's
bug from emptying a cluster,

* one run gets at most one node quarantined: if it keeps failing elsewhere, it is the job's fault;
* only a limited number of nodes is quarantined at a time, and never the only one;
* a failed connection is not a strike, because the other end went away;
* only daemons are judged. Users who start rdzvrun on a node choose that node themselves.

This module is pure: the record is a value, stored by its owner, and `judge` returns the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import field

from rdzv.core.events import Event, NodeNotQuarantined, NodeQuarantined, NodeStuck, RoundSettled
from rdzv.core.model import Cause, Failure
from rdzv.core.root_cause import describe_failure, is_connection_error
from rdzv.core.words import duration, listed
from rdzv.structs import replace, struct

MAX_STRIKES = 1_000
"""The number of strikes remembered across all nodes. The oldest are forgotten first."""
MAX_BLAMED = 1_000
"""The number of runs remembered because they got a node quarantined. The oldest are forgotten
first."""
REASON_CHARS = 200
"""The length to which a failure's text is truncated, which is a line or two in a terminal."""


@struct(frozen=True)
class QuarantineTuning:
    """The rules for when a node is quarantined and for how long; the same for all nodes."""

    failures: int = 3
    """The number of strikes within the window after which a node is quarantined, or 0 for never."""
    window_ms: int = 3_600_000
    ttl_ms: int = 12 * 3_600_000
    """The length of a quarantine, unless an operator lifts it."""
    max_nodes: int = 0
    """The maximum number of nodes quarantined at a time; 0 means a quarter of the known daemons."""


@struct(frozen=True)
class Strike:
    """A round that ended through the fault of one node."""

    node_id: str
    rdzv_id: str
    run: str
    round: int
    at_ms: int
    reason: str


@struct(frozen=True)
class Quarantined:
    """A node's quarantine: the reason, and the time until which nothing is placed on the node."""

    at_ms: int
    until_ms: int
    reason: str


@struct(frozen=True)
class Record:
    """Everything that is remembered about strikes and quarantines; stored unchanged."""

    strikes: tuple[Strike, ...] = ()
    """The strikes, oldest first."""
    nodes: Mapping[str, Quarantined] = field(default_factory=dict)
    """The quarantined nodes, by node_id."""
    blamed: tuple[tuple[str, int], ...] = ()
    """Runs that got a node quarantined, with the time until which each is remembered."""

    def quarantined(self, now_ms: int) -> dict[str, Quarantined]:
        """Return the nodes that are quarantined now, by name."""
        return {n: held for n, held in self.nodes.items() if now_ms < held.until_ms}


@struct(frozen=True)
class Verdict:
    """The outcome of a strike."""

    record: Record
    event: NodeQuarantined | NodeNotQuarantined | None = None
    """The decision, or None if no decision was needed."""


def strikes_in(rdzv_id: str, run: str, events: Iterable[Event], now_ms: int) -> tuple[Strike, ...]:
    """Return a strike for each node that these events show to be at fault for a round's end."""
    found: dict[tuple[str, int], Strike] = {}
    for event in events:
        match event:
            case RoundSettled(cause=Cause.WORKER_FAILURE, root_cause=Failure() as failure):
                if is_connection_error(failure):
                    continue
                node_id, reason = failure.node_id, describe_failure(failure)
            case NodeStuck():
                node_id, reason = event.node_id, event.reason
            case _:
                continue
        strike = Strike(node_id, rdzv_id, run, event.round, now_ms, _short(reason))
        found.setdefault((node_id, event.round), strike)
    return tuple(found.values())


def judge(
    record: Record,
    strike: Strike,
    tuning: QuarantineTuning,
    daemons: Collection[str],
    now_ms: int,
) -> Verdict:
    """Record a strike, and decide whether its node is quarantined for it.

    A known strike has no effect, so it may be repeated after a failed commit. `daemons` are the
    currently known nodes whose agent is a daemon.
    """
    node_id = strike.node_id
    if not tuning.failures or node_id not in daemons or _known(record, strike):
        return Verdict(record)
    if node_id in record.quarantined(now_ms):
        # Jobs still running there prove nothing new.
        return Verdict(record)
    kept = _pruned(record, tuning, now_ms)
    kept = replace(kept, strikes=(*kept.strikes, strike)[-MAX_STRIKES:])
    mine = [other for other in kept.strikes if other.node_id == node_id]
    if len(mine) < tuning.failures:
        return Verdict(kept)
    within = duration(now_ms - mine[0].at_ms)
    often = "at fault " + (f"{len(mine)} times within {within}" if len(mine) > 1 else "once")
    if refusal := _refusal(kept, strike, mine, tuning, daemons, now_ms):
        return Verdict(kept, NodeNotQuarantined(node_id, often, refusal))
    reason = f"{often}, last in {strike.rdzv_id}: {strike.reason}"
    nodes = {**kept.nodes, node_id: Quarantined(now_ms, now_ms + tuning.ttl_ms, reason)}
    kept = Record(
        tuple(other for other in kept.strikes if other.node_id != node_id),
        nodes,
        (*kept.blamed, (strike.run, now_ms + tuning.ttl_ms))[-MAX_BLAMED:],
    )
    return Verdict(kept, NodeQuarantined(node_id, tuning.ttl_ms, reason))


def lift(record: Record, node_id: str) -> Record:
    """Return the record without a node's quarantine and strikes, so that the node is used again."""
    return replace(
        record,
        strikes=tuple(strike for strike in record.strikes if strike.node_id != node_id),
        nodes={n: held for n, held in record.nodes.items() if n != node_id},
    )


def _refusal(
    record: Record,
    strike: Strike,
    mine: Collection[Strike],
    tuning: QuarantineTuning,
    daemons: Collection[str],
    now_ms: int,
) -> str:
    """Explain why a node that has reached the fault limit is not quarantined, or return ""."""
    blamed = {run for run, _ in record.blamed}
    if sum(1 for one in mine if one.run not in blamed) < tuning.failures:
        return (
            f"another was quarantined for this run of {strike.rdzv_id} already, so the job "
            "itself is more likely at fault"
        )
    if len(daemons) < 2:
        return "no other node is known"
    held, most = record.quarantined(now_ms), tuning.max_nodes or max(len(daemons) // 4, 1)
    if len(held) < most:
        return ""
    are = "is" if len(held) == 1 else "are"
    return f"{listed(held)} {are} already, and of {len(daemons)} nodes only {most} may be at a time"


def _known(record: Record, strike: Strike) -> bool:
    key = (strike.node_id, strike.run, strike.round)
    return any((s.node_id, s.run, s.round) == key for s in record.strikes)


def _pruned(record: Record, tuning: QuarantineTuning, now_ms: int) -> Record:
    """Return the record without the entries that no longer count."""
    since_ms = now_ms - tuning.window_ms
    return Record(
        tuple(strike for strike in record.strikes if strike.at_ms > since_ms),
        record.quarantined(now_ms),
        tuple(one for one in record.blamed if now_ms < one[1]),
    )


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= REASON_CHARS else f"{line[: REASON_CHARS - 3]}..."
