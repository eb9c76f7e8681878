"""How a round that the server does not know is rebuilt from what its nodes say of it.

A server may know less than its nodes: its memory is gone, or was restored from a backup. Each
participant of a round *claims* its place. The first claim makes the round, with a *stand-in* on
every other seat; each further claim takes the place of its stand-in. A stand-in holds its seat
like a node that is away, until it is claimed or `takeover_grace` is over, so all rules about
seats hold for it: nobody is started beside a node that has not been heard yet.

The highest round wins, for it was complete only when those before it had ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rdzv.core.model import (
    Claim,
    Membership,
    Offer,
    Participant,
    Round,
    State,
    is_stand_in,
    stand_in,
)


def adoptable(state: State, run: str, number: int) -> bool:
    """Say whether a claim of this round tells this server something that it does not know.

    A run that is not known beside an open one whose nodes are there is not adopted: a job has one
    run at a time.
    """
    membership = state.membership
    if not membership.run:
        return True
    if run != membership.run:
        known = any(earlier.run == run for earlier in membership.earlier)
        alive = any(node_id not in state.away for node_id in state.seats)
        return not known and not alive and number >= membership.next_round
    if membership.ended is not None:
        return False
    round_ = membership.round
    if round_ is None or number > round_.number:
        return True
    return number == round_.number and any(map(is_stand_in, state.seats))


def first_claim(node_id: str, incarnation: int, claim: Claim, now_ms: int) -> Round | None:
    """Return the round of which this is the first claim; None if no such round can be."""
    places = {claim.group_rank: _participant(node_id, incarnation, claim)}
    participants = _with_stand_ins(places, claim.group_world_size, claim.world_size)
    if participants is None:
        return None
    return Round(
        number=claim.round,
        participants=participants,
        master_addr=claim.master_addr,
        master_port=claim.master_port,
        use_agent_store=claim.use_agent_store,
        restarts=claim.restarts,
        at_ms=now_ms,
        adopted=True,
    )


def further_claim(round_: Round, node_id: str, incarnation: int, claim: Claim) -> Round | None:
    """Return the round with one stand-in less; None if the claim does not fit into it."""
    places = {
        group_rank: participant
        for group_rank, participant in enumerate(round_.participants)
        if not is_stand_in(participant.node_id)
    }
    size = len(round_.participants)
    told = (claim.group_world_size, claim.world_size, claim.master_addr, claim.master_port)
    if told != (size, round_.world_size, round_.master_addr, round_.master_port):
        return None
    if claim.group_rank in places or any(p.node_id == node_id for p in places.values()):
        return None
    places[claim.group_rank] = _participant(node_id, incarnation, claim)
    participants = _with_stand_ins(places, size, claim.world_size)
    return None if participants is None else replace(round_, participants=participants)


def _participant(node_id: str, incarnation: int, claim: Claim) -> Participant:
    return Participant(
        node_id=node_id,
        incarnation=incarnation,
        offer=claim.offer,
        rank_first=claim.rank_first,
        role_rank_first=claim.role_rank_first,
        role_world_size=claim.role_world_size,
    )


def _with_stand_ins(
    places: Mapping[int, Participant], size: int, world_size: int
) -> tuple[Participant, ...] | None:
    """Fill a round's gaps so that RANKs tile; None if they can not."""
    participants: list[Participant] = []
    rank_first = 0
    for group_rank in range(size):
        if (participant := places.get(group_rank)) is None:
            later = [n for n in places if n > group_rank]
            heard = min(later, default=size)
            until = places[heard].rank_first if later else world_size
            workers = (until - rank_first) // (heard - group_rank)
            participant = _stand_in(group_rank, rank_first, workers)
        if participant.rank_first != rank_first or participant.offer.local_world_size < 1:
            return None
        participants.append(participant)
        rank_first += participant.offer.local_world_size
    return tuple(participants) if rank_first == world_size else None


def _stand_in(group_rank: int, rank_first: int, local_world_size: int) -> Participant:
    offer = Offer(address="", local_world_size=local_world_size)
    return Participant(stand_in(group_rank), 0, offer, rank_first, 0, 0)


def same_participants(before: Round, after: Round) -> bool:
    """Whether a round has the participants that it had, but for claimed stand-ins."""
    if before.participants == after.participants:
        return True
    if not before.adopted or len(before.participants) != len(after.participants):
        return False
    pairs = zip(before.participants, after.participants, strict=True)
    return all(old == new or is_stand_in(old.node_id) for old, new in pairs)


def restarts_known(membership: Membership, restarts: int, now_ms: int) -> tuple[int, ...]:
    """Return when restarts were spent, as many as a claim tells of; of those not known, now."""
    missing = max(restarts - len(membership.restarts), 0)
    return membership.restarts + (now_ms,) * missing
