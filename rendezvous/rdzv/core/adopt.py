"""How a round that the server does not know is rebuilt from what its nodes say of it.

A server may know less than its nodes: its memory is gone, or was restored from a backup. Each
participant of a round *claims* its place. The first claim makes the round, with a *stand-in* on
every other seat; each further claim takes the place of its stand-in. A stand-in holds its seat
like a node that is away, until it is claimed or `takeover_grace` is over, so all rules about
seats hold for it: nobody is started beside a node that has not been heard yet.

The highest round wins, for it was complete only when those before it had ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import is_not

from rdzv.core.commands import Join, Resume
from rdzv.core.model import (
    MAX_RESTART_AGES,
    Claim,
    Membership,
    Offer,
    Participant,
    Round,
    Spent,
    State,
    Tally,
    is_stand_in,
    stand_in,
)
from rdzv.structs import replace


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
    return number == round_.number and any(map(is_stand_in, state.away))


def first_claim(command: Join | Resume, claim: Claim, now_ms: int) -> Round | None:
    """Return the round of which this is the first claim; None if no such round can be."""
    participant = _participant(command, claim)
    whole = range(claim.group_world_size)
    participants = _filled(whole, range(claim.world_size), claim.group_rank, participant)
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


def further_claim(round_: Round, command: Join | Resume, claim: Claim) -> Round | None:
    """Return the round with one stand-in less; None if the claim does not fit into it.

    The node must not have a place in the round already.
    """
    seats, place = round_.participants, claim.group_rank
    known = (len(seats), _ranks(seats[-1]).stop, round_.master_addr, round_.master_port)
    told = (claim.group_world_size, claim.world_size, claim.master_addr, claim.master_port)
    if known != told or not is_stand_in(seats[place].node_id):
        return None
    participant = _participant(command, claim)
    gap = _gap(seats, place, _ranks(participant))
    ranks = range(_ranks(seats[gap.start]).start, _ranks(seats[gap.stop - 1]).stop)
    filled = _filled(gap, ranks, place, participant)
    if filled is None:
        return None
    return replace(round_, participants=(*seats[: gap.start], *filled, *seats[gap.stop :]))


def _gap(seats: Sequence[Participant], place: int, ranks: range) -> range:
    """Return the places that a claim of these RANKs changes: its own, if what was guessed is true.

    Where nodes bring different numbers of workers it may not be; then all stand-ins around it.
    """
    first, end = place, place + 1
    if _ranks(seats[place]) != ranks:
        while first and is_stand_in(seats[first - 1].node_id):
            first -= 1
        while end < len(seats) and is_stand_in(seats[end].node_id):
            end += 1
    return range(first, end)


def _filled(
    places: range, ranks: range, place: int, participant: Participant
) -> tuple[Participant, ...] | None:
    """Put stand-ins around a participant, so that these places have these RANKs; None if not so."""
    own = _ranks(participant)
    before = _stand_ins(range(places.start, place), range(ranks.start, own.start))
    behind = _stand_ins(range(place + 1, places.stop), range(own.stop, ranks.stop))
    if before is None or behind is None or own.start < ranks.start or own.stop > ranks.stop:
        return None
    return (*before, participant, *behind)


def _stand_ins(places: range, ranks: range) -> tuple[Participant, ...] | None:
    """Divide RANKs among places as evenly as can be; None if there are too few, or too many."""
    if len(ranks) < len(places) or (ranks and not places):
        return None
    stand_ins: list[Participant] = []
    first = ranks.start
    for count, group_rank in zip(range(len(places), 0, -1), places, strict=True):
        offer = Offer(address="", local_world_size=(ranks.stop - first) // count)
        stand_ins.append(Participant(stand_in(group_rank), 0, offer, first, 0, 0))
        first += offer.local_world_size
    return tuple(stand_ins)


def _ranks(participant: Participant) -> range:
    first = participant.rank_first
    return range(first, first + participant.offer.local_world_size)


def _participant(command: Join | Resume, claim: Claim) -> Participant:
    return Participant(
        node_id=command.node_id,
        incarnation=command.incarnation,
        offer=claim.offer,
        rank_first=claim.rank_first,
        role_rank_first=claim.role_rank_first,
        role_world_size=claim.role_world_size,
        instance=command.instance,
    )


def same_participants(before: Round, after: Round) -> bool:
    """Whether a round has the participants that it had, but for claimed stand-ins."""
    if before.participants == after.participants:
        return True
    if not before.adopted or len(before.participants) != len(after.participants):
        return False
    return all(old == new or is_stand_in(old.node_id) for old, new in _exchanged(before, after))


def claimed(before: Round, after: Round) -> tuple[Participant, ...] | None:
    """Return who took the places of stand-ins; None if anything else changed of the participants.

    The stand-ins that make place for others are not among them.
    """
    if not before.adopted or len(before.participants) != len(after.participants):
        return None
    exchanged = _exchanged(before, after)
    if not all(is_stand_in(old.node_id) for old, _ in exchanged):
        return None
    return tuple(new for old, new in exchanged if old.node_id != new.node_id)


def _exchanged(before: Round, after: Round) -> list[tuple[Participant, Participant]]:
    """Pair those who are not the same, of rounds of one size: a claim changes one of thousands."""
    old, new = before.participants, after.participants
    places = compress(range(len(old)), map(is_not, old, new))
    return [(old[place], new[place]) for place in places]


def tally_of(membership: Membership, now_ms: int) -> Tally | None:
    """Return what the nodes of a round are to keep for a server that knows less; None: nothing."""
    window_ms = membership.settings.restart_window_ms
    if membership.spent == Spent() and not (window_ms and membership.restarts):
        return None
    ages = [now_ms - at_ms for at_ms in membership.restarts]
    counted = [max(age_ms, 0) for age_ms in ages if age_ms < window_ms]
    return Tally(membership.spent, tuple(counted[-MAX_RESTART_AGES:]))


def spent_known(membership: Membership, tally: Tally | None) -> Spent:
    """Return what a run has spent: what is known, and what the nodes of a newer round tell."""
    known = membership.spent
    if tally is None:
        return known
    told = tally.spent
    steps = [step for step in (known.step, told.step) if step is not None]
    return Spent(
        preemptions=max(known.preemptions, told.preemptions),
        store_failures=max(known.store_failures, told.store_failures),
        soon=told.soon,
        in_vain=told.in_vain,
        step=max(steps, default=None),
    )


def restarts_known(
    membership: Membership, restarts: int, tally: Tally | None, now_ms: int
) -> tuple[int, ...]:
    """Return when restarts were spent, as many as a claim tells of.

    Those that are not known, and of which the claim does not tell when, count as if spent now:
    a budget may be thought smaller than it is, but never greater.
    """
    missing = max(restarts - len(membership.restarts), 0)
    if tally is None or not missing:
        return membership.restarts + (now_ms,) * missing
    told = tuple(now_ms - age_ms for age_ms in tally.restart_ages_ms)[-missing:]
    # Those before were forgotten when the tally was taken, unless that had no place for them.
    forgotten_ms = now_ms - membership.settings.restart_window_ms
    before_ms = told[0] if len(told) == MAX_RESTART_AGES else forgotten_ms
    return membership.restarts + (before_ms,) * (missing - len(told)) + told
