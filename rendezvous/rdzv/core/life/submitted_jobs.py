"""Submitted jobs: their nodes are chosen by the server, withdrawn, or unable to run the job."""

from __future__ import annotations

from collections.abc import Iterable

from rdzv.core.commands import Bar, Decline, Place, Submit, Withdraw
from rdzv.core.draft import Draft, Ignored
from rdzv.core.events import JobQueued, NodeDeclined, NodesPlaced, NodesWithdrawn, RunBegan
from rdzv.core.life.leaving import depart
from rdzv.core.life.runs import next_run
from rdzv.core.model import NodeState, State, SubmittedRun
from rdzv.errors import JobExistsError
from rdzv.structs import replace


def submit(work: Draft, command: Submit) -> Ignored | None:
    """Begin a run without nodes. Submitting the same run again has no effect."""
    old = work.membership
    if command.run in (old.run, *(earlier.run for earlier in old.earlier)):
        return Ignored.KNOWN
    refuse_submission(work.state, command)
    submission = SubmittedRun(command.spec, command.submitted_by, work.now_ms)
    membership = next_run(old, command.run, command.settings, work.now_ms, command.spec.submitter)
    work.state = State(
        replace(membership, submission=submission), work.state.tuning, barred=work.state.barred
    )
    reason = f"submitted by {command.submitted_by}"
    if submitter := command.spec.submitter:
        reason += f" [{submitter}]"
    gpus = command.spec.gpus_per_node
    work.events.append(
        RunBegan(membership.run, membership.run_number, reason, queued=True, gpus_per_node=gpus)
    )
    return None


def refuse_submission(state: State, command: Submit) -> None:
    """Refuse a submission while a run of the job is open."""
    old = state.membership
    if not state.run_is_open:
        return
    if old.stopping:
        raise JobExistsError(
            f"job {old.rdzv_id} is being stopped; submit it again when its workers are gone, for "
            f"which `rdzvctl wait {old.rdzv_id}` waits, or choose another name"
        )
    by = f", submitted by {old.submission.submitted_by}" if old.submission else ""
    raise JobExistsError(
        f"a job {old.rdzv_id} already exists{by}, and has not ended; choose another name, or "
        "stop that one first"
    )


def choose_nodes(work: Draft, command: Place) -> Ignored | None:
    submission, was_queued = _submission(work), work.state.queued
    # A node may have been barred after it was chosen.
    chosen = [n for n in command.node_ids if n not in work.state.barred]
    work.store_submission(submission.with_placed(chosen))
    added = work.state.placed[len(submission.placed) :]
    if not added:
        return Ignored.BARRED if chosen != list(command.node_ids) else Ignored.KNOWN
    work.events.append(NodesPlaced(added, was_queued))
    return None


def take_back(work: Draft, command: Withdraw) -> Ignored | None:
    """Withdraw nodes chosen for a submitted run, except those that have a seat."""
    node_ids = withdrawable(work.state, command.node_ids)
    withdraw_nodes(work, node_ids, command.reason)
    if node_ids and work.state.queued:
        work.events.append(JobQueued(command.reason))
    return None if node_ids else _not_withdrawn(work, command.node_ids)


def decline_job(work: Draft, command: Decline) -> Ignored | None:
    """Release a chosen node that cannot run the job.

    The node is not chosen again in this run, unless the obstacle is `passing`.
    """
    submission, node_id = _submission(work), command.node_id
    if node_id not in submission.placed or node_id in work.state.seats:
        return _not_withdrawn(work, (node_id,))
    if command.passing:
        withdraw_nodes(work, (node_id,), command.reason)
        return None
    work.store_submission(submission.with_declined(node_id, command.reason))
    work.events.append(NodeDeclined(node_id, command.reason))
    if work.state.present(node_id):
        depart(work, node_id, NodeState.LEFT, command.reason, None)
    _record_queued(work)
    return None


def _not_withdrawn(work: Draft, node_ids: Iterable[str]) -> Ignored:
    seated = any(node_id in work.state.seats for node_id in node_ids)
    return Ignored.SEATED if seated else Ignored.NOT_PLACED


def bar_nodes(work: Draft, command: Bar) -> Ignored | None:
    """Record the nodes that submitted jobs must not keep; `withdraw_barred` releases them."""
    barred = dict(command.barred)
    if barred == work.state.barred:
        return Ignored.KNOWN
    work.state = replace(work.state, barred=barred)
    return None


def _submission(work: Draft) -> SubmittedRun:
    submission = work.membership.submission
    assert submission is not None
    return submission


def withdraw_nodes(work: Draft, node_ids: tuple[str, ...], reason: str) -> None:
    """Withdraw nodes from a submitted run. Nodes that have already joined it leave it."""
    if not node_ids:
        return
    for node_id in node_ids:
        if work.state.present(node_id):
            depart(work, node_id, NodeState.LEFT, reason, None)
    work.store_submission(_submission(work).without(node_ids))
    work.events.append(NodesWithdrawn(node_ids, reason))
    _record_queued(work)


def _record_queued(work: Draft) -> None:
    if work.state.queued:
        work.store_submission(replace(_submission(work), queued_again_ms=work.now_ms))


def withdraw_barred(work: Draft) -> bool:
    """Release a barred node from a submitted job once none of the job's workers remain on it."""
    state = work.state
    if not state.barred or state.membership.submission is None or not work.open:
        return False
    for node_id in withdrawable(state, state.barred):
        if node_id not in state.stuck:
            withdraw_nodes(work, (node_id,), state.barred[node_id])
            return True
    return False


def awaited(state: State) -> tuple[str, ...]:
    """Return the IDs of the chosen nodes that have not joined yet."""
    return tuple(node_id for node_id in state.placed if not state.present(node_id))


def withdrawable(state: State, node_ids: Iterable[str]) -> tuple[str, ...]:
    """Return those of the given nodes that are in the job or chosen for it but hold no seat."""
    return tuple(
        node_id
        for node_id in node_ids
        if node_id not in state.seats and (node_id in state.placed or state.present(node_id))
    )
