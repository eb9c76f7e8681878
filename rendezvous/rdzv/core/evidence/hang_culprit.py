"""The hung workers reported by their nodes, and the failure that ends their round.

When one worker hangs, all workers stall, so the stacks rather than the order of the reports show
which worker is at fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rdzv.bounds import Elapsed, LocalRank, Sentence
from rdzv.core.evidence.collectives import FINISHED
from rdzv.core.evidence.stacks import CollectedStacks, as_traceback, odd_one_out
from rdzv.core.words import ranks_text
from rdzv.structs import struct

MAX_MESSAGE_CHARS = 1_000


@struct(frozen=True)
class HangTimeout:
    """How long a worker may go without reporting progress.

    None means that it is derived from the worker's own steps.
    """

    ms: int | None = None


@struct(frozen=True)
class HungWorker:
    """A hung worker as reported by its node."""

    rank: int
    local_rank: LocalRank
    pid: int
    silent_ms: Elapsed
    reason: Sentence
    timed_out: bool = False
    """Whether the worker has already ended because its collective timed out."""


@struct(frozen=True)
class Culprit:
    """The failure that ends the round, and the way in which it is reported."""

    node_id: str
    rank: int
    local_rank: int
    pid: int
    message: str
    traceback: str
    finished: bool = False
    """Whether the worker has exited with 0, and the others wait for it."""


def describe_hung(workers: Iterable[HungWorker]) -> str:
    """Describe the hung workers in one line, with the reason for the one that was silent longest.

    >>> describe_hung([HungWorker(2, 0, 9, 61_000, "no progress for 61 s")])
    'RANK 2: no progress for 61 s'
    """
    known = sorted(workers, key=lambda worker: -worker.silent_ms)
    return f"RANK {ranks_text(worker.rank for worker in known)}: {known[0].reason}"


def verdict(
    hung: Mapping[str, tuple[HungWorker, ...]], report: CollectedStacks | None, why: str
) -> Culprit:
    """Decide which of the hung workers (keyed by node_id) failed, and describe where they are.

    The failed worker is the one that the others are waiting for, according to the records of
    collectives or, failing those, the stacks. Without either, it is the worker silent longest or,
    if several are, the one with the lowest RANK. `why` explains a missing `report`.
    """
    known = [(node_id, worker) for node_id, workers in hung.items() for worker in workers]
    reports = describe_hung(worker for _, worker in known)
    what = report.summary if report is not None else f"no stacks were taken: {why}"
    how = "a collective timed out" if any(one.timed_out for _, one in known) else "hung"
    stacks = {stack.rank: stack for stack in report.stacks} if report is not None else {}
    odd = _waited_for(report) if report is not None else None
    if odd is None and len(known) > 1:
        what = f"the rank at fault is unknown; {what}"
    message = f"{how}: {what} ({reports})"[:MAX_MESSAGE_CHARS]
    if odd is not None and odd in stacks:
        of = stacks[odd]
        who = (of.node_id, of.rank, of.local_rank, of.pid, message, as_traceback(of))
        return Culprit(*who, finished=of.state == FINISHED)
    node_id, worker = min(known, key=lambda one: (-one[1].silent_ms, one[1].rank))
    traceback = as_traceback(stacks[worker.rank]) if worker.rank in stacks else ""
    return Culprit(node_id, worker.rank, worker.local_rank, worker.pid, message, traceback)


def _waited_for(report: CollectedStacks) -> int | None:
    if report.cause is None:
        return odd_one_out(report.groups)
    if report.cause.ranks:
        return report.cause.ranks[0]
    # The others do not wait for those that have exited: these are in other process groups.
    return odd_one_out([group for group in report.groups if group.state != FINISHED])
