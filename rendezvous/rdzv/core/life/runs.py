"""Beginning and closing runs, and operators' commands for one: stop, restart, and scale."""

from __future__ import annotations

from rdzv.core.commands import Join, Restart, Scale, Stop
from rdzv.core.draft import Draft, Ignored
from rdzv.core.events import JobScaled, RunBegan
from rdzv.core.life.failures import end_round
from rdzv.core.life.leaving import unheard, unheard_until_ms
from rdzv.core.model import (
    Cause,
    Ended,
    EndedRun,
    LeaveCause,
    Membership,
    Result,
    Settings,
    State,
    Tuning,
)
from rdzv.core.words import duration, listed
from rdzv.errors import InvalidRequestError, RendezvousClosedError
from rdzv.structs import replace

MAX_EARLIER_RUNS = 16
"""The number of earlier runs for which a job remembers how they ended."""
REPLACED = "all nodes were gone, and it was launched again with other settings"
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
    work.close(Result.SUCCEEDED, "all workers exited 0")
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
    work.close(Result.STOPPED, reason)
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
        work.close(Result.FAILED, f"no node could start its workers: {reason}")
    elif cause is LeaveCause.FAILED:
        work.close(Result.FAILED, f"all nodes left, the last with failed workers: {reason}")
    elif cause is LeaveCause.TIMEOUT:
        work.close(Result.FAILED, reason, retry_sensible=True)
    else:
        work.close(Result.STOPPED, f"all nodes left: {reason}")
    return True


def stop(work: Draft, command: Stop) -> Ignored | None:
    """Stop every node. The run closes only once all nodes have stopped, so no two runs overlap."""
    refuse_operator(work.state, command, work.now_ms)
    if work.membership.stopping:
        return Ignored.KNOWN
    work.store(replace(work.membership, stopping=command.reason))
    end_round(work, Cause.OPERATOR, command.reason, broken=False, keep=False)
    return None


def restart(work: Draft, command: Restart) -> Ignored | None:
    """End the latest round so that another can form, without spending a restart."""
    refuse_operator(work.state, command, work.now_ms)
    round_ = work.membership.round
    if round_ is None or command.round != round_.number:
        return Ignored.OTHER_ROUND
    if not round_.live:
        return Ignored.KNOWN
    end_round(work, Cause.OPERATOR, command.reason, broken=False, keep=False)
    return None


def scale(work: Draft, command: Scale) -> Ignored | None:
    """Change the run's bounds, ending a round that has more nodes than they allow."""
    refuse_operator(work.state, command, work.now_ms)
    bounds = (command.min_nodes, command.max_nodes)
    membership = work.membership
    if bounds == membership.bounds:
        return Ignored.KNOWN
    work.store(replace(membership, scaled=bounds))
    work.events.append(JobScaled(*bounds, command.reason))
    round_ = membership.round
    if round_ is not None and len(work.state.seats) > command.max_nodes:
        end_round(work, Cause.OPERATOR, command.reason, broken=False)
    return None


def refuse_operator(state: State, command: Stop | Restart | Scale, now_ms: int) -> None:
    """Refuse an operator's command unless its run is still open and the round it names has existed.

    Raises:
        RendezvousClosedError: the run has ended, or is being stopped (a repeated stop is allowed).
        InvalidRequestError: there has been no such round to restart.

    """
    membership, round_ = state.membership, state.membership.round
    if command.run != membership.run or membership.ended is not None:
        what = "been followed by another"
        if membership.ended and command.run == membership.run:
            ago = duration(now_ms - membership.ended.at_ms)
            what = f"{membership.ended.result} {ago} ago"
        raise RendezvousClosedError(
            f"run {command.run} of {membership.rdzv_id} has {what}; nothing was changed"
        )
    if membership.stopping and not isinstance(command, Stop):
        raise RendezvousClosedError(
            f"run {command.run} of {membership.rdzv_id} is being stopped ({membership.stopping}); "
            "nothing was changed"
        )
    if isinstance(command, Restart) and (round_ is None or command.round > round_.number):
        raise InvalidRequestError(
            f"{membership.rdzv_id} has had no round {command.round}; nothing was changed"
        )
