"""Writes rdzvd's /metrics page: what `server_metrics` counts, and the state at the scrape.

The server's own metrics use prometheus-client; `job_metrics_page` writes those of the jobs, one
slice of jobs at a time.
"""

from __future__ import annotations

import asyncio
import platform
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rdzv.core.model import JobState, NodeState, State, job_state
from rdzv.errors import LimitExceededError
from rdzv.runtime.exposition import Collect, PageParts, add_process, by_label, counted, expiry
from rdzv.server.telemetry.job_metrics_page import JobPage
from rdzv.server.telemetry.server_metrics import Metrics
from rdzv.view.answers import JobStatus

if TYPE_CHECKING:
    from rdzv.server.driver import Driver

SLICE_JOBS = 50
"""How many jobs are written before other tasks run; this takes two or three milliseconds."""

SCRAPES = 4
"""The number of callers that read /metrics at once: for each, all of it is in memory."""

SERVER, ROOM, JOBS, C10D, TLS = "server", "room", "jobs", "c10d", "tls"
"""The groups of metrics that are computed at each scrape. If one fails, the others remain."""

_LIVE_STATES = (JobState.QUEUED, JobState.JOINING, JobState.RUNNING, JobState.STOPPING)


class MetricsPage(Collector):
    """What one server counts and is, as Prometheus reads it."""

    def __init__(
        self,
        metrics: Metrics,
        look: Callable[[], Driver | None],
        store: str,
        version: str,
        c10d: Callable[[], Iterable[JobStatus]] | None = None,
        expires: Callable[[], datetime] | None = None,
    ) -> None:
        """Get the driver from `look`, or None while the server does not lead.

        `c10d` returns the jobs in torch's own store; it is None if this server serves no such
        store. `expires` returns when the server's certificate expires; it is None if there is no
        certificate.
        """
        self.metrics = metrics
        self._look = look
        self._about = {"version": version, "python": platform.python_version(), "store": store}
        self._c10d = c10d
        self._expires = expires
        self._parts = PageParts("rdzv_collector_success", "rdzvd")
        self._scrapes = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def add_process(self) -> None:
        add_process(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the server's own metrics; called by prometheus-client.

        If a part fails, its gauges are missing and a metric reports the failure.
        """
        asked: dict[str, Collect] = {SERVER: self._collect_server, ROOM: self._collect_room}
        if (views := self._c10d) is not None:
            asked[C10D] = lambda: c10d_metrics(views())
        if (expires := self._expires) is not None:
            asked[TLS] = lambda: expiry("rdzv_certificate_expiry_timestamp_seconds", expires())
        yield from self._parts.collect(asked)
        yield from counted(self.metrics.counts)
        about = GaugeMetricFamily(
            "rdzv_build_info", "1; the labels describe this server.", labels=list(self._about)
        )
        about.add_metric(list(self._about.values()), 1)
        yield about

    def _collect_server(self) -> Iterator[Metric]:
        driver = self._look()
        yield GaugeMetricFamily(
            "rdzv_leads",
            "1 if this server leads and can prove it, else 0.",
            int(driver is not None),
        )
        if driver is None:
            return
        now_ms, nodes = driver.clock.now_ms(), driver.leases.records.values()
        jobs = Counter(job_state(state) for state in _known(driver.jobs.states))
        connected = [node.heard_ms for node in nodes if node.stream is not None]
        yield GaugeMetricFamily(
            "rdzv_leadership", "Number of this server's take-over.", driver.leadership
        )
        yield by_label(
            "rdzv_jobs",
            "Jobs that have not ended, by state.",
            "state",
            {str(state): jobs[state] for state in _LIVE_STATES},
        )
        yield by_label(
            "rdzv_nodes",
            "Nodes of all jobs: with a stream, or waited for without one.",
            "state",
            {"connected": len(connected), "away": len(nodes) - len(connected)},
        )
        for name, text, value in (
            ("rdzv_streams", "Open streams of nodes.", len(driver.streams.open)),
            ("rdzv_watchers", "Callers that watch a job.", driver.operations.watching),
            (
                "rdzv_store_away_seconds",
                "How long the store has been away; 0 while it is available.",
                driver.store.away_ms / 1000,
            ),
            (
                "rdzv_lease_seconds",
                "The lease of a node that connects now.",
                driver.leases.lease_ms / 1000,
            ),
            (
                "rdzv_node_silence_seconds",
                "The longest silence of any node with an open stream.",
                (now_ms - min(connected, default=now_ms)) / 1000,
            ),
        ):
            yield GaugeMetricFamily(name, text, value)

    def _collect_room(self) -> Iterator[Metric]:
        if (driver := self._look()) is None:
            return
        states, drains = tuple(_known(driver.jobs.states)), driver.fleet.drains()
        gpus, places = ({"free": 0, "taken": 0, "unusable": 0} for _ in range(2))
        busy = set[str]()
        for host in driver.fleet.hosts(states):
            left = "unusable" if host.unusable else "free"
            gpus[left] += host.gpus_free
            gpus["taken"] += len(host.resources.gpus) - host.gpus_free
            places[left] += host.places_free
            places["taken"] += host.resources.capacity - host.places_free
            if host.taken:
                busy.add(host.node_id)
        for node_id in drains:
            if any(state.present(node_id) or node_id in state.placed for state in states):
                busy.add(node_id)
        barred = {
            "cordoned": len(driver.fleet.ordered),
            "quarantined": len(driver.quarantine.nodes),
        }
        draining = len(drains.keys() & busy)
        for name, text, label, values in (
            ("rdzv_gpus", "GPUs of nodes that take submitted jobs.", "state", gpus),
            ("rdzv_places", "Submitted jobs that the nodes take at once.", "state", places),
            (
                "rdzv_nodes_barred",
                "Nodes on which no submitted job is placed until an operator allows it.",
                "by",
                barred,
            ),
            (
                "rdzv_node_drains",
                "Nodes that leave all their jobs: still draining, or drained.",
                "state",
                {"draining": draining, "drained": len(drains) - draining},
            ),
        ):
            yield by_label(name, text, label, values)

    async def text(self) -> bytes:
        """Return all metrics in Prometheus's text format; other tasks run in between."""
        if self._scrapes >= SCRAPES:
            raise LimitExceededError(
                f"{self._scrapes} callers read metrics here, which is the limit; scrape less often"
            )
        self._scrapes += 1
        try:
            parts = []
            with self._parts.computing(JOBS):
                async for part in self._job_parts():
                    parts.append(part)
            # Generate this after the jobs, because it reports whether they could be written.
            return b"".join((prometheus_client.generate_latest(self._registry), *parts))
        finally:
            self._scrapes -= 1

    async def _job_parts(self) -> AsyncIterator[bytes]:
        if (driver := self._look()) is None:
            return
        now_ms, page, metrics = driver.clock.now_ms(), JobPage(), self.metrics
        metrics.forget_ended(now_ms)
        ledgers = metrics.ledgers
        live = [s for s in _known(driver.jobs.states) if s.membership.rdzv_id in metrics.tallies]
        for number, state in enumerate(live, 1):
            rdzv_id = state.membership.rdzv_id
            if (tally := metrics.tallies.get(rdzv_id)) is not None:
                phases = ledgers.phases(rdzv_id, now_ms, state)
                page.add_counted(rdzv_id, job_state(state), tally, phases, now_ms)
                progress = driver.rounds.progress(state)
                page.add_live(state, now_ms, progress, driver.rounds.stragglers(state))
                page.add_snapshots(state, driver.snapshots.shown(state), progress, now_ms)
            if number % SLICE_JOBS == 0:
                await asyncio.sleep(0)
        for number, (rdzv_id, tally) in enumerate(tuple(metrics.ended.items()), 1):
            assert tally.final is not None, "only an ended job has no present state"
            phases = ledgers.phases(rdzv_id, now_ms)
            page.add_counted(rdzv_id, tally.final, tally, phases, now_ms)
            if number % SLICE_JOBS == 0:
                await asyncio.sleep(0)
        for part in page.parts():
            yield part
            await asyncio.sleep(0)


def _known(states: Iterable[State]) -> Iterator[State]:
    return (s for s in states if s.membership.run and s.membership.ended is None)


# ------------------------------------------------------------------ jobs in torch's own store

_C10D_LIVE = (JobState.JOINING, JobState.RUNNING)
_C10D_HERE = (NodeState.SEATED, NodeState.WAITING, NodeState.SPARE, NodeState.LOST)
"""The node states to count. Lost nodes count, because losing one does not re-form the group."""


def c10d_metrics(views: Iterable[JobStatus]) -> Iterator[Metric]:
    live = [view for view in views if view.state in _C10D_LIVE]
    jobs = Counter(view.state for view in live)
    yield by_label(
        "rdzv_c10d_jobs",
        "Jobs in torch's own store that are not closed.",
        "state",
        {state: jobs[state] for state in _C10D_LIVE},
    )
    nodes = GaugeMetricFamily(
        "rdzv_c10d_job_nodes", "Nodes of a job in torch's own store.", labels=("rdzv_id", "state")
    )
    for view in live:
        found = Counter(node.state for node in view.nodes)
        for node_state in _C10D_HERE:
            nodes.add_metric((view.rdzv_id, node_state), found[node_state])
    yield nodes
    yield by_label(
        "rdzv_c10d_job_round",
        "Number of the last round that was completed in torch's own store.",
        "rdzv_id",
        {view.rdzv_id: view.round for view in live if view.round is not None},
    )
