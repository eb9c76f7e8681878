"""Joins, each of which gives a node its place in the next round and reports on the last one.

A node that reconnects *resumes* instead: its workers still run. Every reason to refuse either is in
`refuse_join` and `refuse_resume`. A refusal raises an exception, so nothing has changed.
"""

from __future__ import annotations

from rdzv.core import model
from rdzv.core.commands import Join, Resume
from rdzv.core.draft import Draft, Ignored
from rdzv.core.events import NodeJoined, NodeStopped
from rdzv.core.life.failures import (
    add_failures,
    end_by_failure,
    end_round,
    fails_when_stopped,
    failures_on,
)
from rdzv.core.life.leaving import give_up, mark_back, note_heard, unheard
from rdzv.core.life.restoring import adopt
from rdzv.core.life.runs import REPLACED, begin_run, ended_run
from rdzv.core.rounds.budgets import further
from rdzv.core.rounds.reachability import note_reach, refuse_unreachable
from rdzv.core.shared_map import put, without
from rdzv.core.words import duration, listed
from rdzv.errors import (
    DeniedError,
    NodeSupersededError,
    RendezvousClosedError,
    RunStoppingError,
    SettingsMismatchError,
    UnknownNodeError,
)
from rdzv.structs import field_names, replace


def join(work: Draft, command: Join) -> Ignored | None:
    """Admit a node, confirm that its workers are gone, or accept a repeated join; see `Join`."""
    before, node_id, report = work.state, command.node_id, command.recovery
    leaves = report is not None and report.assignment.round == command.left_round
    if report is not None and leaves and not _others_run_on(before, command):
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


def _others_run_on(state: model.State, command: Join) -> bool:
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
    there = any(
        node_id not in state.away and not model.is_placeholder(node_id) for node_id in begun
    )
    return there and command.left_round > round_.number


def _round_to_stop(state: model.State, node_id: str) -> int | None:
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
        work.close(model.Result.STOPPED, REPLACED)
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
    former = work.state.superseded.get(command.node_id)
    if former is not None and (
        former.incarnation != command.incarnation
        or (command.left_round is not None and command.left_round >= former.round)
    ):
        others = without(work.state.superseded, command.node_id)
        work.state = replace(work.state, superseded=others)
    known = work.state.waiting.get(command.node_id)
    waiting = model.WaitingNode(
        incarnation=command.incarnation,
        offer=command.offer,
        since_ms=since_ms,
        instance=command.instance,
        left_round=command.left_round,
        # A fence kills workers rather than parking them.
        kept=() if command.fenced else command.kept,
        snapshots=command.snapshots if command.run == work.membership.run else (),
        preparing=command.preparing,
        standby=command.standby,
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


def _sealed_a_step(round_: model.Round, command: Join) -> bool:
    furthest = max((offer.step or 0 for offer in command.kept), default=0)
    return round_.resume_step is not None and furthest > round_.resume_step


def _number(left_round: int | None) -> int:
    return -1 if left_round is None else left_round


def _confirm_stopped(work: Draft, command: Join, number: int) -> None:
    round_ = work.membership.round
    if command.node_id in work.state.seats and round_ is not None:
        failures = failures_on(work, command.node_id, round_, command.failures)
        if command.fenced:
            # Workers that failed in the meantime lost their connections to the workers killed here.
            ago = f" {duration(command.fenced_age_ms)} ago" if command.fenced_age_ms else ""
            reason = (
                f"{command.node_id}: it was cut off, and has killed its workers{ago} "
                "(--fence-after)"
            )
            dead_ms, node_id = command.fenced_age_ms, command.node_id
            end_round(
                work, model.Cause.NODE_LEFT, reason, broken=True, dead_ms=dead_ms, node_id=node_id
            )
        elif round_.live and any(not failure.finished for failure in failures):
            end_by_failure(work, failures)
        elif round_.live:
            reason = f"{command.node_id}: it has stopped its workers, and joins again"
            end_round(work, model.Cause.NODE_LEFT, reason, broken=False, node_id=command.node_id)
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


def resume(work: Draft, command: Resume) -> Ignored | None:
    """Transfer a seat to the incarnation that now represents its workers."""
    before = work.state
    if command.recovery is not None:
        adopt(work, command, command.recovery)
    refuse_resume(before, work.state, command)
    seat = work.state.seats.get(command.node_id)
    round_ = work.membership.round
    if round_ is None or command.round != round_.number:
        return Ignored.OTHER_ROUND
    if seat is None:
        return Ignored.NO_SEAT
    if seat.incarnation != command.incarnation:
        moved = replace(seat, incarnation=command.incarnation)
        work.put(of=command.node_id, seats=put(work.state.seats, command.node_id, moved))
    mark_back(work, command.node_id)
    return Ignored.KNOWN if work.state is before else None


def joined_replaced_run(state: model.State, node_id: str, incarnation: int, run: str) -> bool:
    """Return whether a waiting node names the run that it joined before an adopted run replaced it.

    That run had formed no round, and the node may not know of the replacement.
    """
    waiting, membership = state.waiting.get(node_id), state.membership
    if waiting is None or waiting.incarnation != incarnation or run in ("", membership.run):
        return False
    return all(earlier.run != run for earlier in membership.earlier)


def is_barred(state: model.State, node_id: str) -> bool:
    """Return whether the open run was submitted and is not allowed to keep this node."""
    if node_id not in state.barred:
        return False
    return state.run_is_open and state.membership.submission is not None


def refuse_join(
    before: model.State, state: model.State, command: Join, now_ms: int, *, admits: bool
) -> None:
    """Refuse a join for the first of the reasons below that applies.

    `before` is the job as the server knew it; `state` adds what the join reports about a round that
    the server did not know. `admits` means that the join would bring the node into the job, either
    because the node is not in it or because this instance replaces the one that is.

    Raises:
        DeniedError: the node does not know the job's secret.
        NodeSupersededError: a newer instance has the node's place.
        RendezvousClosedError: the run that it names has ended.
        RunStoppingError: the last run is being stopped, or can only fail; retry.
        SettingsMismatchError: the job was launched with other settings.
        RendezvousClosedError: the last run has ended, and this node may not begin another.
        InvalidRequestError: other nodes could not reach this one.
        UnreachableNodeError: this node could not reach another, or not tell itself from it; retry.

    """
    membership, node_id = state.membership, command.node_id
    _refuse_stranger(before, command)
    _refuse_former_instance(state, command)
    run = command.run
    if run and not joined_replaced_run(state, node_id, command.incarnation, run):
        _refuse_ended_run(state, command)
    if not admits:
        return
    if membership.stopping and state.run_is_open and not (run or state.present(node_id)):
        raise RunStoppingError(
            f"the last run of {membership.rdzv_id} is being stopped; the next begins when the "
            f"workers on {listed((*state.seats, *unheard(state)))} are gone"
        )
    if not (run or state.present(node_id)) and fails_when_stopped(state, now_ms):
        raise RunStoppingError(
            f"the last run of {membership.rdzv_id} has no budget left and fails when the workers "
            f"on {listed(state.seats)} are gone; the next begins then"
        )
    if is_barred(state, node_id):
        return
    if replaces_run(state, command):
        _refuse_reuse(membership.rdzv_id, model.Result.STOPPED, REPLACED, command)
    elif state.run_is_open and command.settings != membership.settings:
        raise _settings_mismatch(membership, command)
    elif membership.ended is not None:
        _refuse_reuse(membership.rdzv_id, membership.ended.result, membership.ended.reason, command)
    refuse_unreachable(state, command)


def refuse_resume(before: model.State, state: model.State, command: Resume) -> None:
    """Refuse a node that reports running workers, for the first of the reasons below that applies.

    `before` and `state` are as in `refuse_join`.

    Raises:
        DeniedError: the node does not know the job's secret.
        UnknownNodeError: the job is not known.
        RendezvousClosedError: the run that it names has ended.
        NodeSupersededError: a newer instance has the node's place.

    """
    _refuse_stranger(before, command)
    if not state.membership.run:
        raise UnknownNodeError(
            f"{state.membership.rdzv_id} is not known here; {command.node_id} reports that it runs "
            f"round {command.round} of it"
        )
    _refuse_ended_run(state, command)
    _refuse_former_instance(state, command)


def replaces_run(state: model.State, command: Join) -> bool:
    """Return whether a launch with other settings ends the open run, which has no other nodes."""
    if command.settings == state.membership.settings or not state.run_is_open:
        return False
    if command.run or state.membership.submission:
        return False
    present = (*state.seats, *state.waiting, *state.stuck)
    return all(node_id == command.node_id for node_id in present)


def _refuse_stranger(state: model.State, command: Join | Resume) -> None:
    membership = state.membership
    if membership.secret == command.secret or not state.run_is_open:
        return
    if any(earlier.run == command.run for earlier in membership.earlier):
        # The node is told how that run ended, but nothing about this one.
        return
    if not membership.secret:
        difference = "it has a job secret, and the job was begun without one"
    elif command.secret:
        difference = "its job secret is not that of the job"
    else:
        difference = "the job was begun with a job secret, and it has none"
    raise DeniedError(
        f"{command.node_id} cannot join {membership.rdzv_id}: {difference}. Launch all nodes of a "
        "job with the same RDZV_JOB_SECRET_FILE, or choose another --rdzv-id"
    )


def _refuse_former_instance(state: model.State, command: Join | Resume) -> None:
    held = state.incarnation(command.node_id)
    if held is not None and command.incarnation < held:
        raise NodeSupersededError(
            f"a newer instance of node_id {command.node_id} has taken its place in "
            f"{state.membership.rdzv_id}; this one is superseded and must stop its workers"
        )


def _refuse_ended_run(state: model.State, command: Join | Resume) -> None:
    ended = ended_run(state, command.run)
    if ended is not None:
        raise RendezvousClosedError(
            f"run {command.run} of {state.membership.rdzv_id} has ended: {ended.reason}"
        )


def _refuse_reuse(rdzv_id: str, result: model.Result, reason: str, command: Join) -> None:
    if command.refuse_reuse:
        raise RendezvousClosedError(
            f"the last run of {rdzv_id} has {result} ({reason}) and "
            "reuse=false was given; choose another --rdzv-id"
        )


def _settings_mismatch(membership: model.Membership, command: Join) -> SettingsMismatchError:
    theirs, ours = command.settings, membership.settings
    differences = [
        f"{name.removesuffix('_ms')} is {_shown(name, here)} here and {_shown(name, there)} in the "
        "job"
        for name in field_names(model.Settings)
        if (here := getattr(theirs, name)) != (there := getattr(ours, name))
    ]
    return SettingsMismatchError(
        f"{command.node_id} cannot join {membership.rdzv_id}: {'; '.join(differences)}. "
        "Launch all nodes of a job alike, or choose another --rdzv-id"
    )


def _shown(name: str, value: object) -> str:
    if value is None:
        restarts = name == "max_restarts"
        return "left to each node's own agent (torchrun)" if restarts else "without limit"
    if isinstance(value, tuple):
        return ",".join(value) or "empty"
    # The command line takes seconds.
    return f"{value / 1000:g} s" if name.endswith("_ms") and isinstance(value, int) else str(value)
