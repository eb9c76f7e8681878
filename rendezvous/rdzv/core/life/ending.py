"""How a round ends, and to which cause its end is charged."""

from __future__ import annotations

from rdzv.core.commands import Fail, FailureReport, ReportStoreHost
from rdzv.core.draft import Draft
from rdzv.core.events import RoundEnded, RoundSettled, WorkerFailed
from rdzv.core.life.absences import longest_stop_ms
from rdzv.core.life.conditions import Ignored
from rdzv.core.life.runs import close
from rdzv.core.model import UNMOVED, Cause, Failure, Membership, Result, Round, RoundEnd, State
from rdzv.core.root_cause import (
    charged_failures,
    describe_failure,
    keep_earliest,
    only_suspects,
    root_cause,
)
from rdzv.core.rounds.budgets import exceeded, spend
from rdzv.structs import replace


def fail(work: Draft, command: Fail) -> Ignored | None:
    """Record failed workers of a node.

    A live round ends, and everyone stops. If it has already ended, the failures are added to its
    causes; `settle_charge` picks the root cause when everyone has stopped, and spends a restart.
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
    first = root_cause(failures, work.state.tuning.root_cause_window_ms)
    reason = describe_failure(first[0]) if first else "a worker failed"
    node_id = first[0].node_id if first else ""
    end_round(work, Cause.WORKER_FAILURE, reason, broken=True, node_id=node_id)
    add_failures(work, failures)


def failures_from(
    work: Draft, node_id: str, round_: Round, reports: tuple[FailureReport, ...]
) -> tuple[Failure, ...]:
    """Turn reports into failures at the server's time."""
    if not reports:
        return ()
    address = next((p.offer.address for p in round_.participants if p.node_id == node_id), "")
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
    """Note failures of the ended round until its charge is settled; return whether any are new."""
    round_ = work.membership.round
    if round_ is None or round_.end is None or round_.end.settled or not failures:
        return False
    kept = keep_earliest((*round_.end.failures, *failures))
    if kept == round_.end.failures:
        return False
    known = {(f.node_id, f.local_rank, f.suspect) for f in round_.end.failures}
    work.store_round(replace(round_, end=replace(round_.end, failures=kept)))
    work.events += [
        WorkerFailed(round_.number, f, max(work.now_ms - f.at_ms, 0))
        for f in kept
        if (f.node_id, f.local_rank, f.suspect) not in known
    ]
    return True


def end_round(
    work: Draft,
    cause: Cause,
    reason: str,
    *,
    broken: bool,
    dead_ms: int = 0,
    node_id: str = "",
    keep: bool = True,
) -> None:
    """End the live round, if there is one: everyone stops, and with `keep` parks if it can.

    `node_id` is what the cause is about.
    """
    round_ = work.membership.round
    if round_ is None or not round_.live:
        return
    # An agent that restarts its workers by itself keeps none of them.
    keep = keep and work.membership.settings.max_restarts is not None
    end = RoundEnd(cause, reason, work.now_ms, broken, cause_node_id=node_id, keep=keep)
    work.store_round(replace(round_, end=end))
    work.state = replace(
        work.state,
        stop_deadline_ms=work.now_ms + longest_stop_ms(round_, work.state.tuning),
    )
    work.events.append(RoundEnded(round_.number, end, dead_ms))
    if round_.excuse:
        charge_instead(work, Cause.NODE_LEFT, round_.excuse)


def charge_stuck(work: Draft, node_id: str, reason: str) -> None:
    """Give workers that survive SIGKILL as the reason of an end that only suspects explain."""
    round_ = work.membership.round
    if round_ is None or round_.end is None or round_.end.settled:
        return
    failed = round_.end.cause is Cause.WORKER_FAILURE and round_.end.failures
    if failed and only_suspects(round_.end.failures):
        end = replace(round_.end, reason=reason, cause_node_id=node_id)
        work.store_round(replace(round_, end=end))


_EXCUSES = (Cause.NODE_LEFT, Cause.STORE_HOST, Cause.NODE_LOST)
"""Causes that a worker failure may turn out to follow from, in rising order of weight."""


def charge_instead(work: Draft, cause: Cause, reason: str, node_id: str = "") -> None:
    """Charge an ended round to the cause behind its failures, if it becomes known in time.

    When a node's processes or the store die, the others' collectives fail within milliseconds,
    often before the loss itself is known.
    """
    round_ = work.membership.round
    if round_ is None or round_.end is None or round_.end.settled:
        return
    weight = {Cause.WORKER_FAILURE: -1} | {c: i for i, c in enumerate(_EXCUSES)}
    if weight.get(round_.end.cause, len(weight)) < weight[cause]:
        end = replace(round_.end, cause=cause, reason=reason, cause_node_id=node_id)
        work.store_round(replace(round_, end=end))


def settle_charge(work: Draft) -> bool:
    """Charge the end of the round to its cause once everyone has stopped."""
    round_ = work.membership.round
    if not work.open or round_ is None or round_.end is None or round_.end.settled:
        return False
    if work.state.seats:
        return False
    end = replace(round_.end, settled=True)
    spent, store_failures = work.membership.restarts, work.membership.store_failures
    max_restarts = work.membership.settings.max_restarts
    failures = charged_failures(round_, work.state.tuning.root_cause_window_ms)
    if failures:
        root = failures[0]
        end = replace(end, reason=describe_failure(root), cause_node_id=root.node_id)
    others = spend(work.membership, round_, end, work.state.moved, work.state.tuning)
    over = exceeded(work.membership.settings, end, others)
    budget_left = over is None
    if end.cause is Cause.WORKER_FAILURE and budget_left:
        counted = restarts_that_count(work.membership, work.now_ms)
        # An agent that counts restarts itself reports a failure only when none is left.
        budget_left = max_restarts is not None and counted < max_restarts
        spent = (*spent, work.now_ms) if budget_left else spent
    work.store(
        replace(
            work.membership,
            round=replace(round_, end=end),
            restarts=spent,
            store_failures=store_failures + 1 if end.cause is Cause.STORE_HOST else 0,
            last_failures=failures or work.membership.last_failures,
            spent=others,
        )
    )
    furthest = work.state.moved.step
    work.state = replace(work.state, stop_deadline_ms=None, moved=UNMOVED)
    counted = restarts_that_count(work.membership, work.now_ms)
    first = failures[0] if failures else None
    charge = (end.cause, end.reason, counted, max_restarts, first, end.cause_node_id)
    work.events.append(RoundSettled(round_.number, *charge, furthest))
    if not budget_left:
        budget = f"restarts spent: {counted} of {max_restarts}"
        if max_restarts is None:
            budget = "the node's own agent restarts no more"
        reason = f"{end.cause}: {end.reason}; {budget}" if over is None else over.reason
        no_progress = over is not None and over.no_progress
        close(work, Result.FAILED, reason, failures=failures, no_progress=no_progress)
    return True


def restarts_that_count(membership: Membership, now_ms: int) -> int:
    """Count the spent restarts that still lie within `restart_window`."""
    window_ms = membership.settings.restart_window_ms
    if not window_ms:
        return len(membership.restarts)
    return sum(1 for at_ms in membership.restarts if now_ms - at_ms < window_ms)


def some_succeeded(state: State) -> bool:
    """Whether a participant of the running round has succeeded, present or not."""
    round_ = state.membership.round
    gone = round_ is not None and round_.live and bool(round_.gone)
    return gone or any(seat.succeeded for seat in state.seats.values())
