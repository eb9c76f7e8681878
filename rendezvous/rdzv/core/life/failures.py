"""Failures of workers and of a round's store.

A failure ends the round (`round_end`), and the end is charged once all nodes have stopped
(`charging`).
"""

from __future__ import annotations

from rdzv.core.commands import Fail, FailureReport, ReportStoreHost
from rdzv.core.draft import Draft
from rdzv.core.events import WorkerFailed
from rdzv.core.life.charging import charge_instead
from rdzv.core.life.conditions import Ignored
from rdzv.core.life.round_end import end_round
from rdzv.core.model import Cause, Failure, Round
from rdzv.core.root_cause import describe_failure, keep_earliest, root_cause
from rdzv.core.rounds.participants import find
from rdzv.structs import replace


def fail(work: Draft, command: Fail) -> Ignored | None:
    """Record the failed workers of a node.

    A live round ends, and all nodes stop. Failures in a round that has already ended are added to
    those of its end. Once all nodes have stopped, `settle_charge` picks the root cause and spends a
    restart.
    """
    round_ = work.membership.round
    assert round_ is not None
    failures = failures_from(work, command.node_id, round_, command.failures)
    if round_.live:
        end_by_failure(work, failures)
        return None
    return None if add_failures(work, failures) else Ignored.KNOWN


def report_store_host(work: Draft, command: ReportStoreHost) -> Ignored | None:
    """End the round whose c10d store has died, or charge its end to the store."""
    before = work.state
    reason = f"on {command.node_id}: {command.reason}"
    end_round(work, Cause.STORE_HOST, reason, broken=True, node_id=command.node_id)
    charge_instead(work, Cause.STORE_HOST, reason, command.node_id)
    return Ignored.ROUND_ENDED if work.state is before else None


def end_by_failure(work: Draft, failures: tuple[Failure, ...]) -> None:
    """End the live round because workers failed."""
    failures = (*failures, *_finished_nodes(work))
    first = root_cause(failures)
    reason = describe_failure(first[0]) if first else "a worker failed"
    node_id = first[0].node_id if first else ""
    end_round(work, Cause.WORKER_FAILURE, reason, broken=True, node_id=node_id)
    add_failures(work, failures)


def _finished_nodes(work: Draft) -> tuple[Failure, ...]:
    """Return the first worker of each node whose workers have all exited with 0."""
    round_ = work.membership.round
    found = []
    for node in round_.participants if round_ is not None else ():
        seat = work.state.seats.get(node.node_id)
        if seat is not None and seat.succeeded:
            who = (node.node_id, node.offer.address, 0, node.rank_first, 0)
            found.append(Failure(*who, 0, None, message="", traceback="", at_ms=seat.since_ms))
    return tuple(found)


def failures_from(
    work: Draft, node_id: str, round_: Round, reports: tuple[FailureReport, ...]
) -> tuple[Failure, ...]:
    """Convert reports into failures, with times on the server's clock."""
    if not reports:
        return ()
    participant = find(round_.participants, node_id)
    address = participant.offer.address if participant is not None else ""
    return tuple(
        Failure(
            node_id=node_id,
            address=address,
            local_rank=report.local_rank,
            rank=report.rank,
            pid=report.pid,
            exit_code=report.exit_code,
            signal=report.signal,
            message=report.message,
            traceback=report.traceback,
            at_ms=work.now_ms - report.age_ms,
            suspect=report.suspect,
        )
        for report in reports
    )


def add_failures(work: Draft, failures: tuple[Failure, ...]) -> bool:
    """Record failures in an ended round that is not settled; return whether any are new."""
    round_ = work.membership.round
    if round_ is None or round_.end is None or round_.end.settled or not failures:
        return False
    kept = keep_earliest((*round_.end.failures, *failures))
    if kept == round_.end.failures:
        return False
    before = {(f.node_id, f.local_rank, f.suspect) for f in round_.end.failures}
    work.store_round(replace(round_, end=replace(round_.end, failures=kept)))
    work.events += [
        WorkerFailed(round_.number, f, max(work.now_ms - f.at_ms, 0))
        for f in kept
        if (f.node_id, f.local_rank, f.suspect) not in before and (f.message or not f.finished)
    ]
    return True
