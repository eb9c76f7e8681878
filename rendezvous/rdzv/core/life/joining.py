"""Joins, each of which gives a node its place in the next round and reports on the last one."""

from __future__ import annotations

from rdzv.core.commands import Join
from rdzv.core.draft import Draft
from rdzv.core.events import NodeJoined, NodeStopped
from rdzv.core.life.absences import mark_back, note_heard
from rdzv.core.life.charging import charge_instead
from rdzv.core.life.conditions import Ignored, is_barred
from rdzv.core.life.failures import add_failures, end_by_failure, failures_from
from rdzv.core.life.leaving import give_up
from rdzv.core.life.refusals import refuse_join, replaces_run
from rdzv.core.life.restoring import adopt
from rdzv.core.life.round_end import end_round
from rdzv.core.life.runs import REPLACED, begin_run, close
from rdzv.core.model import Cause, Result, Round, State, Waiting, is_placeholder
from rdzv.core.rounds.budgets import further
from rdzv.core.rounds.reachability import note_reach
from rdzv.core.shared_map import put, without
from rdzv.core.words import duration
from rdzv.structs import replace


def join(work: Draft, command: Join) -> Ignored | None:
    """Admit a node, confirm that its workers are gone, or accept a repeated join; see `Join`."""
    before, node_id, report = work.state, command.node_id, command.recovery
    if report and report.round == command.left_round and not _others_run_on(before, command):
        adopt(work, command, report)
    held = work.state.incarnation(node_id)
    number = None if held is None else _round_to_stop(work.state, node_id)
    confirms = number is not None and number == command.left_round
    admits = held != command.incarnation and not confirms
    refuse_join(before, work.state, command, work.now_ms, admits=admits)
    barred = is_barred(work.state, node_id)
    if confirms and number is not None:
        _confirm_stopped(work, command, number)
    elif held is None and barred:
        # This is a late duplicate of a join; the node will be notified of its release.
        return Ignored.BARRED
    elif admits:
        if held is not None:
            give_up(work, node_id, "a new instance of the node took its place", heard=True)
        if not barred:
            _admit(work, command)
    elif node_id in work.state.waiting:
        _wait(work, command, work.state.waiting[node_id].since_ms)
        return Ignored.KNOWN if work.state is before else None
    else:
        return Ignored.SEATED
    return None


def _others_run_on(state: State, command: Join) -> bool:
    """Return whether present nodes are running a lower round than the one that this node left.

    A server without memory began their round after waiting in vain for the nodes of the higher one.
    This node has stopped, so if the higher round were adopted, the next one could begin while
    workers of the lower round are still running.
    """
    round_ = state.membership.round
    if round_ is None or command.run != state.membership.run or command.left_round is None:
        return False
    # Seats loaded when the server started are younger than their round. They may come from an old
    # copy of the store, and their nodes may be in the higher round themselves.
    begun = (n for n, seat in state.seats.items() if seat.since_ms == round_.at_ms)
    there = any(node_id not in state.away and not is_placeholder(node_id) for node_id in begun)
    return there and command.left_round > round_.number


def _round_to_stop(state: State, node_id: str) -> int | None:
    """Return the round for which a join would confirm that a present node has no workers left.

    Return None if the node has no such round, or has announced that it is leaving; in that case
    only a `Leave` confirms it.
    """
    if node_id in state.stuck:
        return state.stuck[node_id].round
    seat, round_ = state.seats.get(node_id), state.membership.round
    return round_.number if seat and round_ and not seat.leaving else None


def _admit(work: Draft, command: Join) -> None:
    if replaces_run(work.state, command):
        close(work, Result.STOPPED, REPLACED)
    if not work.open:
        begin_run(work, command)
    note_reach(work, command.offer)
    if command.left_round is not None and command.left_round >= work.membership.next_round:
        work.store(replace(work.membership, next_round=command.left_round + 1))
    _wait(work, command, work.now_ms)
    offer = command.offer
    work.state = replace(work.state, newest_ms=work.now_ms, last_leave=None)
    work.events.append(
        NodeJoined(command.node_id, command.incarnation, offer.address, offer.local_world_size)
    )


def _wait(work: Draft, command: Join, since_ms: int) -> None:
    """Add a connected node to the waiting nodes, or update its offer if it is already waiting."""
    former = work.state.superseded.get(command.node_id)
    if former is not None and (
        former.incarnation != command.incarnation
        or (command.left_round is not None and command.left_round >= former.round)
    ):
        others = without(work.state.superseded, command.node_id)
        work.state = replace(work.state, superseded=others)
    known = work.state.waiting.get(command.node_id)
    waiting = Waiting(
        incarnation=command.incarnation,
        offer=command.offer,
        since_ms=since_ms,
        instance=command.instance,
        left_round=command.left_round,
        # A fence kills workers rather than parking them.
        kept=() if command.fenced else command.kept,
        snapshots=command.snapshots if command.run == work.membership.run else (),
        preparing=command.preparing,
    )
    if known is not None and _number(command.left_round) < _number(known.left_round):
        # This is a late duplicate; the node has since offered its parked workers.
        waiting = replace(
            waiting, left_round=known.left_round, kept=known.kept, snapshots=known.snapshots
        )
    if known != waiting:
        work.put(of=command.node_id, waiting=put(work.state.waiting, command.node_id, waiting))
    note_heard(work, command.node_id)
    mark_back(work, command.node_id)


def _sealed_a_step(round_: Round, command: Join) -> bool:
    furthest = max((offer.step or 0 for offer in command.kept), default=0)
    return round_.resume_step is not None and furthest > round_.resume_step


def _number(left_round: int | None) -> int:
    return -1 if left_round is None else left_round


def _confirm_stopped(work: Draft, command: Join, number: int) -> None:
    """Free the seat of a node whose workers have left the round, and let it wait for the next."""
    round_ = work.membership.round
    if command.node_id in work.state.seats and round_ is not None:
        failures = failures_from(work, command.node_id, round_, command.failures)
        if command.fenced:
            # Workers that failed in the meantime lost their connections to the workers killed here.
            ago = f" {duration(command.fenced_age_ms)} ago" if command.fenced_age_ms else ""
            reason = (
                f"{command.node_id}: it was cut off, and has killed its workers{ago} "
                "(--fence-after)"
            )
            dead_ms = command.fenced_age_ms
            node_id = command.node_id
            end_round(work, Cause.NODE_LEFT, reason, broken=True, dead_ms=dead_ms, node_id=node_id)
            charge_instead(work, Cause.NODE_LEFT, reason, node_id)
        elif round_.live and any(not failure.finished for failure in failures):
            end_by_failure(work, failures)
        elif round_.live:
            reason = f"{command.node_id}: it has stopped its workers, and joins again"
            end_round(work, Cause.NODE_LEFT, reason, broken=False, node_id=command.node_id)
        else:
            add_failures(work, failures)
        moved = replace(command.moved, sealed=_sealed_a_step(round_, command))
        work.state = replace(work.state, moved=further(work.state.moved, moved))
    work.put(
        of=command.node_id,
        seats=without(work.state.seats, command.node_id),
        stuck=without(work.state.stuck, command.node_id),
    )
    _wait(work, command, work.now_ms)
    work.events.append(NodeStopped(command.node_id, number, len(command.kept)))
