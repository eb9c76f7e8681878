"""Nodes that are away or have come back, and lost nodes that may still be running workers."""

from __future__ import annotations

from rdzv.core.commands import MarkAway
from rdzv.core.draft import Draft
from rdzv.core.events import NodeCameBack, NodeWentAway
from rdzv.core.life.conditions import Ignored
from rdzv.core.model import Away, Participant, Round, State, is_placeholder
from rdzv.core.rounds.participants import facts, find
from rdzv.core.shared_map import put, without
from rdzv.structs import replace


def mark_away(work: Draft, command: MarkAway) -> Ignored | None:
    """Keep the place of a node whose stream has ended, until it returns or is given up."""
    before = work.state.away.get(command.node_id)
    since_ms = work.now_ms if before is None else before.since_ms
    away = Away(since_ms, command.until_ms, command.firm, command.may_run)
    if away == before:
        return Ignored.KNOWN
    if before is None:
        work.events.append(NodeWentAway(command.node_id, command.until_ms - work.now_ms))
    work.put(of=command.node_id, away=put(work.state.away, command.node_id, away))
    return None


def mark_back(work: Draft, node_id: str) -> Ignored | None:
    """Record that a node is connected again."""
    away = work.state.away.get(node_id)
    if away is None:
        return Ignored.KNOWN
    work.put(of=node_id, away=without(work.state.away, node_id))
    work.events.append(NodeCameBack(node_id, work.now_ms - away.since_ms))
    if node_id in work.state.seats:
        work.state = replace(work.state, back_ms=work.now_ms)
    deadline_ms, round_ = work.state.stop_deadline_ms, work.membership.round
    if away.firm and deadline_ms is not None and round_ is not None:
        # The node may find out only now that the round has ended.
        late_ms = work.now_ms + longest_stop_ms(round_)
        work.state = replace(work.state, stop_deadline_ms=max(deadline_ms, late_ms))
    return None


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


def may_run_on(state: State, node_id: str) -> bool:
    """Return whether workers may still be running on a node that was given up."""
    return node_id in unheard(state)


def may_run(state: State, node_id: str) -> bool:
    """Return whether workers may still be running on a node if it is given up without a report."""
    away = state.away.get(node_id)
    if node_id in state.waiting or is_placeholder(node_id):
        return False
    if away is not None and not away.may_run:
        return False
    participant = participant_of(state, node_id)
    return participant is not None and not participant.instance.fence_after_ms


def orphans_end_after_ms(work: Draft, node_id: str) -> int:
    """Return how long a runner whose agent is dead may take to kill its workers.

    The runner waits for another agent no longer than the longest lease, and then stops the workers.
    """
    away, round_, tuning = work.state.away.get(node_id), work.membership.round, work.state.tuning
    age_ms = work.now_ms - away.since_ms if away is not None else 0
    stop_ms = longest_stop_ms(round_) if round_ is not None else 0
    return max(tuning.takeover_grace_ms + stop_ms - age_ms, 0)


def some_seat_away(state: State) -> bool:
    """Return whether a participant is away, and therefore cannot confirm its stop or success."""
    return any(node_id in state.seats for node_id in state.away)


STOP_MARGIN_MS = 20_000
"""The time that a node may take to stop its workers beyond its `shutdown_timeout`: processes that
use GPUs take long to die."""


def longest_stop_ms(round_: Round) -> int:
    """Return the longest time that any participant of a round may take to stop its workers."""
    return facts(round_.participants).longest_shutdown_ms + STOP_MARGIN_MS


def participant_of(state: State, node_id: str) -> Participant | None:
    """Return a node's place in the latest round, or None if it has none."""
    round_ = state.membership.round
    return find(round_.participants, node_id) if round_ is not None else None
