"""The cost of ended rounds: how long a crash loop waits, and when a budget is exhausted.

The stories are in `tests/scenarios/5_7_*`; here are the tables behind them.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import SETTLED
from rdzv.core.events import RoundSettled
from rdzv.core.model import (
    UNMOVED,
    Cause,
    Membership,
    Moved,
    Participant,
    Round,
    RoundEnd,
    Settings,
    Spent,
)
from rdzv.core.rounds.budgets import SOON_MS, backoff_ms, exceeded, further, spend
from rdzv.structs import replace
from tests.support.builders import SETTINGS, Job, offer, report, running

PARTICIPANT = Participant("n1", 1, offer("n1"), 0, 0, 1)
LONG_MS = SOON_MS
NOTHING = Spent()


def ended(
    cause: Cause = Cause.WORKER_FAILURE,
    after_ms: int = 0,
    spent: Spent = NOTHING,
    settings: Settings = SETTINGS,
    restarts: int = 1,
) -> Membership:
    """Return a job whose round ended `after_ms` after it was complete."""
    end = RoundEnd(cause, "why", 1_000 + after_ms, broken=True)
    round_ = Round(1, (PARTICIPANT,), "n1.net", 1, True, 0, at_ms=1_000, end=end)
    return Membership(
        *("job-7", "run-1", 1, settings, 0), round=round_, restarts=(0,) * restarts, spent=spent
    )


def spent_by(membership: Membership, moved: Moved = UNMOVED) -> Spent:
    round_ = membership.round
    assert round_ is not None and round_.end is not None
    return spend(membership, round_, round_.end, moved)


# ------------------------------------------------------------------ what an end costs


@pytest.mark.parametrize(
    ("cause", "preemptions", "store_failures", "soon", "without_progress"),
    [
        (Cause.WORKER_FAILURE, 0, 0, 1, 1),
        (Cause.NODE_LOST, 1, 0, 0, 0),
        (Cause.NODE_LEFT, 1, 0, 0, 0),
        (Cause.STORE_HOST, 0, 1, 0, 0),
        (Cause.NODES_JOINED, 0, 0, 0, 0),
        (Cause.START_FAILED, 0, 0, 0, 0),
        (Cause.OPERATOR, 0, 0, 0, 0),
    ],
)
def test_each_cause_is_counted_by_itself(
    cause: Cause, preemptions: int, store_failures: int, soon: int, without_progress: int
) -> None:
    assert spent_by(ended(cause)) == Spent(preemptions, store_failures, soon, without_progress)


def test_who_restarts_workers_itself_is_no_preempted_node_when_it_joins_again() -> None:
    uncounted = replace(SETTINGS, max_restarts=None)
    assert spent_by(ended(Cause.NODE_LEFT, settings=uncounted)).preemptions == 0
    assert spent_by(ended(Cause.NODE_LOST, settings=uncounted)).preemptions == 1


@pytest.mark.parametrize(
    ("after_ms", "moved", "soon", "without_progress", "step"),
    [
        (0, Moved(), 4, 4, 100),
        (LONG_MS - 1, Moved(), 4, 4, 100),
        (LONG_MS, Moved(), 0, 4, 100),
        (0, Moved(furthest_step=100), 4, 4, 100),
        (0, Moved(furthest_step=99), 4, 4, 100),
        (0, Moved(furthest_step=101), 0, 0, 101),
        (0, Moved(snapshot_changed=True), 0, 0, 100),
        (0, Moved(furthest_step=7, snapshot_changed=True), 0, 0, 100),
        # By another server's clock, a round may have ended before it began.
        (-5, Moved(), 4, 4, 100),
    ],
)
def test_a_row_of_failures_ends_with_time_or_with_progress(
    after_ms: int, moved: Moved, soon: int, without_progress: int, step: int
) -> None:
    before = Spent(soon=3, without_progress=3, furthest_step=100)
    after = spent_by(ended(after_ms=after_ms, spent=before), moved)
    assert after == Spent(soon=soon, without_progress=without_progress, furthest_step=step)


def test_the_first_step_that_is_ever_said_is_progress_even_if_it_is_0() -> None:
    assert spent_by(ended(), Moved(furthest_step=0)) == Spent(furthest_step=0)


def test_the_first_round_is_no_restart() -> None:
    assert spent_by(ended(restarts=0)) == Spent(soon=1, without_progress=0)


@pytest.mark.parametrize("cause", [Cause.NODE_LOST, Cause.NODES_JOINED, Cause.STORE_HOST])
def test_a_round_that_ends_otherwise_neither_ends_a_row_nor_goes_on_with_it(cause: Cause) -> None:
    after = spent_by(ended(cause, spent=Spent(soon=3, without_progress=2)))
    assert (after.soon, after.without_progress) == (3, 2)
    after = spent_by(ended(cause, spent=Spent(soon=3, without_progress=2)), Moved(furthest_step=1))
    assert (after.soon, after.without_progress) == (0, 0)


def test_what_nodes_say_adds_up_in_any_order() -> None:
    said = (Moved(), Moved(furthest_step=0), Moved(furthest_step=7), Moved(snapshot_changed=True))
    total = Moved()
    for one in (*said, *reversed(said), *said):
        total = further(total, one)
    assert total == Moved(7, True)


# ------------------------------------------------------------------ how long it waits


@pytest.mark.parametrize(
    ("soon", "base_ms", "max_ms", "waits_ms"),
    [
        (0, 1_000, 60_000, 0),
        (1, 1_000, 60_000, 0),
        (2, 1_000, 60_000, 1_000),
        (3, 1_000, 60_000, 2_000),
        (7, 1_000, 60_000, 32_000),
        (8, 1_000, 60_000, 60_000),
        (1_000_000, 1_000, 60_000, 60_000),
        (1_000_000, 1, 2_592_000_000, 2_592_000_000),
        (9, 0, 60_000, 0),
        (2, 5_000, 5_000, 5_000),
    ],
)
def test_a_crash_loop_waits_twice_as_long_each_time(
    soon: int, base_ms: int, max_ms: int, waits_ms: int
) -> None:
    settings = replace(SETTINGS, restart_backoff_ms=base_ms, restart_backoff_max_ms=max_ms)
    assert backoff_ms(ended(spent=Spent(soon=soon), settings=settings)) == waits_ms
    assert backoff_ms(ended(Cause.NODE_LOST, spent=Spent(soon=soon), settings=settings)) == 0


def test_nobody_waits_before_the_first_round() -> None:
    assert backoff_ms(replace(ended(spent=Spent(soon=9)), round=None)) == 0


def test_the_wait_begins_with_the_end_of_the_round_and_stopping_is_part_of_it() -> None:
    job = running("n1", "n2", settings=replace(SETTINGS, max_nodes=2, max_restarts=5))
    job.fail("n1", report())
    job.stopped("n1", "n2")
    failed_ms = job.now_ms
    job.fail("n2", report())
    job.pass_until(failed_ms + 900)
    job.stopped("n1", "n2")
    assert job.reason.startswith(
        "have 2 of 2:2 nodes; backing off 1.0 s before restart 2 of 5: 2 rounds in a row failed "
        "soon; continues in 0.1 s"
    )
    assert job.wake_at_ms == failed_ms + 1_000
    job.pass_until(failed_ms + 999)
    assert job.round.number == 1
    job.pass_until(failed_ms + 1_000)
    assert job.round.number == 2


def test_who_comes_while_it_backs_off_is_seated_with_the_others() -> None:
    job = running("n1", "n2", settings=replace(SETTINGS, max_restarts=5))
    for _ in range(2):
        job.fail("n1", report())
        job.stopped("n1", "n2")
    job.pass_until(job.now_ms + 500)
    job.join("n3")
    job.pass_until(job.now_ms + 500)
    assert job.seated == ["n1", "n2", "n3"]


def test_a_clock_that_was_ahead_does_not_lengthen_the_wait() -> None:
    settings = replace(SETTINGS, min_nodes=1, max_nodes=1, max_restarts=5)
    job = running("n1", settings=settings, now_ms=3_600_000)
    for _ in range(2):
        job.fail("n1", report())
        job.stopped("n1")
    # The server that stored this was an hour ahead of the one that takes over.
    job.now_ms -= 3_600_000
    job.crash()
    job.join("n1", run=job.membership.run, left_round=1)
    assert job.wake_at_ms == job.now_ms + 1_000
    assert "backing off" in job.reason


# ------------------------------------------------------------------ when it is too much


@pytest.mark.parametrize(
    ("cause", "budgets", "spent", "reason"),
    [
        (Cause.NODE_LOST, {}, Spent(preemptions=9), None),
        (Cause.NODE_LOST, {"max_preemptions": 3}, Spent(preemptions=3), None),
        (Cause.NODE_LOST, {"max_preemptions": 3}, Spent(preemptions=4), "preemptions spent: 3 of"),
        (Cause.NODE_LEFT, {"max_preemptions": 0}, Spent(preemptions=1), "preemptions spent: 0 of"),
        (Cause.NODES_JOINED, {"max_preemptions": 0}, Spent(preemptions=1), None),
        (Cause.WORKER_FAILURE, {"max_preemptions": 0}, Spent(preemptions=1), None),
        (Cause.STORE_HOST, {}, Spent(store_failures=9), None),
        (Cause.STORE_HOST, {"max_store_failures": 1}, Spent(store_failures=1), None),
        (Cause.STORE_HOST, {"max_store_failures": 1}, Spent(store_failures=2), "store failures"),
        (Cause.NODE_LOST, {"max_store_failures": 1}, Spent(store_failures=2), None),
        (Cause.WORKER_FAILURE, {}, Spent(without_progress=99), None),
        (Cause.WORKER_FAILURE, {"no_progress_restarts": 3}, Spent(without_progress=2), None),
        (
            Cause.WORKER_FAILURE,
            {"no_progress_restarts": 3},
            Spent(without_progress=3),
            "no progress: none",
        ),
        (Cause.NODE_LOST, {"no_progress_restarts": 3}, Spent(without_progress=3), None),
        (Cause.WORKER_FAILURE, {"restart_on": ("3",)}, Spent(), "not restarted: how it ended"),
        (Cause.NODE_LOST, {"restart_on": ("3",)}, Spent(), None),
        (Cause.STORE_HOST, {"restart_on": ("3",)}, Spent(), None),
    ],
)
def test_a_budget_is_of_its_cause_alone(
    cause: Cause, budgets: dict[str, Any], spent: Spent, reason: str | None
) -> None:
    settings = replace(SETTINGS, **budgets)
    found = exceeded(settings, RoundEnd(cause, "why", 0, broken=True), spent, None)
    assert (found is not None) == (reason is not None)
    if found is not None and reason is not None:
        assert reason in found.reason
        assert f"{cause}: why" in found.reason
        assert found.no_progress == reason.startswith("no progress")


def test_an_end_that_is_not_restarted_fails_the_job_though_restarts_are_left() -> None:
    settings = replace(SETTINGS, max_nodes=2, max_restarts=9, no_restart_on=("3",))
    job = running("n1", "n2", settings=settings)
    # It is listed, but it is not the root cause.
    job.fail("n1", report(rank=0, exit_code=3))
    job.fail(
        "n2",
        report(rank=1, exit_code=1, message="ValueError: x", traceback="T", at_ms=job.now_ms - 1),
    )
    job.stopped("n1", "n2")
    assert (job.membership.ended, job.round.number, job.round.restarts) == (None, 1, 1)
    job.fail("n2", report(rank=1, exit_code=3))
    job.stopped("n1")
    assert job.membership.ended is None
    job.stopped("n2")
    ended = job.membership.ended
    assert ended is not None and ended.failures[0].exit_code == 3
    assert ended.reason == (
        "worker failure: rank 1 (local_rank 0) on n2: exit code 3; not restarted: exit code 3 is "
        "listed in --no-restart-on"
    )
    assert job.reason == ended.reason
    assert job.last(RoundSettled).restarts == 1


def test_only_the_listed_ends_are_restarted_and_a_lost_node_is_no_workers_end() -> None:
    settings = replace(SETTINGS, min_nodes=1, max_restarts=9, restart_on=("137",))
    job = running("n1", "n2", settings=settings)
    job.fail("n1", report(exit_code=None, signal=9))
    job.stopped("n1", "n2")
    job.lost("n2")
    job.stopped("n1")
    assert (job.round.number, job.membership.ended) == (2, None)
    job.fail("n1", report(exit_code=1))
    job.stopped("n1")
    ended = job.membership.ended
    assert ended is not None
    assert ended.reason.endswith("; not restarted: --restart-on does not list exit code 1")


def test_who_makes_no_progress_is_told_how_far_it_came() -> None:
    settings = replace(SETTINGS, no_progress_restarts=1)
    end = RoundEnd(Cause.WORKER_FAILURE, "rank 3 on n2: exit code 1", 0, broken=True)
    found = [
        exceeded(settings, end, Spent(without_progress=1, furthest_step=step), None)
        for step in (None, 0, 120)
    ]
    last = "; the last worker failure: rank 3 on n2: exit code 1"
    assert [one and one.reason for one in found] == [
        f"no progress: none of 1 restart in a row moved it on{last}",
        f"no progress: none of 1 restart in a row got it beyond step 0{last}",
        f"no progress: none of 1 restart in a row got it beyond step 120{last}",
    ]


def test_a_run_that_follows_begins_with_nothing_spent() -> None:
    settings = replace(SETTINGS, min_nodes=1, max_nodes=1, max_preemptions=0)
    job = running("n1", settings=settings)
    job.lost("n1")
    assert job.membership.ended is not None
    assert (job.membership.spent.preemptions, job.membership.ended.no_progress) == (1, False)
    job.join("n1")
    assert (job.membership.run, job.membership.spent) == ("run-2", Spent())


# ------------------------------------------------------------------ in any order


@pytest.mark.slow
@SETTLED
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["fail", "store", "a node comes or goes"]),
            st.integers(0, 3),
            st.booleans(),
            st.sampled_from([1, 500, 61_000]),
        ),
        max_size=25,
    ),
    st.sampled_from([None, 0, 2]),
    st.sampled_from([None, 1]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([0, 10, 1_000]),
)
def test_whatever_rounds_end_by_no_budget_is_overdrawn(
    ends: list[tuple[str, int, bool, int]],
    preemptions: int | None,
    store_failures: int | None,
    without_progress: int,
    backoff: int,
) -> None:
    """Every order of ends, compared with a separate count: the job fails exactly when it must."""
    settings = Settings(
        *(1, 2, 100),
        last_call_timeout_ms=0,
        restart_backoff_ms=backoff,
        max_preemptions=preemptions,
        max_store_failures=store_failures,
        no_progress_restarts=without_progress,
    )
    job = Job(settings, strict=False)
    job.join("n1")
    lost = failed = row = failures = 0
    furthest = -1
    for what, step, snapshot, ran_ms in ends:
        kind = what
        job.pass_until(job.now_ms + ran_ms)
        if not job.round.live:
            assert job.wake_at_ms is not None
            job.pass_until(job.wake_at_ms)
        assert job.round.live
        if kind == "fail":
            job.fail("n1", report())
        elif kind == "store":
            job.report_store_host("n1")
        elif "n2" in job.seated:
            job.lost("n2")
            kind = "lose"
        else:
            job.join("n2")
            kind = "newcomer"
        if job.round.live:
            # A node that was lost repeatedly is not admitted at once, and must not slip in later.
            job.leave("n2")
            continue
        job.stopped(*(n for n in job.seated if n in job.state.seats and n != "n1"))
        job.stopped("n1", moved=Moved(step, snapshot))
        is_further = snapshot or step > furthest
        furthest = max(furthest, step)
        row = 0 if is_further else row + (kind == "fail" and failures > 0)
        failures += kind == "fail"
        lost += kind == "lose"
        failed += kind == "store"
        over = (
            (kind == "lose" and preemptions is not None and lost > preemptions)
            or (kind == "store" and store_failures is not None and failed > store_failures)
            or (kind == "fail" and without_progress > 0 and row >= without_progress)
        )
        assert (job.membership.ended is not None) == over
        assert job.membership.spent.furthest_step == furthest
        if over:
            return
