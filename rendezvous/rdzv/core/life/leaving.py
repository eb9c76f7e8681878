"""Nodes that succeed, leave, get stuck, are away, or are lost; a lost one may still run workers."""

from __future__ import annotations

from collections.abc import Iterable

from rdzv.core import events
from rdzv.core.commands import Leave, MarkAway, MarkLost, ReportStuck, Succeed
from rdzv.core.draft import Draft, Ignored
from rdzv.core.life.failures import charge_stuck, end_round, some_succeeded
from rdzv.core.model import (
    DAEMON_RETURN_MS,
    RECONNECT_GRACE_MS,
    Away,
    Cause,
    Departure,
    LeaveCause,
    NodeState,
    Offer,
    Round,
    State,
    StuckWorkers,
    is_placeholder,
)
from rdzv.core.root_cause import is_odd_replica
from rdzv.core.rounds.ranks import longest_stop_ms, participant_of
from rdzv.core.shared_map import put, without
from rdzv.structs import replace

MAX_DEPARTURES = 64
"""The number of losses and leaves that a job remembers."""


def succeed(work: Draft, command: Succeed) -> Ignored | None:
    """Record a node's success, even if the node was given up or the round has ended."""
    round_, node_id = work.membership.round, command.node_id
    assert round_ is not None
    seat = work.state.seats.get(node_id)
    if node_id in round_.succeeded:
        return Ignored.KNOWN
    if seat is not None and seat.incarnation == command.incarnation and round_.live:
        _note_success(work, round_, node_id)
        done = replace(seat, succeeded=True, since_ms=work.now_ms)
        work.put(of=node_id, seats=put(work.state.seats, node_id, done))
        return None
    own = participant_of(round_, node_id)
    if round_.live or own is None or own.incarnation > command.incarnation:
        return Ignored.NO_SEAT if seat is None else Ignored.OTHER_INSTANCE
    _note_success(work, round_, node_id)
    note_heard(work, node_id)
    return None


def _note_success(work: Draft, round_: Round, node_id: str) -> None:
    work.store_round(replace(round_, succeeded=(*round_.succeeded, node_id)))
    work.events.append(events.NodeSucceeded(node_id, round_.number))


def leave(work: Draft, command: Leave) -> Ignored | None:
    """Remove a node that wants to leave, either at once or when its workers are gone."""
    round_ = work.membership.round
    seat = work.state.seats.get(command.node_id)
    if seat is None or round_ is None:
        depart(work, command.node_id, NodeState.LEFT, command.reason, command.cause)
        return None
    failed = command.cause is LeaveCause.FAILED
    if command.exited_zero and round_.live and not seat.succeeded and some_succeeded(work.state):
        # The node was asked to leave, but its workers had finished, like those of other nodes.
        seat = replace(seat, succeeded=True, since_ms=work.now_ms)
        # If they had not finished, failures caused by their absence may be reported after this.
        round_ = replace(round_, excuse=f"{command.node_id}: {command.reason}")
        _note_success(work, round_, command.node_id)
    # A node that leaves because its workers failed does not excuse that failure.
    if not seat.succeeded and (round_.live or not (seat.leaving or failed)):
        cause = _CAUSE_OF_LEAVE[command.cause] if round_.live else Cause.NODE_LEFT
        reason = f"{command.node_id}: {command.reason}"
        end_round(work, cause, reason, broken=failed, node_id=command.node_id)
    if seat.succeeded or command.left_round == round_.number:
        depart(work, command.node_id, NodeState.LEFT, command.reason, command.cause)
    elif seat.leaving:
        return Ignored.KNOWN
    else:
        leaving = replace(seat, leaving=command.reason)
        work.put(of=command.node_id, seats=put(work.state.seats, command.node_id, leaving))
        work.events.append(events.NodeLeaving(command.node_id, command.reason))
    return None


_CAUSE_OF_LEAVE = {
    LeaveCause.SIGNAL: Cause.NODE_LEFT,
    LeaveCause.TIMEOUT: Cause.NODE_LEFT,
    LeaveCause.START_FAILED: Cause.START_FAILED,
    LeaveCause.FAILED: Cause.WORKER_FAILURE,
}


def report_stuck(work: Draft, command: ReportStuck) -> None:
    """Release the seat of a node whose workers are stuck.

    The node gets no other seat until it reports that these workers are gone.
    """
    round_ = work.membership.round
    assert round_ is not None
    pids = ", ".join(str(pid) for pid in command.pids)
    reason = f"workers survive SIGKILL (pid {pids})"
    text = f"{command.node_id}: {reason}"
    end_round(work, Cause.WORKER_FAILURE, text, broken=True, node_id=command.node_id)
    charge_stuck(work, command.node_id, text)
    _leave_seat(work, command.node_id)
    stuck = StuckWorkers(command.incarnation, round_.number, command.pids, work.now_ms)
    work.put(of=command.node_id, stuck=put(work.state.stuck, command.node_id, stuck))
    work.events.append(events.NodeStuck(command.node_id, round_.number, reason))


def mark_away(work: Draft, command: MarkAway) -> Ignored | None:
    """Keep the place of a node whose stream has ended, until it returns or is given up."""
    before = work.state.away.get(command.node_id)
    since_ms = work.now_ms if before is None else before.since_ms
    away = Away(since_ms, command.until_ms, command.firm, command.may_run)
    if away == before:
        return Ignored.KNOWN
    if before is None:
        work.events.append(events.NodeWentAway(command.node_id, command.until_ms - work.now_ms))
    work.put(of=command.node_id, away=put(work.state.away, command.node_id, away))
    return None


def mark_back(work: Draft, node_id: str) -> Ignored | None:
    away = work.state.away.get(node_id)
    if away is None:
        return Ignored.KNOWN
    work.put(of=node_id, away=without(work.state.away, node_id))
    work.events.append(events.NodeCameBack(node_id, work.now_ms - away.since_ms))
    if node_id in work.state.seats:
        work.state = replace(work.state, back_ms=work.now_ms)
    deadline_ms, round_ = work.state.stop_deadline_ms, work.membership.round
    if away.firm and deadline_ms is not None and round_ is not None:
        # The node may find out only now that the round has ended.
        late_ms = work.now_ms + longest_stop_ms(round_)
        work.state = replace(work.state, stop_deadline_ms=max(deadline_ms, late_ms))
    return None


def mark_lost(work: Draft, command: MarkLost) -> None:
    give_up(work, command.node_id, command.reason, heard=command.heard, silent_ms=command.silent_ms)


def give_up(
    work: Draft,
    node_id: str,
    reason: str,
    *,
    heard: bool = False,
    stopped_late: bool = False,
    silent_ms: int = 0,
) -> None:
    """Mark a node as lost, and apply the consequences to a live or unsettled round."""
    seat = work.state.seats.get(node_id)
    done = seat is not None and seat.succeeded
    ends_after_ms = None
    if not (heard or done) and may_run(work.state, node_id):
        # A node that has used up its time gets no more.
        ends_after_ms = 0 if stopped_late else orphans_end_after_ms(work, node_id)
    if seat is not None and seat.leaving:
        depart(work, node_id, NodeState.LEFT, seat.leaving, LeaveCause.SIGNAL)
        return
    if seat is not None and not seat.succeeded:
        text = f"{node_id}: {reason}"
        end_round(work, Cause.NODE_LOST, text, broken=True, node_id=node_id)
    if (away := work.state.away.get(node_id)) is not None:
        silent_ms = max(work.now_ms - away.since_ms, silent_ms)
    lost = (node_id, NodeState.LOST, reason, None)
    depart(work, *lost, ends_after_ms=ends_after_ms, silent_ms=silent_ms)


def depart(
    work: Draft,
    node_id: str,
    how: NodeState,
    reason: str,
    cause: LeaveCause | None,
    *,
    ends_after_ms: int | None = None,
    silent_ms: int = 0,
) -> None:
    offer = _offer_of(work.state, node_id)
    _leave_seat(work, node_id)
    work.put(
        of=node_id,
        waiting=without(work.state.waiting, node_id),
        stuck=without(work.state.stuck, node_id),
        away=without(work.state.away, node_id),
    )
    departure = Departure(
        node_id=node_id,
        state=how,
        reason=reason,
        at_ms=work.now_ms,
        address=offer.address,
        local_world_size=offer.local_world_size,
        role=offer.role,
        may_run=ends_after_ms is not None,
        ends_after_ms=ends_after_ms or 0,
    )
    departures = (*work.membership.departures, departure)[-MAX_DEPARTURES:]
    work.store(replace(work.membership, departures=departures))
    if (submission := work.membership.submission) is not None:
        if cause is LeaveCause.START_FAILED or _had_odd_replica(work, node_id):
            work.store_submission(submission.with_declined(node_id, reason))
        else:
            work.store_submission(submission.without((node_id,)))
    work.state = replace(work.state, last_leave=cause)
    if how is NodeState.LOST:
        work.events.append(events.NodeLost(node_id, reason, departure.may_run, silent_ms))
    else:
        work.events.append(events.NodeLeft(node_id, reason))


def _had_odd_replica(work: Draft, node_id: str) -> bool:
    round_ = work.membership.round
    failures = round_.end.failures if round_ is not None and round_.end is not None else ()
    return any(one.node_id == node_id and is_odd_replica(one) for one in failures)


def _offer_of(state: State, node_id: str) -> Offer:
    if node_id in state.waiting:
        return state.waiting[node_id].offer
    participant = participant_of(state.membership.round, node_id)
    return participant.offer if participant is not None else Offer(address="")


def _leave_seat(work: Draft, node_id: str) -> None:
    round_ = work.membership.round
    if node_id in work.state.seats and round_ is not None:
        work.put(of=node_id, seats=without(work.state.seats, node_id))
        work.store_round(replace(round_, gone=(*round_.gone, node_id)))


def release_away_seats(work: Draft) -> bool:
    """Give up nodes that are still away `RECONNECT_GRACE_MS` after the end of a round."""
    for node_id, due_ms in away_seats_due(work.state):
        if work.now_ms >= due_ms:
            grace_s = RECONNECT_GRACE_MS / 1000
            reason = f"away when the round ended, and not back within {grace_s:g} s"
            give_up(work, node_id, reason)
            return True
    return False


def away_seats_due(state: State) -> Iterable[tuple[str, int]]:
    """Yield the away nodes that an ended round is still waiting for, and when each is given up."""
    round_ = state.membership.round
    if round_ is None or round_.end is None or not state.hasty:
        return
    for node_id, away in state.away.items():
        if not away.firm and node_id in state.seats:
            since_ms = max(away.since_ms, round_.end.at_ms)
            yield node_id, since_ms + RECONNECT_GRACE_MS


def release_unstopped_seats(work: Draft) -> bool:
    """Give up a node that has not stopped its workers by the deadline."""
    deadline_ms = work.state.stop_deadline_ms
    if deadline_ms is None or work.now_ms < deadline_ms or not any_seat_has_deadline(work.state):
        return False
    for node_id in seats_with_deadline(work.state):
        give_up(work, node_id, "it did not stop its workers in time", stopped_late=True)
        return True
    return False


def any_seat_has_deadline(state: State) -> bool:
    """Return whether `seats_with_deadline` yields any, by counts, as each step asks for it.

    After a takeover of the server, thousands of nodes may be away, and all may have been promised
    more time.
    """
    stuck = sum(node_id in state.away for node_id in state.stuck)
    promised = len(state.away) - state.hasty - state.unready - stuck
    return len(state.seats) > promised


def seats_with_deadline(state: State) -> Iterable[str]:
    """Yield the nodes that must stop by the deadline: all except those promised more time."""
    for node_id in state.seats:
        if node_id not in state.away or not state.away[node_id].firm:
            yield node_id


def note_heard(work: Draft, node_id: str) -> Ignored | None:
    """Record a lost node's report that none of its workers remain."""
    departures = work.membership.departures
    if not any(d.may_run and d.node_id == node_id for d in departures):
        return Ignored.KNOWN
    heard = (replace(d, may_run=d.may_run and d.node_id != node_id) for d in departures)
    work.store(replace(work.membership, departures=tuple(heard)))
    return None


def unheard(state: State) -> tuple[str, ...]:
    """Return the IDs of the nodes that were given up but may still be running workers."""
    return tuple(d.node_id for d in state.membership.departures if d.may_run)


def unheard_until_ms(state: State) -> int:
    """Return when runners will have killed the workers of all dead agents, or 0 if none exist."""
    departures = state.membership.departures
    return max((d.at_ms + d.ends_after_ms for d in departures if d.may_run), default=0)


def may_run(state: State, node_id: str) -> bool:
    """Return whether workers may still be running on a node if it is given up without a report."""
    away = state.away.get(node_id)
    if node_id in state.waiting or is_placeholder(node_id):
        return False
    if away is not None and not away.may_run:
        return False
    participant = participant_of(state.membership.round, node_id)
    return participant is not None and not participant.instance.fence_after_ms


def orphans_end_after_ms(work: Draft, node_id: str) -> int:
    """Return how long a runner whose agent is dead may take to kill its workers.

    The runner waits for another agent no longer than the longest lease or `DAEMON_RETURN_MS`, and
    then stops the workers.
    """
    away, round_, tuning = work.state.away.get(node_id), work.membership.round, work.state.tuning
    age_ms = work.now_ms - away.since_ms if away is not None else 0
    stop_ms = longest_stop_ms(round_) if round_ is not None else 0
    return max(max(tuning.takeover_grace_ms, DAEMON_RETURN_MS) + stop_ms - age_ms, 0)
