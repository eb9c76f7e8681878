"""An agent's /metrics page: what `agent_counts` counts, and the state at each scrape.

`docs/metrics.md` lists the metrics.
"""

from __future__ import annotations

import logging
import platform
from collections import Counter as Tally
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial

import prometheus_client
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rdzv.agent.node.placements import Placements
from rdzv.agent.server_link.link import ServerLink
from rdzv.errors import InvalidRequestError
from rdzv.runtime import exposition
from rdzv.transport.endpoints import Listen, is_loopback

log = logging.getLogger("rdzv.agent")

_http_log = exposition.http_log(
    "rdzv.agent.http", "rdzvctl and nodes connect to rdzvd's --listen, not to an agent"
)


class AgentMetrics(Collector):
    """One node's metrics, exported to Prometheus."""

    def __init__(self, link: ServerLink, placements: Placements | None = None) -> None:
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
        }
        if (placements := self._placements) is not None:
            parts["placements"] = lambda: _collect_placements(placements)
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
        lease_ms = self._link.lease_ms
        yield GaugeMetricFamily(
            "rdzv_agent_connected",
            "1 while a server receives this node's messages, else 0.",
            int(lease_ms is not None),
        )
        yield GaugeMetricFamily(
            "rdzv_agent_lease_seconds",
            "How much silence of this node the server tolerates; 0 without a stream.",
            (lease_ms or 0) / 1000,
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


# ------------------------------------------------------------------ the page


@asynccontextmanager
async def serving_metrics(
    listen: Listen,
    link: ServerLink,
    placements: Placements | None = None,
) -> AsyncIterator[Listen]:
    """Collect metrics, and serve /metrics and /healthz until the body ends; yield the address."""
    metrics = AgentMetrics(link, placements)
    metrics.add_process()

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": exposition.CONTENT_TYPE})

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", page), web.get("/healthz", healthz)])
    runner = web.AppRunner(app, access_log=None, logger=_http_log)
    await runner.setup()
    try:
        await _start(runner, listen)
        bound = Listen(listen.host, runner.addresses[0][1])
        link.metrics_at = partial(announced, bound)
        whom = "accessible from this machine only" if bound.loopback else "listed by the server"
        log.info("serving metrics at http://%s/metrics (%s)", bound, whom)
        yield bound
    finally:
        await runner.cleanup()


def announced(bound: Listen, address: str) -> str:
    """Return the address at which other machines reach a listener, or "" if they cannot.

    `address` is the one that the node uses towards the server. If it is a loopback address, the
    server is on this machine, and can reach a loopback listener.

    >>> announced(Listen("0.0.0.0", 29481), "10.0.0.5")
    '10.0.0.5:29481'
    >>> announced(Listen("127.0.0.1", 29481), "10.0.0.5")
    ''
    """
    if bound.unspecified:
        return str(Listen(address, bound.port)) if address else ""
    if bound.loopback and not is_loopback(address):
        return ""
    return str(bound)


async def _start(runner: web.AppRunner, listen: Listen) -> None:
    try:
        await web.TCPSite(runner, listen.host, listen.port).start()
    except OSError as error:
        raise InvalidRequestError(
            f"`metrics_listen` = {str(listen)!r}: cannot listen there: "
            f"{error.strerror}; give another address"
        ) from error
