"""An agent's /metrics page; `docs/metrics.md` lists the metrics.

Counters and histograms start at zero with the agent, and are updated by the calls with which it
acts. Gauges are computed at each scrape. No label names a job or a worker: the server reports on
jobs, this page on the node.
"""

from __future__ import annotations

import logging
import platform
import signal
import time
from collections import Counter as Tally
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import prometheus_client
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rdzv.agent.agent_metrics_interface import JobMeter, Meter
from rdzv.agent.core import commands, events
from rdzv.agent.job.job_driver import JobDriver
from rdzv.agent.node.placements import Placements
from rdzv.agent.server_link.link import ServerLink
from rdzv.errors import InvalidRequestError
from rdzv.runtime.exposition import (
    CONTENT_TYPE,
    Collect,
    Parts,
    add_process,
    by_label,
    expiry,
    http_log,
)
from rdzv.transport.addresses import is_loopback
from rdzv.transport.endpoints import Listen

log = logging.getLogger("rdzv.agent")

_http_log = http_log(
    "rdzv.agent.http", "rdzvctl and nodes connect to rdzvd's --listen, not to an agent"
)

RUN, STOP = "run", "stop"
"""The values of a label for worker exits: during the run, or after the worker was told to stop."""

_STARTS = ("kept", "warm", "cold")

_START_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class AgentMetrics(Meter, Collector):
    """One node's metrics, exported to Prometheus."""

    def __init__(
        self,
        link: ServerLink,
        placements: Placements | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Export the stream and, if the node takes any, the submitted jobs."""
        self._link = link
        self._placements = placements
        self._now_s = now_s
        self._jobs: dict[_JobCounter, None] = {}
        self._lost = False
        """Whether a stream was lost and none has been opened since."""
        self._parts = Parts("rdzv_agent_collector_success", "rdzv-agent")
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._count_workers(self._registry)
        self._count_streams(self._registry)
        about = Gauge(
            "rdzv_agent_build_info",
            "1; this agent's properties as labels.",
            ("version", "python"),
            registry=self._registry,
        )
        about.labels(link.identity.version, platform.python_version()).set(1)

    def _count_workers(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        seconds = partial(Histogram, buckets=_START_SECONDS, registry=registry)
        self.rounds = counter(
            "rdzv_agent_rounds_started_total",
            "Rounds for which this node was told to start workers.",
        )
        self.restarts = counter(
            "rdzv_agent_restarts_total",
            "Of these rounds, those that follow a round with failed workers.",
        )
        self.start_seconds = seconds(
            "rdzv_agent_worker_start_seconds",
            "Time from the decision to start workers until each runs.",
        )
        self.start_failures = counter(
            "rdzv_agent_worker_start_failures_total", "Workers that could not be started."
        )
        self.cold_starts = counter(
            "rdzv_agent_workers_started_cold_total",
            "Workers that should have started warm, but started cold.",
        )
        self.starts = counter(
            "rdzv_agent_worker_starts_total",
            "Workers that began a round: kept from the previous round, started warm, or cold.",
            ("how",),
        )
        for how in _STARTS:
            self.starts.labels(how)
        self.park_seconds = seconds(
            "rdzv_agent_park_seconds",
            "Time from the end of a round until all kept workers are parked.",
        )
        self.resume_seconds = seconds(
            "rdzv_agent_resume_seconds",
            "Time from the decision to start workers until a kept one continues training.",
        )
        self.exits = counter(
            "rdzv_agent_worker_exits_total",
            "Workers that exited, by exit code or signal; by themselves, or when told to stop.",
            ("how", "during"),
        )
        for during in (RUN, STOP):
            # These start at zero, because Prometheus misses the first increase of a new series.
            for how in ("exit 0", "exit 1", "SIGKILL", "SIGTERM"):
                self.exits.labels(how, during)
        self.fenced = counter(
            "rdzv_agent_rounds_fenced_total",
            "Rounds whose workers were killed because the server was unreachable.",
        )
        self.store_host_exits = counter(
            "rdzv_agent_store_host_exits_total",
            "Store hosts of this node that exited, as intended or not.",
        )
        self.runner_exits = counter(
            "rdzv_agent_runner_exits_total", "Runners that have exited.", ("how",)
        )
        for how in ("in order", "unexpectedly"):
            self.runner_exits.labels(how)

    def _count_streams(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self._opened = counter(
            "rdzv_agent_streams_opened_total", "Streams in which a server has welcomed this node."
        )
        self._streams_lost = counter(
            "rdzv_agent_streams_lost_total", "Open streams that ended, but not by this agent."
        )
        self._reconnects = counter(
            "rdzv_agent_reconnects_total", "Streams that were opened after one was lost."
        )
        self._failed_attempts = counter(
            "rdzv_agent_connect_failures_total",
            "Attempts to open a stream that no server welcomed.",
        )

    def add_process(self) -> None:
        add_process(self._registry)

    # ---------------------------------------------------------------- events

    def job(self, local_world_size: int) -> JobMeter:
        """Return the meter for a new job with `local_world_size` workers on this node."""
        job = _JobCounter(self, local_world_size, self._now_s)
        self._jobs[job] = None
        return job

    def forget(self, job: _JobCounter) -> None:
        """Stop counting a job once nothing of it is left."""
        self._jobs.pop(job, None)

    def stream_opened(self) -> None:
        """Record that a server has welcomed this node."""
        self._opened.inc()
        if self._lost:
            self._lost = False
            self._reconnects.inc()

    def stream_ended(self, *, welcomed: bool, on_purpose: bool) -> None:
        """Record that the stream has ended, or could not be opened."""
        if on_purpose:
            return
        if welcomed:
            self._lost = True
            self._streams_lost.inc()
        else:
            self._failed_attempts.inc()

    # ---------------------------------------------------------------- gauges

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges. Called by prometheus-client at each scrape."""
        parts: dict[str, Collect] = {
            "stream": self._collect_stream,
            "jobs": self._collect_jobs,
            "tls": self._collect_tls,
        }
        if (placements := self._placements) is not None:
            parts["placements"] = lambda: _collect_placements(placements)
        yield from self._parts.collect(parts)

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
        yield from expiry(name, self._link.certificate_expires())

    def _collect_jobs(self) -> Iterator[Metric]:
        workers = Tally({"starting": 0, "running": 0, "stopping": 0, "parked": 0})
        for job in self._jobs:
            workers.update(job.workers())
        yield by_label("rdzv_agent_workers", "Workers by state.", "state", workers)
        yield GaugeMetricFamily(
            "rdzv_agent_stuck_processes",
            "Processes that survive SIGKILL.",
            sum(job.stuck for job in self._jobs),
        )
        yield GaugeMetricFamily(
            "rdzv_agent_runners", "Runners.", sum(job.has_runner for job in self._jobs)
        )

    def text(self) -> bytes:
        return prometheus_client.generate_latest(self._registry)


class _JobCounter(JobMeter):
    """The meter for one job, which adds to its node's counters."""

    def __init__(
        self, node: AgentMetrics, local_world_size: int, now_s: Callable[[], float]
    ) -> None:
        self._node = node
        self._local_world_size = local_world_size
        self._now_s = now_s
        self._starting = 0
        self._running: set[int] = set()
        self._stopping = False
        self._parked = 0
        self._started_s = self._stopped_s = 0.0
        self._restarts: int | None = None
        """The number of restarts spent when this node last started workers, or None before the
        first start.
        """
        self.stuck = 0
        self.has_runner = False

    def workers(self) -> dict[str, int]:
        running = len(self._running)
        if self._parked:
            return {"parked": self._parked}
        if self._stopping:
            return {"stopping": self._starting + running}
        return {"starting": self._starting, "running": running}

    def runner_started(self) -> None:
        self.has_runner = True

    def adopted(self, local_ranks: Collection[int], restarts: int | None) -> None:
        self.has_runner, self._running, self._restarts = True, set(local_ranks), restarts

    def closed(self) -> None:
        self._node.forget(self)

    def decided(self, command: commands.Command) -> None:
        match command:
            case commands.StartWorkers():
                self._start(command.assignment.restarts)
            case commands.StopWorkers():
                self._stopping = True
                self._stopped_s = self._now_s()

    def _start(self, restarts: int) -> None:
        self._node.rounds.inc()
        if self._restarts is not None and restarts > self._restarts:
            self._node.restarts.inc()
        self._restarts = restarts
        self._starting, self._stopping, self._parked = self._local_world_size, False, 0
        self._started_s = self._now_s()

    def runner_said(self, event: events.RunnerEvent) -> None:
        node = self._node
        match event:
            case events.WorkerStarted():
                self._starting = max(self._starting - 1, 0)
                self._running.add(event.local_rank)
                node.start_seconds.observe(self._now_s() - self._started_s)
                if event.how:  # Empty in jobs whose workers are never kept.
                    node.starts.labels(event.how).inc()
            case events.WorkerResumed():
                node.resume_seconds.observe(self._now_s() - self._started_s)
            case events.WorkerExited():
                self._running.discard(event.local_rank)
                how = how_it_exited(event.exit_code, event.signal)
                node.exits.labels(how, STOP if self._stopping else RUN).inc()
            case events.KeptExited():
                self._parked = max(self._parked - 1, 0)
                node.exits.labels(how_it_exited(event.exit_code, event.signal), STOP).inc()
            case events.StartFailed():
                node.start_failures.inc()
            case events.WorkersStartedCold():
                node.cold_starts.inc(len(event.local_ranks))
            case events.WorkersStuck():
                self.stuck = len(event.pids)
            case events.Fenced():
                self._stopping = True
                node.fenced.inc()
            case events.WorkersGone():
                self._parked = len(event.kept)
                if event.kept:
                    node.park_seconds.observe(self._now_s() - self._stopped_s)
                self._forget_workers()
            case events.StoreHostExited():
                node.store_host_exits.inc()
            case events.RunnerExited():
                self._forget_workers()
                self.has_runner = False
                how = "in order" if event.exit_code == 0 else "unexpectedly"
                node.runner_exits.labels(how).inc()

    def _forget_workers(self) -> None:
        self._starting, self.stuck = 0, 0
        self._running.clear()


def how_it_exited(exit_code: int | None, signum: int | None) -> str:
    """Describe how a worker exited, as one of a few hundred label values.

    >>> [how_it_exited(0, None), how_it_exited(None, 9), how_it_exited(None, 77)]
    ['exit 0', 'SIGKILL', 'signal 77']
    """
    if signum is None:
        return f"exit {(exit_code or 0) & 0xFF}"
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum & 0x7F}"


def _collect_placements(placements: Placements) -> Iterable[Metric]:
    occupancy = placements.occupancy()
    yield by_label(
        "rdzv_agent_jobs", "Submitted jobs that this node holds.", "state", occupancy.jobs
    )
    yield by_label("rdzv_agent_gpus", "GPUs by their holder.", "state", occupancy.gpus)
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
    drivers: Sequence[JobDriver] = (),
) -> AsyncIterator[Listen]:
    """Collect metrics, and serve /metrics and /healthz until the body ends; yield the address.

    Raises:
        InvalidRequestError: the address cannot be bound.
    """
    metrics = AgentMetrics(link, placements)
    metrics.add_process()
    async with _answering(listen, metrics) as bound:
        link.meter = metrics
        if placements is not None:
            placements.meter = metrics
        for driver in drivers:
            driver.meter = metrics.job(driver.local_world_size)
        link.metrics_at = partial(announced, bound)
        whom = "accessible from this machine only" if bound.loopback else "listed by the server"
        log.info("serving metrics at http://%s/metrics (%s)", bound, whom)
        yield bound


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


@asynccontextmanager
async def _answering(listen: Listen, metrics: AgentMetrics) -> AsyncIterator[Listen]:
    async def page(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", page), web.get("/healthz", healthz)])
    runner = web.AppRunner(app, access_log=None, logger=_http_log)
    await runner.setup()
    try:
        site = web.TCPSite(runner, listen.host, listen.port)
        try:
            await site.start()
        except OSError as error:
            raise InvalidRequestError(
                f"`metrics_listen` = {str(listen)!r}: cannot listen there: "
                f"{error.strerror}; give another address"
            ) from error
        yield Listen(listen.host, runner.addresses[0][1])
    finally:
        await runner.cleanup()
