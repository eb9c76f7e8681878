"""Collects nodes' reports of when the workers in one round entered collectives."""

from __future__ import annotations

from dataclasses import dataclass, field

from rdzv.core.evidence.lateness import LEAST_PAIRS, GroupLook, pairs
from rdzv.messages import Arrivals, GroupArrivals

MAX_GROUPS = 1_024
"""The maximum number of process groups in one round; a large job has a few for each of its
nodes."""
MAX_KEPT = 512
"""The maximum number of one group's collectives that are kept until all nodes have reported
them."""


@dataclass(slots=True)
class _Group:
    """The entries into one process group's collectives."""

    latest: dict[str, int] = field(default_factory=dict)
    """The latest collective that each node has reported, by node_id."""
    entered_us: dict[int, dict[int, int]] = field(default_factory=dict)
    per_second: float = 0.0
    errors_us: dict[str, int | None] = field(default_factory=dict)

    def note(self, node_id: str, said: GroupArrivals) -> None:
        self.per_second, self.errors_us[node_id] = said.per_second, said.error_us
        self.latest[node_id] = max(said.entered_us, default=self.latest.get(node_id, 0))
        for sequence, entered in said.entered_us.items():
            self.entered_us.setdefault(sequence, {}).update(entered)
        for sequence in sorted(self.entered_us)[:-MAX_KEPT]:
            del self.entered_us[sequence]

    def complete(self) -> int:
        """Return how many collectives all nodes have reported together with their successors."""
        upto = min(self.latest.values())
        return sum(n < upto for n in pairs(self.entered_us))

    def take(self) -> GroupLook:
        upto = min(self.latest.values())
        taken = {n: entered for n, entered in self.entered_us.items() if n <= upto}
        # The last one is kept, so that it can be compared with the next one later.
        self.entered_us = {n: entered for n, entered in self.entered_us.items() if n >= upto}
        errors_us = [one for one in self.errors_us.values() if one is not None]
        known = len(errors_us) == len(self.errors_us)
        return GroupLook(taken, self.per_second, max(errors_us) if known else None)


class ArrivalBoard:
    """A round's entries into collectives that have not been compared yet."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def note(self, node_id: str, said: Arrivals) -> None:
        """Add a node's report."""
        for group in said.groups:
            if group.group in self._groups or len(self._groups) < MAX_GROUPS:
                self._groups.setdefault(group.group, _Group()).note(node_id, group)

    def take(self) -> list[GroupLook]:
        """Remove and return the entries that can be compared now, or [] while there are too few."""
        if all(group.complete() < LEAST_PAIRS for group in self._groups.values()):
            return []
        return [group.take() for group in self._groups.values() if group.complete()]
