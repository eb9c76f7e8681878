"""What one server counts. `docs/metrics.md` lists the metrics; `metrics_page` writes them.

It counts from the start of this process, so it starts from zero in a server that takes over.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rdzv.core.events import (
    Event,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeStopped,
    NodeSucceeded,
    RoundAdopted,
    RoundCompleted,
    RoundEnded,
    RoundSettled,
    RunBegan,
    RunEnded,
    StacksTaken,
    WorkerFailed,
    WorkersStarted,
    WorkerStart,
)
from rdzv.core.evidence.collectives import KINDS
from rdzv.core.model import Cause, JobState, Result, Round, State, job_state
from rdzv.errors import DeniedError, UnauthenticatedError
from rdzv.runtime.counts import Counted, Counts, each
from rdzv.stores.base import Record
from rdzv.view import history
from rdzv.view.history import Kept
from rdzv.view.ledger import Book

if TYPE_CHECKING:
    from rdzv.server.telemetry.notifications import Notifications

ENDED_JOBS = 1_000
"""The maximum number of ended jobs shown by /metrics."""

ENDED_JOB_MS = 5 * 60_000
"""How long /metrics shows a job that has ended, so that its last counts are scraped."""

FIRST, AGAIN = "first", "again"
"""The kinds of formation: a run's first round, or a later one."""

CHANGES = ("joined", "left", "lost", "replaced")
"""The kinds of change in a job's membership."""

STOP, FORM = "stop", "form"
"""The phases of a recovery: until the last node has stopped, and from then until the next round."""

NO_CAUSE = "none"
"""The cause counted for a hang if the records of collectives show none."""

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1_800)
_COMMIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LAG_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)

FORMATION = "Time from the first join, or the end of a round, to the next complete round."
RECOVERY = "Time after a round's end: until all have stopped, and from then to the next round."
ROUNDS_ENDED = "Rounds that ended, by the cause that the end is charged to."
MEMBERSHIP_CHANGES = "Nodes that joined, left or were lost, and seats that another node took over."

COUNTED = (
    Counted("rdzv_runs_ended_total", "Runs that ended, by result.", ("result",), each(Result)),
    Counted("rdzv_rounds_ended_total", ROUNDS_ENDED, ("cause",), each(Cause)),
    Counted("rdzv_membership_changes_total", MEMBERSHIP_CHANGES, ("kind",), each(CHANGES)),
    Counted(
        "rdzv_hangs_total",
        "Hangs whose stacks were taken, by what the records of collectives show, or none.",
        ("cause",),
        each((*KINDS, NO_CAUSE)),
    ),
    Counted("rdzv_worker_failures_total", "Workers that failed."),
    Counted(
        "rdzv_workers_started_total",
        "Workers of rounds that all nodes have started, by how: kept, hot, warm or cold.",
        ("kind",),
        each(WorkerStart),
    ),
    Counted("rdzv_restarts_total", "Restarts spent on worker failures."),
    Counted("rdzv_formation_seconds", FORMATION, ("kind",), each((FIRST, AGAIN)), _SECONDS),
    Counted("rdzv_recovery_seconds", RECOVERY, ("phase",), each((STOP, FORM)), _SECONDS),
    Counted(
        "rdzv_commit_seconds",
        "Time that the store took to commit a decision.",
        buckets=_COMMIT_SECONDS,
    ),
    Counted(
        "rdzv_store_errors_total",
        "Calls to the store that failed.",
        ("operation",),
        each(("read", "write")),
    ),
    Counted(
        "rdzv_loop_lag_seconds",
        "Delay of the event loop, sampled four times a second while this server leads.",
        buckets=_LAG_SECONDS,
    ),
    Counted("rdzv_streams_opened_total", "Streams that nodes have opened."),
    Counted("rdzv_nodes_lost_total", "Nodes that were given up, whatever jobs they were in."),
    Counted(
        "rdzv_refused_calls_total",
        "Calls refused because the caller was not authenticated, or not permitted.",
        ("reason",),
        each((DeniedError.code, UnauthenticatedError.code)),
    ),
    Counted("rdzv_messages_received_total", "Messages received from nodes."),
    Counted("rdzv_messages_sent_total", "Messages queued for nodes."),
)


@dataclass(slots=True)
class Sum:
    """The number of events of one kind and their total duration."""

    count: int = 0
    ms: int = 0


@dataclass(slots=True)
class JobTally:
    """What is counted of one run of a job, from the moment this server learned of it."""

    since_ms: int
    ended_ms: int | None = None
    final: JobState | None = None
    running_ms: int = 0
    running_since_ms: int | None = None
    round_ended_ms: int | None = None
    settled_ms: int | None = None
    """When all nodes in the last round had stopped; None if they have not, or if this is
    unknown."""
    completed: int = 0
    counts: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """By the name of the metric, without its prefix, and its label."""
    formation: Sum = field(default_factory=Sum)
    recovery: dict[str, Sum] = field(default_factory=lambda: {STOP: Sum(), FORM: Sum()})

    @classmethod
    def of(cls, state: State, now_ms: int) -> JobTally:
        """Return counters that start at zero, for a run that may have begun long ago."""
        tally = cls(now_ms)
        round_ = state.membership.round
        if round_ is not None and round_.end is not None:
            tally.round_ended_ms = round_.end.at_ms
        tally.follow(state, now_ms)
        return tally

    def follow(self, state: State, now_ms: int) -> None:
        live = job_state(state) is JobState.RUNNING
        if live and self.running_since_ms is None:
            self.running_since_ms = now_ms
        elif not live and self.running_since_ms is not None:
            self.running_ms += max(now_ms - self.running_since_ms, 0)
            self.running_since_ms = None

    def running_until(self, now_ms: int) -> int:
        since_ms = now_ms if self.running_since_ms is None else self.running_since_ms
        return self.running_ms + max(now_ms - since_ms, 0)

    def elapsed_until(self, now_ms: int) -> int:
        return max((now_ms if self.ended_ms is None else self.ended_ms) - self.since_ms, 0)


@dataclass(slots=True)
class _Job:
    book: Book
    earlier: Counter[str] = field(default_factory=Counter)
    earlier_nodes: Counter[str] = field(default_factory=Counter)


class JobLedgers:
    """The ledgers of one server's jobs, which show how they spend their time.

    A job's time is counted over all its runs, from the moment this server learns of the job.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}

    def loaded(self, state: State, now_ms: int) -> None:
        membership = state.membership
        if membership.rdzv_id in self._jobs:
            return
        book = Book(membership.run, now_ms)
        round_ = membership.round
        if round_ is not None and round_.live:
            book.note(now_ms, history.RoundAdopted(round_.number, len(round_.participants)))
        self._jobs[membership.rdzv_id] = _Job(book)

    def recorded(self, rows: Sequence[Record], events: Sequence[Kept]) -> None:
        for row, event in zip(rows, events, strict=True):
            if isinstance(event, NodeStopped | NodeSucceeded) or not row.run:
                continue  # They do not affect how time is counted.
            job = self._jobs.get(row.rdzv_id)
            # A first run is one of a new job, even if the name was another's before.
            if job is None or (isinstance(event, RunBegan) and event.run_number == 1):
                job = self._jobs[row.rdzv_id] = _Job(Book(row.run, row.unix_ms))
            elif job.book.run != row.run:
                spent, of_nodes = job.book.sums(row.unix_ms)
                job.earlier.update(spent)
                job.earlier_nodes.update(of_nodes)
                job.book = Book(row.run, row.unix_ms)
            job.book.note(row.unix_ms, event)
            job.book.fold()

    def phases(
        self, rdzv_id: str, now_ms: int, state: State | None = None
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return the milliseconds that a job and its nodes have spent in each phase.

        Both mappings are empty if the job is not being counted.
        """
        job = self._jobs.get(rdzv_id)
        if job is None:
            return {}, {}
        spent, of_nodes = job.book.sums(now_ms, job_state(state) if state is not None else "")
        return (
            {phase: ms + job.earlier[phase] for phase, ms in spent.items()},
            {phase: ms + job.earlier_nodes[phase] for phase, ms in of_nodes.items()},
        )

    def drop(self, rdzv_id: str) -> None:
        self._jobs.pop(rdzv_id, None)

    def clear(self) -> None:
        self._jobs.clear()


class Metrics:
    """Counts one server's events over all its terms as leader. No method waits."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self.counts = Counts(COUNTED)
        self.tallies: dict[str, JobTally] = {}
        """The tallies of jobs that have not ended, by rdzv_id."""
        self.ended: dict[str, JobTally] = {}
        """The tallies of jobs that have ended, in the order in which they ended."""
        self.ledgers = JobLedgers()
        self.notifications: Notifications | None = None
        """Told of the same rows of history, if there is somebody to notify."""

    def loaded(self, state: State, now_ms: int) -> None:
        """Start counting a job that was loaded from the store, or resume its earlier counts."""
        membership = state.membership
        if not membership.run or membership.ended is not None:
            self.tallies.pop(membership.rdzv_id, None)
            return
        self.ledgers.loaded(state, now_ms)
        tally = self.tallies.setdefault(membership.rdzv_id, JobTally.of(state, now_ms))
        tally.follow(state, now_ms)

    def recorded(self, rows: Sequence[Record], events: Sequence[Kept]) -> None:
        """Count what all events tell: time by phase, worker starts, and hangs."""
        self.ledgers.recorded(rows, events)
        for event in events:
            match event:
                case StacksTaken(cause=cause):
                    self.counts.add("rdzv_hangs_total", cause or NO_CAUSE)
                case WorkersStarted():
                    for how in WorkerStart:
                        number = getattr(event, how.value)
                        self.counts.add("rdzv_workers_started_total", how, by=number)
        if self.notifications is not None:
            self.notifications.recorded(rows)

    def count_step(self, before: State, after: State, events: Sequence[Event], now_ms: int) -> None:
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
                    self._count(tally, "worker_failures_total")
                case NodeJoined():
                    self._count(tally, "membership_changes_total", "joined")
                case NodeLeft():
                    self._count(tally, "membership_changes_total", "left")
                case NodeLost():
                    self._count(tally, "membership_changes_total", "lost")
        if after.membership.ended is not None:
            self.tallies.pop(rdzv_id, None)
        elif (present := self.tallies.get(rdzv_id)) is not None:
            present.follow(after, now_ms)

    def _count(self, tally: JobTally, name: str, *label: str, by: int = 1) -> None:
        """Count what is told both of the server and of each job."""
        self.counts.add(f"rdzv_{name}", *label, by=by)
        tally.counts[name, *label] += by

    def _observe(self, times: Sum, name: str, for_ms: int, label: str) -> None:
        times.count += 1
        times.ms += max(for_ms, 0)
        self.counts.observe(f"rdzv_{name}", max(for_ms, 0) / 1000, label)

    def _complete(
        self, tally: JobTally, after: State, last: Round | None, round_: Round, now_ms: int
    ) -> None:
        tally.completed += 1
        since_ms, kind = tally.round_ended_ms, AGAIN
        if since_ms is None:
            since_ms, kind = after.membership.began_at_ms, FIRST
        self._observe(tally.formation, "formation_seconds", round_.at_ms - since_ms, kind)
        if tally.settled_ms is not None:
            for_ms = now_ms - tally.settled_ms
            self._observe(tally.recovery[FORM], "recovery_seconds", for_ms, FORM)
        tally.round_ended_ms = tally.settled_ms = None
        if last is not None and kind == AGAIN:
            replaced = _replaced(last, round_)
            self._count(tally, "membership_changes_total", "replaced", by=replaced)

    def _settle(self, tally: JobTally, event: RoundSettled, restarts: int, now_ms: int) -> None:
        self._count(tally, "rounds_ended_total", event.cause)
        if event.root_cause is not None and event.root_cause.suspect:
            # No peer's failure was found, so the suspect's own failure counts.
            self._count(tally, "worker_failures_total")
        if event.cause is Cause.WORKER_FAILURE and restarts > 0:
            self._count(tally, "restarts_total")
        if tally.round_ended_ms is not None:
            for_ms = now_ms - tally.round_ended_ms
            self._observe(tally.recovery[STOP], "recovery_seconds", for_ms, STOP)
        tally.settled_ms = now_ms

    def _end(self, rdzv_id: str, tally: JobTally, event: RunEnded, now_ms: int) -> None:
        self.counts.add("rdzv_runs_ended_total", event.ended.result)
        tally.running_ms, tally.running_since_ms = tally.running_until(now_ms), None
        tally.ended_ms, tally.final = now_ms, JobState(event.ended.result.value)
        self.tallies.pop(rdzv_id, None)
        self.ended.pop(rdzv_id, None)
        self.ended[rdzv_id] = tally
        self.forget_ended(now_ms)

    def forget_ended(self, now_ms: int) -> None:
        while self.ended:
            rdzv_id, oldest = next(iter(self.ended.items()))
            long_ago = oldest.ended_ms is None or now_ms - oldest.ended_ms >= ENDED_JOB_MS
            if not long_ago and len(self.ended) <= ENDED_JOBS:
                return
            del self.ended[rdzv_id]
            self.ledgers.drop(rdzv_id)

    def forget_jobs(self) -> None:
        self.tallies.clear()
        self.ended.clear()
        self.ledgers.clear()
        if self.notifications is not None:
            self.notifications.forget_jobs()

    def loop_late(self, late_ms: int) -> None:
        self.counts.observe("rdzv_loop_lag_seconds", max(late_ms, 0) / 1000)

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Time the commit in the body, unless it raises."""
        began_s = self._now_s()
        yield
        self.counts.observe("rdzv_commit_seconds", self._now_s() - began_s)


def _replaced(last: Round, round_: Round) -> int:
    before = {participant.node_id for participant in last.participants}
    after = {participant.node_id for participant in round_.participants}
    return min(len(before - after), len(after - before))
