"""The conditions under which commands take effect; otherwise they are ignored.

A command that arrives late, arrives twice, or comes from a replaced instance is not an error. It is
*ignored*: nothing changes, and `Transition.ignored` gives the reason. Each condition takes the
state and a command, and returns the reason to ignore the command if it does not hold. A *refused*
command raises an error instead; see `refusals`.
"""

from __future__ import annotations

from enum import StrEnum

from rdzv.core.commands import (
    Decline,
    Fail,
    GiveUp,
    Leave,
    MarkAway,
    MarkBack,
    MarkLost,
    Place,
    ReportStoreHost,
    ReportStuck,
    Succeed,
    Withdraw,
)
from rdzv.core.model import State

OfRound = Fail | Succeed | ReportStuck | ReportStoreHost
"""Commands that name a round."""
FromNode = Fail | Leave | ReportStuck | ReportStoreHost | MarkAway | MarkBack | MarkLost
"""Commands from, or about, one instance of a node in the job."""
OfSubmission = Place | Withdraw | Decline | GiveUp
"""Commands about a submitted run."""


class Ignored(StrEnum):
    """The reason why a command had no effect."""

    NO_OPEN_RUN = "no run is open"
    OTHER_RUN = "it names another run"
    OTHER_ROUND = "it names another round"
    ROUND_ENDED = "the round has ended for another cause"
    NOT_PRESENT = "the node is not in the job"
    OTHER_INSTANCE = "another instance has the node's place"
    NO_SEAT = "the node has no seat in the round"
    SEATED = "the node still has a seat"
    NOT_STORE_HOST = "the node does not host the store"
    NOT_SUBMITTED = "the run was not submitted"
    NOT_PLACED = "the node was not chosen"
    BARRED = "the node is barred from submitted jobs"
    KNOWN = "nothing new"


def run_is_open(state: State, _: object) -> Ignored | None:
    """Require a run that has not ended."""
    return None if state.run_is_open else Ignored.NO_OPEN_RUN


def of_this_run(state: State, command: OfRound | OfSubmission) -> Ignored | None:
    """Ignore a command unless it names the current run."""
    return None if command.run == state.membership.run else Ignored.OTHER_RUN


def of_run_joined(state: State, command: Leave) -> Ignored | None:
    """Require that the node name the run it joined, or no run if it does not know the run yet."""
    if command.run in ("", state.membership.run):
        return None
    joined = joined_replaced_run(state, command.node_id, command.incarnation, command.run)
    return None if joined else Ignored.OTHER_RUN


def of_latest_round(state: State, command: OfRound) -> Ignored | None:
    """Require that the command name the latest round, whether live or ended."""
    round_ = state.membership.round
    return None if round_ is not None and round_.number == command.round else Ignored.OTHER_ROUND


def from_holder(state: State, command: FromNode) -> Ignored | None:
    """Require that the command be from, or about, the instance that has the node's place."""
    held = state.incarnation(command.node_id)
    if held is None:
        return Ignored.NOT_PRESENT
    return None if held == command.incarnation else Ignored.OTHER_INSTANCE


def from_seat(state: State, command: Fail | ReportStuck) -> Ignored | None:
    """Require that the node have a seat in the latest round."""
    return None if command.node_id in state.seats else Ignored.NO_SEAT


def from_store_host(state: State, command: ReportStoreHost) -> Ignored | None:
    """Require that the node, as GROUP_RANK 0, host the c10d store of the latest round."""
    round_ = state.membership.round
    first = round_.participants[0].node_id if round_ is not None else None
    return None if command.node_id == first else Ignored.NOT_STORE_HOST


def of_submitted_run(state: State, _: object) -> Ignored | None:
    """Require that the server choose the nodes of this run."""
    return None if state.membership.submission is not None else Ignored.NOT_SUBMITTED


def is_barred(state: State, node_id: str) -> bool:
    """Return whether the open run was submitted and is not allowed to keep this node."""
    if node_id not in state.barred:
        return False
    return state.run_is_open and state.membership.submission is not None


def joined_replaced_run(state: State, node_id: str, incarnation: int, run: str) -> bool:
    """Return whether a waiting node names the run that it joined before an adopted run replaced it.

    That run had formed no round, and the node may not know of the replacement.
    """
    waiting, membership = state.waiting.get(node_id), state.membership
    if waiting is None or waiting.incarnation != incarnation or run in ("", membership.run):
        return False
    return all(earlier.run != run for earlier in membership.earlier)
