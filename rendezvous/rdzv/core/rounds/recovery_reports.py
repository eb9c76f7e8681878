"""Rebuilds a round that the server does not know from its nodes' reports.

ARCHITECTURE.md (*What the server does not know*) says why; a placeholder is subject to all rules
about seats, so no new worker starts while a node has yet to report.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import is_not

from rdzv.core.commands import Join, Resume
from rdzv.core.model import (
    LATEST,
    MAX_RESTART_AGES,
    Membership,
    Offer,
    Participant,
    RecoveryReport,
    Round,
    Spent,
    State,
    Tally,
    is_placeholder,
    placeholder,
)
from rdzv.structs import replace


def adoptable(state: State, run: str, number: int) -> bool:
    """Return whether a report of this round contains something new to this server.

    An unknown run is not adopted alongside an open one whose nodes are present, because a job has
    only one run at a time.
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
    return number == round_.number and round_.adopted and any(map(is_placeholder, state.away))


def first_report(command: Join | Resume, report: RecoveryReport, now_ms: int) -> Round | None:
    """Return the round described by its first report, or None if no such round is possible."""
    participant, assignment = _participant(command, report), report.assignment
    whole = range(assignment.group_world_size)
    participants = _filled(whole, range(assignment.world_size), assignment.group_rank, participant)
    if participants is None:
        return None
    return Round(
        number=assignment.round,
        participants=participants,
        master_addr=assignment.master_addr,
        master_port=assignment.master_port,
        use_agent_store=assignment.use_agent_store,
        restarts=assignment.restarts,
        at_ms=now_ms,
        adopted=True,
        source=assignment.source,
        resume_step=assignment.resume_step,
        snapshot=assignment.snapshot,
        snapshot_loads=assignment.snapshot_loads,
        origin=assignment.origin,
        lineage=assignment.lineage,
        renewed=assignment.renewed,
    )


def further_report(round_: Round, command: Join | Resume, report: RecoveryReport) -> Round | None:
    """Return the round with one placeholder replaced, or None if the report does not fit into it.

    The node must not already have a place in the round.
    """
    assignment = report.assignment
    seats, place = round_.participants, assignment.group_rank
    known = (len(seats), seats[-1].ranks.stop, round_.master_addr, round_.master_port)
    same = known == (
        assignment.group_world_size,
        assignment.world_size,
        assignment.master_addr,
        assignment.master_port,
    )
    if not same or not is_placeholder(seats[place].node_id):
        return None
    participant = _participant(command, report)
    gap = _gap(seats, place, participant.ranks)
    ranks = range(seats[gap.start].ranks.start, seats[gap.stop - 1].ranks.stop)
    filled = _filled(gap, ranks, place, participant)
    if filled is None:
        return None
    participants = (*seats[: gap.start], *filled, *seats[gap.stop :])
    round_ = replace(
        round_,
        snapshot=round_.snapshot or assignment.snapshot,
        snapshot_loads=max(round_.snapshot_loads, assignment.snapshot_loads),
        origin=max(round_.origin, assignment.origin),
        lineage=max(round_.lineage, assignment.lineage),
        renewed=max(round_.renewed, assignment.renewed),
    )
    return replace(round_, participants=participants)


def _gap(seats: Sequence[Participant], place: int, ranks: range) -> range:
    """Return the places changed by a report of these RANKs: only its own if the guess was right.

    The guess may be wrong if nodes have different numbers of workers. All placeholders adjacent to
    the place then change as well.
    """
    first, end = place, place + 1
    if seats[place].ranks != ranks:
        while first and is_placeholder(seats[first - 1].node_id):
            first -= 1
        while end < len(seats) and is_placeholder(seats[end].node_id):
            end += 1
    return range(first, end)


def _filled(
    places: range, ranks: range, place: int, participant: Participant
) -> tuple[Participant, ...] | None:
    """Return a participant among placeholders for the other RANKs, or None if they cannot fit."""
    own = participant.ranks
    before = _placeholders(range(places.start, place), range(ranks.start, own.start))
    behind = _placeholders(range(place + 1, places.stop), range(own.stop, ranks.stop))
    if before is None or behind is None or own.start < ranks.start or own.stop > ranks.stop:
        return None
    return (*before, participant, *behind)


def _placeholders(places: range, ranks: range) -> tuple[Participant, ...] | None:
    """Divide RANKs among places as evenly as possible; return None if this is impossible."""
    if len(ranks) < len(places) or (ranks and not places):
        return None
    placeholders: list[Participant] = []
    first = ranks.start
    for count, group_rank in zip(range(len(places), 0, -1), places, strict=True):
        offer = Offer(address="", local_world_size=(ranks.stop - first) // count)
        placeholders.append(Participant(placeholder(group_rank), 0, offer, first, 0, 0))
        first += offer.local_world_size
    return tuple(placeholders)


def _participant(command: Join | Resume, report: RecoveryReport) -> Participant:
    assignment = report.assignment
    return Participant(
        node_id=command.node_id,
        incarnation=command.incarnation,
        offer=report.offer,
        rank_first=assignment.rank_first,
        role_rank_first=assignment.role_rank_first,
        role_world_size=assignment.role_world_size,
        instance=command.instance,
        kept=assignment.kept,
    )


def same_participants(before: Round, after: Round) -> bool:
    """Return whether two rounds have the same participants, except for replaced placeholders."""
    # Comparing tuples, even one with itself, visits every item, and a large job takes many steps.
    if before.participants is after.participants or before.participants == after.participants:
        return True
    if not before.adopted or len(before.participants) != len(after.participants):
        return False
    pairs = zip(before.participants, after.participants, strict=True)
    changed = compress(pairs, map(is_not, before.participants, after.participants))
    return all(old == new or is_placeholder(old.node_id) for old, new in changed)


def tally_of(membership: Membership, now_ms: int) -> Tally | None:
    """Return the tally that nodes keep for a server without memory, or None if it is empty."""
    window_ms = membership.settings.restart_window_ms
    if membership.spent == Spent() and not (window_ms and membership.restarts):
        return None
    counted = tuple(at_ms for at_ms in membership.restarts if now_ms - at_ms < window_ms)
    return Tally(membership.spent, counted[LATEST])


def spent_known(membership: Membership, tally: Tally | None) -> Spent:
    """Return a run's spent budgets, combining what is known here with what its nodes report."""
    known = membership.spent
    if tally is None:
        return known
    reported = tally.spent
    steps = [step for step in (known.furthest_step, reported.furthest_step) if step is not None]
    return Spent(
        preemptions=max(known.preemptions, reported.preemptions),
        store_failures=max(known.store_failures, reported.store_failures),
        soon=reported.soon,
        without_progress=reported.without_progress,
        furthest_step=max(steps, default=None),
    )


def restarts_known(
    membership: Membership, restarts: int, tally: Tally | None, now_ms: int
) -> tuple[int, ...]:
    """Return the times at which restarts were spent, one for each restart that the report counts.

    Restarts unknown here take their times from the tally. Restarts missing from the tally have left
    the window or, if the tally is full, are as old as its oldest. Without a tally, unknown restarts
    count as spent now, so the remaining budget may be underestimated but never overestimated.
    """
    missing = max(restarts - len(membership.restarts), 0)
    if tally is None or not missing:
        return membership.restarts + (now_ms,) * missing
    reported = tally.restarts_ms[-missing:]
    # Earlier restarts had left the window when the tally was taken, unless the tally was full.
    forgotten_ms = now_ms - membership.settings.restart_window_ms
    before_ms = reported[0] if len(reported) == MAX_RESTART_AGES else forgotten_ms
    return membership.restarts + (before_ms,) * (missing - len(reported)) + reported
