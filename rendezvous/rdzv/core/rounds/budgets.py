"""The budgets of a run, and how long it backs off before restarting.

A round may end for many reasons. A worker failure spends one of `max_restarts`. Ends caused by
machines (a node leaves or is lost, or a store host fails) are free unless the job was launched with
a budget for them. A job that keeps failing is slowed down or given up. Consecutive restarts after
rounds that failed soon *back off*. If so configured, the job also fails after several restarts that
did not *move* it on, either to a new highest step or to a changed snapshot file.

Everything here follows from durable state, so a server that takes over backs off for the same time
and continues the counts.
"""

from __future__ import annotations

from rdzv.core.model import Cause, Failure, Membership, Moved, Round, RoundEnd, Settings, Spent
from rdzv.core.root_cause import why_not_restarted
from rdzv.core.words import counted
from rdzv.structs import struct

PREEMPTIONS = frozenset({Cause.NODE_LOST, Cause.NODE_LEFT})
"""The causes counted against `max_preemptions`."""

_MAX_DOUBLINGS = 32


@struct(frozen=True)
class Exceeded:
    """The reason why a run fails: the budget or rule that it exceeded, and how its round ended."""

    reason: str
    no_progress: bool = False


def further(moved: Moved, reported: Moved) -> Moved:
    """Merge another node's report into a round's progress, and return the result."""
    steps = [step for step in (moved.furthest_step, reported.furthest_step) if step is not None]
    return Moved(
        max(steps, default=None),
        moved.snapshot_changed or reported.snapshot_changed,
        moved.sealed or reported.sealed,
    )


SOON_MS = 60_000
"""A round that fails sooner than this after its completion counts toward a crash loop."""


def spend(membership: Membership, round_: Round, end: RoundEnd, moved: Moved) -> Spent:
    """Return the budgets spent after a round ends, except restarts (charged separately)."""
    spent, failed = membership.spent, end.cause is Cause.WORKER_FAILURE
    further = _is_further(moved.furthest_step, spent.furthest_step)
    has_moved = moved.snapshot_changed or moved.sealed or further
    soon, without_progress = spent.soon, spent.without_progress
    if has_moved or end.at_ms - round_.at_ms >= SOON_MS:
        soon = 0
    elif failed:
        soon += 1
    if has_moved:
        without_progress = 0
    elif failed and membership.restarts:
        # Before the first restart, no restart can have been in vain.
        without_progress += 1
    return Spent(
        preemptions=spent.preemptions + _is_preemption(membership.settings, end),
        store_failures=spent.store_failures + (end.cause is Cause.STORE_HOST),
        soon=soon,
        without_progress=without_progress,
        furthest_step=moved.furthest_step if further else spent.furthest_step,
    )


def _is_preemption(settings: Settings, end: RoundEnd) -> bool:
    if settings.max_restarts is None and end.cause is Cause.NODE_LEFT:
        # This is how a node whose own agent restarts its workers reports such a restart.
        return False
    return end.cause in PREEMPTIONS


def _is_further(step: int | None, than: int | None) -> bool:
    return step is not None and (than is None or step > than)


def exceeded(
    settings: Settings, end: RoundEnd, spent: Spent, root_cause: Failure | None
) -> Exceeded | None:
    """Return why this end of a round ends the run, even if restarts are left, or None."""
    why = f"{end.cause}: {end.reason}"
    most, given = settings.no_progress_restarts, settings.max_preemptions
    if end.cause is Cause.WORKER_FAILURE and most and spent.without_progress >= most:
        restarts = f"{counted(spent.without_progress, 'restart')} in a row"
        step = spent.furthest_step
        beyond = "moved it on" if step is None else f"got it beyond step {step}"
        return Exceeded(
            f"no progress: none of {restarts} {beyond}; the last {why}", no_progress=True
        )
    rule = why_not_restarted(settings, root_cause) if end.cause is Cause.WORKER_FAILURE else ""
    if rule:
        return Exceeded(f"{why}; not restarted: {rule}")
    if _is_preemption(settings, end) and given is not None and spent.preemptions > given:
        return Exceeded(f"{why}; preemptions spent: {given} of {given}")
    given = settings.max_store_failures
    if end.cause is Cause.STORE_HOST and given is not None and spent.store_failures > given:
        return Exceeded(f"{why}; store failures spent: {given} of {given}")
    return None


def backoff_ms(membership: Membership) -> int:
    """Return the delay from the end of a run's last round to its restart, or 0 for no delay."""
    round_, settings = membership.round, membership.settings
    if round_ is None or round_.end is None or round_.end.cause is not Cause.WORKER_FAILURE:
        return 0
    if membership.spent.soon < 2:
        # A single failure is not a loop, and must not cause a delay.
        return 0
    doublings = min(membership.spent.soon - 2, _MAX_DOUBLINGS)
    return min(settings.restart_backoff_ms << doublings, settings.restart_backoff_max_ms)
