"""The participants of a round: their seats, their ranks (GROUP_RANK, RANK, ROLE_RANK), and lookups.

A large job takes as many steps as it has nodes, and few of them change the participants. Lookups
use tables computed once rather than at every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from rdzv.core.model import Participant, Round, StandbyState, WaitingNode
from rdzv.structs import struct


def assign_seats(
    prior: Sequence[Participant], candidates: Mapping[str, WaitingNode], max_nodes: int
) -> tuple[Participant, ...]:
    """Seat at most `max_nodes` candidates, in GROUP_RANK order, and assign their ranks.

    Survivors of the previous round keep their GROUP_RANK. Each lost seat, in GROUP_RANK order, goes
    to the best spare: one with the same local world size, then the same topology label, then one
    whose standby is ready, then the longest wait, then the lowest node id. Unfilled seats are
    closed up, and any remaining room goes to the nodes that have waited longest. If there are more
    survivors than seats, those with the highest GROUP_RANKs lose theirs.

    Without a previous round, nodes are ordered by topology label, then by node id. The result
    depends on nothing else, so two servers given the same round agree.

    RANKs are prefix sums of local world sizes, so they change only where sizes differ.

    >>> from rdzv.core.model import Offer
    >>> def node(size, rack="", since=0):
    ...     return WaitingNode(1, Offer("h", size, topology=rack), since)
    >>> first = assign_seats((), {"n2": node(8), "n1": node(8), "n3": node(4)}, 3)
    >>> [(p.node_id, p.rank_first) for p in first]
    [('n1', 0), ('n2', 8), ('n3', 16)]
    >>> again = assign_seats(first, {"n1": node(8), "n3": node(4), "n7": node(4), "n8": node(8)}, 3)
    >>> [(p.node_id, p.rank_first) for p in again]
    [('n1', 0), ('n8', 8), ('n3', 16)]
    """
    seats: list[str | None] = [p.node_id if p.node_id in candidates else None for p in prior]
    survivors = [node_id for node_id in seats if node_id is not None]
    seated_before = frozenset(survivors)
    spares = {n: waiting for n, waiting in candidates.items() if n not in seated_before}
    room = max_nodes - len(survivors)
    if room <= 0:
        return _with_ranks(survivors[:max_nodes], candidates)
    for group_rank, holder in enumerate(seats):
        if holder is None and room and spares:
            seats[group_rank] = best = _best_spare(spares, prior[group_rank])
            del spares[best]
            room -= 1
    seated = [node_id for node_id in seats if node_id is not None]
    return _with_ranks(seated + _growth(spares, room), candidates)


def _best_spare(spares: Mapping[str, WaitingNode], lost: Participant) -> str:
    def badness(node_id: str) -> tuple[bool, bool, bool, int, str]:
        spare = spares[node_id]
        return (
            spare.offer.local_world_size != lost.offer.local_world_size,
            spare.offer.topology != lost.offer.topology,
            spare.standby.state is not StandbyState.READY,
            spare.since_ms,
            node_id,
        )

    return min(spares, key=badness)


def _growth(spares: Mapping[str, WaitingNode], room: int) -> list[str]:
    """Return the `room` nodes that have waited longest, ordered by topology and then by name."""
    chosen = sorted(spares, key=lambda n: (spares[n].since_ms, n))[:room]
    return sorted(chosen, key=lambda n: (spares[n].offer.topology, n))


def _with_ranks(
    order: Sequence[str], candidates: Mapping[str, WaitingNode]
) -> tuple[Participant, ...]:
    role_world_sizes: Counter[str] = Counter()
    for node_id in order:
        offer = candidates[node_id].offer
        role_world_sizes[offer.role] += offer.local_world_size
    rank_first = 0
    role_rank_first: Counter[str] = Counter()
    participants: list[Participant] = []
    for node_id in order:
        waiting = candidates[node_id]
        role = waiting.offer.role
        participants.append(
            Participant(
                node_id=node_id,
                incarnation=waiting.incarnation,
                offer=waiting.offer,
                rank_first=rank_first,
                role_rank_first=role_rank_first[role],
                role_world_size=role_world_sizes[role],
                instance=waiting.instance,
            )
        )
        rank_first += waiting.offer.local_world_size
        role_rank_first[role] += waiting.offer.local_world_size
    return tuple(participants)


Participants = tuple[Participant, ...]


@struct(frozen=True)
class Facts:
    """Facts derived from the participants of one round."""

    group_ranks: Mapping[str, int]
    longest_shutdown_ms: int


def facts(participants: Participants) -> Facts:
    """Return the facts about these participants, using cached results if available."""
    return _facts(_Same(participants))


def participant_of(round_: Round | None, node_id: str) -> Participant | None:
    if round_ is None:
        return None
    group_rank = facts(round_.participants).group_ranks.get(node_id)
    return None if group_rank is None else round_.participants[group_rank]


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


STOP_MARGIN_MS = 20_000
"""The time that a node may take to stop its workers beyond its `shutdown_timeout`: processes that
use GPUs take long to die."""


def longest_stop_ms(round_: Round) -> int:
    return facts(round_.participants).longest_shutdown_ms + STOP_MARGIN_MS
