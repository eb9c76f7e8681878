"""Who may join or resume, and how it is refused."""

from __future__ import annotations

from rdzv.core.commands import Join, Leave, Resume
from rdzv.core.draft import Draft
from rdzv.core.model import Membership, Settings, State
from rdzv.core.runs import ended_run
from rdzv.errors import (
    DeniedError,
    NodeSupersededError,
    RendezvousClosedError,
    SettingsMismatchError,
)
from rdzv.structs import field_names


def check_secret(work: Draft, command: Join | Resume) -> None:
    """Keep strangers out of a run: whoever takes part in it knows its secret, if it has one."""
    membership = work.membership
    if not work.open or membership.secret == command.secret:
        return
    if any(earlier.run == command.run for earlier in membership.earlier):
        # It is to hear how that run has ended; of this one it hears nothing.
        return
    if not membership.secret:
        difference = "it gives a job secret, and the job was begun without one"
    elif command.secret:
        difference = "its job secret is not that of the job"
    else:
        difference = "the job was begun with a job secret, and it gives none"
    raise DeniedError(
        f"{command.node_id} can not join {membership.rdzv_id}: {difference}. Launch all nodes of a "
        "job with the same RDZV_JOB_SECRET_FILE, or choose another --rdzv-id"
    )


def check_speaker(work: Draft, command: Join | Resume) -> None:
    """Refuse a former instance of a node."""
    held = work.state.incarnation(command.node_id)
    if held is not None and command.incarnation < held:
        raise NodeSupersededError(
            f"a newer instance of node_id {command.node_id} has taken its place in "
            f"{work.membership.rdzv_id}; this one is superseded and must stop its workers"
        )


def check_run(work: Draft, command: Join | Resume) -> None:
    """Refuse a node of a run that has ended."""
    ended = ended_run(work.state, command.run)
    if ended is not None:
        raise RendezvousClosedError(
            f"run {command.run} of {work.membership.rdzv_id} has ended: {ended.reason}"
        )


def went_along(state: State, node_id: str, incarnation: int, run: str) -> bool:
    """Say whether a node that had joined the run of this uid waits in the present one.

    That was adopted in the place of its own, which had begun no round, and of which nothing else is
    left. It may not have heard so.
    """
    waiting, membership = state.waiting.get(node_id), state.membership
    if waiting is None or waiting.incarnation != incarnation or run in ("", membership.run):
        return False
    return all(earlier.run != run for earlier in membership.earlier)


def has_gone_along(work: Draft, command: Join | Leave) -> bool:
    """Whether a node speaks of the run that an adopted one has replaced; see `went_along`."""
    return went_along(work.state, command.node_id, command.incarnation, command.run)


def settings_mismatch(membership: Membership, command: Join) -> SettingsMismatchError:
    """Say in what the settings of a node differ from those of the job."""
    theirs, ours = command.settings, membership.settings
    differences = [
        f"{name.removesuffix('_ms')} is {_shown(name, here)} here and {_shown(name, there)} in the "
        "job"
        for name in field_names(Settings)
        if (here := getattr(theirs, name)) != (there := getattr(ours, name))
    ]
    return SettingsMismatchError(
        f"{command.node_id} can not join {membership.rdzv_id}: {'; '.join(differences)}. "
        "Launch all nodes of a job alike, or choose another --rdzv-id"
    )


def _shown(name: str, value: object) -> str:
    """Write a setting for people; some may be open."""
    if value is None:
        restarts = name == "max_restarts"
        return "left to each node's own agent (torchrun)" if restarts else "without limit"
    # As it is said on the command line, which knows seconds.
    return f"{value / 1000:g} s" if name.endswith("_ms") and isinstance(value, int) else str(value)
