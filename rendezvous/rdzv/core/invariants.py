"""Executable invariants: the guarantees that hold for every state and every step.

The driver checks them before it persists a step, and every simulation checks them after each step.
A violation is always a bug in this project, never in the caller.
"""

from __future__ import annotations

from rdzv.core.life.leaving import MAX_DEPARTURES
from rdzv.core.model import Membership, Round, State
from rdzv.core.rounds.recovery_reports import same_participants

COUNTED_ABOVE = 512
"""Above this number, nodes are only counted: a large job takes as many steps as it has nodes."""


def violations(before: State, after: State) -> list[str]:
    """List every guarantee that the step from `before` to `after` would break."""
    return [
        *_presence(before, after),
        *_placements(before, after),
        *_durability(before.membership, after.membership),
        *_new_round(before, after),
    ]


def _presence(before: State, after: State) -> list[str]:
    """Check that no node is in two places at once and that every seat belongs to the round."""
    found = []
    round_, runs = after.membership.round, after.membership.live_round is not None
    participants, gone = (round_.participants, round_.gone) if round_ else ((), ())
    if (not after.membership.run or after.membership.ended) and after.anybody:
        found.append("presence: a node is present in a run that is closed")
    if runs and len(after.seats) + len(gone) < len(participants):
        found.append("presence: a participant of the running round holds no seat")
    if max(len(participants), len(after.waiting), len(after.away)) > COUNTED_ABOVE:
        return found
    seats, waiting, stuck = after.seats.keys(), after.waiting.keys(), after.stuck.keys()
    if seats & waiting or seats & stuck or waiting & stuck:
        found.append("presence: a node has two places at once")
    if after.away.keys() - seats - waiting - stuck:
        found.append("presence: a node is away but not present")
    if after.hasty != sum(map(after.is_hasty, after.away)):
        found.append("presence: the nodes whose grace a round's end shortens are miscounted")
    if after.unready != sum(map(after.is_unready, after.away)):
        found.append("presence: the waiting nodes that are away are miscounted")
    if after.seats is not before.seats:
        if seats - {p.node_id for p in participants}:
            found.append("presence: a node holds a seat in a round in which it does not take part")
        if seats & set(gone):
            found.append("presence: a node holds a seat that was given up")
    return found


def _placements(before: State, after: State) -> list[str]:
    """Check that no node is chosen twice, or chosen again after declining the job."""
    submission = after.membership.submission
    if submission is None or submission is before.membership.submission:
        return []
    found = []
    if len(set(submission.placed)) < len(submission.placed):
        found.append("placement: a node is placed twice")
    if {declined.node_id for declined in submission.declined} & set(submission.placed):
        found.append("placement: a node is placed that has declined")
    return found


def _durability(before: Membership, after: Membership) -> list[str]:
    """Check that numbers never decrease, and that nothing closed, spent or announced is undone."""
    found = []
    if after.run_number < before.run_number:
        found.append("durability: run numbers went back")
    if after.next_round < before.next_round:
        found.append("durability: round numbers went back")
    if after.run != before.run:
        return found if after.run_number > before.run_number else [*found, "durability: run uid"]
    if before.ended is not None and after.ended != before.ended:
        found.append("durability: a closed run changed")
    # If the clock was set back, times in the future are set to now, so times can only decrease.
    pairs = list(zip(before.restarts, after.restarts, strict=False))
    if len(pairs) < len(before.restarts) or any(new > old for old, new in pairs):
        found.append("durability: a spent restart was forgotten")
    old, new = before.spent, after.spent
    if old.preemptions > new.preemptions or old.store_failures > new.store_failures:
        found.append("durability: a spent preemption or store failure was forgotten")
    if old.furthest_step is not None and (
        new.furthest_step is None or new.furthest_step < old.furthest_step
    ):
        found.append("durability: the furthest step went back")
    if before.round is not None and not _continues(before.round, after.round):
        found.append("consistency: a completed round changed or was forgotten")
    return found


def _continues(before: Round, after: Round | None) -> bool:
    """Return whether `after` is a later round, or the same one with all announcements intact."""
    if after is None or after.number < before.number:
        return False
    if after.number > before.number:
        return True
    return (
        same_participants(before, after)
        and (after.master_addr, after.master_port) == (before.master_addr, before.master_port)
        and after.gone[: len(before.gone)] == before.gone
        and after.succeeded[: len(before.succeeded)] == before.succeeded
        and not (before.end is not None and after.end is None)
    )


def _new_round(before: State, after: State) -> list[str]:
    """Check that a round completes within its bounds, with the expected ranks, and alone."""
    round_ = after.membership.round
    old = before.membership.round
    if round_ is None or (old is not None and old.number == round_.number):
        return []
    if before.membership.run == after.membership.run and after.membership.run == "":
        return ["consistency: a round without a run"]
    found = []
    least, most = after.membership.min_nodes, after.membership.max_nodes
    nodes = len(round_.participants)
    if not least <= nodes <= most:
        found.append(f"barrier: {nodes} nodes, {least}:{most} asked")
    if len({p.node_id for p in round_.participants}) != nodes:
        found.append("consistency: a node takes part twice")
    rank_first = 0
    for participant in round_.participants:
        if participant.rank_first != rank_first:
            found.append(f"consistency: ranks of {participant.node_id} do not tile")
        rank_first += participant.offer.local_world_size
    found += _kept_workers(round_)
    found += _snapshot(round_)
    if round_.adopted:
        # The server that completed the round knew which nodes had stopped. This server may know the
        # round only from a node that has left it, so it can check only the number.
        if old is not None and round_.number < old.number:
            found.append("durability: round numbers went back")
        return found
    if round_.number < before.membership.next_round:
        found.append("durability: round numbers went back")
    same_run = before.membership.run == after.membership.run
    # If a later round was adopted in the same step, `before` has the seats of an older one.
    follows = round_.number == before.membership.next_round
    if follows:
        found += _lineage(old if same_run else None, round_)
    if same_run and follows and len(_unstopped(before, after)) > 1:
        found.append("exclusivity: a round completed while others of the last had not stopped")
    return found


def _kept_workers(round_: Round) -> list[str]:
    found = []
    kept: set[int] = set()
    for participant in round_.participants:
        ranks = {*participant.kept, *participant.charged_suspects}
        if len(ranks) < len(participant.kept) + len(participant.charged_suspects):
            found.append(f"keeping: a worker of {participant.node_id} is named twice")
        if not ranks.issubset(range(participant.offer.local_world_size)):
            found.append(f"keeping: {participant.node_id} does not have this worker")
        kept.update(participant.rank_first + local_rank for local_rank in participant.kept)
    if (round_.source is None) != (round_.resume_step is None):
        found.append("keeping: a source without a step, or a step without a source")
    if round_.source is not None and round_.source not in kept and not round_.adopted:
        found.append("keeping: the source is not kept")
    return found


def _snapshot(round_: Round) -> list[str]:
    """Check that a round loads only snapshots of its own history."""
    mark, found = round_.snapshot, []
    if mark is None:
        return ["snapshots: loaded, and there are none"] if round_.snapshot_loads else []
    if not round_.origin <= mark.lineage < round_.number and not round_.adopted:
        found.append("snapshots: outdated, or of a round to come")
    if round_.snapshot_loads and round_.source is not None:
        found.append("snapshots: loaded beside a kept worker that has the state")
    return found


def _lineage(old: Round | None, round_: Round) -> list[str]:
    """Check that kept workers took part in the previous round, and that none of them ended it."""
    keepers = {p.node_id: p for p in round_.participants if p.kept}
    if not keepers:
        return []
    if old is None:
        return ["keeping: there is no round in which the kept workers took part"]
    found = []
    # A placeholder of an adopted round may have been replaced in this step.
    if not old.adopted and keepers.keys() - {p.node_id for p in old.participants}:
        found.append("keeping: a kept worker did not take part in the round before")
    if old.end is None:
        # The previous round ended in this step.
        return found
    if not old.end.keep:
        found.append("keeping: the end of the round before asked for new processes")
    failed = [f for f in old.end.failures if not f.suspect and f.node_id in keepers]
    if any(f.local_rank in keepers[f.node_id].kept for f in failed):
        found.append("keeping: a worker is kept whose failure ended the round before")
    return found


def _unstopped(before: State, after: State) -> set[str]:
    """Return the nodes that held a seat and were not given up in this step.

    One of them may just have stopped.
    """
    known = before.membership.departures
    departed = [d for d in after.membership.departures if d not in known]
    if len(departed) == MAX_DEPARTURES:
        # More nodes may have departed than are remembered.
        return set()
    return before.seats.keys() - {departure.node_id for departure in departed}
