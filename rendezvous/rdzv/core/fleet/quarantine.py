"""Quarantines nodes on which workers keep failing, so they get no submitted jobs for a while.

A *strike* is a round that ended where one node's worker failed first, or where its processes
survived SIGKILL. After enough strikes within a window, the node is quarantined. Ranks are stable,
so a bug of a script hits the same node every time. To prevent a bug from taking nodes out of
service,

* the strikes must be *the machine's* (a signal, an error of the device, processes that survive
  SIGKILL) or those of two jobs; an exception, an exit code or a hang in one job alone is the job's;
* one run gets at most one node quarantined: if it keeps failing elsewhere, it is the job's fault;
* only a limited number of nodes is quarantined at a time, and never the only one;
* a failed connection is not a strike, because the other end went away, nor is a difference between
  replicas if no majority shows which is wrong;
* only daemons are judged. Users who start rdzvrun on a node choose that node themselves.

This module is pure: the record is a value, stored by its owner, and `judge` returns the next one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Annotated

from rdzv.core.events import Event, NodeNotQuarantined, NodeQuarantined, NodeStuck, RoundSettled
from rdzv.core.model import Cause, Failure
from rdzv.core.root_cause import describe_failure, is_connection_error, names_of_end
from rdzv.core.words import duration, listed
from rdzv.structs import Duration, replace, setting, struct

MAX_STRIKES = 1_000
"""The number of strikes remembered across all nodes. The oldest are forgotten first."""
MAX_BLAMED = 1_000
"""The number of runs remembered because they got a node quarantined. The oldest are forgotten
first."""
REASON_CHARS = 200
"""The length to which a failure's text is truncated, which is a line or two in a terminal."""

_DEVICE_ERROR = re.compile(
    r"(?:AcceleratorError: |CudaError: |RuntimeError: (?=(?:CUDA|HIP) error: ))"
    # The script's own: a value that a kernel refuses, and more memory than there is.
    r"(?!.*(?:device-side assert|out of memory))"
    r"|DistBackendError: (?s:.*)^ncclUnhandledCudaError: (?!(?s:.*)out of memory)",
    re.MULTILINE,
)
"""Matches an exception that torch raises for an error of the device, or NCCL's for such an error.
"""


WINDOW_MS = 3_600_000
"""Only failures within this time count: broken hardware fails again soon."""


# fmt: off
@struct(frozen=True)
class QuarantineRules:
    """When a node is quarantined and for how long: the same for all nodes of a server."""

    failures: Annotated[int, setting(ge=0, le=1_000, unit="rounds", reason="""
        A daemon's node is quarantined after its machine ended this number of rounds (a signal, a
        device error, a worker that could not be killed). A script's exceptions count only if two
        jobs failed there. 0: never.""")] = 3
    ttl_ms: Annotated[Duration, setting(ge=1_000, le=365 * 86_400_000, reason="""
        How long a quarantined node gets no job: time for a person to look at it.
        `rdzvctl uncordon` ends the quarantine.""")] = 12 * 3_600_000
    max_nodes: Annotated[int, setting(ge=0, le=1_000_000, unit="nodes", reason="""
        The largest number of nodes in quarantine. 0: a quarter of the known daemons, and at least
        one; a single daemon is never quarantined.""")] = 0
# fmt: on


@struct(frozen=True)
class Strike:
    """A round that ended where one node's worker failed first."""

    node_id: str
    rdzv_id: str
    run: str
    round: int
    at_ms: int
    reason: str
    machine: bool = False
    """Whether the failure itself points to the node's machine rather than to the job."""


@struct(frozen=True)
class Quarantined:
    """A node's quarantine: the reason, and the time until which nothing is placed on the node."""

    at_ms: int
    until_ms: int
    reason: str


@struct(frozen=True)
class QuarantineRecord:
    """Everything that is remembered about strikes and quarantines; stored unchanged."""

    strikes: tuple[Strike, ...] = ()
    nodes: Mapping[str, Quarantined] = field(default_factory=dict)
    blamed: tuple[tuple[str, int], ...] = ()
    """Runs that got a node quarantined, with the time until which each is remembered."""

    def quarantined(self, now_ms: int) -> dict[str, Quarantined]:
        return {n: held for n, held in self.nodes.items() if now_ms < held.until_ms}


@struct(frozen=True)
class StrikeOutcome:
    """The outcome of a strike."""

    record: QuarantineRecord
    event: NodeQuarantined | NodeNotQuarantined | None = None


def strikes_in(rdzv_id: str, run: str, events: Iterable[Event], now_ms: int) -> tuple[Strike, ...]:
    """Return a strike for each node where these events show the cause of a round's end."""
    found: dict[tuple[str, int], Strike] = {}
    for event in events:
        match event:
            case RoundSettled(cause=Cause.WORKER_FAILURE, root_cause=Failure() as failure):
                machine = _points_to_machine(failure)
                if is_connection_error(failure) or failure.finished:
                    continue
                if "ReplicasDifferError" in names_of_end(failure):
                    continue
                node_id, reason = failure.node_id, describe_failure(failure)
            case NodeStuck():
                node_id, reason, machine = event.node_id, event.reason, True
            case _:
                continue
        strike = Strike(node_id, rdzv_id, run, event.round, now_ms, _short(reason), machine)
        found.setdefault((node_id, event.round), strike)
    return tuple(found.values())


def _points_to_machine(failure: Failure) -> bool:
    """Return whether a failure is of a kind that a script does not cause by its own exceptions.

    A hang is not: the script may wait for ever, too. Where the kernel hangs, its processes survive
    SIGKILL.
    """
    if failure.signal is not None:
        return True
    return bool(failure.traceback) and _DEVICE_ERROR.match(failure.message) is not None


def judge(
    record: QuarantineRecord,
    strike: Strike,
    rules: QuarantineRules,
    daemons: Collection[str],
    now_ms: int,
) -> StrikeOutcome:
    """Record a strike, and decide whether its node is quarantined for it.

    A known strike has no effect, so it may be repeated after a failed commit. `daemons` are the
    currently known nodes whose agent is a daemon.
    """
    node_id = strike.node_id
    if not rules.failures or node_id not in daemons or _known(record, strike):
        return StrikeOutcome(record)
    if node_id in record.quarantined(now_ms):
        # Jobs still running there prove nothing new.
        return StrikeOutcome(record)
    kept = _pruned(record, now_ms)
    kept = replace(kept, strikes=(*kept.strikes, strike)[-MAX_STRIKES:])
    mine = [other for other in kept.strikes if other.node_id == node_id]
    blamed = {run for run, _ in kept.blamed}
    counted = [other for other in mine if other.run not in blamed]
    if len(counted) < rules.failures:
        mine = [other for other in mine if other.run == strike.run]
        if strike.run not in blamed or len(mine) < rules.failures:
            return StrikeOutcome(kept)
        refusal = f"a node was quarantined for this run of {strike.rdzv_id} already, so {_THE_JOB}"
        return StrikeOutcome(kept, NodeNotQuarantined(node_id, _place_of(mine, now_ms), refusal))
    machine, jobs = sum(1 for one in counted if one.machine), {one.rdzv_id for one in counted}
    if machine < rules.failures and len(jobs) < 2:
        refusal = (
            f"only {strike.rdzv_id} failed there, and {machine or 'none'} of these failures "
            f"{'is' if machine < 2 else 'are'} the machine's (a signal, a device error), so "
            f"{_THE_JOB}"
        )
        return StrikeOutcome(kept, NodeNotQuarantined(node_id, _place_of(counted, now_ms), refusal))
    often = f"at fault {_often(counted, now_ms)}"
    if refusal := _refusal(kept, rules, daemons, now_ms):
        return StrikeOutcome(kept, NodeNotQuarantined(node_id, often, refusal))
    reason = f"{often}, last in {strike.rdzv_id}: {strike.reason}"
    nodes = {**kept.nodes, node_id: Quarantined(now_ms, now_ms + rules.ttl_ms, reason)}
    kept = QuarantineRecord(
        tuple(other for other in kept.strikes if other.node_id != node_id),
        nodes,
        (*kept.blamed, (strike.run, now_ms + rules.ttl_ms))[-MAX_BLAMED:],
    )
    return StrikeOutcome(kept, NodeQuarantined(node_id, rules.ttl_ms, reason))


def lift(record: QuarantineRecord, node_id: str) -> QuarantineRecord:
    """Return the record without a node's quarantine and strikes, so that the node is used again."""
    return replace(
        record,
        strikes=tuple(strike for strike in record.strikes if strike.node_id != node_id),
        nodes={n: held for n, held in record.nodes.items() if n != node_id},
    )


_THE_JOB = "the job itself is more likely at fault"


def _place_of(strikes: Sequence[Strike], now_ms: int) -> str:
    return f"a round failed there {_often(strikes, now_ms)}"


def _often(strikes: Sequence[Strike], now_ms: int) -> str:
    times = len(strikes)
    return f"{times} times within {duration(now_ms - strikes[0].at_ms)}" if times > 1 else "once"


def _refusal(
    record: QuarantineRecord, rules: QuarantineRules, daemons: Collection[str], now_ms: int
) -> str:
    """Explain why a node that is at fault is not quarantined, or return ""."""
    if len(daemons) < 2:
        return "no other node is known"
    held, most = record.quarantined(now_ms), rules.max_nodes or max(len(daemons) // 4, 1)
    if len(held) < most:
        return ""
    are = "is" if len(held) == 1 else "are"
    names = listed(held)
    return f"{names} {are} quarantined already, and at most {most} of {len(daemons)} nodes may be"


def _known(record: QuarantineRecord, strike: Strike) -> bool:
    key = (strike.node_id, strike.run, strike.round)
    return any((s.node_id, s.run, s.round) == key for s in record.strikes)


def _pruned(record: QuarantineRecord, now_ms: int) -> QuarantineRecord:
    since_ms = now_ms - WINDOW_MS
    return QuarantineRecord(
        tuple(strike for strike in record.strikes if strike.at_ms > since_ms),
        record.quarantined(now_ms),
        tuple(one for one in record.blamed if now_ms < one[1]),
    )


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= REASON_CHARS else f"{line[: REASON_CHARS - 3]}..."
