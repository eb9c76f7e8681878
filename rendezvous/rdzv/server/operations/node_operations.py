"""Changes to nodes that operators can request: cordon, uncordon, drain and undrain."""

from __future__ import annotations

from rdzv.messages import LookAgain
from rdzv.server.engine.watchers import Watchers
from rdzv.server.operations.node_views import NodeViews
from rdzv.server.scheduling.scheduling import Scheduling
from rdzv.server.sessions.node_jobs import NodeJobs
from rdzv.server.sessions.streams import Streams
from rdzv.view.answers import Node


class NodeOperations:
    """Makes changes to one server's nodes. Each call returns the node's new view.

    Raises:
        UnknownNodeError: no such node is known.
        RendezvousError: the change was not stored; retry.

    """

    def __init__(
        self,
        *,
        views: NodeViews,
        scheduling: Scheduling,
        streams: Streams,
        node_jobs: NodeJobs,
        watchers: Watchers,
    ) -> None:
        self._views = views
        self._scheduling = scheduling
        self._streams = streams
        self._node_jobs = node_jobs
        self._watchers = watchers

    async def cordon(self, node_id: str, reason: str) -> Node:
        """Stop placing jobs on a node."""
        await self._scheduling.cordons.cordon(node_id, reason)
        self._watchers.nodes_changed()
        return self._views.summary(node_id)

    async def uncordon(self, node_id: str) -> Node:
        """Allow jobs on a node again by lifting its cordon, drain and quarantine.

        A connected node is asked to rerun its health checks.
        """
        if not await self._scheduling.quarantine.lift(node_id):
            self._scheduling.cordons.check_known(node_id)
        await self._scheduling.drains.lift(node_id, cordon=True)
        self._streams.send(node_id, LookAgain())
        self._watchers.nodes_changed()
        return self._views.summary(node_id)

    async def drain(
        self, node_id: str, deadline_ms: int, reason: str, *, force: bool = False
    ) -> Node:
        """Make a node leave all its jobs by the deadline, and place no more jobs on it.

        Raises:
            TooFewNodesError: without `force`, one of its jobs would be left with too few nodes.

        """
        short = self._scheduling.placer.short_without if not force else None
        await self._scheduling.drains.drain(node_id, deadline_ms, reason, short)
        self._show_drain(node_id)
        return self._views.summary(node_id)

    async def undrain(self, node_id: str, *, cordon: bool = False) -> Node:
        self._scheduling.cordons.check_known(node_id)
        await self._scheduling.drains.lift(node_id, cordon=cordon)
        self._show_drain(node_id)
        return self._views.summary(node_id)

    def _show_drain(self, node_id: str) -> None:
        for rdzv_id in self._node_jobs.jobs_of(node_id):
            self._watchers.job_changed(rdzv_id)
