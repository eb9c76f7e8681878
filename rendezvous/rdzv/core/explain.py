"""A job's state and the reason for it, and the view shown by `status`.

All of this is derived from `State` on request; nothing is stored separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import add
from types import MappingProxyType

from rdzv.core.fleet.drain import Drain
from rdzv.core.fleet.job_queue import QueuedWait
from rdzv.core.kept_ranks import kept_workers
from rdzv.core.life.absences import some_seat_away, unheard, unheard_until_ms
from rdzv.core.life.charging import restarts_that_count
from rdzv.core.life.chosen_nodes import awaited
from rdzv.core.life.forming import (
    completion_due_ms,
    holds,
    newcomers_due_ms,
    preparing,
    restart_due_ms,
    superseded_until_ms,
)
from rdzv.core.life.round_end import some_succeeded
from rdzv.core.model import (
    Departure,
    Ended,
    Failure,
    JobState,
    Membership,
    NodeState,
    Offer,
    Participant,
    Result,
    Round,
    RoundEnd,
    ScaleUp,
    State,
    Submission,
    is_placeholder,
)
from rdzv.core.rounds.budgets import backoff_ms
from rdzv.core.timed_text import LAST_CALL, left, past
from rdzv.core.words import counted, duration, listed
from rdzv.structs import replace, struct

_JOB_STATE_OF_RESULT = {
    Result.SUCCEEDED: JobState.SUCCEEDED,
    Result.FAILED: JobState.FAILED,
    Result.STOPPED: JobState.STOPPED,
}


_NO_DRAINS: Mapping[str, Drain] = MappingProxyType({})

_MOST_LEAVERS = 4
"""The maximum number of leaving nodes that a job's reason names."""


@struct(frozen=True)
class NodeView:
    """One node of a job; `rdzv.view.answers.NodeStatus` is its public form."""

    node_id: str
    state: NodeState
    group_rank: int | None
    rank_first: int | None
    local_world_size: int
    address: str
    role: str
    state_age_ms: int
    reason: str
    drain_left_ms: int | None = None
    """The time that its workers have left if it is about to leave, or None if it is staying."""


@struct(frozen=True)
class BudgetsView:
    """The budgets of a run other than restarts, spent and allowed, with None for no limit."""

    preemptions: int
    max_preemptions: int | None
    store_failures: int
    max_store_failures: int | None
    restarts_in_vain: int
    no_progress_restarts: int
    furthest_step: int | None
    restart_window_ms: int


@struct(frozen=True)
class JobView:
    """One job as the server knows it; `rdzv.view.answers.JobStatus` is its public form."""

    rdzv_id: str
    run: str
    run_number: int
    state: JobState
    reason: str
    round: int | None
    min_nodes: int
    max_nodes: int
    world_size: int
    restarts: int | None
    """The number of spent restarts that still count. None, like `max_restarts`, if the nodes' own
    agents count restarts and do not report them."""
    max_restarts: int | None
    nodes: tuple[NodeView, ...]
    state_age_ms: int
    run_age_ms: int
    master_addr: str
    master_port: int
    last_failure: tuple[Failure, ...]
    last_failure_age_ms: int | None
    last_end: str | None
    submission: Submission | None = None
    jobs_before: int | None = None
    """The number of jobs ahead of this one in the queue, if it was submitted and is waiting for
    nodes."""
    budgets: BudgetsView | None = None
    """The run's budgets, or None if unknown."""
    no_progress: bool = False
    ended_by_failure: bool = False
    """Whether `last_failure` ended the run."""
    """Whether the job failed because it made no progress, so the same launch would fail again."""
    backend: str = "rdzv"
    """The rendezvous backend. This server only observes groups formed by other backends."""
    owner: str = ""
    """The job's owner, as in `Membership`."""
    has_secret: bool = False
    """Whether nodes must know a secret to join."""
    kept: int = 0
    """The number of kept workers in the last complete round."""
    source: int | None = None
    """The RANK of the source, as in `Round`."""
    resume_step: int | None = None
    """The step at which the round resumes, as in `Round`."""


def job_state(state: State) -> JobState:
    membership = state.membership
    if membership.ended is not None:
        return _JOB_STATE_OF_RESULT[membership.ended.result]
    round_ = membership.round
    if round_ is not None and round_.live:
        return JobState.RUNNING
    if state.seats or membership.stopping:
        return JobState.STOPPING
    return JobState.QUEUED if state.queued else JobState.JOINING


def explain(state: State, now_ms: int) -> str:
    """Return a sentence that explains why the job is in its state and what it is waiting for."""
    membership = state.membership
    match job_state(state):
        case JobState.RUNNING:
            return _explain_running(state, now_ms)
        case JobState.STOPPING:
            return _explain_stopping(state, now_ms)
        case JobState.QUEUED:
            return "no nodes were chosen for it yet" + _missing(state, now_ms)
        case JobState.JOINING:
            return _explain_joining(state, now_ms) + _had_succeeded(state)
        case _:
            return membership.ended.reason if membership.ended else ""


def _explain_running(state: State, now_ms: int) -> str:
    round_ = _round(state)
    nodes, workers = len(round_.participants), round_.world_size
    text = f"{counted(nodes, 'node')} and {counted(workers, 'worker')} run round {round_.number}"
    done = sum(1 for seat in state.seats.values() if seat.succeeded) + len(round_.gone)
    if done:
        text += f"; {done} of {nodes} have succeeded; waiting for the others"
    away = [node_id for node_id in state.seats if node_id in state.away]
    if away:
        text += f"; away: {listed(away)}"
    due_ms = newcomers_due_ms(state, now_ms)
    if due_ms is not None:
        coming = preparing(state, now_ms)
        when = f"once {listed(coming)} can start workers warm, " if coming else ""
        text += f"; newcomers are admitted {when}within "
        text = text + left(due_ms - now_ms, "newcomers")
    return text + _missing(state, now_ms)


def _explain_stopping(state: State, now_ms: int) -> str:
    round_ = _round(state)
    end = round_.end
    why = f"round {round_.number} ended ({_why_ended(end)})" if end else ""
    text = f"{why}; waiting for {listed(state.seats)} to stop"
    if not state.seats:
        names = listed(unheard(state))
        text = f"{why}; workers may still run on {names} (no report); waiting "
        text = text + left(unheard_until_ms(state) - now_ms) + " more"
    # Iterate over the away nodes, which are few, because there may be thousands of seats.
    away = [node_id for node_id in state.away if node_id in state.seats]
    if away:
        text = text + f"; away: {listed(away)}"
    return text + _missing(state, now_ms)


def _why_ended(end: RoundEnd) -> str:
    return f"{end.cause}: {end.reason}"


def _explain_joining(state: State, now_ms: int) -> str:
    ready, text = state.ready, ""
    bounds = f"{state.membership.min_nodes}:{state.membership.max_nodes}"
    due_ms = completion_due_ms(state)
    if due_ms is not None:
        waits, name = _waits_for(state, due_ms)
        text = f"have {ready} of {bounds} nodes; {waits}, " + left(due_ms - now_ms, name) + " left"
        return text + _missing(state, now_ms)
    missing = max(state.membership.min_nodes - ready, 0)
    if not missing:
        away = [node_id for node_id in state.waiting if node_id in state.away]
        text = f"have {ready} of {bounds} nodes; waiting for {listed(away)} to come back"
        return text + _missing(state, now_ms)
    if len(coming := awaited(state)) >= missing:
        was, is_ = ("was", "is") if len(coming) == 1 else ("were", "are")
        text = f"{listed(coming)} {was} chosen, and {is_} starting (have {ready} of {bounds} nodes"
        return text + _missing(state, now_ms) + ")" + _join_deadline(state, now_ms)
    text = f"waiting for {missing} more node{'s' if missing != 1 else ''} (have {ready} of {bounds}"
    return text + _missing(state, now_ms) + ")" + _join_deadline(state, now_ms)


def _had_succeeded(state: State) -> str:
    """Return text saying that the job may yet succeed, or "" if no node of the last round did."""
    round_ = state.membership.round
    if round_ is None or not round_.succeeded:
        return ""
    done, nodes = len(round_.succeeded), len(round_.participants)
    return (
        f"; {done} of {nodes} nodes have succeeded in round {round_.number}: the job succeeds if "
        "the others report that before the next round"
    )


def _waits_for(state: State, due_ms: int) -> tuple[str, str]:
    """Describe what a round with enough nodes is still waiting for, and name the wait."""
    failures = state.membership.store_failures
    if due_ms == restart_due_ms(state):
        return _backs_off(state.membership, due_ms), "backing off"
    if due_ms == superseded_until_ms(state):
        who = listed(state.superseded)
        return f"waiting for {who} to stop workers of an earlier round", "time left"
    if coming := awaited(state):
        return f"{listed(coming)} may still join", "joining"
    if state.membership.round is None and state.membership.resumed_at_ms is not None:
        return "other nodes may still be running it, and have time to report", "time left"
    if state.membership.round is None:
        return "last call", LAST_CALL
    if failures:
        times = "once" if failures == 1 else f"{failures} times in a row"
        return f"backing off because the store host failed {times}", "backing off"
    return "gathering newcomers", "gathering"


def _backs_off(membership: Membership, now_ms: int) -> str:
    """Describe a crash loop's backoff and the restart that it delays."""
    number, most = restarts_that_count(membership, now_ms), membership.settings.max_restarts
    waits = f"backs off {duration(backoff_ms(membership))} before restart {number} of {most}"
    return f"{waits}: {membership.spent.soon} rounds in a row failed soon"


def _join_deadline(state: State, now_ms: int) -> str:
    if state.short_since_ms is None:
        return ""
    left_ms = state.short_since_ms + state.membership.settings.join_timeout_ms - now_ms
    does = "gives up" if state.membership.submission is None else "is queued again"
    return f"; {does} in " + left(left_ms, "join timeout")


def _missing(state: State, now_ms: int) -> str:
    """Describe the stuck nodes, and the nodes that were lost or left since the last round began."""
    round_ = state.membership.round
    since_ms = round_.at_ms if round_ else state.membership.began_at_ms
    recent = [d for d in _absent(state) if d.at_ms >= since_ms]
    gone: list[str] = [
        f"; {d.node_id} {_went(d)} " + past(now_ms - d.at_ms) + f" ago: {_why_gone(d)}"
        for d in recent[-4:]
    ]
    if state.stuck:
        gone.append(f"; workers of {listed(state.stuck)} survive SIGKILL")
    return reduce(add, gone[-4:], "")


def _why_gone(departure: Departure) -> str:
    may_run = "; its workers may still run until it reports" if departure.may_run else ""
    return departure.reason + may_run


def _went(departure: Departure) -> str:
    return "was lost" if departure.state is NodeState.LOST else "left"


def _absent(state: State) -> list[Departure]:
    """Return the latest departure of every node that is not present, oldest first."""
    latest = {departure.node_id: departure for departure in state.membership.departures}
    return [d for d in latest.values() if not state.present(d.node_id)]


def waiting_reason(state: State, node_id: str, now_ms: int, job: str | None = None) -> str:
    """Explain why this node has no workers to run.

    Return an empty string if it has workers or is not in the job. `job` is the result of `explain`
    for this state, if known; it is the same for all nodes.
    """
    if node_id in state.stuck:
        pids = ", ".join(str(pid) for pid in state.stuck[node_id].pids)
        return f"its workers survive SIGKILL (pid {pids}); it is seated when they are gone"
    if node_id not in state.waiting:
        return ""
    held_ms = holds(state).get(node_id, 0)
    if held_ms > now_ms:
        why = "it was lost more than once lately; seated at the next natural end of a round, or in "
        return why + left(held_ms - now_ms)
    if _all_seats_taken(state):
        return f"spare: all {state.membership.max_nodes} seats are taken"
    if job_state(state) is JobState.RUNNING:
        return f"{_why_not_let_in(state)}; " + (job or explain(state, now_ms))
    return job or explain(state, now_ms)


def _why_not_let_in(state: State) -> str:
    """Explain why a waiting node does not end the running round, or not yet."""
    if some_succeeded(state):
        return "participants have begun to succeed, so that no newcomer ends the round"
    settings, round_ = state.membership.settings, state.membership.round
    if settings.scale_up is ScaleUp.ON_RESTART:
        return "newcomers are seated at the next natural end of a round (scale-up on-restart)"
    if settings.scale_up is ScaleUp.AFTER and round_ is not None:
        after = duration(settings.scale_up_after_ms)
        return f"newcomers are admitted when the round has run for {after} (scale-up after)"
    if some_seat_away(state):
        return "newcomers are admitted when the nodes that are away are back"
    return "newcomers are gathered"


def _all_seats_taken(state: State) -> bool:
    return len(state.seats) >= state.membership.max_nodes


def view(
    state: State,
    now_ms: int,
    wait: QueuedWait | None = None,
    drains: Mapping[str, Drain] = _NO_DRAINS,
) -> JobView:
    """Return the view of the whole job.

    `wait` explains why a submitted job lacks nodes; `drains` contains the nodes that are about to
    leave.
    """
    membership, round_ = state.membership, state.membership.round
    failures = membership.last_failures
    if membership.ended is not None:
        wait, drains = None, _NO_DRAINS
    drains = {n: drain for n, drain in drains.items() if state.present(n)}
    return JobView(
        rdzv_id=membership.rdzv_id,
        run=membership.run,
        run_number=membership.run_number,
        state=job_state(state),
        reason=_reason(state, now_ms, wait) + _leavers(drains, now_ms),
        round=round_.number if round_ else None,
        min_nodes=membership.min_nodes,
        max_nodes=membership.max_nodes,
        world_size=round_.world_size if round_ else 0,
        restarts=_restarts(membership, now_ms),
        max_restarts=membership.settings.max_restarts,
        nodes=tuple(_drained_view(one, drains, now_ms) for one in node_views(state, now_ms)),
        state_age_ms=max(now_ms - _state_since_ms(state), 0),
        run_age_ms=max(now_ms - membership.began_at_ms, 0),
        master_addr=round_.master_addr if round_ else "",
        master_port=round_.master_port if round_ else 0,
        last_failure=failures,
        last_failure_age_ms=max(now_ms - failures[0].at_ms, 0) if failures else None,
        last_end=_why_ended(round_.end) if round_ and round_.end else None,
        submission=membership.submission,
        owner=membership.owner,
        has_secret=bool(membership.secret),
        kept=kept_workers(round_),
        source=round_.source if round_ else None,
        resume_step=round_.resume_step if round_ else None,
        jobs_before=wait.jobs_before if wait is not None else None,
        budgets=_budgets(membership),
        no_progress=membership.ended is not None and membership.ended.no_progress,
        ended_by_failure=membership.ended is not None and bool(membership.ended.failures),
    )


def _reason(state: State, now_ms: int, wait: QueuedWait | None) -> str:
    """Explain why the job is in its state and which nodes it is waiting for."""
    if wait is None:
        return explain(state, now_ms)
    if state.queued:
        return wait.reason + _missing(state, now_ms)
    return explain(state, now_ms) + f"; {wait.reason}"


def _leavers(drains: Mapping[str, Drain], now_ms: int) -> str:
    """Describe the nodes that are about to leave, soonest first."""
    soonest = sorted(drains.items(), key=lambda item: (item[1].due_ms, item[0]))
    shown = [f"; {name} is " + drain.describe(now_ms) for name, drain in soonest[:_MOST_LEAVERS]]
    more = len(soonest) - len(shown)
    return reduce(add, shown, "") + (f"; {counted(more, 'other')} too" if more else "")


def _drained_view(one: NodeView, drains: Mapping[str, Drain], now_ms: int) -> NodeView:
    drain = drains.get(one.node_id)
    if drain is None:
        return one
    text = drain.describe(now_ms)
    reason = text + "; " + one.reason if one.reason else text
    return replace(one, reason=reason, drain_left_ms=drain.left_ms(now_ms))


def _budgets(membership: Membership) -> BudgetsView:
    settings, spent = membership.settings, membership.spent
    return BudgetsView(
        preemptions=spent.preemptions,
        max_preemptions=settings.max_preemptions,
        store_failures=spent.store_failures,
        max_store_failures=settings.max_store_failures,
        restarts_in_vain=spent.in_vain,
        no_progress_restarts=settings.no_progress_restarts,
        furthest_step=spent.step,
        restart_window_ms=settings.restart_window_ms,
    )


def _restarts(membership: Membership, now_ms: int) -> int | None:
    if membership.settings.max_restarts is None:
        return None
    return restarts_that_count(membership, now_ms)


def _state_since_ms(state: State) -> int:
    membership, round_ = state.membership, state.membership.round
    if membership.ended is not None:
        return membership.ended.at_ms
    submission = membership.submission
    if state.queued and submission is not None and submission.queued_again_ms is not None:
        return submission.queued_again_ms
    if round_ is None:
        return membership.began_at_ms
    return round_.end.at_ms if round_.end else round_.at_ms


def node_views(state: State, now_ms: int) -> tuple[NodeView, ...]:
    """Return a view of each node: participants by GROUP_RANK, then waiting nodes, then departed."""
    round_ = state.membership.round
    participants = round_.participants if round_ else ()
    ended = state.membership.ended
    views = [
        _participant_view(state, p, group_rank, now_ms)
        for group_rank, p in enumerate(participants)
        if p.node_id in state.seats or ended is not None
    ]
    shown = {v.node_id for v in views}
    others = [n for n in (*state.waiting, *state.stuck) if n not in shown]
    job = explain(state, now_ms) if others else None
    views += [_waiting_view(state, node_id, now_ms, job) for node_id in others]
    shown |= set(others)
    coming = [n for n in awaited(state) if n not in shown] if ended is None else []
    views += [_placed_view(node_id) for node_id in coming]
    shown |= set(coming)
    views += [_departed_view(d, now_ms) for d in _absent(state) if d.node_id not in shown]
    return tuple(views)


def _participant_view(
    state: State, participant: Participant, group_rank: int, now_ms: int
) -> NodeView:
    node_id = participant.node_id
    node_state, since_ms, reason = _participant_state(state, node_id, now_ms)
    return _node_view(
        node_id,
        node_state,
        participant.offer,
        now_ms - since_ms,
        reason,
        group_rank,
        participant.rank_first,
    )


def _participant_state(state: State, node_id: str, now_ms: int) -> tuple[NodeState, int, str]:
    round_, ended = _round(state), state.membership.ended
    if ended is not None:
        return _final_state(state, node_id, ended)
    seat = state.seats[node_id]
    if node_id in state.away:
        away = state.away[node_id]
        reason: str = "its stream ended; its seat is kept for " + left(away.until_ms - now_ms)
        if is_placeholder(node_id):
            reason = "no report since this server learned of the round; waiting "
            reason = reason + left(away.until_ms - now_ms) + " more"
        return NodeState.AWAY, away.since_ms, reason
    if seat.succeeded:
        return NodeState.SUCCEEDED, seat.since_ms, ""
    if round_.end is not None:
        reason = seat.leaving and f"leaving: {seat.leaving}"
        return NodeState.STOPPING, round_.end.at_ms, reason or _why_ended(round_.end)
    return NodeState.SEATED, seat.since_ms, ""


def _final_state(state: State, node_id: str, ended: Ended) -> tuple[NodeState, int, str]:
    """Return the state that a participant of the last round had when the run closed."""
    if ended.result is Result.SUCCEEDED:
        return NodeState.SUCCEEDED, ended.at_ms, ""
    for departure in reversed(state.membership.departures):
        if departure.node_id == node_id and departure.at_ms >= _round(state).at_ms:
            return departure.state, departure.at_ms, _why_gone(departure)
    return NodeState.LEFT, ended.at_ms, f"the job has {ended.result}"


def _waiting_view(state: State, node_id: str, now_ms: int, job: str | None) -> NodeView:
    reason = waiting_reason(state, node_id, now_ms, job)
    if node_id in state.stuck:
        stuck = state.stuck[node_id]
        offer = Offer(address="", local_world_size=0)
        return _node_view(node_id, NodeState.STOPPING, offer, now_ms - stuck.since_ms, reason)
    waiting = state.waiting[node_id]
    age_ms = now_ms - waiting.since_ms
    if node_id in state.away:
        return _node_view(node_id, NodeState.AWAY, waiting.offer, age_ms, "its stream ended")
    node_state = NodeState.SPARE if _all_seats_taken(state) else NodeState.WAITING
    return _node_view(node_id, node_state, waiting.offer, age_ms, reason)


def _placed_view(node_id: str) -> NodeView:
    offer = Offer(address="", local_world_size=0)
    reason = "it was chosen for the job, and has not joined yet"
    return _node_view(node_id, NodeState.WAITING, offer, 0, reason)


def _departed_view(departure: Departure, now_ms: int) -> NodeView:
    offer = Offer(
        departure.address, local_world_size=departure.local_world_size, role=departure.role
    )
    age_ms = now_ms - departure.at_ms
    return _node_view(departure.node_id, departure.state, offer, age_ms, _why_gone(departure))


def _node_view(
    node_id: str,
    node_state: NodeState,
    offer: Offer,
    age_ms: int,
    reason: str,
    group_rank: int | None = None,
    rank_first: int | None = None,
) -> NodeView:
    return NodeView(
        node_id=node_id,
        state=node_state,
        group_rank=group_rank,
        rank_first=rank_first,
        local_world_size=offer.local_world_size,
        address=offer.address,
        role=offer.role,
        state_age_ms=max(age_ms, 0),
        reason=reason,
    )


def _round(state: State) -> Round:
    round_ = state.membership.round
    assert round_ is not None
    return round_
