"""Nodes as operators see them, and changes that operators ask for: cordon, drain, and back."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rdzv.server.engine.watchers import Watchers
from rdzv.server.messages import LookAgain, NodeSummary
from rdzv.server.scheduling.placer import Placer
from rdzv.server.sessions.presence import Presence
from rdzv.server.sessions.streams import Streams


class NodeOperations:
    """Shows and changes the nodes of one server."""

    def __init__(
        self, *, placer: Placer, streams: Streams, presence: Presence, watchers: Watchers
    ) -> None:
        self._placer = placer
        self._streams = streams
        self._presence = presence
        self._watchers = watchers

    def summaries(self, node_ids: Collection[str] = ()) -> Sequence[NodeSummary]:
        """Show every node that is connected, away, cordoned or quarantined; of these, if any."""
        return self._placer.summaries(node_ids)

    async def cordon(self, node_id: str, reason: str) -> NodeSummary:
        """Place nothing more on a node, and show it as it then is; see `Placer.cordon`."""
        await self._placer.cordon(node_id, reason)
        self._watchers.nodes_changed()
        return self._placer.summary(node_id)

    async def uncordon(self, node_id: str) -> NodeSummary:
        """Let a node be placed on again, and show it as it then is; see `Placer.uncordon`.

        One that is connected runs its checks anew.
        """
        await self._placer.uncordon(node_id)
        self._streams.send(node_id, LookAgain())
        self._watchers.nodes_changed()
        return self._placer.summary(node_id)

    async def drain(
        self, node_id: str, deadline_ms: int, reason: str, *, keep_min: bool = False
    ) -> NodeSummary:
        """Empty a node, and show it as it then is; see `Placer.drain_node`."""
        await self._placer.drain_node(node_id, deadline_ms, reason, keep_min=keep_min)
        self._show_drain(node_id)
        return self._placer.summary(node_id)

    async def undrain(self, node_id: str) -> NodeSummary:
        """Lift a drain, and show the node as it then is; see `Placer.undrain`."""
        await self._placer.undrain(node_id)
        self._show_drain(node_id)
        return self._placer.summary(node_id)

    def _show_drain(self, node_id: str) -> None:
        for rdzv_id in self._presence.jobs_of(node_id):
            self._watchers.job_changed(rdzv_id)
