"""/metrics has the sums of each job's ledger: equal to the report, and bounded in memory."""

from __future__ import annotations

import pytest

from rdzv.core.commands import Submit
from rdzv.core.life.runs import vacant
from rdzv.core.model import Ended, JobSpec, Result, Settings, Tuning
from rdzv.core.rendezvous import step
from rdzv.server.engine.history import records
from rdzv.server.telemetry.server_metrics import JobLedgers
from rdzv.structs import replace
from rdzv.view.answers import event_in
from rdzv.view.history import fields_in, kept, read
from rdzv.view.ledger import Book, ledgers_of, summed
from tests.unit.server.test_metrics import history, scraped
from tests.unit.view.test_ledger import TABLE, ledger_of

REDOES = "a failure is detected after it has happened, and its steps are redone"


@pytest.mark.slow
async def test_the_sums_are_those_of_the_report() -> None:
    async with scraped() as s:
        await history(s)
        now_ms = s.clock.now_ms()
        for rdzv_id in ("job-7", "eval", "later", "done"):
            rows = await s.driver.history.of(rdzv_id, 10_000)
            runs = ledgers_of([event_in(row) for row in rows], now_ms)
            ledgers = JobLedgers()
            events = [read(row.name, fields_in(row.data)) for row in rows]
            ledgers.recorded(rows, [event for event in events if event is not None])
            shown, of_nodes = ledgers.phases(rdzv_id, now_ms)
            for phase, ms in shown.items():
                assert ms == sum(run.phases[phase] for run in runs), (rdzv_id, phase)
            assert sum(of_nodes.values()) == sum(run.node_ms for run in runs)
            assert sum(shown.values()) == sum(run.wall_ms for run in runs)


@pytest.mark.slow
async def test_a_server_that_takes_over_counts_from_then() -> None:
    async with scraped() as s:
        await s.pair()
        state = s.driver.jobs.peek("job-7")
        assert state is not None
        now_ms = s.clock.now_ms()
    ledgers = JobLedgers()
    ledgers.loaded(state, now_ms)
    shown, _ = ledgers.phases("job-7", now_ms + 5_000, state)
    assert shown["training"] == sum(shown.values()) == 5_000
    ledgers.loaded(state, now_ms + 1_000)
    assert ledgers.phases("job-7", now_ms + 5_000, state)[0] == shown
    ledgers.drop("job-7")
    assert ledgers.phases("job-7", now_ms) == ({}, {})


def test_what_was_queued_is_counted_over_all_runs() -> None:
    ledgers, state = JobLedgers(), vacant("job-7", Tuning())
    for number, at_ms in enumerate((0, 60_000), 1):
        submitted = Submit(f"run-{number}", Settings(1, 1), JobSpec(("a.py",)), "ada")
        transition = step(state, submitted, at_ms)
        told = transition.events
        ledgers.recorded(records("job-7", f"run-{number}", told, at_ms), [*map(kept, told)])
        ended = Ended(Result.STOPPED, "", at_ms)
        state = replace(
            transition.state, membership=replace(transition.state.membership, ended=ended)
        )
    shown, _ = ledgers.phases("job-7", 90_000, transition.state)
    assert shown["queued"] == sum(shown.values()) == 90_000


def test_a_name_that_is_used_again_after_it_was_forgotten_begins_at_zero() -> None:
    ledgers = JobLedgers()
    for at_ms in (0, 60_000):
        submitted = Submit(f"run-{at_ms}", Settings(1, 1), JobSpec(("a.py",)), "ada")
        transition = step(vacant("job-7", Tuning()), submitted, at_ms)
        told = transition.events
        ledgers.recorded(records("job-7", f"run-{at_ms}", told, at_ms), [*map(kept, told)])
    shown, _ = ledgers.phases("job-7", 90_000, transition.state)
    assert shown["queued"] == sum(shown.values()) == 30_000


def test_no_interval_is_kept() -> None:
    """A job in a crash loop has thousands, and only their sums are shown."""
    book = Book("r", 0)
    story, now_s, _ = TABLE[REDOES]
    for at_s, event in story:
        book.note(round(at_s * 1000), event)
        book.fold()
        assert book.booked == []
    ledger = ledger_of(story, now_s)
    sums = (ledger.phases, summed(ledger.intervals, nodes=True))
    assert book.sums(round(now_s * 1000)) == sums


def test_rounds_that_never_made_a_step_have_not_trained() -> None:
    """Also if their costs are already summed up, at the first step of a later round."""
    story, now_s, _ = TABLE["a failure before the first step is no training once any step is made"]
    book = Book("r", 0)
    for at_s, event in story:
        book.note(round(at_s * 1000), event)
        book.fold()
    ledger = ledger_of(story, now_s)
    sums = (ledger.phases, summed(ledger.intervals, nodes=True))
    assert book.sums(round(now_s * 1000)) == sums
