"""Keeps nodes' reports about themselves: their resources, their health, and the jobs they hold."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rdzv.core.fleet.node_resources import FailingCheck, Resources
from rdzv.messages import Hello, Holding
from rdzv.runtime.clock import Clock
from rdzv.structs import replace, struct

log = logging.getLogger("rdzv.scheduling")


@struct(frozen=True)
class KnownNode:
    """What one node has reported about itself."""

    version: str
    resources: Resources | None
    holdings: tuple[Holding, ...] = ()
    metrics: str = ""
    """The address at which the node's agent serves /metrics; empty if it serves none."""
    failing: tuple[FailingCheck, ...] = ()
    failing_since_ms: int = 0

    @property
    def unhealthy(self) -> str:
        """A description of the node's failing health checks; empty if none fails."""
        return "; ".join(map(str, self.failing))


class KnownNodes:
    """The reports of one server's nodes, each kept until the node is lost."""

    def __init__(self, clock: Clock, on_change: Callable[[], None]) -> None:
        self._clock = clock
        self._on_change = on_change
        self._known: dict[str, KnownNode] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, node_id: str) -> KnownNode | None:
        """Return a node's reports, or None if it has made none."""
        return self._known.get(node_id)

    @property
    def daemons(self) -> list[str]:
        """The known nodes that accept submitted jobs."""
        return [node_id for node_id, known in self._known.items() if known.resources is not None]

    def resources(self, node_id: str) -> Resources | None:
        """Return a node's resources for submitted jobs, or None if it accepts none."""
        known = self._known.get(node_id)
        return known.resources if known is not None else None

    def held(self, node_id: str) -> dict[str, set[str]]:
        held: dict[str, set[str]] = {}
        for holding in self._known[node_id].holdings if node_id in self._known else ():
            held.setdefault(holding.rdzv_id, set()).add(holding.run)
        return held

    def note_hello(self, hello: Hello) -> None:
        """Record what a node reports about itself in its hello."""
        former = self._known.get(hello.node_id)
        self._known[hello.node_id] = KnownNode(
            hello.agent_version,
            hello.resources,
            hello.holdings.holdings,
            hello.metrics,
            former.failing if former else (),
            former.failing_since_ms if former else 0,
        )
        self.note_health(hello.node_id, hello.health.failing)
        self._on_change()

    def note_health(self, node_id: str, failing: tuple[FailingCheck, ...]) -> None:
        """Record which of a node's health checks are failing; the node is healthy if none is."""
        known = self._known.get(node_id)
        if known is None or known.failing == failing:
            return
        since_ms = known.failing_since_ms if known.failing else self._clock.now_ms()
        now = self._known[node_id] = replace(known, failing=failing, failing_since_ms=since_ms)
        if failing:
            log.warning("node %s is unhealthy; placing nothing on it: %s", node_id, now.unhealthy)
        else:
            log.warning("node %s is healthy again", node_id)
        self._on_change()

    def note_holdings(self, node_id: str, holdings: tuple[Holding, ...]) -> None:
        """Record the submitted jobs that a node currently holds."""
        if (known := self._known.get(node_id)) is not None and known.holdings != holdings:
            self._known[node_id] = replace(known, holdings=holdings)
            self._on_change()

    def note_lost(self, node_id: str) -> None:
        """Forget a node that was given up; if it returns, it reports its holdings again."""
        self._known.pop(node_id, None)
        self._on_change()
