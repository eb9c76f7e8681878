"""Charging the end of a round to its cause, which spends a restart if a worker failed."""

from __future__ import annotations

from rdzv.core.draft import Draft
from rdzv.core.events import RoundSettled
from rdzv.core.life.runs import close
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
from rdzv.core.root_cause import charged_failures, describe_failure, only_suspects
from rdzv.core.rounds.budgets import Exceeded, exceeded, spend
from rdzv.core.snapshots import has_whole
from rdzv.core.spent import Spent
from rdzv.structs import replace, struct


@struct(frozen=True)
class _Charge:
    """What the end of a round costs its run."""

    end: RoundEnd
    failures: tuple[Failure, ...]
    restarts: tuple[int, ...]
    spent: Spent
    over: Exceeded | None
    budget_left: bool


def settle_charge(work: Draft) -> bool:
    """Charge the end of the round to its cause once every participant has stopped."""
    round_ = work.membership.round
    if not work.open or round_ is None or round_.end is None or round_.end.settled:
        return False
    if work.state.seats:
        return False
    moved, max_restarts = _moved(work.state, round_), work.membership.settings.max_restarts
    charge = _charge(work.state, round_, round_.end, work.now_ms)
    end, failures, over = charge.end, charge.failures, charge.over
    work.store(
        replace(
            work.membership,
            round=replace(round_, end=end),
            restarts=charge.restarts,
            store_failures=(
                work.membership.store_failures + 1 if end.cause is Cause.STORE_HOST else 0
            ),
            last_failures=failures or work.membership.last_failures,
            spent=charge.spent,
        )
    )
    work.state = replace(work.state, stop_deadline_ms=None, moved=UNMOVED)
    counted = restarts_that_count(work.membership, work.now_ms)
    first = failures[0] if failures else None
    charged = (end.cause, end.reason, counted, max_restarts, first, end.cause_node_id)
    work.events.append(RoundSettled(round_.number, *charged, moved.furthest_step))
    if not charge.budget_left:
        budget = f"restarts spent: {counted} of {max_restarts}"
        if max_restarts is None:
            budget = "the node's own agent restarts no more"
        reason = f"{end.cause}: {end.reason}; {budget}" if over is None else over.reason
        no_progress = over is not None and over.no_progress
        close(work, Result.FAILED, reason, failures=failures, no_progress=no_progress)
    return True


def fails_when_stopped(state: State, now_ms: int) -> bool:
    """Return whether the run fails once its nodes have stopped, as far as its failures show."""
    round_ = state.membership.round
    if not state.run_is_open or round_ is None or round_.end is None or round_.end.settled:
        return False
    return not _charge(state, round_, round_.end, now_ms).budget_left


def _charge(state: State, round_: Round, ended: RoundEnd, now_ms: int) -> _Charge:
    """Return what the end of a round costs, as far as its nodes have reported."""
    membership, end = state.membership, replace(ended, settled=True)
    failures = charged_failures(round_)
    if failures:
        root = failures[0]
        end = replace(end, reason=describe_failure(root), cause_node_id=root.node_id)
    spent = spend(membership, round_, end, _moved(state, round_))
    over = exceeded(membership.settings, end, spent, failures[0] if failures else None)
    restarts, budget_left = membership.restarts, over is None
    if end.cause is Cause.WORKER_FAILURE and budget_left:
        most = membership.settings.max_restarts
        # An agent that counts restarts itself reports a failure only when it has no restarts left.
        budget_left = most is not None and restarts_that_count(membership, now_ms) < most
        restarts = (*restarts, now_ms) if budget_left else restarts
    return _Charge(end, failures, restarts, spent, over, budget_left)


def _moved(state: State, round_: Round) -> Moved:
    """Return how far the round came, as far as its nodes have reported."""
    whole = has_whole(round_, state.waiting.values())
    return replace(state.moved, sealed=True) if whole else state.moved


_EXCUSES = (Cause.NODE_LEFT, Cause.STORE_HOST, Cause.NODE_LOST)
"""Causes that may explain a worker failure, in ascending order of precedence."""


def charge_instead(work: Draft, cause: Cause, reason: str, node_id: str = "") -> None:
    """Charge an ended round to the cause behind its failures, if that cause becomes known in time.

    When a node's processes or the store die, collectives on other nodes fail within milliseconds,
    often before the loss itself is known.
    """
    round_ = work.membership.round
    if round_ is None or round_.end is None or round_.end.settled:
        return
    weight = {Cause.WORKER_FAILURE: -1} | {c: i for i, c in enumerate(_EXCUSES)}
    if weight.get(round_.end.cause, len(weight)) < weight[cause]:
        end = replace(round_.end, cause=cause, reason=reason, cause_node_id=node_id)
        work.store_round(replace(round_, end=end))


def charge_stuck(work: Draft, node_id: str, reason: str) -> None:
    """Charge the end to workers that survive SIGKILL, if only suspects explain it otherwise."""
    round_ = work.membership.round
    if round_ is None or round_.end is None or round_.end.settled:
        return
    failed = round_.end.cause is Cause.WORKER_FAILURE and round_.end.failures
    if failed and only_suspects(round_.end.failures):
        end = replace(round_.end, reason=reason, cause_node_id=node_id)
        work.store_round(replace(round_, end=end))


def restarts_that_count(membership: Membership, now_ms: int) -> int:
    window_ms = membership.settings.restart_window_ms
    if not window_ms:
        return len(membership.restarts)
    return sum(1 for at_ms in membership.restarts if now_ms - at_ms < window_ms)
