"""The addresses at which agents serve /metrics, as reported by the agents and listed by /sd.

A lost node stays listed for a while: if it were removed at once, Prometheus would forget it, and no
alert would report that it no longer responds.
"""

from __future__ import annotations

from collections.abc import Mapping

KEPT_MS = 3_600_000
"""How long a lost node stays listed: long enough for an alert to fire and for people to react."""


class ScrapeTargets:
    """The agents that serve /metrics on known nodes and on recently lost nodes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._present: dict[str, str] = {}
        self._lost: dict[str, tuple[str, int]] = {}
        """The address of each lost node and the time when it was lost, by node_id, in order of
        loss."""

    def note(self, node_id: str, address: str) -> None:
        """Record the address of a node that has connected; an empty address removes the node."""
        self._lost.pop(node_id, None)
        self._present.pop(node_id, None)
        if address:
            self._present[node_id] = address

    def lose(self, node_id: str, now_ms: int) -> None:
        if (address := self._present.pop(node_id, "")) != "":
            self._lost[node_id] = (address, now_ms)
            if len(self._lost) > self._most:
                del self._lost[next(iter(self._lost))]

    def listed(self, now_ms: int) -> Mapping[str, str]:
        while self._lost:
            node_id, (_, lost_ms) = next(iter(self._lost.items()))
            if now_ms - lost_ms < KEPT_MS:
                break
            del self._lost[node_id]
        # A node restarted under another name keeps its address, so list it only under its new name.
        taken = set(self._present.values())
        lost = {n: at for n, (at, _) in self._lost.items() if at not in taken}
        return {**lost, **self._present}
