"""There is always a reason: a job that does not run says why, with numbers and names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rdzv.core.commands import Decline, Place, Submit, Withdraw
from rdzv.core.evidence.stragglers import Straggler
from rdzv.core.model import (
    JobSpec,
    JobState,
    LeaveCause,
    Membership,
    NodeState,
    ScaleUp,
    Settings,
    Spent,
    State,
)
from rdzv.core.reason import Reason, ReasonItem
from rdzv.ctl import live
from rdzv.structs import replace
from rdzv.view.answers import WholeSnapshot
from rdzv.view.job_status import node_views, view, waiting_reason
from tests.support.builders import SETTINGS, Job, report, running

RESTARTS = replace(SETTINGS, max_restarts=3)


def states(state: State, now_ms: int) -> dict[str, NodeState]:
    return {node.node_id: node.state for node in node_views(state, now_ms)}


# ------------------------------------------------------------------ what a job waits for


def one_of_two() -> Job:
    job = Job()
    job.join("n1")
    return job


def at_last_call() -> Job:
    job = Job()
    job.join("n1", "n2")
    return job


def one_lost() -> Job:
    job = running("n1", "n2", settings=replace(RESTARTS, max_nodes=2))
    job.lost("n2", reason="lease expired")
    job.stopped("n1")
    job.pass_until(job.now_ms + 12_000)
    return job


def all_lost() -> Job:
    job = running("n1", "n2")
    job.lost("n1", "n2")
    return job


def stopping() -> Job:
    job = running("n1", "n2", "n3", settings=RESTARTS)
    job.fail("n2", report(rank=1, message="ValueError: loss is nan"))
    job.stopped("n1")
    return job


def one_leaves() -> Job:
    job = running("n1", "n2", "n3", settings=RESTARTS)
    job.leave("n2")
    return job


def one_stuck() -> Job:
    job = running("n1", "n2", settings=RESTARTS)
    job.fail("n2")
    job.report_stuck("n2", 4711)
    job.stopped("n1")
    return job


def backing_off() -> Job:
    job = running("n1", "n2", settings=RESTARTS)
    for _ in range(3):
        job.report_store_host("n1")
        job.stopped("n1", "n2")
        if job.membership.store_failures < 3:
            job.pass_until(job.now_ms + 30_000)
    return job


def gathering() -> Job:
    job = one_lost()
    job = running("n1", "n2", settings=RESTARTS)
    job.lost("n2")
    job.stopped("n1")
    job.join("n4")
    return job


def survivor_away() -> Job:
    job = running("n1", "n2", "n3", settings=RESTARTS)
    job.fail("n1")
    job.stopped("n1", "n2")
    job.away("n2", firm=True)
    job.stopped("n3")
    return job


@pytest.mark.parametrize(
    ("story", "state", "told"),
    [
        (one_of_two, JobState.JOINING, ["waiting for 1 more node", "have 1 of 2:3", "gives up in"]),
        (at_last_call, JobState.JOINING, ["have 2 of 2:3 nodes; last call ends in 5.0 s"]),
        (
            one_lost,
            JobState.JOINING,
            ["waiting for 1 more node", "have 1 of 2:2", "n2 (lost): lease expired"],
        ),
        (
            all_lost,
            JobState.JOINING,
            ["waiting for 2 more nodes", "0 of 2:3", "n1 (lost)", "n2 (lost)"],
        ),
        (
            stopping,
            JobState.STOPPING,
            ["round 0 ended", "rank 1", "ValueError: loss is nan", "waiting for n2, n3 to stop"],
        ),
        (one_leaves, JobState.STOPPING, ["n2", "SIGTERM", "waiting for n1, n2, n3 to stop"]),
        (
            one_stuck,
            JobState.JOINING,
            ["have 1 of 2:3", "n2 (stopping): its workers survive SIGKILL"],
        ),
        (backing_off, JobState.JOINING, ["store host failed 3 times in a row; continues in 2.0 s"]),
        (gathering, JobState.JOINING, ["have 2 of 2:3", "gathering newcomers; continues in 1.0 s"]),
        (survivor_away, JobState.JOINING, ["have 2 of 2:3", "waiting for n2 to come back"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_job_that_does_not_run_says_what_it_waits_for(
    story: Callable[[], Job], state: JobState, told: list[str]
) -> None:
    job = story()
    shown = view(job.state, job.now_ms)
    assert shown.state is state
    for words in told:
        assert words in str(shown.reason)
    assert "\n" not in shown.reason.headline and len(shown.reason.headline) < 80


def test_no_fact_stands_twice() -> None:
    for story in (one_of_two, one_lost, all_lost, stopping, one_leaves, one_stuck, survivor_away):
        job = story()
        text = str(view(job.state, job.now_ms).reason)
        for fact in ("lease expired", "SIGTERM", "loss is nan", "SIGKILL", "its stream ended"):
            assert text.count(fact) <= (2 if story is all_lost else 1), text


def test_times_that_are_left_are_never_negative_however_late_one_asks() -> None:
    for story in (one_of_two, at_last_call, one_lost, survivor_away, gathering, backing_off):
        job = story()
        reason = view(job.state, job.now_ms + 86_400_000).reason
        left = [reason.left_ms, *(item.left_ms for item in reason.items)]
        assert {ms for ms in left if ms is not None} <= {0}


def test_a_reason_goes_on_while_nothing_happens() -> None:
    reason = view(survivor_away().state, 0).reason
    why, item = reason.items
    assert item.left_ms is not None and item.left_ms > 2_000
    later = live.later(reason, 2_000)
    assert later.items == (why, replace(item, left_ms=item.left_ms - 2_000))
    assert live.later(reason, 86_400_000).items[1].left_ms == 0
    assert later != reason and later.without_times() == reason.without_times()


def test_every_age_goes_on_while_nothing_happens() -> None:
    straggler = Straggler(3, 5_000, late_ms=40.0)
    status = replace(
        view(one_of_two().state, 0),
        stragglers=(straggler,),
        snapshot=WholeSnapshot(0, 40, 2, 7_000, lost_steps=3),
    )
    later = live.later(status, 60_000)
    assert later.stragglers == (replace(straggler, age_ms=65_000),)
    assert later.snapshot == WholeSnapshot(0, 40, 2, 67_000, lost_steps=3)
    assert later.state_age_ms == status.state_age_ms + 60_000


def test_of_many_items_a_line_has_the_first_and_their_number() -> None:
    items = tuple(ReasonItem("lease expired", f"n{i}", "lost") for i in range(10))
    text = str(Reason("waiting for 10 more nodes", items=items))
    assert text.endswith("; n7 (lost): lease expired; and 2 more")
    assert Reason(items=(*items[:1], *items[:2])).by_node == {
        "n0": "lease expired; lease expired",
        "n1": "lease expired",
    }


# ------------------------------------------------------------------ why a node has no workers


def test_a_spare_says_that_all_seats_are_taken() -> None:
    job = running("n1", "n2", "n3")
    job.join("n4")
    assert waiting_reason(job.state, "n4", job.now_ms) == "spare: all 3 seats are taken"
    assert states(job.state, job.now_ms)["n4"] is NodeState.SPARE


def test_a_newcomer_says_why_it_is_not_let_in() -> None:
    job = running("n1", "n2", settings=replace(SETTINGS, max_nodes=4))
    job.join("n3")
    assert "newcomers are admitted within 1.0 s" in waiting_reason(job.state, "n3", job.now_ms)
    job.away("n1")
    assert "when the nodes that are away are back" in waiting_reason(job.state, "n3", job.now_ms)
    job.back("n1")
    job.succeed("n1")
    assert "participants have succeeded" in waiting_reason(job.state, "n3", job.now_ms)


def test_a_newcomer_under_on_restart_says_so() -> None:
    job = running("n1", "n2", settings=replace(SETTINGS, scale_up=ScaleUp.ON_RESTART))
    job.join("n3")
    assert "when the round ends for another reason" in waiting_reason(job.state, "n3", job.now_ms)


def test_a_flapping_node_says_until_when_it_is_held_back() -> None:
    job = running("n1", "n2", settings=Settings(1, 2))
    for _ in range(2):
        job.lost("n2")
        job.stopped("n1")
        job.join("n2")
        if not job.round.live:
            job.stopped("n1")
    reason = waiting_reason(job.state, "n2", job.now_ms)
    assert "lost more than once recently" in reason and "1 min 0 s" in reason


def test_who_has_workers_or_is_not_there_has_no_reason() -> None:
    job = running("n1", "n2")
    assert waiting_reason(job.state, "n1", job.now_ms) == ""
    assert waiting_reason(job.state, "n9", job.now_ms) == ""


# ------------------------------------------------------------------ the nodes of a job


def test_every_node_state_is_shown() -> None:
    job = running("n1", "n2", "n3", settings=replace(RESTARTS, min_nodes=1))
    job.join("n4")
    job.succeed("n1")
    job.away("n2")
    assert states(job.state, job.now_ms) == {
        "n1": NodeState.SUCCEEDED,
        "n2": NodeState.AWAY,
        "n3": NodeState.SEATED,
        "n4": NodeState.SPARE,
    }
    job.leave("n4")
    job.lost("n2")
    job.stopped("n1")
    assert states(job.state, job.now_ms) == {
        "n3": NodeState.STOPPING,
        "n1": NodeState.WAITING,
        "n4": NodeState.LEFT,
        "n2": NodeState.LOST,
    }


def test_who_is_not_there_says_why() -> None:
    """Those that wait or stop with all others do so for the job's own reason."""
    shown = (NodeState.SEATED, NodeState.WAITING, NodeState.STOPPING)
    for story, named in (
        (one_lost, {"n2"}),
        (stopping, set()),
        (one_leaves, {"n2"}),
        (one_stuck, {"n2"}),
        (survivor_away, {"n2"}),
    ):
        job = story()
        whys = view(job.state, job.now_ms).reason.by_node
        assert {who for who in whys if who} == named
        nodes = node_views(job.state, job.now_ms)
        assert {node.node_id for node in nodes if node.state not in shown} <= named


# ------------------------------------------------------------------ how a run ended


@pytest.mark.parametrize(
    ("cause", "state", "told"),
    [
        (LeaveCause.SIGNAL, JobState.STOPPED, "all nodes left"),
        (LeaveCause.START_FAILED, JobState.FAILED, "no node could start its workers"),
        (LeaveCause.TIMEOUT, JobState.FAILED, "no such luck"),
    ],
)
def test_a_run_that_everyone_left_says_why(cause: LeaveCause, state: JobState, told: str) -> None:
    job = Job()
    job.join("n1")
    job.leave("n1", cause=cause, reason="no such luck")
    shown = view(job.state, job.now_ms)
    assert shown.state is state
    assert told in shown.reason.headline and "no such luck" in shown.reason.headline


def test_a_failed_run_shows_its_root_cause_and_what_was_spent() -> None:
    job = running("n1", "n2", settings=replace(SETTINGS, max_nodes=2))
    job.fail("n1", report(message="ValueError: loss is nan", traceback="..."))
    job.stopped("n1", "n2")
    shown = view(job.state, job.now_ms + 3_000)
    assert shown.state is JobState.FAILED
    assert "ValueError: loss is nan" in shown.reason.headline
    assert "0 of 0" in shown.reason.headline and shown.reason.items == ()
    assert shown.last_failure is not None and shown.last_failure.age_ms == 3_000
    assert shown.last_failure.root_cause.message == "ValueError: loss is nan"
    assert {node.state for node in shown.nodes} == {NodeState.LEFT}


def test_a_job_that_has_succeeded_shows_its_last_round() -> None:
    job = running("n1", "n2")
    job.succeed("n1", "n2")
    shown = view(job.state, job.now_ms)
    assert (shown.state, shown.round, shown.world_size) == (JobState.SUCCEEDED, 0, 2)
    assert {node.state for node in shown.nodes} == {NodeState.SUCCEEDED}


@pytest.mark.slow
def test_a_thousand_nodes_are_not_all_named() -> None:
    settings = Settings(1_000, 1_000, max_restarts=1)
    job = Job(settings, strict=False)
    job.join(*(f"n{i:04}" for i in range(1_000)))
    job.fail("n0007")
    assert "n0007 and 992 more" in job.reason
    assert len(job.reason) < 500


def test_budgets_show_what_is_spent_and_how_much_there_is() -> None:
    settings = replace(
        SETTINGS,
        max_preemptions=11,
        max_store_failures=12,
        no_progress_restarts=13,
        restart_window_ms=14,
    )
    spent = Spent(preemptions=1, store_failures=2, soon=3, without_progress=4, furthest_step=5)
    membership = Membership("job-7", "run-1", 1, settings, 0, spent=spent)
    shown = view(State(membership), 0).budgets
    assert (shown.preemptions, shown.max_preemptions) == (1, 11)
    assert (shown.store_failures, shown.max_store_failures) == (2, 12)
    assert (shown.restarts_without_progress, shown.no_progress_restarts) == (4, 13)
    assert (shown.furthest_step, shown.restart_window_ms) == (5, 14)


# ------------------------------------------------------------------ for how long


def test_a_job_is_queued_for_as_long_as_it_has_had_no_nodes() -> None:
    """It keeps its place in the queue; but it has not waited there all the time."""
    job = Job()
    job.do(Submit("run-1", SETTINGS, JobSpec(("train.py",)), "ada"))

    def age_after(delay_ms: int) -> int:
        job.pass_until(job.now_ms + delay_ms)
        shown = view(job.state, job.now_ms)
        assert shown.state is JobState.QUEUED
        return shown.state_age_ms

    assert age_after(7_000) == 7_000
    job.do(Place("run-1", ("n1", "n2")))
    job.pass_until(job.now_ms + 10_000)
    job.do(Withdraw("run-1", ("n1",), "drained"))
    job.pass_until(job.now_ms + 1_000)
    job.do(Decline("n2", "run-1", "no such account"))
    assert age_after(3_000) == 3_000
    # And once more, after a round.
    job.do(Place("run-1", ("n3", "n4")))
    job.join("n3", "n4", run="run-1")
    job.lost("n4")
    job.stopped("n3")
    job.pass_until(job.now_ms + 20_000)
    job.do(Withdraw("run-1", ("n3",), "drained"))
    assert age_after(4_000) == 4_000
