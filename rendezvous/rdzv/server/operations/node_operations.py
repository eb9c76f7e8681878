"""Nodes at one leading server: what operators are shown, and what they change."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from rdzv.core.fleet import nodes
from rdzv.core.fleet.job_queue import Host
from rdzv.core.fleet.node_resources import NodeResources
from rdzv.core.life.submitted_jobs import awaited
from rdzv.core.model import State
from rdzv.messages import LookAgain
from rdzv.structs import replace
from rdzv.transport.wire import convert
from rdzv.view import answers
from rdzv.view.answers import Node, NodeJob

if TYPE_CHECKING:
    from rdzv.server.driver import Driver


class NodeOperations:
    """The nodes of one server. Each change returns the node's new view."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    # ---------------------------------------------------------------- shown

    def room(self) -> Mapping[str, Mapping[str, int]]:
        """Count, for submitted jobs, GPUs and places by state, nodes by what bars them, drains.

        A node has a place for each submitted job that it can run at once; it is `unusable` where
        nothing can be placed now.
        """
        gpus, places = ({"free": 0, "taken": 0, "unusable": 0} for _ in range(2))
        hosts = self._driver.fleet.hosts(self._driver.jobs.states)
        for host in hosts:
            left = "unusable" if host.unusable else "free"
            has, takes = len(host.resources.gpus), host.resources.capacity
            gpus[left] += host.gpus_free
            gpus["taken"] += has - host.gpus_free
            places[left] += host.places_free
            places["taken"] += takes - host.places_free
        barred = {
            "cordoned": len(self._driver.fleet.ordered),
            "quarantined": len(self._driver.quarantine.nodes),
        }
        drains = self._count_drains(hosts)
        return {"gpus": gpus, "places": places, "barred": barred, "drains": drains}

    def _count_drains(self, hosts: Iterable[Host]) -> dict[str, int]:
        found = {"draining": 0, "drained": 0}
        if drains := self._driver.fleet.drains():
            busy = {host.node_id for host in hosts if host.taken}
            busy |= {n for state in self._driver.jobs.states for n, _ in _memberships(state)}
            found["draining"] = len(drains.keys() & busy)
            found["drained"] = len(drains) - found["draining"]
        return found

    def summaries(self, node_ids: Collection[str] = ()) -> list[Node]:
        """Return the views of all known, cordoned or quarantined nodes, or only of `node_ids`."""
        driver = self._driver
        known = {*driver.leases.records, *driver.fleet.ordered, *driver.quarantine.nodes}
        return self._show(sorted(known.intersection(node_ids) if node_ids else known))

    def summary(self, node_id: str) -> Node:
        """Return a node's view, even if the node is no longer known."""
        (summary,) = self._show([node_id])
        return summary

    def _show(self, node_ids: Iterable[str]) -> list[Node]:
        states, now_ms = self._driver.jobs.states, self._driver.clock.now_ms()
        hosts = {host.node_id: host for host in self._driver.fleet.hosts(states)}
        records = self._driver.leases.records
        jobs_of: dict[str, list[NodeJob]] = {}
        for state in states:
            for node_id, job in _memberships(state):
                jobs_of.setdefault(node_id, []).append(job)
        for node_id, host in hosts.items():
            jobs_of[node_id] = _with_gpus(jobs_of.get(node_id, []), host)
        return [
            self._summary(node_id, records.get(node_id), hosts.get(node_id), jobs_of, now_ms)
            for node_id in node_ids
        ]

    def _summary(
        self,
        node_id: str,
        record: nodes.NodeRecord | None,
        host: Host | None,
        jobs_of: Mapping[str, list[NodeJob]],
        now_ms: int,
    ) -> Node:
        fleet = self._driver.fleet
        known, own = fleet.reported.get(node_id), fleet.restrictions.cordons.get(node_id)
        ordered, drain = fleet.restrictions.drains.get(node_id), fleet.drain_of(node_id)
        cordon = own or ordered
        quarantined = self._driver.quarantine.nodes.get(node_id)
        state = "gone" if record is None else "away" if record.stream is None else "connected"
        shown = Node(
            node_id=node_id,
            state=state,
            state_age_ms=max(now_ms - record.since_ms, 0) if record is not None else None,
            program="rdzv-agent" if host is not None else "rdzvrun" if record is not None else None,
            address=(record.address if record is not None else "") or None,
            agent_version=(known.version if known is not None else "") or None,
            resources=_resources(host.resources) if host is not None else None,
            gpus_free=host.gpus_free if host is not None else None,
            jobs=tuple(jobs_of.get(node_id, ())),
            cordoned=cordon is not None,
            cordon_reason=(cordon.reason if cordon is not None else "") or None,
            cordon_age_ms=max(now_ms - cordon.at_ms, 0) if cordon is not None else None,
            metrics=(known.metrics if known is not None else "") or None,
            cordoned_besides=own is not None and ordered is not None,
        )
        if quarantined is not None:
            shown = replace(
                shown,
                quarantine=quarantined.reason,
                quarantine_age_ms=max(now_ms - quarantined.at_ms, 0),
                quarantine_left_ms=max(quarantined.until_ms - now_ms, 0),
            )
        if known is not None and known.unhealthy:
            since_ms = known.failing_since_ms
            shown = replace(
                shown, unhealthy=known.unhealthy, unhealthy_age_ms=max(now_ms - since_ms, 0)
            )
        if drain is not None:
            shown = replace(
                shown,
                drain="draining" if shown.jobs else "drained",
                drain_reason=drain.reason or None,
                drain_left_ms=drain.left_ms(now_ms),
                drain_age_ms=max(now_ms - drain.at_ms, 0),
                drained_by_operator=drain.by_operator,
            )
        return shown

    # ---------------------------------------------------------------- changed

    async def cordon(self, node_id: str, reason: str) -> Node:
        await self._driver.fleet.cordon(node_id, reason)
        self._driver.watchers.nodes_changed()
        return self.summary(node_id)

    async def uncordon(self, node_id: str) -> Node:
        """Allow jobs on a node again by lifting its cordon, drain and quarantine.

        A connected node is asked to rerun its health checks.
        """
        if not await self._driver.quarantine.lift(node_id):
            self._driver.fleet.check_known(node_id)
        await self._driver.fleet.lift(node_id, cordon=True)
        self._driver.streams.send(node_id, LookAgain())
        self._driver.watchers.nodes_changed()
        return self.summary(node_id)

    async def drain(
        self, node_id: str, deadline_ms: int, reason: str, *, force: bool = False
    ) -> Node:
        """Make a node leave all its jobs by the deadline, and place no more jobs on it."""
        short = self._driver.placer.short_without if not force else None
        await self._driver.fleet.drain(node_id, deadline_ms, reason, short)
        return self._with_changed_drain(node_id)

    async def undrain(self, node_id: str, *, cordon: bool = False) -> Node:
        self._driver.fleet.check_known(node_id)
        await self._driver.fleet.lift(node_id, cordon=cordon)
        return self._with_changed_drain(node_id)

    def _with_changed_drain(self, node_id: str) -> Node:
        for rdzv_id in self._driver.node_jobs.jobs_of(node_id):
            self._driver.watchers.job_changed(rdzv_id)
        return self.summary(node_id)


@lru_cache(maxsize=16_384)
def _resources(has: NodeResources) -> answers.Resources:
    """Return the answer for a node's resources. It is cached, because resources seldom change."""
    return convert(answers.Resources, has)


def _memberships(state: State) -> Iterable[tuple[str, NodeJob]]:
    rdzv_id = state.membership.rdzv_id
    ended = state.membership.round is not None and not state.membership.round.live
    for node_id in state.seats:
        yield node_id, NodeJob(rdzv_id, 0, "stopping" if ended else "seated")
    for node_id in state.waiting:
        yield node_id, NodeJob(rdzv_id, 0, "waiting")
    for node_id in state.stuck:
        yield node_id, NodeJob(rdzv_id, 0, "stopping")
    if state.membership.ended is None:
        for node_id in awaited(state):
            yield node_id, NodeJob(rdzv_id, 0, "placed")


def _with_gpus(jobs: Iterable[NodeJob], host: Host) -> list[NodeJob]:
    """Add each job's GPU count, and ended jobs that still hold resources on the node."""
    gpus = {rdzv_id: number for (rdzv_id, _), number in host.taken.items()}
    shown = [replace(job, gpus=gpus.get(job.rdzv_id, 0)) for job in jobs]
    names = {job.rdzv_id for job in shown}
    left = [NodeJob(name, number, "holding") for name, number in gpus.items() if name not in names]
    return [*shown, *left]
