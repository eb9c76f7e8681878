"""Runs whose nodes the server chooses: what becomes of a submission and its placements."""

from __future__ import annotations

from rdzv.core.commands import Decline, GiveUp, Place, Submit, Withdraw
from rdzv.core.draft import Draft, store_submission
from rdzv.core.events import NodeDeclined, NodesPlaced, NodesWithdrawn, RunBegan
from rdzv.core.leaving import depart
from rdzv.core.model import NodeState, Result, State, Submission
from rdzv.core.runs import close, next_run
from rdzv.core.submissions import decline, place, withdraw, withdrawable
from rdzv.errors import JobExistsError
from rdzv.structs import replace


def submit(work: Draft, command: Submit) -> None:
    """Begin a run without nodes. Who submits again what was submitted, changes nothing."""
    old = work.membership
    known = (old.run, *(earlier.run for earlier in old.earlier))
    if command.run in known:
        return
    if work.open and old.stopping:
        raise JobExistsError(
            f"job {old.rdzv_id} is being stopped; submit it again when its workers are gone, for "
            f"which `rdzvctl wait {old.rdzv_id}` waits, or choose another name"
        )
    if work.open:
        by = f", submitted by {old.submission.submitted_by}" if old.submission else ""
        raise JobExistsError(
            f"a job {old.rdzv_id} is there already{by}, and has not ended; choose another name, or "
            "stop that one first"
        )
    submission = Submission(command.spec, command.submitted_by, work.now_ms)
    membership = next_run(old, command.run, command.settings, work.now_ms, command.spec.submitter)
    work.state = State(
        replace(membership, submission=submission), work.state.tuning, barred=work.state.barred
    )
    reason = f"submitted by {command.submitted_by}"
    if submitter := command.spec.submitter:
        reason += f" [{submitter}]"
    work.events.append(RunBegan(membership.run, membership.run_number, reason))


def apply_to_submitted(work: Draft, command: Place | Withdraw | Decline | GiveUp) -> None:
    """Change what a submission has got; of a run that is over, nothing is left to change."""
    submission = work.membership.submission
    if not work.open or submission is None or command.run != work.membership.run:
        return
    match command:
        case Place():
            # One may have been barred since it was chosen.
            chosen = [n for n in command.node_ids if n not in work.state.barred]
            store_submission(work, place(submission, chosen))
            if added := work.state.placed[len(submission.placed) :]:
                work.events.append(NodesPlaced(added))
        case Withdraw():
            withdraw_nodes(work, withdrawable(work.state, command.node_ids), command.reason)
        case Decline(passing=True):
            if command.node_id in submission.placed:
                withdraw_nodes(work, withdrawable(work.state, (command.node_id,)), command.reason)
        case Decline():
            if command.node_id in submission.placed and command.node_id not in work.state.seats:
                store_submission(work, decline(submission, command.node_id, command.reason))
                work.events.append(NodeDeclined(command.node_id, command.reason))
                if work.state.present(command.node_id):
                    depart(work, command.node_id, NodeState.LEFT, command.reason, None)
        case GiveUp():
            close(work, Result.FAILED, command.reason)


def withdraw_nodes(work: Draft, node_ids: tuple[str, ...], reason: str) -> None:
    """Take back placements; who waits is in the job no more."""
    submission = work.membership.submission
    if submission is None or not node_ids:
        return
    for node_id in node_ids:
        if work.state.present(node_id):
            depart(work, node_id, NodeState.LEFT, reason, None)
    store_submission(work, withdraw(work.membership.submission or submission, node_ids))
    work.events.append(NodesWithdrawn(node_ids, reason))


def withdraw_barred(work: Draft) -> bool:
    """A submitted job lets go of a barred node as soon as no worker of it is left there."""
    state = work.state
    if not state.barred or state.membership.submission is None or not work.open:
        return False
    for node_id in withdrawable(state, state.barred):
        if node_id not in state.stuck:
            withdraw_nodes(work, (node_id,), state.barred[node_id])
            return True
    return False
