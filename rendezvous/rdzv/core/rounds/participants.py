"""Facts derived from a round's participants, computed once rather than at every step.

A large job takes as many steps as it has nodes, and few of them change the participants.
"""

from __future__ import annotations

from collections.abc import Mapping

from rdzv.core.model import Participant
from rdzv.structs import struct

_MOST = 16
"""The number of rounds remembered: the jobs of one server take turns."""


@struct(frozen=True)
class Known:
    """Facts derived from the participants of one round."""

    participants: tuple[Participant, ...]
    by_node_id: Mapping[str, Participant]
    longest_shutdown_ms: int
    """The longest time that one of them gives its workers to stop."""


def known(participants: tuple[Participant, ...]) -> Known:
    """Return the facts about these participants, remembered or newly derived."""
    found = _remembered.get(id(participants))
    if found is None or found.participants is not participants:
        found = Known(
            participants,
            {p.node_id: p for p in participants},
            max((p.offer.shutdown_timeout_ms for p in participants), default=0),
        )
        if len(_remembered) >= _MOST:
            del _remembered[next(iter(_remembered))]
        _remembered[id(participants)] = found
    return found


_remembered: dict[int, Known] = {}
"""Keyed by the identity of the tuple, which stays alive here: comparing tuples would look at every
participant."""
