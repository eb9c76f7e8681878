"""Totals of the jobs' ledgers for /metrics, which show how a server's jobs spend their time.

A job's time is counted over all its runs, from the moment this server learns of the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rdzv.core.events import NodeStopped, NodeSucceeded, RunBegan
from rdzv.core.model import State, job_state
from rdzv.stores.base import Record
from rdzv.view.history import Kept, RoundAdopted
from rdzv.view.ledger import Book


@dataclass(slots=True)
class _Job:
    """A job's current or last run, and the totals of its earlier runs."""

    book: Book
    earlier: Counter[str] = field(default_factory=Counter)
    earlier_nodes: Counter[str] = field(default_factory=Counter)


class JobLedgers:
    """The ledgers of one server's jobs."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}

    def loaded(self, state: State, now_ms: int) -> None:
        """Start counting a job that was loaded from the store, unless it is already counted."""
        membership = state.membership
        if membership.rdzv_id in self._jobs:
            return
        book = Book(membership.run, now_ms)
        round_ = membership.round
        if round_ is not None and round_.live:
            book.note(now_ms, RoundAdopted(round_.number, len(round_.participants)))
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
        """Forget all jobs because this server no longer leads."""
        self._jobs.clear()
