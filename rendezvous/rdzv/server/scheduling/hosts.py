"""Nodes as placement sees them: their resources, how much is in use, and why any are unusable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rdzv.core.fleet import nodes
from rdzv.core.fleet.job_queue import Host
from rdzv.core.fleet.node_resources import gpus_needed
from rdzv.core.model import State
from rdzv.core.reason import ReasonItem
from rdzv.server.scheduling.cordons import Cordons
from rdzv.server.scheduling.drains import Drains
from rdzv.server.scheduling.known_nodes import KnownNodes
from rdzv.server.scheduling.quarantined_nodes import Quarantine


class Hosts:
    """The nodes of one server that accept submitted jobs."""

    def __init__(
        self,
        records: Callable[[], Mapping[str, nodes.NodeRecord]],
        known: KnownNodes,
        cordons: Cordons,
        drains: Drains,
        quarantine: Quarantine,
    ) -> None:
        self._records = records
        self._known = known
        self._cordons = cordons
        self._drains = drains
        self._quarantine = quarantine

    def all(self, states: Iterable[State]) -> list[Host]:
        """Return all nodes that accept submitted jobs, and what the jobs in `states` use there."""
        taken = self._taken(states)
        hosts, quarantined = [], self._quarantine.nodes
        for node_id, record in self._records().items():
            known = self._known.of(node_id)
            if known is None or known.resources is None:
                continue
            held = {(h.rdzv_id, h.run): h.gpus for h in known.holdings}
            has = taken.get(node_id, {}) | held
            # Such a state may last for hours, so no waiting job may reserve other nodes until it
            # ends.
            barred = node_id in quarantined
            cordoned = node_id in self._cordons.by_node or self._drains.wishes(node_id)
            cordoned = cordoned or barred or bool(known.failing)
            unusable = self._unusable(record)
            hosts.append(Host(node_id, known.resources, has, unusable, cordoned, barred))
        return hosts

    def _taken(self, states: Iterable[State]) -> dict[str, dict[tuple[str, str], int]]:
        taken: dict[str, dict[tuple[str, str], int]] = {}
        for state in states:
            membership = state.membership
            if membership.submission is None or membership.ended is not None:
                continue
            for node_id in membership.submission.placed:
                if (resources := self._known.resources(node_id)) is not None:
                    gpus = gpus_needed(membership.submission.spec, resources)
                    of_node = taken.setdefault(node_id, {})
                    of_node[membership.rdzv_id, membership.run] = gpus
        return taken

    def _unusable(self, record: nodes.NodeRecord) -> ReasonItem | None:
        """Return why nothing can be placed on a node now; None if the node is usable."""
        no_reason = "no reason was given"
        if (drain := self._drains.of(record.node_id)) is not None:
            return ReasonItem(drain.reason or no_reason, state=drain.what)
        if (cordon := self._cordons.of(record.node_id)) is not None:
            lifted = "`rdzvctl uncordon` lifts that"
            return ReasonItem(cordon.reason or no_reason, state="cordoned", then=lifted)
        if (held := self._quarantine.nodes.get(record.node_id)) is not None:
            lifted = "`rdzvctl uncordon` lifts that, too"
            return ReasonItem(held.reason, state="quarantined", then=lifted)
        if record.stream is None:
            return ReasonItem("its agent is not connected", state="away")
        known = self._known.of(record.node_id)
        if known is None or not known.failing:
            return None
        return ReasonItem(known.unhealthy, state="unhealthy", then="it counts once its checks pass")
