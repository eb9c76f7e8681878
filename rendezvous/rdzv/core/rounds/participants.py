"""Lookups in a round's participants, using tables computed once rather than at every step.

A large job takes as many steps as it has nodes, and few of them change the participants.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from rdzv.core.model import Participant
from rdzv.structs import struct

Participants = tuple[Participant, ...]


@struct(frozen=True)
class Facts:
    """Facts derived from the participants of one round."""

    group_ranks: Mapping[str, int]
    """The GROUP_RANK of each node, by node_id."""
    longest_shutdown_ms: int
    """The longest time that any participant gives its workers to stop."""


def facts(participants: Participants) -> Facts:
    """Return the facts about these participants, using cached results if available."""
    return _facts(_Same(participants))


def find(participants: Participants, node_id: str) -> Participant | None:
    """Return the participant with this node_id, or None if there is none."""
    group_rank = facts(participants).group_ranks.get(node_id)
    return None if group_rank is None else participants[group_rank]


class _Same:
    """A tuple as a cache key, compared by identity because comparing values visits every node."""

    __slots__ = ("participants",)

    def __init__(self, participants: Participants) -> None:
        self.participants = participants

    def __hash__(self) -> int:
        return id(self.participants)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.participants is other.participants


# Enough for the rounds of jobs whose steps alternate on one server.
@lru_cache(maxsize=16)
def _facts(of: _Same) -> Facts:
    return Facts(
        {participant.node_id: rank for rank, participant in enumerate(of.participants)},
        max((one.offer.shutdown_timeout_ms for one in of.participants), default=0),
    )
