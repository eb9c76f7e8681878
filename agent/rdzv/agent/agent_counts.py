"""What an agent counts, from its start on. `node.agent_metrics` shows it, if there is a page.

No label names a job or a worker: the server reports on jobs, this on the node.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection

from rdzv.agent.core import commands, events
from rdzv.runtime.counts import Counted, Counts, each

RUN, STOP = "run", "stop"
"""The values of a label for worker exits: during the run, or after the worker was told to stop."""

_START_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

COUNTED = (
    Counted(
        "rdzv_agent_rounds_started_total",
        "Rounds for which this node was told to start workers.",
    ),
    Counted(
        "rdzv_agent_restarts_total",
        "Of these rounds, those that follow a round with failed workers.",
    ),
    Counted(
        "rdzv_agent_worker_start_seconds",
        "Time from the decision to start workers until each runs.",
        buckets=_START_SECONDS,
    ),
    Counted("rdzv_agent_worker_start_failures_total", "Workers that could not be started."),
    Counted(
        "rdzv_agent_workers_started_cold_total",
        "Workers that should have started warm, but started cold.",
    ),
    Counted(
        "rdzv_agent_worker_starts_total",
        "Workers that began a round: kept from the previous one, hot (standbys), warm, or cold.",
        ("how",),
        each(("kept", "hot", "warm", "cold")),
    ),
    Counted(
        "rdzv_agent_park_seconds",
        "Time from the end of a round until all kept workers are parked.",
        buckets=_START_SECONDS,
    ),
    Counted(
        "rdzv_agent_resume_seconds",
        "Time from the decision to start workers until a kept one continues training.",
        buckets=_START_SECONDS,
    ),
    Counted(
        "rdzv_agent_worker_exits_total",
        "Workers that exited, by exit code or signal; by themselves, or when told to stop.",
        ("how", "during"),
        [(h, d) for d in (RUN, STOP) for h in ("exit 0", "exit 1", "SIGKILL", "SIGTERM")],
    ),
    Counted(
        "rdzv_agent_rounds_fenced_total",
        "Rounds whose workers were killed because the server was unreachable.",
    ),
    Counted(
        "rdzv_agent_store_host_exits_total",
        "Store hosts of this node that exited, as intended or not.",
    ),
    Counted(
        "rdzv_agent_runner_exits_total",
        "Runners that have exited.",
        ("how",),
        each(("in order", "unexpectedly")),
    ),
    Counted("rdzv_agent_streams_opened_total", "Streams in which a server has welcomed this node."),
    Counted("rdzv_agent_streams_lost_total", "Open streams that ended, but not by this agent."),
    Counted("rdzv_agent_reconnects_total", "Streams that were opened after one was lost."),
    Counted(
        "rdzv_agent_connect_failures_total",
        "Attempts to open a stream that no server welcomed.",
    ),
)


class NodeCounts:
    """What is counted of one node and its jobs. No method waits."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.counts = Counts(COUNTED)
        self.jobs: dict[JobCounts, None] = {}
        self._now_s = now_s
        self._lost = False
        """Whether a stream was lost and none has been opened since."""

    def job(self, local_world_size: int) -> JobCounts:
        job = JobCounts(self, local_world_size, self._now_s)
        self.jobs[job] = None
        return job

    def stream_opened(self) -> None:
        self.counts.add("rdzv_agent_streams_opened_total")
        if self._lost:
            self._lost = False
            self.counts.add("rdzv_agent_reconnects_total")

    def stream_ended(self, *, welcomed: bool, on_purpose: bool) -> None:
        if on_purpose:
            return
        if welcomed:
            self._lost = True
            self.counts.add("rdzv_agent_streams_lost_total")
        else:
            self.counts.add("rdzv_agent_connect_failures_total")


class JobCounts:
    """What is counted of one job's workers on this node."""

    def __init__(self, node: NodeCounts, local_world_size: int, now_s: Callable[[], float]) -> None:
        self._node, self._counts = node, node.counts
        self._local_world_size = local_world_size
        self._now_s = now_s
        self._starting = 0
        self._running: set[int] = set()
        self._stopping = False
        self._parked = 0
        self._started_s = self._stopped_s = 0.0
        self._restarts: int | None = None
        self.stuck = 0
        self.has_runner = False

    def workers(self) -> dict[str, int]:
        running = len(self._running)
        if self._parked:
            return {"parked": self._parked}
        if self._stopping:
            return {"stopping": self._starting + running}
        return {"starting": self._starting, "running": running}

    def adopted(self, local_ranks: Collection[int], restarts: int | None) -> None:
        self.has_runner, self._running, self._restarts = True, set(local_ranks), restarts

    def closed(self) -> None:
        self._node.jobs.pop(self, None)

    def decided(self, command: commands.Command) -> None:
        match command:
            case commands.StartWorkers():
                self._start(command.assignment.restarts)
            case commands.StopWorkers():
                self._stopping = True
                self._stopped_s = self._now_s()

    def _start(self, restarts: int) -> None:
        self._counts.add("rdzv_agent_rounds_started_total")
        if self._restarts is not None and restarts > self._restarts:
            self._counts.add("rdzv_agent_restarts_total")
        self._restarts = restarts
        self._starting, self._stopping, self._parked = self._local_world_size, False, 0
        self._started_s = self._now_s()

    def runner_said(self, event: events.RunnerEvent) -> None:
        add, observe = self._counts.add, self._counts.observe
        match event:
            case events.WorkerStarted():
                self._starting = max(self._starting - 1, 0)
                self._running.add(event.local_rank)
                observe("rdzv_agent_worker_start_seconds", self._now_s() - self._started_s)
                if event.how:  # Empty in jobs whose workers are never kept.
                    add("rdzv_agent_worker_starts_total", event.how)
            case events.WorkerResumed():
                observe("rdzv_agent_resume_seconds", self._now_s() - self._started_s)
            case events.WorkerExited():
                self._running.discard(event.local_rank)
                how = how_it_exited(event.exit_code, event.signal)
                add("rdzv_agent_worker_exits_total", how, STOP if self._stopping else RUN)
            case events.KeptExited():
                self._parked = max(self._parked - 1, 0)
                how = how_it_exited(event.exit_code, event.signal)
                add("rdzv_agent_worker_exits_total", how, STOP)
            case events.StartFailed():
                add("rdzv_agent_worker_start_failures_total")
            case events.WorkersStartedCold():
                add("rdzv_agent_workers_started_cold_total", by=len(event.local_ranks))
            case events.WorkersStuck():
                self.stuck = len(event.pids)
            case events.Fenced():
                self._stopping = True
                add("rdzv_agent_rounds_fenced_total")
            case events.WorkersGone():
                self._parked = len(event.kept)
                if event.kept:
                    observe("rdzv_agent_park_seconds", self._now_s() - self._stopped_s)
                self._forget_workers()
            case events.StoreHostExited():
                add("rdzv_agent_store_host_exits_total")
            case events.RunnerExited():
                self._forget_workers()
                self.has_runner = False
                how = "in order" if event.exit_code == 0 else "unexpectedly"
                add("rdzv_agent_runner_exits_total", how)

    def _forget_workers(self) -> None:
        self._starting, self.stuck = 0, 0
        self._running.clear()


def how_it_exited(exit_code: int | None, signum: int | None) -> str:
    """As one of a few hundred label values.

    >>> [how_it_exited(0, None), how_it_exited(None, 9), how_it_exited(None, 77)]
    """
    if signum is None:
        return f"exit {(exit_code or 0) & 0xFF}"
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum & 0x7F}"
