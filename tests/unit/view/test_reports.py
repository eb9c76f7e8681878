"""The ledgers of all jobs, summed up: the causes and nodes that cost most in a period."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from past_events import a_summary

from rdzv.structs import replace
from rdzv.view.ledger import Ledger
from rdzv.view.reports import Report, clipped, ended_before, report, spent_by
from tests.unit.view.test_ledger import TABLE, ledger_of


def report_of(ledgers: Mapping[str, Sequence[Ledger]], from_ms: int, until_ms: int) -> Report:
    spent = (spent_by(a_summary(rdzv_id), runs, from_ms) for rdzv_id, runs in ledgers.items())
    return report(spent, from_ms, until_ms)


def of(name: str) -> Ledger:
    story, now_s, _ = TABLE[name]
    return ledger_of(story, now_s)


LOST = of("a lost node is detected from its last word")
DRAINED = of("a drain costs the stop and the next start, and nothing to detect")
QUEUED = of("a submitted job is queued until it is placed")


def test_what_was_before_is_not_counted() -> None:
    """An interval that began earlier is cut off, and so is the time of its nodes."""
    assert clipped(LOST, 0) == LOST.intervals
    found = clipped(LOST, 30_000)
    assert [one.ms for one in found] == [10_000, 1_000, 9_000]
    assert [one.node_ms for one in found] == [20_000, 1_000, 9_000]
    assert clipped(LOST, 50_000) == ()


def test_all_jobs_are_summed_up_by_cause_and_node() -> None:
    found = report_of({"a": [LOST], "b": [DRAINED, LOST], "c": [QUEUED]}, 0, 50_000)
    assert [(line.rdzv_id, line.runs) for line in found.jobs] == [("b", 2), ("a", 1), ("c", 1)]
    assert found.node_ms == sum(line.node_ms for line in found.jobs)
    lost = found.node_ms - sum(line.lost_node_ms for line in found.jobs)
    assert found.goodput == pytest.approx(lost / found.node_ms)
    by_cause = {loss.cause: loss for loss in found.causes}
    assert by_cause["node lost"].times == 2
    # Held: two nodes while the failure is detected, and one from then on.
    assert by_cause["node lost"].node_ms == 2 * (15_000 * 2 + 10_000)
    assert [loss.node_id for loss in found.nodes] == ["n2"]
    assert found.nodes[0].times == 3
    walls = sum(ledger.wall_ms for ledger in (LOST, LOST, DRAINED, QUEUED))
    assert sum(found.phases.values()) == walls


def test_gpus_are_counted_where_they_are_known() -> None:
    """One run without these figures makes a sum unknown, rather than too small."""
    known = replace(LOST, gpus_per_node=8)
    (line,) = report_of({"a": [known]}, 0, 50_000).jobs
    assert line.lost_gpu_ms == 8 * line.lost_node_ms
    found = report_of({"a": [known], "b": [LOST]}, 0, 50_000)
    assert [line.lost_gpu_ms is None for line in found.jobs] == [False, True]
    assert all(loss.gpu_ms is None for loss in found.causes)


def test_jobs_without_a_run_in_that_time_are_left_out() -> None:
    found = report_of({"a": [LOST]}, 60_000, 90_000)
    assert (found.jobs, found.causes, found.nodes, found.goodput) == ((), (), (), None)


def test_a_job_that_never_trained_makes_no_share_an_upper_bound() -> None:
    assert not QUEUED.steps_reported
    only_queued = replace(QUEUED, intervals=QUEUED.intervals[:1])
    assert [one.phase for one in only_queued.intervals] == ["queued"]
    lines = report_of({"a": [only_queued], "b": [QUEUED]}, 0, 50_000).jobs
    assert {line.rdzv_id: line.steps_reported for line in lines} == {"a": True, "b": False}


def test_which_jobs_need_not_be_read() -> None:
    job = replace(a_summary("a"), state="failed", state_age_ms=8_000)
    assert ended_before(job, 7_000)
    assert not ended_before(job, 8_000)
    assert not ended_before(replace(job, state="running"), 7_000)
