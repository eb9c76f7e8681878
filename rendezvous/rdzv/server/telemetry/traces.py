"""Converts runs to traces: each run is a trace, each round a span, and each phase a child span.

Spans are created from the same rows as the log and the history, using the same mapping as `rdzvctl
trace`. A round is sent once all its nodes have stopped, and a run once it has ended.

No step waits for this: rows go into a bounded queue, from which a task takes them. The task keeps
only the last round of each run. If this server has not seen the beginning of a run, the run is
first read from the history. Ids are derived from names, so all servers' spans of a run form a
single trace.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rdzv.core.words import LISTED
from rdzv.errors import RendezvousError
from rdzv.server.telemetry.metrics_interface import Meter
from rdzv.stores.base import Record
from rdzv.structs import struct
from rdzv.view.answers import event_in
from rdzv.view.life import Round, Run, note
from rdzv.view.spans import Span, about, spans_of, went_wrong

log = logging.getLogger("rdzv.traces")

ROWS = 10_000
"""How many rows can be queued: more than the largest job produces in one round."""

PAST = 500
"""How many history rows to read for a run that began before this server led."""

HAPPENINGS = 100
"""The maximum number of events of one kind shown for a round. The first ones are kept, because they
include the cause."""

ENDED = 1_000
"""How many sent runs are remembered, so that late rows do not reopen them."""

SLICE = 100
"""How many rows are processed before other tasks run; this takes less than a millisecond."""

SUMMED_UP = {"NodeStopped", "NodeSucceeded", "NodeAdopted"}
"""Events that every node causes in every round. Spans show the number of nodes instead."""

Attribute = str | int | Sequence[str]


@struct(frozen=True)
class TraceSpan:
    """A span that is ready to be sent."""

    rdzv_id: str
    run: str
    key: str
    """The span's key, unique within its trace; empty for the run's own span."""
    parent: str | None
    name: str
    since_ms: int
    until_ms: int
    attributes: Mapping[str, Attribute]
    wrong: str = ""
    """What went wrong; empty if nothing did."""
    happenings: tuple[tuple[int, str, str], ...] = ()
    """The span's events, each with its time, name and text."""


Send = Callable[[TraceSpan], None]
"""Accepts or drops a span immediately; never waits."""

ReadHistory = Callable[[str, int], Awaitable[Sequence[Record]]]


@dataclass(slots=True)
class _Tale:
    """What is known about one run."""

    run: Run
    sent: int = -1
    """The number of the last round sent, either by this server or by an earlier one."""


class Traces(Meter):
    """Creates spans from history rows. Use `tracing` to create one."""

    def __init__(self, history: ReadHistory, send: Send, most_rows: int = ROWS) -> None:
        """Read past rows with `history`, pass spans to `send`, and queue up to `most_rows` rows."""
        self._history = history
        self._send = send
        self._most_rows = most_rows
        self._rows: deque[Record | None] = deque()
        """The queued rows. None marks the point at which everything known about runs becomes
        outdated."""
        self._news = asyncio.Event()
        self._dropped = 0
        self._tales: dict[str, _Tale] = {}
        """The current run of each job, by rdzv_id, until the run has ended."""
        self._ended: dict[tuple[str, str], None] = {}

    def recorded(self, rows: Sequence[Record]) -> None:
        """Queue history rows; if there are too many at once, drop the rest and log their number."""
        for row in rows:
            if not row.run or row.name in SUMMED_UP:
                continue
            if len(self._rows) < self._most_rows:
                self._rows.append(row)
            else:
                self._dropped += 1
        self._news.set()

    def forget_jobs(self) -> None:
        """Record that this server no longer leads, so another server sends its jobs' spans."""
        self._rows.append(None)
        self._news.set()

    @property
    def known(self) -> dict[str, Run]:
        """What is known about the current run of each job, by rdzv_id."""
        return {rdzv_id: tale.run for rdzv_id, tale in self._tales.items()}

    async def run(self) -> None:
        """Create spans from rows as they arrive, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            await self.drain()

    async def drain(self) -> None:
        """Create spans from all queued rows."""
        number = 0
        while self._rows:
            row = self._rows.popleft()
            try:
                await self._take(row)
            except Exception:
                # Traces must not bring down the server, and the next row may succeed.
                log.exception("a bug in rdzvd, please report it: could not trace %s", row)
            number += 1
            if number % SLICE == 0:
                await asyncio.sleep(0)
        if self._dropped:
            log.warning("dropped %d history rows from the traces: too many at once", self._dropped)
            self._dropped = 0

    async def _take(self, row: Record | None) -> None:
        if row is None:
            self._tales.clear()
            return
        if (row.rdzv_id, row.run) in self._ended:
            return
        tale = self._tales.get(row.rdzv_id)
        if tale is None or tale.run.run != row.run:
            tale = self._tales[row.rdzv_id] = await self._begun(row)
        _note(tale.run, row)
        if row.name in ("RoundSettled", "RunEnded"):
            self._tell(row.rdzv_id, tale)

    async def _begun(self, row: Record) -> _Tale:
        """Return what the history shows about a run before this row."""
        tale = _Tale(Run(row.run, row.unix_ms))
        if row.name == "RunBegan":
            return tale
        try:
            past = [r for r in await self._history(row.rdzv_id, PAST) if r.run == row.run]
        except RendezvousError as error:
            log.warning(
                "job %s: cannot read its earlier events, which will be missing from its trace: %s",
                row.rdzv_id,
                error,
            )
            return tale
        # `row` and the rows after it will be processed in turn.
        past = past[: past.index(row)] if row in past else past
        if past:
            tale.run.began_ms = past[0].unix_ms
        for one in past:
            if one.name not in SUMMED_UP:
                _note(tale.run, one)
            if one.name == "RoundSettled":
                tale.sent = _last(tale.run)
                _tidy(tale)
        return tale

    def _tell(self, rdzv_id: str, tale: _Tale) -> None:
        run = tale.run
        spans = tuple(trace_spans(rdzv_id, run, tale.sent))
        # Record this before sending, so that a failure is not retried with each of the following
        # rows.
        tale.sent = _last(run)
        _tidy(tale)
        if run.ended_ms is not None:
            del self._tales[rdzv_id]
            self._ended[rdzv_id, run.run] = None
            if len(self._ended) > ENDED:
                del self._ended[next(iter(self._ended))]
        for span in spans:
            self._send(span)


def _note(run: Run, row: Record) -> None:
    note(run, event_in(row))
    del run.happenings[HAPPENINGS:], run.failures[HAPPENINGS:], run.suspects[HAPPENINGS:]


def _last(run: Run) -> int:
    return run.round.number if run.round is not None else -1


def _tidy(tale: _Tale) -> None:
    """Drop everything about a run that is not needed for the next round's spans."""
    run = tale.run
    del run.rounds[:-1]
    run.happenings.clear()
    run.failures.clear()
    run.suspects.clear()
    run.nodes.clear()


# ---------------------------------------------------------------- spans of a run


def trace_spans(rdzv_id: str, run: Run, sent: int = -1) -> Iterator[TraceSpan]:
    """Yield the spans of all rounds after `sent`, and the run's own span if the run has ended."""
    until_ms = _latest_ms(run)
    spans = list(spans_of(run, until_ms))
    rounds = [r for r in run.rounds if r.number > sent]
    happenings = _happenings(run)
    for round_ in rounds:
        own = [span for span in spans if span.round is round_]
        told = happenings if round_ is rounds[-1] else ()
        yield from _round_spans(rdzv_id, run, round_, own, told)
    if run.ended_ms is None:
        return
    for span in spans:
        if span.round is None:
            # The run ended before its first round.
            key, name = "forming", "forming"
            yield TraceSpan(rdzv_id, run.run, key, "", name, span.since_ms, span.until_ms, {})
    yield TraceSpan(
        rdzv_id,
        run.run,
        key="",
        parent=None,
        name=f"run of {rdzv_id}",
        since_ms=run.began_ms,
        until_ms=run.ended_ms,
        attributes=_named(
            {"rdzv_id": rdzv_id, "run": run.run, "run number": run.number or ""},
            {"result": run.result, "because": run.reason},
        ),
        wrong=run.reason if run.result == "failed" else "",
        happenings=() if rounds else happenings,
    )


def _round_spans(
    rdzv_id: str,
    run: Run,
    round_: Round,
    phases: Sequence[Span],
    happenings: tuple[tuple[int, str, str], ...],
) -> Iterator[TraceSpan]:
    name = f"round {round_.number}"
    wrong = round_.charge_reason or round_.reason if went_wrong(round_) else ""
    yield TraceSpan(
        rdzv_id,
        run.run,
        key=name,
        parent="",
        name=name,
        since_ms=min(span.since_ms for span in phases),
        until_ms=max(span.until_ms for span in phases),
        attributes=_named(
            {"rdzv_id": rdzv_id, "run": run.run, "round": round_.number},
            {"cause": round_.charge or round_.cause, **about(round_)},
            {"nodes": len(round_.nodes) + round_.more, "workers": round_.workers or ""},
            {"participants": round_.nodes[:LISTED]},
        ),
        wrong=wrong,
        happenings=happenings,
    )
    for span in phases:
        key, times_ms = f"{name}/{span.phase}", (span.since_ms, span.until_ms)
        yield TraceSpan(
            rdzv_id, run.run, key, name, span.phase, *times_ms, _named({"round": round_.number})
        )


def _named(*groups: Mapping[str, Attribute]) -> dict[str, Attribute]:
    """Give attributes their OpenTelemetry names, and omit empty ones."""
    return {
        f"rdzv.{name.replace(' ', '_')}": value
        for group in groups
        for name, value in group.items()
        if value not in ("", ())
    }


def _happenings(run: Run) -> tuple[tuple[int, str, str], ...]:
    failed = (*run.failures, *run.suspects)
    failures = [(at_ms, "WorkerFailed", text) for at_ms, text in failed]
    others = [(event.unix_ms, event.name, event.text) for event in run.happenings]
    return tuple(sorted([*failures, *others]))


def _latest_ms(run: Run) -> int:
    """Return the time of the last known fact about a run."""
    if run.ended_ms is not None:
        return run.ended_ms
    times_ms = (run.began_ms, *(r.settled_ms or r.ended_ms or r.at_ms for r in run.rounds))
    return max(times_ms)


# ---------------------------------------------------------------- for a server


@asynccontextmanager
async def tracing(history: ReadHistory, send: Send, most_rows: int = ROWS) -> AsyncIterator[Traces]:
    """Create spans until the body ends, and then from the rows that are still queued."""
    traces = Traces(history, send, most_rows)
    async with asyncio.TaskGroup() as tasks:
        making = tasks.create_task(traces.run())
        try:
            yield traces
        finally:
            making.cancel()
            await asyncio.wait([making])
            await traces.drain()
