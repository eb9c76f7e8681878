"""Nodes at one leading server, as operators are shown them; `Fleet` has what they change."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from rdzv.core.fleet.job_queue import Host
from rdzv.core.fleet.node_resources import NodeResources
from rdzv.core.life.submitted_jobs import awaited
from rdzv.core.model import State
from rdzv.structs import replace
from rdzv.transport.wire import convert
from rdzv.view import answers
from rdzv.view.answers import Node, NodeJob

if TYPE_CHECKING:
    from rdzv.server.driver import Driver


def known_nodes(driver: Driver) -> set[str]:
    return {*driver.leases.records, *driver.fleet.ordered, *driver.quarantine.nodes}


def shown_nodes(driver: Driver, node_ids: Iterable[str]) -> list[Node]:
    """Return what is shown of these nodes, which need not be known any more."""
    states, now_ms = driver.jobs.states, driver.clock.now_ms()
    hosts = {host.node_id: host for host in driver.fleet.hosts(states)}
    jobs_of: dict[str, list[NodeJob]] = {}
    for state in states:
        for node_id, job in _memberships(state):
            jobs_of.setdefault(node_id, []).append(job)
    for node_id, host in hosts.items():
        jobs_of[node_id] = _with_gpus(jobs_of.get(node_id, []), host)
    return [
        _shown(driver, node_id, hosts.get(node_id), jobs_of.get(node_id, ()), now_ms)
        for node_id in node_ids
    ]


def _shown(
    driver: Driver, node_id: str, host: Host | None, jobs: Iterable[NodeJob], now_ms: int
) -> Node:
    record, fleet = driver.leases.records.get(node_id), driver.fleet
    known, own = fleet.reported.get(node_id), fleet.restrictions.cordons.get(node_id)
    ordered, drain = fleet.restrictions.drains.get(node_id), fleet.drain_of(node_id)
    cordon = own or ordered
    quarantined = driver.quarantine.nodes.get(node_id)
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
        jobs=tuple(jobs),
        cordoned=cordon is not None,
        cordon_reason=(cordon.reason if cordon is not None else "") or None,
        cordon_age_ms=max(now_ms - cordon.at_ms, 0) if cordon is not None else None,
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
        age_ms = max(now_ms - known.failing_since_ms, 0)
        shown = replace(shown, unhealthy=known.unhealthy, unhealthy_age_ms=age_ms)
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
