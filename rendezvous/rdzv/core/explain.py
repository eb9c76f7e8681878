"""What a job is doing and why: states, reasons and the view that `status` shows.

All of it is derived from the state at the time of asking; nothing is stored beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
    is_stand_in,
)
from rdzv.core.rendezvous import (
    completion_due_ms,
    holds,
    newcomers_due_ms,
    restarts_that_count,
    some_seat_away,
    some_succeeded,
)

_JOB_STATE_OF_RESULT = {
    Result.SUCCEEDED: JobState.SUCCEEDED,
    Result.FAILED: JobState.FAILED,
    Result.STOPPED: JobState.STOPPED,
}


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as `status` shows it."""

    node_id: str
    state: NodeState
    group_rank: int | None
    rank_first: int | None
    local_world_size: int
    address: str
    role: str
    state_age_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobView:
    """One job as `status` shows it."""

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
    """None, like `max_restarts`: the nodes' own agents count, and do not tell."""
    max_restarts: int | None
    nodes: tuple[NodeView, ...]
    state_age_ms: int
    run_age_ms: int
    master_addr: str
    master_port: int
    last_failure: tuple[Failure, ...]
    last_failure_age_ms: int | None
    last_end: str | None
    backend: str = "rdzv"
    """Who forms the group; what another than this server forms, it only watches."""


def job_state(state: State) -> JobState:
    """Say what the job is doing."""
    membership = state.membership
    if membership.ended is not None:
        return _JOB_STATE_OF_RESULT[membership.ended.result]
    round_ = membership.round
    if round_ is not None and round_.live:
        return JobState.RUNNING
    return JobState.STOPPING if state.seats else JobState.JOINING


def explain(state: State, now_ms: int) -> str:
    """Say in a sentence why the job is in its state, and what it waits for."""
    membership = state.membership
    match job_state(state):
        case JobState.RUNNING:
            return _explain_running(state, now_ms)
        case JobState.STOPPING:
            return _explain_stopping(state, now_ms)
        case JobState.JOINING:
            return _explain_joining(state, now_ms)
        case _:
            return membership.ended.reason if membership.ended else ""


def _explain_running(state: State, now_ms: int) -> str:
    round_ = _round(state)
    nodes, workers = len(round_.participants), round_.world_size
    text = f"{_count(nodes, 'node')} and {_count(workers, 'worker')} run round {round_.number}"
    done = sum(1 for seat in state.seats.values() if seat.succeeded) + len(round_.gone)
    if done:
        text += f"; {done} of {nodes} have succeeded, the others are waited for"
    away = [node_id for node_id in state.seats if node_id in state.away]
    if away:
        text += f"; away: {_names(away)}"
    due_ms = newcomers_due_ms(state, now_ms)
    if due_ms is not None:
        text += f"; newcomers are let in within {_seconds(due_ms - now_ms)}"
    return text + _missing(state, now_ms)


def _explain_stopping(state: State, now_ms: int) -> str:
    round_ = _round(state)
    end = round_.end
    why = f"round {round_.number} ended ({_why_ended(end)})" if end else ""
    text = f"{why}; waiting for {_names(state.seats)} to stop"
    away = [node_id for node_id in state.seats if node_id in state.away]
    if away:
        text += f"; away: {_names(away)}"
    return text + _missing(state, now_ms)


def _why_ended(end: RoundEnd) -> str:
    return f"{end.cause}: {end.reason}"


def _explain_joining(state: State, now_ms: int) -> str:
    ready = state.ready
    bounds = f"{state.membership.min_nodes}:{state.membership.max_nodes}"
    due_ms = completion_due_ms(state)
    if due_ms is not None:
        left = _seconds(due_ms - now_ms)
        text = f"have {ready} of {bounds} nodes; {_waits_for(state)}, {left} left"
        return text + _missing(state, now_ms)
    missing = max(state.membership.min_nodes - ready, 0)
    if not missing:
        away = [node_id for node_id in state.waiting if node_id in state.away]
        text = f"have {ready} of {bounds} nodes; waiting for {_names(away)} to come back"
        return text + _missing(state, now_ms)
    text = f"waiting for {missing} more node{'s' if missing != 1 else ''} (have {ready} of {bounds}"
    return f"{text}{_missing(state, now_ms)})" + _join_deadline(state, now_ms)


def _waits_for(state: State) -> str:
    """Say what time is given to before the next round, when enough nodes are there."""
    failures = state.membership.store_failures
    if state.membership.round is None:
        resumed = state.membership.resumed_at_ms is not None
        return "others may run it still, and have time to say so" if resumed else "last call"
    if failures:
        times = "once" if failures == 1 else f"{failures} times in a row"
        return f"backing off, for the store host failed {times}"
    return "gathering newcomers"


def _join_deadline(state: State, now_ms: int) -> str:
    if state.short_since_ms is None:
        return ""
    left_ms = state.short_since_ms + state.membership.settings.join_timeout_ms - now_ms
    return f"; gives up in {_seconds(left_ms)}"


def _missing(state: State, now_ms: int) -> str:
    """Name those who are stuck, and who were lost or left since the last round began."""
    round_ = state.membership.round
    since_ms = round_.at_ms if round_ else state.membership.began_at_ms
    gone = [
        f"{d.node_id} {_went(d)} {_seconds(now_ms - d.at_ms)} ago: {d.reason}"
        for d in _absent(state)
        if d.at_ms >= since_ms
    ]
    if state.stuck:
        gone.append(f"workers of {_names(state.stuck)} survive SIGKILL")
    return "; " + "; ".join(gone[-4:]) if gone else ""


def _went(departure: Departure) -> str:
    return "was lost" if departure.state is NodeState.LOST else "left"


def _absent(state: State) -> list[Departure]:
    """List the latest departure of every node that is not present, oldest first."""
    latest = {departure.node_id: departure for departure in state.membership.departures}
    return [d for d in latest.values() if not state.present(d.node_id)]


def waiting_reason(state: State, node_id: str, now_ms: int) -> str:
    """Say why this node has no workers to run; empty if it has, or is not in the job."""
    if node_id in state.stuck:
        pids = ", ".join(str(pid) for pid in state.stuck[node_id].pids)
        return f"its workers survive SIGKILL (pid {pids}); it is seated when they are gone"
    if node_id not in state.waiting:
        return ""
    held_ms = holds(state).get(node_id, 0)
    if held_ms > now_ms:
        return (
            "it was lost more than once lately; seated at the next natural end of a round, or in "
            f"{_seconds(held_ms - now_ms)}"
        )
    if _all_seats_taken(state):
        return f"spare: all {state.membership.max_nodes} seats are taken"
    if job_state(state) is JobState.RUNNING:
        return f"{_why_not_let_in(state)}; {explain(state, now_ms)}"
    return explain(state, now_ms)


def _why_not_let_in(state: State) -> str:
    """Say why a newcomer does not end the running round, or not yet."""
    if some_succeeded(state):
        return "participants have begun to succeed, so that no newcomer ends the round"
    if state.membership.settings.scale_up is not ScaleUp.EAGER:
        return "newcomers are seated at the next natural end of a round (scale-up on-restart)"
    if some_seat_away(state):
        return "newcomers are let in when those away are back"
    return "newcomers are gathered"


def _all_seats_taken(state: State) -> bool:
    return len(state.seats) >= state.membership.max_nodes


def view(state: State, now_ms: int) -> JobView:
    """Show the whole job."""
    membership, round_ = state.membership, state.membership.round
    failures = membership.last_failures
    return JobView(
        rdzv_id=membership.rdzv_id,
        run=membership.run,
        run_number=membership.run_number,
        state=job_state(state),
        reason=explain(state, now_ms),
        round=round_.number if round_ else None,
        min_nodes=membership.min_nodes,
        max_nodes=membership.max_nodes,
        world_size=round_.world_size if round_ else 0,
        restarts=_restarts(membership, now_ms),
        max_restarts=membership.settings.max_restarts,
        nodes=node_views(state, now_ms),
        state_age_ms=max(now_ms - _state_since_ms(state), 0),
        run_age_ms=max(now_ms - membership.began_at_ms, 0),
        master_addr=round_.master_addr if round_ else "",
        master_port=round_.master_port if round_ else 0,
        last_failure=failures,
        last_failure_age_ms=max(now_ms - failures[0].at_ms, 0) if failures else None,
        last_end=_why_ended(round_.end) if round_ and round_.end else None,
    )


def _restarts(membership: Membership, now_ms: int) -> int | None:
    if membership.settings.max_restarts is None:
        return None
    return restarts_that_count(membership, now_ms)


def _state_since_ms(state: State) -> int:
    membership, round_ = state.membership, state.membership.round
    if membership.ended is not None:
        return membership.ended.at_ms
    if round_ is None:
        return membership.began_at_ms
    return round_.end.at_ms if round_.end else round_.at_ms


def node_views(state: State, now_ms: int) -> tuple[NodeView, ...]:
    """Show every node: participants by GROUP_RANK, then those that wait, then those gone."""
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
    views += [_waiting_view(state, node_id, now_ms) for node_id in others]
    shown |= set(others)
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
    """Return state, since when, and why, of a node that has a seat or had one at the end."""
    round_, ended = _round(state), state.membership.ended
    if ended is not None:
        return _final_state(state, node_id, ended)
    seat = state.seats[node_id]
    if node_id in state.away:
        away = state.away[node_id]
        left = _seconds(away.until_ms - now_ms)
        if is_stand_in(node_id):
            reason = f"not heard since this server knows of the round; waited for {left} more"
            return NodeState.AWAY, away.since_ms, reason
        return NodeState.AWAY, away.since_ms, f"its stream ended; its seat is kept for {left}"
    if seat.succeeded:
        return NodeState.SUCCEEDED, seat.since_ms, ""
    if round_.end is not None:
        reason = seat.leaving and f"leaving: {seat.leaving}"
        return NodeState.STOPPING, round_.end.at_ms, reason or _why_ended(round_.end)
    return NodeState.SEATED, seat.since_ms, ""


def _final_state(state: State, node_id: str, ended: Ended) -> tuple[NodeState, int, str]:
    """Return what a participant of the last round was when the run was closed."""
    if ended.result is Result.SUCCEEDED:
        return NodeState.SUCCEEDED, ended.at_ms, ""
    for departure in reversed(state.membership.departures):
        if departure.node_id == node_id and departure.at_ms >= _round(state).at_ms:
            return departure.state, departure.at_ms, departure.reason
    return NodeState.LEFT, ended.at_ms, f"the job has {ended.result}"


def _waiting_view(state: State, node_id: str, now_ms: int) -> NodeView:
    reason = waiting_reason(state, node_id, now_ms)
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


def _departed_view(departure: Departure, now_ms: int) -> NodeView:
    offer = Offer(
        departure.address, local_world_size=departure.local_world_size, role=departure.role
    )
    age_ms = now_ms - departure.at_ms
    return _node_view(departure.node_id, departure.state, offer, age_ms, departure.reason)


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


def _names(node_ids: Iterable[str]) -> str:
    names = list(node_ids)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _seconds(ms: int) -> str:
    """Write a duration for people.

    >>> [_seconds(ms) for ms in (-5, 240, 1_500, 59_000, 125_000, 7_260_000)]
    ['0.0 s', '0.2 s', '1.5 s', '59 s', '2 min 5 s', '2 h 1 min']
    """
    ms = max(ms, 0)
    if ms < 10_000:
        return f"{ms / 1000:.1f} s"
    seconds = round(ms / 1000)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"
