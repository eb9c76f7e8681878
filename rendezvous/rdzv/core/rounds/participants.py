"""What follows from the participants of a round, found once and not at each step.

A large job takes as many steps as it has nodes, and few of them change the participants.
"""

from __future__ import annotations

from collections.abc import Mapping

from rdzv.core.model import Participant
from rdzv.structs import struct

_MOST = 16
"""For how many rounds it is remembered: jobs of one server take turns."""


@struct(frozen=True)
class Known:
    """What follows from the participants of one round."""

    participants: tuple[Participant, ...]
    by_node_id: Mapping[str, Participant]
    longest_shutdown_ms: int
    """The longest time that one of them gives its workers to stop."""


def known(participants: tuple[Participant, ...]) -> Known:
    """Return what follows from these participants."""
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
"""By the identity of the participants, which stay alive here: to compare them would look at all."""
