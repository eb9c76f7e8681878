"""Decides what nodes are told: messages computed from states and events. Pure functions.

`after_step` serves nodes that are connected when an event happens; `missed` serves a node that
reconnects. A node may receive the same message from both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rdzv.core.commands import Join, Resume
from rdzv.core.events import (
    Event,
    LastCallBegan,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodesPlaced,
    NodesWithdrawn,
    RoundAdopted,
    RoundCompleted,
    RoundEnded,
    RoundSettled,
    RunBegan,
    RunEnded,
)
from rdzv.core.life.runs import ended_run
from rdzv.core.life.submitted_jobs import awaited
from rdzv.core.model import (
    Assignment,
    Cause,
    Membership,
    Participant,
    Round,
    RoundEnd,
    State,
    Tally,
    is_placeholder,
)
from rdzv.core.rounds.ranks import facts
from rdzv.core.rounds.recovery_reports import adoptable, tally_of
from rdzv.messages import (
    Announcement,
    Belief,
    Closed,
    Joined,
    Placed,
    RoundOver,
    Waiting,
    Withdrawn,
)
from rdzv.structs import replace
from rdzv.transport.wire import convert
from rdzv.view.job_status import waiting_reason

_NEW_PHASE = (LastCallBegan, RoundCompleted, RoundAdopted, RoundEnded, RoundSettled)
"""Waiting nodes are sent their reason again only after one of these events; otherwise n joins would
cost n * n messages."""


def after_step(
    before: State, after: State, events: Sequence[Event], now_ms: int
) -> Iterator[tuple[str, Announcement]]:
    """Yield the messages that a transition causes, each with its node_id, in event order.

    The reasons sent to waiting nodes come last.
    """
    membership = after.membership
    ends = any(isinstance(event, RunEnded) for event in events)
    # Only the end of a run concerns every node; other steps must not loop over all nodes.
    present = {*before.seats, *before.waiting, *before.stuck} if ends else set()
    for event in events:
        match event:
            case NodeJoined():
                present.add(event.node_id)
            case RunBegan():
                # Nodes that were waiting for a first round move to the adopted run, seated or not.
                for node_id in before.waiting.keys() & {*after.waiting, *after.seats}:
                    yield node_id, Joined(membership.rdzv_id, event.run, event.run_number)
            case RoundCompleted():
                yield from assignments(membership, event.round, now_ms)
            case RoundAdopted():
                yield from _superseded(before, event.round)
            case RoundEnded():
                over = RoundOver(membership.rdzv_id, membership.run, event.round, event.end)
                culprits = _culprits(membership.round)
                for node_id in {**before.seats, **after.seats}:
                    own = culprits.get(node_id)
                    yield node_id, replace(over, culprits=own) if own else over
            case RunEnded():
                closed = Closed(membership.rdzv_id, event.run, event.ended)
                for node_id in present:
                    yield node_id, closed
                over_for = Withdrawn(
                    membership.rdzv_id, event.run, f"the job has {event.ended.result}"
                )
                for node_id in awaited(before):
                    yield node_id, over_for
                # A node that joins later in the same transition belongs to the next run.
                present = set()
            case NodeLeft() | NodeLost():
                # The node may have started the job again in the meantime; it must learn that it no
                # longer has a placement.
                gone = event.node_id in before.placed and event.node_id not in after.placed
                if gone and membership.ended is None:
                    yield event.node_id, Withdrawn(membership.rdzv_id, membership.run, event.reason)
            case NodesPlaced():
                for node_id in event.node_ids:
                    yield node_id, placed(membership)
            case NodesWithdrawn():
                withdrawn = Withdrawn(membership.rdzv_id, membership.run, event.reason)
                for node_id in event.node_ids:
                    yield node_id, withdrawn
    if any(isinstance(event, _NEW_PHASE) for event in events):
        for node_id in after.waiting:
            yield node_id, waiting(after, node_id, now_ms)


def placed(membership: Membership) -> Placed:
    submission = membership.submission
    assert submission is not None, "only a submitted job is placed"
    return Placed(membership.rdzv_id, membership.run, submission.spec)


def missed_placement(state: State, node_id: str, held: Collection[str]) -> Iterator[Announcement]:
    """Yield the messages for a returning node about a submitted job that it holds or should hold.

    `held` lists the runs of the job that the node holds. A node that is present in the job is not
    withdrawn from its current run; `missed` covers that case.
    """
    membership = state.membership
    chosen = node_id in state.placed and membership.ended is None
    if chosen and membership.run not in held:
        yield placed(membership)
    for run in held:
        if run == membership.run and (chosen or state.present(node_id)):
            continue
        ended = ended_run(state, run)
        # A server that has lost its data leaves jobs it does not know alone.
        if ended is not None or (membership.submission and run == membership.run):
            reason = (
                f"the job has {ended.result}"
                if ended
                else "its place was given away while it was silent"
            )
            yield Withdrawn(membership.rdzv_id, run, reason)


def _superseded(before: State, adopted: Round) -> Iterator[tuple[str, Announcement]]:
    membership, old = before.membership, before.membership.round
    if old is None:
        return
    reason = f"round {adopted.number} has followed it"
    end = old.end or RoundEnd(Cause.NODE_LEFT, reason, adopted.at_ms, broken=True, keep=False)
    for node_id in before.seats:
        if not is_placeholder(node_id):
            yield node_id, RoundOver(membership.rdzv_id, membership.run, old.number, end)


def concerns(state: State, node_id: str, incarnation: int, message: Announcement) -> bool:
    """Return whether a message is for this incarnation; only the seat's holder gets an assignment.

    Otherwise a newly connected incarnation would start workers in its predecessor's seat before it
    has a seat of its own.
    """
    return not isinstance(message, Assignment) or state.incarnation(node_id) == incarnation


def missed_assignment(before: State, command: Join, now_ms: int) -> Assignment | RoundOver | None:
    """Return the message that a seated node must have missed if it asks for a seat, or None.

    The message is the node's assignment while the round is live, and `RoundOver` afterwards.
    """
    seat, round_ = before.seats.get(command.node_id), before.membership.round
    if seat is None or seat.incarnation != command.incarnation or round_ is None:
        return None
    if round_.live and command.left_round is None:
        return None
    if command.left_round is not None and command.left_round >= round_.number:
        return None
    return _about_its_seat(before.membership, command.node_id, now_ms)


def assignments(
    membership: Membership, round_: Round, now_ms: int
) -> Iterator[tuple[str, Assignment]]:
    tally = tally_of(membership, now_ms)
    for group_rank, participant in enumerate(round_.participants):
        yield participant.node_id, _assignment(membership, round_, group_rank, tally)


def _assignment(
    membership: Membership, round_: Round, group_rank: int, tally: Tally | None
) -> Assignment:
    participant, last = round_.participants[group_rank], round_.participants[-1]
    return convert(
        Assignment,
        round_,
        rdzv_id=membership.rdzv_id,
        run=membership.run,
        round=round_.number,
        group_rank=group_rank,
        group_world_size=len(round_.participants),
        rank_first=participant.rank_first,
        # Do not sum over all participants: the sum would be recomputed for each of them.
        world_size=last.rank_first + last.offer.local_world_size,
        role_rank_first=participant.role_rank_first,
        role_world_size=participant.role_world_size,
        max_restarts=membership.settings.max_restarts,
        tally=tally,
        kept=participant.kept,
        charged_suspects=participant.charged_suspects,
    )


def waiting(state: State, node_id: str, now_ms: int) -> Waiting:
    return Waiting(state.membership.rdzv_id, str(waiting_reason(state, node_id, now_ms)))


def missed(state: State, node_id: str, belief: Belief, now_ms: int) -> tuple[Announcement, ...]:
    """Return the messages to send to a returning node about a job, given what the node believes.

    Running workers are stopped only if their run or round is known to be over. A node with workers
    from a run or round that this server does not know is sent nothing.
    """
    ended = ended_run(state, belief.run)
    if ended is not None:
        return (Closed(state.membership.rdzv_id, belief.run, ended),)
    if unknown(state, belief):
        return ()
    round_, seated = state.membership.round, node_id in state.seats
    current = seated and round_ is not None and round_.number == belief.round
    announcements: list[Announcement] = []
    if belief.has_workers and belief.round is not None and not current:
        # This holds even if another instance has the seat: these workers belong to a round that is
        # over.
        announcements.append(_seat_given_up(state.membership, node_id, belief.round))
    if seated:
        announcements.append(
            _about_its_seat(state.membership, node_id, now_ms, _reported_rank(belief))
        )
    if node_id in state.waiting:
        announcements.append(waiting(state, node_id, now_ms))
    return tuple(announcements)


def _reported_rank(belief: Belief) -> int | None:
    for command in belief.commands:
        if isinstance(command, Join | Resume) and command.recovery is not None:
            return command.recovery.assignment.group_rank
    return None


def may_be_adopted(state: State, belief: Belief) -> bool:
    """Return whether the node reports a round that this server may not know about."""
    return belief.round is not None and adoptable(state, belief.run, belief.round)


def unknown(state: State, belief: Belief) -> bool:
    """Return whether the node runs workers of a job or round that is unknown to this server.

    A node in another run than the present one is not among them: it is told to stop.
    """
    membership = state.membership
    if not belief.has_workers or ended_run(state, belief.run) is not None:
        return False
    return not membership.run or (
        belief.round is not None and belief.round >= membership.next_round
    )


def _about_its_seat(
    membership: Membership, node_id: str, now_ms: int, reported_rank: int | None = None
) -> Assignment | RoundOver:
    round_ = membership.round
    assert round_ is not None, "a seat is always one of a round"
    if round_.end is not None:
        return _over(membership, round_, round_.end, node_id)
    group_rank = _group_rank(round_.participants, node_id, reported_rank)
    return _assignment(membership, round_, group_rank, tally_of(membership, now_ms))


def _group_rank(
    participants: tuple[Participant, ...], node_id: str, reported_rank: int | None
) -> int:
    # Each recovery report replaces a participant of the adopted round, so the table would have to
    # be recomputed every time.
    if reported_rank is not None and reported_rank < len(participants):
        reported = participants[reported_rank]
        if reported.node_id == node_id:
            return reported_rank
    return facts(participants).group_ranks[node_id]


def _seat_given_up(membership: Membership, node_id: str, number: int) -> RoundOver:
    round_ = membership.round
    if round_ is not None and round_.number == number and round_.end is not None:
        return _over(membership, round_, round_.end, node_id)
    reason = f"round {number} is over, and the seat of {node_id} in it was given up"
    at_ms = round_.at_ms if round_ else membership.began_at_ms
    end = RoundEnd(Cause.NODE_LOST, reason, at_ms, broken=True, keep=False)
    return RoundOver(membership.rdzv_id, membership.run, number, end)


def _over(membership: Membership, round_: Round, end: RoundEnd, node_id: str) -> RoundOver:
    culprits = _culprits(round_).get(node_id, ())
    return RoundOver(membership.rdzv_id, membership.run, round_.number, end, culprits)


def _culprits(round_: Round | None) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for failure in round_.end.failures if round_ is not None and round_.end is not None else ():
        if not (failure.suspect or failure.finished):
            found[failure.node_id] = (*found.get(failure.node_id, ()), failure.local_rank)
    return found
