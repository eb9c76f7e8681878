"""Beginning and closing runs."""

from __future__ import annotations

from rdzv.core.commands import Join
from rdzv.core.draft import Draft
from rdzv.core.events import RunBegan, RunEnded
from rdzv.core.life.absences import unheard, unheard_until_ms
from rdzv.core.model import (
    Ended,
    EndedRun,
    Failure,
    LeaveCause,
    Membership,
    Result,
    Settings,
    State,
    Tuning,
)
from rdzv.core.words import listed
from rdzv.structs import replace

MAX_EARLIER_RUNS = 16
"""The number of earlier runs for which a job remembers how they ended."""
REPLACED = "everyone was gone, and it was launched anew with other settings"
"""The reason for ending an empty run when nodes arrive that cannot join it."""


def vacant(rdzv_id: str, tuning: Tuning) -> State:
    """Return the state of a job that no node has joined yet. It is never stored."""
    nobody = Membership(rdzv_id, run="", run_number=0, settings=Settings(1, 1), began_at_ms=0)
    return State(nobody, tuning)


def ended_run(state: State, run: str) -> Ended | None:
    """Return how the run with this uid ended, for a node that names it.

    An unknown run counts as superseded by the current one. Return None if the current run is open
    and is the one named, if the node is fresh (empty `run`), or if no run is known here.
    """
    membership = state.membership
    if not run or not membership.run:
        return None
    if run == membership.run:
        return membership.ended
    for earlier in membership.earlier:
        if earlier.run == run:
            return earlier.ended
    reason = (
        f"run {run} is not known here, and others have begun run {membership.run} of "
        f"{membership.rdzv_id}"
    )
    return Ended(Result.STOPPED, reason, membership.began_at_ms, retry_sensible=True)


def begin_run(work: Draft, command: Join) -> None:
    old = work.membership
    run = command.run or command.new_run
    membership = next_run(old, run, command.settings, work.now_ms, command.owner)
    membership = replace(membership, secret=command.secret)
    if command.run:
        membership = replace(membership, resumed_at_ms=work.now_ms)
    reason = "the first of this job"
    if old.ended:
        reason = f"the last one has {old.ended.result}: {old.ended.reason}"
    elif command.run:
        reason = "the server had no memory of it"
    if command.owner:
        reason += f"; begun by {command.owner}"
    work.state = State(membership, work.state.tuning)
    work.events.append(RunBegan(membership.run, membership.run_number, reason))


def next_run(old: Membership, run: str, settings: Settings, now_ms: int, owner: str) -> Membership:
    """Return the membership of the run that follows `old`. The job keeps its owner."""
    ended = (EndedRun(old.run, old.ended),) if old.ended else ()
    return Membership(
        rdzv_id=old.rdzv_id,
        run=run,
        run_number=old.run_number + 1,
        settings=settings,
        began_at_ms=now_ms,
        next_round=old.next_round,
        earlier=(*old.earlier, *ended)[-MAX_EARLIER_RUNS:],
        owner=old.owner or owner,
    )


def succeed_run(work: Draft) -> bool:
    """Close the run as succeeded once every participant, present or not, has succeeded.

    A participant that succeeded and was then given up counts, even if that ended the round, because
    its work was done.
    """
    if not work.open or not _all_done(work.state):
        return False
    close(work, Result.SUCCEEDED, "all workers exited 0")
    return True


def _all_done(state: State) -> bool:
    round_ = state.membership.round
    if round_ is None:
        return False
    if round_.live:
        # The counts come first: otherwise each of thousands of successes would look at all seats.
        done = len(round_.succeeded) >= len(state.seats)
        return done and all(seat.succeeded for seat in state.seats.values())
    return len(round_.succeeded) == len(round_.participants)


def close_when_stopped(work: Draft) -> bool:
    """Close a run that an operator is ending, once it has no known remaining workers.

    Workers of a dead agent run until their runner kills them. Nothing is known about the workers of
    a node that is cut off, so the run waits for them only that long.
    """
    if not work.open or not work.membership.stopping or work.state.seats:
        return False
    if work.now_ms < unheard_until_ms(work.state):
        return False
    reason = work.membership.stopping
    if names := unheard(work.state):
        reason += f"; workers may still run on {listed(names)}: no report since it was given up"
    close(work, Result.STOPPED, reason)
    return True


def close_when_all_left(work: Draft) -> bool:
    """End a run that was not submitted once its last node has left voluntarily."""
    cause = work.state.last_leave
    if not work.open or cause is None or work.state.anybody or work.membership.stopping:
        return False
    if work.membership.submission is not None:
        return False
    reason = work.membership.departures[-1].reason
    if cause is LeaveCause.START_FAILED:
        close(work, Result.FAILED, f"no node could start its workers: {reason}")
    elif cause is LeaveCause.FAILED:
        close(work, Result.FAILED, f"all nodes left, the last with failed workers: {reason}")
    elif cause is LeaveCause.TIMEOUT:
        close(work, Result.FAILED, reason, retry_sensible=True)
    else:
        close(work, Result.STOPPED, f"all nodes left: {reason}")
    return True


def close(
    work: Draft,
    result: Result,
    reason: str,
    *,
    retry_sensible: bool = False,
    failures: tuple[Failure, ...] = (),
    no_progress: bool = False,
) -> None:
    """Close the run, which then forms no more rounds and has no nodes."""
    ended = Ended(result, reason, work.now_ms, retry_sensible, failures, no_progress)
    work.state = State(replace(work.membership, ended=ended), work.state.tuning)
    work.events.append(RunEnded(work.membership.run, ended))
