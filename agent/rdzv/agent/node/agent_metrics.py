"""An agent's metrics: what `agent_counts` counts, and the state when the server asks for them.

`docs/metrics.md` lists the metrics.
"""

from __future__ import annotations

import platform
from collections import Counter as Tally
from collections.abc import Iterable, Iterator

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rdzv.agent.node.placements import Placements
from rdzv.agent.server_link.link import ServerLink
from rdzv.runtime import exposition


class AgentMetrics(Collector):
    """One node's metrics, exported to Prometheus."""

    def __init__(self, link: ServerLink, placements: Placements) -> None:
        self._link = link
        self._placements = placements
        self._parts = exposition.PageParts("rdzv_agent_collector_success", "rdzv-agent")
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def add_process(self) -> None:
        exposition.add_process(self._registry)

    def collect(self) -> Iterator[Metric]:
        parts: dict[str, exposition.Collect] = {
            "stream": self._collect_stream,
            "jobs": self._collect_jobs,
            "tls": self._collect_tls,
            "placements": lambda: _collect_placements(self._placements),
        }
        yield from self._parts.collect(parts)
        yield from exposition.counted(self._link.counts.counts)
        about = GaugeMetricFamily(
            "rdzv_agent_build_info",
            "1; this agent's properties as labels.",
            labels=("version", "python"),
        )
        about.add_metric((self._link.identity.version, platform.python_version()), 1)
        yield about

    def _collect_stream(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "rdzv_agent_lease_seconds",
            "How much silence of this node the server tolerates.",
            (self._link.lease_ms or 0) / 1000,
        )

    def _collect_tls(self) -> Iterator[Metric]:
        name = "rdzv_agent_certificate_expiry_timestamp_seconds"
        yield from exposition.expiry(name, self._link.certificate_expires())

    def _collect_jobs(self) -> Iterator[Metric]:
        workers = Tally({"starting": 0, "running": 0, "stopping": 0, "parked": 0})
        for job in self._link.counts.jobs:
            workers.update(job.workers())
        yield exposition.by_label("rdzv_agent_workers", "Workers by state.", "state", workers)
        yield GaugeMetricFamily(
            "rdzv_agent_stuck_processes",
            "Processes that survive SIGKILL.",
            sum(job.stuck for job in self._link.counts.jobs),
        )
        yield GaugeMetricFamily(
            "rdzv_agent_runners", "Runners.", sum(job.has_runner for job in self._link.counts.jobs)
        )

    def text(self) -> bytes:
        return prometheus_client.generate_latest(self._registry)


def _collect_placements(placements: Placements) -> Iterable[Metric]:
    occupancy = placements.occupancy()
    yield exposition.by_label(
        "rdzv_agent_jobs", "Submitted jobs that this node holds.", "state", occupancy.jobs
    )
    yield exposition.by_label("rdzv_agent_gpus", "GPUs by their holder.", "state", occupancy.gpus)
    yield GaugeMetricFamily(
        "rdzv_agent_capacity",
        "How many submitted jobs this node takes at once.",
        placements.resources.capacity,
    )
