"""How a node stops its workers, and what it does once they are gone: join again, or exit."""

from __future__ import annotations

from rdzv.agent.core import commands
from rdzv.agent.core.model import AgentState, Leaving, Outcome, Phase
from rdzv.core.commands import Leave
from rdzv.core.model import NO_STANDBY, Ended, Result, StandbyState
from rdzv.structs import replace


def stop(
    work: commands.Work,
    grace_ms: int,
    signum: int | None = None,
    *,
    keep: bool = False,
    not_kept: tuple[int, ...] = (),
) -> None:
    """Stop the workers, or park those that can if `keep` is set. `WorkersGone` follows."""
    state = work.state
    assert state.assignment is not None
    keep_ms = (state.job.keep_timeout_ms or None) if keep else None
    kept_out = not_kept if keep_ms is not None else ()
    phase = Phase.LEAVING if state.phase is Phase.LEAVING else Phase.STOPPING
    since_ms = work.now_ms if state.stopping_since_ms is None else state.stopping_since_ms
    work.state = replace(state, phase=phase, stopping_since_ms=since_ms)
    work.do(commands.StopWorkers(state.assignment.round, grace_ms, signum, keep_ms, kept_out))


def end_kept(work: commands.Work, charged: tuple[int, ...] = ()) -> None:
    state = work.state
    if not state.ending_kept:
        work.state = replace(state, ending_kept=True)
        work.do(commands.EndKept(state.job.failure_stop_timeout_ms, charged))


def leave(work: commands.Work, leaving: Leaving, grace_ms: int, signum: int | None) -> None:
    """Announce the leave at once, so other nodes need not wait, and exit once workers are gone."""
    if work.state.leaving is not None:
        return
    had_workers = not work.state.workers_gone
    work.state = replace(work.state, leaving=leaving, phase=Phase.LEAVING)
    if had_workers:
        work.do(said_leave(work.state, leaving, None))
        stop(work, grace_ms, signum)
        return
    if work.state.has_workers:
        work.do(said_leave(work.state, leaving, None))
    conclude(work)


def said_leave(state: AgentState, leaving: Leaving, left_round: int | None) -> Leave:
    """Say that this node leaves; `left_round` confirms that its workers are gone."""
    why = (leaving.cause, leaving.reason)
    return Leave(*state.speaker, state.run, *why, left_round, leaving.exited_zero)


def finish(work: commands.Work, outcome: Outcome, charged: tuple[int, ...] = ()) -> None:
    """Set the outcome and end any remaining workers; the `charged` ones raise their exceptions."""
    if work.state.leaving is not None and work.state.workers_gone:
        return  # It has left and is only waiting for its parked workers to end.
    if work.state.outcome is None:
        work.state = replace(work.state, outcome=outcome)
    if work.state.workers_gone:
        conclude(work, charged)
    elif work.state.phase is Phase.RUNNING:
        stop(work, work.state.job.shutdown_timeout_ms)


def conclude(work: commands.Work, charged: tuple[int, ...] = ()) -> None:
    """Join again or exit, now that none take part in a round; an exit ends parked workers first."""
    state = work.state
    notice, anew = state.notice, state.outcome is not None and state.outcome.joins_anew
    stays = anew or not state.is_ending
    if stays and notice is not None and notice.due_ms is not None:
        state = work.state = replace(state, leaving=notice.leaving, phase=Phase.LEAVING)
    if state.is_ending and state.has_workers:
        end_kept(work, charged)
        return
    round_ = state.assignment.round if state.assignment else None
    if round_ is not None:
        work.do(commands.StopStoreHost(round_))
    if state.leaving is not None:
        work.do(said_leave(state, state.leaving, round_))
        _exit(work, state.outcome or _left(state, state.leaving))
    elif anew:
        # Rounds of the other run get higher numbers than this one.
        left_round = state.left_round if round_ is None else round_
        work.state = AgentState(
            state.job,
            left_round=left_round,
            idle_since_ms=work.now_ms,
            disconnected_since_ms=state.disconnected_since_ms,
            disconnected_reason=state.disconnected_reason,
        )
        work.do(rejoin(work.state))
    elif state.outcome is not None:
        _exit(work, state.outcome)
    else:
        work.state = replace(
            state,
            phase=Phase.JOINING,
            left_round=round_,
            store_host_due_ms=None,
            notice=None,
        )
        work.do(rejoin(work.state))


def joins_anew(state: AgentState, ended: Ended) -> bool:
    """Return whether the job continues in another run, in which this node can take part.

    A server that has lost its memory, or was given an old one, answers so to a node whose run it
    does not know. A node whose workers have succeeded does not run them again.
    """
    goes_on = ended.result is Result.STOPPED and ended.retry_sensible
    return goes_on and not state.placed and state.phase is not Phase.SUCCEEDED


def rejoin(state: AgentState) -> commands.SayJoin:
    fenced = state.fenced and not state.failures
    standby = NO_STANDBY if state.ending_kept else state.standby
    is_standby = state.ending_kept or standby.state is StandbyState.READY
    kept = () if is_standby else state.kept
    return commands.SayJoin(
        state.run, state.left_round, state.evidence, fenced, state.moved, kept, standby
    )


def _exit(work: commands.Work, outcome: Outcome) -> None:
    work.state = replace(work.state, phase=Phase.ENDED, outcome=outcome)
    work.do(commands.Exit(outcome))


def _left(state: AgentState, leaving: Leaving) -> Outcome:
    reason = leaving.reason
    if state.disconnected_since_ms is not None and state.assignment is not None:
        reason += (
            f"; no server could be informed ({state.disconnected_reason}), so the job waits until "
            "a server notices that this node is gone"
        )
    return Outcome(leaving.exit_code, reason)
