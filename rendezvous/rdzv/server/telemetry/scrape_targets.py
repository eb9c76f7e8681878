"""Where the agents answer /metrics, as they have said; what /sd lists beside the server itself.

A node that is lost stays on the list for a while: if it went at once, Prometheus would forget it,
and no alert would say that it no longer answers.
"""

from __future__ import annotations

from collections.abc import Mapping

KEPT_MS = 3_600_000
"""How long a lost node is listed: time for an alert, and for its receiver."""


class ScrapeTargets:
    """The agents that answer /metrics, by node_id. There are as many as nodes, and those lost."""

    def __init__(self, most: int) -> None:
        """Keep at most `limit` lost nodes, the latest."""
        self._most = most
        self._present: dict[str, str] = {}
        self._lost: dict[str, tuple[str, int]] = {}
        """With the time at which it was lost, in that order."""

    def note(self, node_id: str, address: str) -> None:
        """Take note of where a node that connects answers; empty: nowhere."""
        self._lost.pop(node_id, None)
        self._present.pop(node_id, None)
        if address:
            self._present[node_id] = address

    def lose(self, node_id: str, now_ms: int) -> None:
        """Take note that a node was given up."""
        if (address := self._present.pop(node_id, "")) != "":
            self._lost[node_id] = (address, now_ms)
            if len(self._lost) > self._most:
                del self._lost[next(iter(self._lost))]

    def listed(self, now_ms: int) -> Mapping[str, str]:
        """Return by node_id where agents are to be asked."""
        while self._lost:
            node_id, (_, lost_ms) = next(iter(self._lost.items()))
            if now_ms - lost_ms < KEPT_MS:
                break
            del self._lost[node_id]
        # One that was started anew under another name answers where the former did.
        taken = set(self._present.values())
        lost = {n: at for n, (at, _) in self._lost.items() if at not in taken}
        return {**lost, **self._present}
