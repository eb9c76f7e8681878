"""All the reasons for which a job's rules refuse a command, in the order in which they are checked.

A refusal raises an exception, so nothing has changed. Reasons to ignore a command are in
`conditions`.
"""

from __future__ import annotations

from rdzv.core.commands import Join, Restart, Resume, Scale, Stop, Submit
from rdzv.core.life.absences import unheard
from rdzv.core.life.charging import fails_when_stopped
from rdzv.core.life.conditions import is_barred, joined_replaced_run
from rdzv.core.life.runs import REPLACED, ended_run
from rdzv.core.model import Membership, Result, Settings, State
from rdzv.core.rounds.reachability import refuse_unreachable
from rdzv.core.words import duration, listed
from rdzv.errors import (
    DeniedError,
    InvalidRequestError,
    JobExistsError,
    NodeSupersededError,
    RendezvousClosedError,
    RunStoppingError,
    SettingsMismatchError,
    UnknownNodeError,
)
from rdzv.structs import field_names


def refuse_join(before: State, state: State, command: Join, now_ms: int, *, admits: bool) -> None:
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
        _refuse_reuse(membership.rdzv_id, Result.STOPPED, REPLACED, command)
    elif state.run_is_open and command.settings != membership.settings:
        raise _settings_mismatch(membership, command)
    elif membership.ended is not None:
        _refuse_reuse(membership.rdzv_id, membership.ended.result, membership.ended.reason, command)
    refuse_unreachable(state, command)


def refuse_resume(before: State, state: State, command: Resume) -> None:
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


def refuse_operator(state: State, command: Stop | Restart | Scale, now_ms: int) -> None:
    """Refuse an operator's command unless its run is still open and the round it names has existed.

    Raises:
        RendezvousClosedError: the run has ended, or is being stopped (a repeated stop is allowed).
        InvalidRequestError: there has been no such round to restart.

    """
    membership, round_ = state.membership, state.membership.round
    if command.run != membership.run or membership.ended is not None:
        what = "been followed by another"
        if membership.ended and command.run == membership.run:
            ago = duration(now_ms - membership.ended.at_ms)
            what = f"{membership.ended.result} {ago} ago"
        raise RendezvousClosedError(
            f"run {command.run} of {membership.rdzv_id} has {what}; nothing was changed"
        )
    if membership.stopping and not isinstance(command, Stop):
        raise RendezvousClosedError(
            f"run {command.run} of {membership.rdzv_id} is being stopped ({membership.stopping}); "
            "nothing was changed"
        )
    if isinstance(command, Restart) and (round_ is None or command.round > round_.number):
        raise InvalidRequestError(
            f"{membership.rdzv_id} has had no round {command.round}; nothing was changed"
        )


def refuse_submission(state: State, command: Submit) -> None:
    """Refuse a submission while a run of the job is open.

    Raises:
        JobExistsError: a run has not ended.

    """
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


def replaces_run(state: State, command: Join) -> bool:
    """Return whether a launch with other settings ends the open run, which has no other nodes."""
    if command.settings == state.membership.settings or not state.run_is_open:
        return False
    if command.run or state.membership.submission:
        return False
    present = (*state.seats, *state.waiting, *state.stuck)
    return all(node_id == command.node_id for node_id in present)


def _refuse_stranger(state: State, command: Join | Resume) -> None:
    """Refuse a node that does not know the run's secret, if the run has one."""
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


def _refuse_former_instance(state: State, command: Join | Resume) -> None:
    held = state.incarnation(command.node_id)
    if held is not None and command.incarnation < held:
        raise NodeSupersededError(
            f"a newer instance of node_id {command.node_id} has taken its place in "
            f"{state.membership.rdzv_id}; this one is superseded and must stop its workers"
        )


def _refuse_ended_run(state: State, command: Join | Resume) -> None:
    ended = ended_run(state, command.run)
    if ended is not None:
        raise RendezvousClosedError(
            f"run {command.run} of {state.membership.rdzv_id} has ended: {ended.reason}"
        )


def _refuse_reuse(rdzv_id: str, result: Result, reason: str, command: Join) -> None:
    if command.refuse_reuse:
        raise RendezvousClosedError(
            f"the last run of {rdzv_id} has {result} ({reason}) and "
            "reuse=false was given; choose another --rdzv-id"
        )


def _settings_mismatch(membership: Membership, command: Join) -> SettingsMismatchError:
    theirs, ours = command.settings, membership.settings
    differences = [
        f"{name.removesuffix('_ms')} is {_shown(name, here)} here and {_shown(name, there)} in the "
        "job"
        for name in field_names(Settings)
        if (here := getattr(theirs, name)) != (there := getattr(ours, name))
    ]
    return SettingsMismatchError(
        f"{command.node_id} cannot join {membership.rdzv_id}: {'; '.join(differences)}. "
        "Launch all nodes of a job alike, or choose another --rdzv-id"
    )


def _shown(name: str, value: object) -> str:
    """Format a setting's value, including None, for display."""
    if value is None:
        restarts = name == "max_restarts"
        return "left to each node's own agent (torchrun)" if restarts else "without limit"
    if isinstance(value, tuple):
        return ",".join(value) or "empty"
    # The command line takes seconds.
    return f"{value / 1000:g} s" if name.endswith("_ms") and isinstance(value, int) else str(value)
