"""How a round ends: workers or its store fail, and its end is charged once all nodes have stopped.

A failure, like every other cause, ends the live round (`end_round`). The cause to which that end is
charged may still change until all nodes have stopped; then `settle_charge` spends a restart if a
worker failed.
"""

from __future__ import annotations

from rdzv.core.commands import Fail, ReportStoreHost
from rdzv.core.draft import Draft, Ignored
from rdzv.core.events import RoundEnded, RoundSettled, WorkerFailed
from rdzv.core.model import (
    UNMOVED,
    Cause,
    Failure,
    Membership,
    Moved,
    Result,
    Round,
    RoundEnd,
    State,
)
from rdzv.core.root_cause import (
    charged_failures,
    describe_failure,
    keep_earliest,
    only_suspects,
    root_cause,
)
from rdzv.core.rounds.budgets import Exceeded, exceeded, spend
from rdzv.core.rounds.ranks import longest_stop_ms, participant_of
from rdzv.core.snapshots import has_whole
from rdzv.structs import replace, struct


def fail(work: Draft, command: Fail) -> Ignored | None:
    """Record the failed workers of a node.

    A live round ends, and all nodes stop. Failures in a round that has already ended are added to
    those of its end. Once all nodes have stopped, `settle_charge` picks the root cause and spends a
    restart.
    """
    round_ = work.membership.round
    assert round_ is not None
    failures = failures_on(work, command.node_id, round_, command.failures)
    if round_.live:
        end_by_failure(work, failures)
        return None
    return None if add_failures(work, failures) else Ignored.KNOWN


def report_store_host(work: Draft, command: ReportStoreHost) -> Ignored | None:
    """End the round whose c10d store has died, or charge its end to the store."""
    before = work.state
    reason = f"on {command.node_id}: {command.reason}"
    end_round(work, Cause.STORE_HOST, reason, broken=True, node_id=command.node_id)
    return Ignored.ROUND_ENDED if work.state is before else None


def end_by_failure(work: Draft, failures: tuple[Failure, ...]) -> None:
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
            first = Failure(0, node.rank_first, 0, 0, None, "", "", at_ms=seat.since_ms)
            found.append(replace(first, node_id=node.node_id, address=node.offer.address))
    return tuple(found)


def failures_on(
    work: Draft, node_id: str, round_: Round, reported: tuple[Failure, ...]
) -> tuple[Failure, ...]:
    """Return what a node has reported as failures on it, none of which is later than this step."""
    participant = participant_of(round_, node_id)
    address = participant.offer.address if participant is not None else ""
    return tuple(
        replace(one, node_id=node_id, address=address, at_ms=min(one.at_ms, work.now_ms))
        for one in reported
    )


def add_failures(work: Draft, failures: tuple[Failure, ...]) -> bool:
    """Record failures in an ended round that is not settled; return whether any are new."""
    if (unsettled := work.state.unsettled) is None or not failures:
        return False
    round_, end = unsettled
    kept = keep_earliest((*end.failures, *failures))
    if kept == end.failures:
        return False
    before = {(f.node_id, f.local_rank, f.suspect) for f in end.failures}
    work.store_end(round_, replace(end, failures=kept))
    work.events += [
        WorkerFailed(round_.number, f, max(work.now_ms - f.at_ms, 0))
        for f in kept
        if (f.node_id, f.local_rank, f.suspect) not in before and (f.message or not f.finished)
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
    """End the live round, if there is one. All workers stop or, with `keep`, park if they can.

    A round that has ended before, but is not settled, is charged to this cause instead if the cause
    explains its failures. `node_id` is the node that the cause refers to.
    """
    round_ = work.membership.round
    if round_ is None or not round_.live:
        _charge_instead(work, cause, reason, node_id)
        return
    # An agent that restarts its workers by itself does not keep any of them.
    keep = keep and work.membership.settings.max_restarts is not None
    end = RoundEnd(cause, reason, work.now_ms, broken, cause_node_id=node_id, keep=keep)
    work.store_end(round_, end)
    work.state = replace(work.state, stop_deadline_ms=work.now_ms + longest_stop_ms(round_))
    work.events.append(RoundEnded(round_.number, end, dead_ms))
    if round_.excuse:
        _charge_instead(work, Cause.NODE_LEFT, round_.excuse)


def some_succeeded(state: State) -> bool:
    """Return whether any participant of the running round has succeeded, present or not."""
    round_ = state.membership.round
    gone = round_ is not None and round_.live and bool(round_.gone)
    return gone or any(seat.succeeded for seat in state.seats.values())


@struct(frozen=True)
class _Charge:
    end: RoundEnd
    failures: tuple[Failure, ...]
    membership: Membership
    over: Exceeded | None
    """The reason why the run then fails, or None if it goes on."""


def settle_charge(work: Draft) -> bool:
    """Charge the end of the round to its cause once every participant has stopped."""
    if (unsettled := work.state.unsettled) is None or work.state.seats:
        return False
    round_, moved = unsettled[0], _moved(work.state, unsettled[0])
    charge = _charge(work.state, *unsettled, work.now_ms)
    end, failures, over = charge.end, charge.failures, charge.over
    work.store(charge.membership)
    work.state = replace(work.state, stop_deadline_ms=None, moved=UNMOVED)
    counted = restarts_that_count(work.membership, work.now_ms)
    max_restarts = work.membership.settings.max_restarts
    first = failures[0] if failures else None
    charged = (end.cause, end.reason, counted, max_restarts, first, end.cause_node_id)
    work.events.append(RoundSettled(round_.number, *charged, moved.furthest_step))
    if over is not None:
        no_progress = over.no_progress
        work.close(Result.FAILED, over.reason, failures=failures, no_progress=no_progress)
    return True


def fails_when_stopped(state: State, now_ms: int) -> bool:
    """Return whether the run fails once its nodes have stopped, as far as its failures show."""
    unsettled = state.unsettled
    return unsettled is not None and _charge(state, *unsettled, now_ms).over is not None


def _charge(state: State, round_: Round, ended: RoundEnd, now_ms: int) -> _Charge:
    membership, end = state.membership, replace(ended, settled=True)
    settings, restarts = membership.settings, membership.restarts
    failures = charged_failures(round_)
    if failures:
        root = failures[0]
        end = replace(end, reason=describe_failure(root), cause_node_id=root.node_id)
    spent = spend(membership, round_, end, _moved(state, round_))
    over = exceeded(settings, end, spent, failures[0] if failures else None)
    if end.cause is Cause.WORKER_FAILURE and over is None:
        counted, most = restarts_that_count(membership, now_ms), settings.max_restarts
        if most is None:
            # An agent that counts restarts itself reports a failure only when it has none left.
            budget = "the node's own agent restarts no more"
            over = Exceeded(f"{end.cause}: {end.reason}; {budget}")
        elif counted >= most:
            budget = f"restarts spent: {counted} of {most}"
            over = Exceeded(f"{end.cause}: {end.reason}; {budget}")
        else:
            restarts = (*restarts, now_ms)
    charged = replace(
        membership,
        round=replace(round_, end=end),
        restarts=restarts,
        store_failures=membership.store_failures + 1 if end.cause is Cause.STORE_HOST else 0,
        last_failures=failures or membership.last_failures,
        spent=spent,
    )
    return _Charge(end, failures, charged, over)


def _moved(state: State, round_: Round) -> Moved:
    whole = has_whole(round_, state.waiting.values())
    return replace(state.moved, sealed=True) if whole else state.moved


_EXCUSES = (Cause.NODE_LEFT, Cause.STORE_HOST, Cause.NODE_LOST)
"""Causes that may explain a worker failure, in ascending order of precedence."""


def _charge_instead(work: Draft, cause: Cause, reason: str, node_id: str = "") -> None:
    """Charge an ended round to the cause behind its failures, if that cause becomes known in time.

    When a node's processes or the store die, collectives on other nodes fail within milliseconds,
    often before the loss itself is known.
    """
    if (unsettled := work.state.unsettled) is None or cause not in _EXCUSES:
        return
    round_, end = unsettled
    weight = {Cause.WORKER_FAILURE: -1} | {c: i for i, c in enumerate(_EXCUSES)}
    if weight.get(end.cause, len(weight)) < weight[cause]:
        work.store_end(round_, replace(end, cause=cause, reason=reason, cause_node_id=node_id))


def charge_stuck(work: Draft, node_id: str, reason: str) -> None:
    """Charge the end to workers that survive SIGKILL, if only suspects explain it otherwise."""
    if (unsettled := work.state.unsettled) is None:
        return
    round_, end = unsettled
    if end.cause is Cause.WORKER_FAILURE and end.failures and only_suspects(end.failures):
        work.store_end(round_, replace(end, reason=reason, cause_node_id=node_id))


def restarts_that_count(membership: Membership, now_ms: int) -> int:
    window_ms = membership.settings.restart_window_ms
    if not window_ms:
        return len(membership.restarts)
    return sum(1 for at_ms in membership.restarts if now_ms - at_ms < window_ms)
