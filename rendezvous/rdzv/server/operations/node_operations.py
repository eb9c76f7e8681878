"""Changes to nodes that operators can request: cordon, uncordon, drain and undrain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rdzv.messages import LookAgain
from rdzv.view.answers import Node

if TYPE_CHECKING:
    from rdzv.server.driver import Driver


class NodeOperations:
    """Makes changes to one server's nodes. Each call returns the node's new view.

    Raises:
        UnknownNodeError: no such node is known.
        RendezvousError: the change was not stored; retry.

    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def cordon(self, node_id: str, reason: str) -> Node:
        """Stop placing jobs on a node."""
        await self._driver.fleet.cordon(node_id, reason)
        self._driver.watchers.nodes_changed()
        return self._driver.node_views.summary(node_id)

    async def uncordon(self, node_id: str) -> Node:
        """Allow jobs on a node again by lifting its cordon, drain and quarantine.

        A connected node is asked to rerun its health checks.
        """
        if not await self._driver.quarantine.lift(node_id):
            self._driver.fleet.check_known(node_id)
        await self._driver.fleet.lift(node_id, cordon=True)
        self._driver.streams.send(node_id, LookAgain())
        self._driver.watchers.nodes_changed()
        return self._driver.node_views.summary(node_id)

    async def drain(
        self, node_id: str, deadline_ms: int, reason: str, *, force: bool = False
    ) -> Node:
        """Make a node leave all its jobs by the deadline, and place no more jobs on it.

        Raises:
            TooFewNodesError: without `force`, one of its jobs would be left with too few nodes.

        """
        short = self._driver.placer.short_without if not force else None
        await self._driver.fleet.drain(node_id, deadline_ms, reason, short)
        self._show_drain(node_id)
        return self._driver.node_views.summary(node_id)

    async def undrain(self, node_id: str, *, cordon: bool = False) -> Node:
        self._driver.fleet.check_known(node_id)
        await self._driver.fleet.lift(node_id, cordon=cordon)
        self._show_drain(node_id)
        return self._driver.node_views.summary(node_id)

    def _show_drain(self, node_id: str) -> None:
        for rdzv_id in self._driver.node_jobs.jobs_of(node_id):
            self._driver.watchers.job_changed(rdzv_id)
