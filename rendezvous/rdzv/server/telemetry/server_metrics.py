"""rdzvd's /metrics page. `docs/metrics.md` lists the metrics.

Counters and histograms are fed by the same events as the log and the history, so all three agree.
They count from the start of this process, so they start from zero in a server that takes over.
Gauges are computed from the current state at each scrape.

The server's own metrics use prometheus-client. `job_metrics_page` writes the jobs' metrics, one
slice of jobs at a time.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections import Counter as Tally
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rdzv.core.events import (
    Event,
    NodeJoined,
    NodeLeft,
    NodeLost,
    RoundAdopted,
    RoundCompleted,
    RoundEnded,
    RoundSettled,
    RunBegan,
    RunEnded,
    WorkerFailed,
    WorkerStart,
)
from rdzv.core.evidence.collectives import KINDS
from rdzv.core.kept_ranks import kept_workers
from rdzv.core.model import Cause, JobState, Result, Round, State, job_state
from rdzv.errors import DeniedError, LimitExceededError, UnauthenticatedError
from rdzv.runtime.exposition import Collect, Parts, add_process, by_label, expiry
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.server.telemetry.c10d_metrics import c10d_metrics
from rdzv.server.telemetry.job_ledgers import JobLedgers
from rdzv.server.telemetry.job_metrics_page import JobPage
from rdzv.server.telemetry.job_tallies import CHANGES, FORM, STOP, JobTally
from rdzv.server.telemetry.metrics_interface import Figures, Meter
from rdzv.stores.base import Record
from rdzv.view.answers import JobStatus, event_in

SLICE_JOBS = 50
"""How many jobs are written before other tasks run; this takes two or three milliseconds."""

ENDED_JOBS = 1_000
"""The maximum number of ended jobs shown by /metrics."""

KEPT, NEW = "kept", "new"
"""The kinds of workers in a round: kept from the previous round, or new."""

STARTS = tuple(WorkerStart)
"""The ways in which workers are started for a round, as reported by nodes."""

FIRST, AGAIN = "first", "again"
"""The kinds of formation: a run's first round, or a later one."""

NO_CAUSE = "none"
"""The cause counted for a hang if the records of collectives show none."""

_LIVE_STATES = (JobState.QUEUED, JobState.JOINING, JobState.RUNNING, JobState.STOPPING)
_RESULT_STATE = {result: JobState(result.value) for result in Result}

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1_800)
_COMMIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LAG_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)

SERVER, ROOM, JOBS, C10D, TLS = "server", "room", "jobs", "c10d", "tls"
"""The groups of metrics that are computed at each scrape. If one fails, the others remain."""


SCRAPES = 4
"""The number of callers that read /metrics at once: for each, all of it is in memory."""


ENDED_JOB_MS = 5 * 60_000
"""How long /metrics shows a job that has ended, so that its last counts are scraped."""


class Metrics(Meter, Collector):
    """Counts one server's events over all its terms as leader, and exposes them to Prometheus."""

    def __init__(
        self,
        look: Callable[[], Figures | None],
        config: RdzvdSettings,
        version: str,
        now_s: Callable[[], float] = time.perf_counter,
        c10d: Callable[[], Iterable[JobStatus]] | None = None,
        expires: Callable[[], datetime] | None = None,
    ) -> None:
        """Get the server's current figures from `look`, or None while the server does not lead.

        `c10d` returns the jobs in torch's own store; it is None if this server serves no such
        store. `expires` returns when the server's certificate expires; it is None if there is no
        certificate.
        """
        self._look = look
        self._c10d = c10d
        self._expires = expires
        self._parts = Parts("rdzv_collector_success", "rdzvd")
        self._now_s = now_s
        self._scrapes = 0
        self.tallies: dict[str, JobTally] = {}
        """The tallies of jobs that have not ended, by rdzv_id."""
        self._ledgers = JobLedgers()
        self.ended: dict[str, JobTally] = {}
        """The tallies of jobs that have ended, in the order in which they ended."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._add_event_counters(self._registry)
        self._add_server_counters(self._registry)
        about = Gauge(
            "rdzv_build_info",
            "1; the labels describe this server.",
            ("version", "python", "store"),
            registry=self._registry,
        )
        about.labels(version, platform.python_version(), config.store).set(1)

    def add_process(self) -> None:
        add_process(self._registry)

    def _add_event_counters(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        seconds = partial(Histogram, buckets=_SECONDS, registry=registry)
        self._runs_ended = counter(
            "rdzv_runs_ended_total", "Runs that ended, by result.", ("result",)
        )
        self._rounds_ended = counter(
            "rdzv_rounds_ended_total",
            "Rounds that ended, by the cause that the end is charged to.",
            ("cause",),
        )
        self._changes = counter(
            "rdzv_membership_changes_total",
            "Nodes that joined, left or were lost, and seats that another node took over.",
            ("kind",),
        )
        self._hangs = counter(
            "rdzv_hangs_total",
            "Hangs whose stacks were taken, by what the records of collectives show, or none.",
            ("cause",),
        )
        self._failures = counter("rdzv_worker_failures_total", "Workers that failed.")
        self._workers = counter(
            "rdzv_round_workers_total",
            "Workers of complete rounds: kept from the round before, or new processes.",
            ("kind",),
        )
        self._starts = counter(
            "rdzv_workers_started_total",
            "Workers of rounds that all nodes have started, by how: kept, warm or cold.",
            ("kind",),
        )
        self._restarts = counter("rdzv_restarts_total", "Restarts spent on worker failures.")
        self._formation = seconds(
            "rdzv_formation_seconds",
            "Time from the first join, or the end of a round, to the next complete round.",
            ("kind",),
        )
        self._recovery = seconds(
            "rdzv_recovery_seconds",
            "Time after a round's end: until all have stopped, and from then to the next round.",
            ("phase",),
        )
        # Every series starts at zero, because Prometheus misses the first increase of a new series.
        for metric, values in (
            (self._runs_ended, Result),
            (self._rounds_ended, Cause),
            (self._changes, CHANGES),
            (self._workers, (KEPT, NEW)),
            (self._starts, STARTS),
            (self._hangs, (*KINDS, NO_CAUSE)),
            (self._formation, (FIRST, AGAIN)),
            (self._recovery, (STOP, FORM)),
        ):
            _begin(metric, values)

    def _add_server_counters(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self._commits = histogram(
            "rdzv_commit_seconds",
            "Time that the store took to commit a decision.",
            buckets=_COMMIT_SECONDS,
        )
        self._store_errors = counter(
            "rdzv_store_errors_total",
            "Calls to the store that failed.",
            ("operation",),
        )
        _begin(self._store_errors, ("read", "write"))
        self._lag = histogram(
            "rdzv_loop_lag_seconds",
            "Delay of the event loop, sampled four times a second while this server leads.",
            buckets=_LAG_SECONDS,
        )
        self._streams_opened = counter(
            "rdzv_streams_opened_total", "Streams that nodes have opened."
        )
        self._nodes_lost = counter(
            "rdzv_nodes_lost_total", "Nodes that were given up, whatever jobs they were in."
        )
        self._calls_refused = counter(
            "rdzv_refused_calls_total",
            "Calls refused because the caller was not authenticated, or not permitted.",
            ("reason",),
        )
        for error in (DeniedError, UnauthenticatedError):
            self._calls_refused.labels(error.code)
        self._received = counter("rdzv_messages_received_total", "Messages received from nodes.")
        self._sent = counter("rdzv_messages_sent_total", "Messages queued for nodes.")

    # ---------------------------------------------------------------- events

    def loaded(self, state: State, now_ms: int) -> None:
        """Start counting a job that was loaded from the store, or resume its earlier counts."""
        membership = state.membership
        if not membership.run or membership.ended is not None:
            self.tallies.pop(membership.rdzv_id, None)
            return
        self._ledgers.loaded(state, now_ms)
        tally = self.tallies.setdefault(membership.rdzv_id, JobTally.of(state, now_ms))
        tally.follow(state, now_ms)

    def recorded(self, rows: Sequence[Record]) -> None:
        """Count what only history rows report: time by phase, worker starts, and hangs."""
        self._ledgers.recorded(rows)
        for row in rows:
            if row.name == "StacksTaken":
                cause = (event_in(row).fields or {}).get("cause") or NO_CAUSE
                self._hangs.labels(cause).inc()
            elif row.name == "WorkersStarted":
                fields = event_in(row).fields or {}
                for how in STARTS:
                    self._starts.labels(how).inc(fields.get(how, 0))

    def count_step(self, before: State, after: State, events: Sequence[Event], now_ms: int) -> None:
        """Count the events of a step that was stored."""
        if not events:
            return
        rdzv_id = after.membership.rdzv_id
        round_ = before.membership.round
        restarts = len(after.membership.restarts) - len(before.membership.restarts)
        for event in events:
            if isinstance(event, RunBegan):
                self.tallies[rdzv_id] = JobTally(now_ms)
                self.ended.pop(rdzv_id, None)
            tally = self.tallies.get(rdzv_id) or self.ended.get(rdzv_id)
            if tally is None:
                tally = self.tallies[rdzv_id] = JobTally.of(before, now_ms)
            match event:
                case RoundCompleted():
                    self._complete(tally, after, round_, event.round, now_ms)
                    round_ = event.round
                case RoundAdopted():
                    tally.round_ended_ms = tally.settled_ms = None
                    round_ = event.round
                case RoundEnded():
                    tally.round_ended_ms, tally.settled_ms = event.end.at_ms, None
                case RoundSettled():
                    self._settle(tally, event, restarts, now_ms)
                case RunEnded():
                    self._end(rdzv_id, tally, event, now_ms)
                case WorkerFailed() if not event.failure.suspect:
                    tally.failures += 1
                    self._failures.inc()
                case NodeJoined():
                    self._change(tally, "joined")
                case NodeLeft():
                    self._change(tally, "left")
                case NodeLost():
                    self._change(tally, "lost")
        if after.membership.ended is not None:
            self.tallies.pop(rdzv_id, None)
        elif (present := self.tallies.get(rdzv_id)) is not None:
            present.follow(after, now_ms)

    def _change(self, tally: JobTally, kind: str, times: int = 1) -> None:
        tally.changes[kind] += times
        self._changes.labels(kind).inc(times)

    def _complete(
        self, tally: JobTally, after: State, last: Round | None, round_: Round, now_ms: int
    ) -> None:
        tally.completed += 1
        kept = kept_workers(round_)
        self._workers.labels(KEPT).inc(kept)
        self._workers.labels(NEW).inc(round_.world_size - kept)
        since_ms, kind = tally.round_ended_ms, AGAIN
        if since_ms is None:
            since_ms, kind = after.membership.began_at_ms, FIRST
        formation_ms = max(round_.at_ms - since_ms, 0)
        tally.formation.add(formation_ms)
        self._formation.labels(kind).observe(formation_ms / 1000)
        if tally.settled_ms is not None:
            self._recover(tally, FORM, now_ms - tally.settled_ms)
        tally.round_ended_ms = tally.settled_ms = None
        if last is not None and kind == AGAIN:
            self._change(tally, "replaced", _replaced(last, round_))

    def _settle(self, tally: JobTally, event: RoundSettled, restarts: int, now_ms: int) -> None:
        tally.ended[event.cause] += 1
        if event.root_cause is not None and event.root_cause.suspect:
            # No peer's failure was found, so the suspect's own failure counts.
            tally.failures += 1
            self._failures.inc()
        self._rounds_ended.labels(event.cause).inc()
        if event.cause is Cause.WORKER_FAILURE and restarts > 0:
            tally.restarts += 1
            self._restarts.inc()
        if tally.round_ended_ms is not None:
            self._recover(tally, STOP, now_ms - tally.round_ended_ms)
        tally.settled_ms = now_ms

    def _recover(self, tally: JobTally, phase: str, for_ms: int) -> None:
        tally.recovery[phase].add(max(for_ms, 0))
        self._recovery.labels(phase).observe(max(for_ms, 0) / 1000)

    def _end(self, rdzv_id: str, tally: JobTally, event: RunEnded, now_ms: int) -> None:
        self._runs_ended.labels(event.ended.result).inc()
        tally.running_ms, tally.running_since_ms = tally.running_until(now_ms), None
        tally.ended_ms, tally.final = now_ms, _RESULT_STATE[event.ended.result]
        self.tallies.pop(rdzv_id, None)
        self.ended.pop(rdzv_id, None)
        self.ended[rdzv_id] = tally
        self._forget_ended(now_ms)

    def _forget_ended(self, now_ms: int) -> None:
        """Forget jobs that ended long ago and, if there are too many, those that ended first."""
        while self.ended:
            rdzv_id, oldest = next(iter(self.ended.items()))
            long_ago = oldest.ended_ms is None or now_ms - oldest.ended_ms >= ENDED_JOB_MS
            if not long_ago and len(self.ended) <= ENDED_JOBS:
                return
            del self.ended[rdzv_id]
            self._ledgers.drop(rdzv_id)

    def forget_jobs(self) -> None:
        """Drop all jobs because this server no longer leads."""
        self.tallies.clear()
        self.ended.clear()
        self._ledgers.clear()

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Time the commit in the body, unless it raises."""
        began_s = self._now_s()
        yield
        self._commits.observe(self._now_s() - began_s)

    def store_failed(self, *, writes: bool) -> None:
        """Count a call that the store did not answer or a write that it did not accept."""
        self._store_errors.labels("write" if writes else "read").inc()

    def call_refused(self, code: str) -> None:
        self._calls_refused.labels(code).inc()

    def loop_late(self, late_ms: int) -> None:
        """Record how late the event loop was for a timer."""
        self._lag.observe(max(late_ms, 0) / 1000)

    def stream_opened(self) -> None:
        self._streams_opened.inc()

    def node_lost(self) -> None:
        """Count a node that was given up; called once for all of its jobs."""
        self._nodes_lost.inc()

    def received(self) -> None:
        """Count a message from a node."""
        self._received.inc()

    def sent(self) -> None:
        """Count a message that was put on a node's stream."""
        self._sent.inc()

    # ---------------------------------------------------------------- scrapes

    def collect(self) -> Iterator[Metric]:
        """Yield the server's own gauges; called by prometheus-client.

        If a part fails, its gauges are missing and a metric reports the failure.
        """
        asked: dict[str, Collect] = {SERVER: self._collect_server, ROOM: self._collect_room}
        if (views := self._c10d) is not None:
            asked[C10D] = lambda: c10d_metrics(views())
        if (expires := self._expires) is not None:
            asked[TLS] = lambda: expiry("rdzv_certificate_expiry_timestamp_seconds", expires())
        yield from self._parts.collect(asked)

    def _collect_server(self) -> Iterator[Metric]:
        figures = self._look()
        yield GaugeMetricFamily(
            "rdzv_leads",
            "1 if this server leads and can prove it, else 0.",
            int(figures is not None),
        )
        if figures is None:
            return
        jobs = Tally(job_state(state) for state in _known(figures.states))
        yield GaugeMetricFamily(
            "rdzv_leadership", "Number of this server's take-over.", figures.leadership
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
            {"connected": figures.nodes_connected, "away": figures.nodes_away},
        )
        yield GaugeMetricFamily("rdzv_streams", "Open streams of nodes.", figures.streams)
        yield GaugeMetricFamily("rdzv_watchers", "Callers that watch a job.", figures.watchers)
        yield GaugeMetricFamily(
            "rdzv_store_away_seconds",
            "How long the store has been away; 0 while it is available.",
            figures.store_away_ms / 1000,
        )
        yield GaugeMetricFamily(
            "rdzv_lease_seconds",
            "The lease of a node that connects now.",
            figures.lease_ms / 1000,
        )
        yield GaugeMetricFamily(
            "rdzv_node_silence_seconds",
            "The longest silence of any node with an open stream.",
            figures.silence_ms / 1000,
        )

    def _collect_room(self) -> Iterator[Metric]:
        figures = self._look()
        if figures is None:
            return
        room = figures.room()
        yield by_label(
            "rdzv_gpus",
            "GPUs of nodes that take submitted jobs.",
            "state",
            room.gpus,
        )
        yield by_label(
            "rdzv_places",
            "Submitted jobs that the nodes take at once.",
            "state",
            room.places,
        )
        yield by_label(
            "rdzv_nodes_barred",
            "Nodes on which no submitted job is placed until an operator allows it.",
            "by",
            room.nodes_barred,
        )
        yield by_label(
            "rdzv_node_drains",
            "Nodes that leave all their jobs: still draining, or drained.",
            "state",
            room.drains,
        )

    async def text(self) -> bytes:
        """Return all metrics in Prometheus's text format; other tasks run in between.

        Raises:
            LimitExceededError: too many scrapes are in progress.

        """
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
        figures = self._look()
        if figures is None:
            return
        now_ms, page = figures.now_ms, JobPage()
        self._forget_ended(now_ms)
        for number, state in enumerate(_known(figures.states), 1):
            tally = self.tallies.get(state.membership.rdzv_id)
            if tally is not None:
                page.add_live(state, tally, figures.progress(state), now_ms)
                page.add_straggling(state, figures.straggling(state))
                page.add_snapshots(state, figures.snapshots(state), figures.progress(state), now_ms)
                rdzv_id = state.membership.rdzv_id
                page.add_phases(rdzv_id, *self._ledgers.phases(rdzv_id, now_ms, state))
            if number % SLICE_JOBS == 0:
                await asyncio.sleep(0)
        for number, (rdzv_id, tally) in enumerate(tuple(self.ended.items()), 1):
            page.add_ended(rdzv_id, tally, now_ms)
            page.add_phases(rdzv_id, *self._ledgers.phases(rdzv_id, now_ms))
            if number % SLICE_JOBS == 0:
                await asyncio.sleep(0)
        for part in page.parts():
            yield part
            await asyncio.sleep(0)


def _known(states: Iterable[State]) -> Iterator[State]:
    return (s for s in states if s.membership.run and s.membership.ended is None)


def _replaced(last: Round, round_: Round) -> int:
    """Count the nodes from the last round whose places other nodes have taken in this one."""
    before = {participant.node_id for participant in last.participants}
    after = {participant.node_id for participant in round_.participants}
    return min(len(before - after), len(after - before))


def _begin(counter: Counter | Histogram, values: Iterable[str]) -> None:
    for value in values:
        counter.labels(value)
