"""The nodes chosen for a submitted job, withdrawn from it, or unable to run it.

The rendezvous treats a submitted run like any other, with three differences: the server chooses its
nodes (`job_queue`), it waits in a queue while it has no nodes, and it never ends because nodes are
missing but goes back to the queue.
"""

from __future__ import annotations

from collections.abc import Iterable

from rdzv.core.model import Declined, State, Submission
from rdzv.structs import replace

MAX_DECLINED = 16
"""The number of nodes that must decline a job before the job itself is considered at fault."""


def place(submission: Submission, node_ids: Iterable[str]) -> Submission:
    return replace(submission, placed=tuple(dict.fromkeys((*submission.placed, *node_ids))))


def withdraw(submission: Submission, node_ids: Iterable[str]) -> Submission:
    gone = frozenset(node_ids)
    kept = tuple(node_id for node_id in submission.placed if node_id not in gone)
    return submission if kept == submission.placed else replace(submission, placed=kept)


def decline(submission: Submission, node_id: str, reason: str) -> Submission:
    """Record that a node cannot run the job, so it is not chosen again."""
    others = tuple(other for other in submission.declined if other.node_id != node_id)
    declined = (*others, Declined(node_id, reason))[-MAX_DECLINED:]
    return replace(withdraw(submission, (node_id,)), declined=declined)


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
