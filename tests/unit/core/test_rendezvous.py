"""The guarantees, one test for each sentence; tests/scenarios show the rules themselves."""

from __future__ import annotations

import pytest

from rdzv.core import events, model
from rdzv.core.commands import MarkLost, Restart, Resume, Succeed, Tick
from rdzv.core.invariants import violations
from rdzv.core.life.forming import STORE_BACKOFF_MAX_MS, STORE_BACKOFF_MS
from rdzv.core.life.leaving import MAX_DEPARTURES, unheard
from rdzv.core.life.restoring import restore
from rdzv.core.life.runs import MAX_EARLIER_RUNS, ended_run
from rdzv.core.rendezvous import step
from rdzv.core.rounds.ranks import STOP_MARGIN_MS
from rdzv.errors import NodeSupersededError, RendezvousClosedError, SettingsMismatchError
from rdzv.structs import replace
from tests.support.builders import SETTINGS, Job, join, report, running

# ------------------------------------------------------------------ 1. barrier


def test_a_round_completes_only_when_at_least_min_nodes_are_seated() -> None:
    job = Job(replace(SETTINGS, min_nodes=3))
    job.join("n1", "n2")
    job.pass_until(60_000)
    assert job.job_state is model.JobState.JOINING
    job.join("n3")
    assert job.seated == ["n1", "n2", "n3"]


def test_a_node_that_is_away_does_not_count_as_there() -> None:
    job = Job(SETTINGS)
    job.join("n1", "n2")
    job.away("n2")
    job.pass_until(60_000)
    assert job.job_state is model.JobState.JOINING


def test_never_more_than_max_nodes_are_seated() -> None:
    job = Job(SETTINGS)
    job.join(*(f"n{i}" for i in range(1, 10)))
    assert job.seated == ["n1", "n2", "n3"]
    assert len(job.state.waiting) == 6
    job.lost("n1", "n2")
    job.stopped("n3")
    assert len(job.seated) == 3


# ------------------------------------------------------------------ 2. exclusivity


def test_no_round_completes_while_a_participant_of_the_last_has_not_stopped() -> None:
    job = running("n1", "n2", "n3", settings=replace(SETTINGS, max_restarts=1))
    job.join("n4", "n5")
    job.fail("n1")
    job.stopped("n1", "n2")
    job.pass_until(job.now_ms + 49_000)
    assert job.round.number == 0
    job.stopped("n3")
    assert job.round.number == 1


def test_only_a_join_that_names_the_round_confirms_that_its_workers_are_gone() -> None:
    job = running("n1", "n2")
    job.lost("n2")
    job.join("n1")
    job.stopped("n1", round_=7)
    assert "n1" in job.state.seats
    job.stopped("n1", round_=0)
    assert "n1" in job.state.waiting


def test_who_is_seated_unheard_keeps_its_seat_until_it_confirms() -> None:
    """A node that never received its round confirms it once it learns that it has ended."""
    job = running("n1", "n2", settings=replace(SETTINGS, max_nodes=2))
    job.lost("n1")
    job.join("n2")
    assert "n2" in job.state.seats
    job.stopped("n2", run=job.membership.run)
    assert "n2" in job.state.waiting


@pytest.mark.parametrize("failure_first", [True, False])
def test_who_was_cut_off_and_killed_its_workers_spends_no_restart(failure_first: bool) -> None:
    """Though the others' workers have failed because of it, before or after it is known."""
    job = running("n1", "n2", settings=replace(SETTINGS, max_restarts=0))
    if failure_first:
        job.fail("n1")
        job.stopped("n1")
    cut_off = join("n2", settings=job.settings, run=job.membership.run, left_round=0)
    job.do(replace(cut_off, fenced=True))
    if not failure_first:
        broken = join("n1", settings=job.settings, run=job.membership.run, left_round=0)
        job.do(replace(broken, failures=(report(),)))
    end = next(event for event in job.events if isinstance(event, events.RoundSettled))
    assert end.cause is model.Cause.NODE_LEFT
    assert end.reason == "n2: it was cut off, and has killed its workers (--fence-after)"
    assert not job.membership.restarts
    assert job.membership.ended is None


# ------------------------------------------------------------------ 3. consistency


def test_a_round_completes_once() -> None:
    job = running("n1", "n2", "n3")
    job.join("n1", "n2", "n3", "n4")
    job.pass_until(3_600_000)
    assert sum(isinstance(event, events.RoundCompleted) for event in job.events) == 1


def test_ranks_are_exactly_0_to_world_size_also_with_different_sizes() -> None:
    job = Job(SETTINGS)
    for node_id, size in (("n1", 3), ("n2", 1), ("n3", 4)):
        job.join(node_id, local_world_size=size)
    ranks = [
        rank
        for p in job.round.participants
        for rank in range(p.rank_first, p.rank_first + p.offer.local_world_size)
    ]
    assert ranks == list(range(job.round.world_size)) == list(range(8))


# ------------------------------------------------------------------ 4. fault tolerance


@pytest.mark.parametrize("lost", ["n1", "n2", "n3"])
def test_with_min_nodes_live_a_round_completes_within_bounded_time(lost: str) -> None:
    job = running("n1", "n2", "n3")
    job.lost(lost)
    others = [n for n in ("n1", "n2", "n3") if n != lost]
    job.stopped(*others)
    assert job.job_state is model.JobState.RUNNING
    assert job.seated == others


def test_a_node_that_is_away_is_not_seated_when_the_others_are() -> None:
    job = Job(replace(SETTINGS, max_nodes=4))
    job.join("n1", "n2", "n3")
    job.away("n2", for_ms=60_000)
    job.pass_until(SETTINGS.last_call_timeout_ms)
    assert job.seated == ["n1", "n3"]
    job.back("n2")
    job.pass_until(job.now_ms + 1_000)
    job.stopped("n1", "n3")
    assert job.seated == ["n1", "n3", "n2"]


def test_whoever_still_stops_is_no_victim_of_the_join_timeout() -> None:
    job = running("n1", "n2", settings=replace(SETTINGS, join_timeout_ms=10_000))
    job.lost("n2")
    job.pass_until(job.now_ms + 20_000)
    assert job.membership.ended is None
    job.join("n3")
    job.stopped("n1")
    job.pass_until(job.now_ms + 1_000)
    assert job.seated == ["n1", "n3"]


def test_the_backoff_after_failed_store_hosts_is_bounded() -> None:
    job = running("n1", "n2", settings=replace(SETTINGS, max_nodes=2), strict=False)
    for _ in range(40):
        ended_ms = job.now_ms
        job.report_store_host("n1")
        job.stopped("n1", "n2")
        assert job.wake_at_ms is not None
        assert job.wake_at_ms - ended_ms <= STORE_BACKOFF_MAX_MS
        job.pass_until(job.wake_at_ms)


def test_the_clock_of_another_server_does_not_lengthen_the_backoff() -> None:
    """The round was ended by a server whose clock was an hour ahead of the one that took over."""
    job = running("n1", "n2", settings=replace(SETTINGS, max_nodes=2), strict=False)
    job.pass_until(3_700_000)
    job.report_store_host("n1")
    job.now_ms -= 3_600_000
    job.crash()
    job.stopped("n1", "n2")
    assert job.wake_at_ms is not None
    assert job.wake_at_ms - job.now_ms <= STORE_BACKOFF_MS


def test_a_participant_that_hangs_holds_the_others_up_for_a_bounded_time() -> None:
    job = running("n1", "n2", "n3", settings=replace(SETTINGS, max_restarts=1))
    job.fail("n1")
    job.stopped("n1", "n2")
    longest_ms = 30_000 + STOP_MARGIN_MS
    job.pass_until(job.now_ms + longest_ms)
    assert job.seated == ["n1", "n2"]


def test_many_can_be_given_up_in_one_step() -> None:
    """As many as are remembered, and more: the driver must not see a broken invariant."""
    names = [f"n{i:03}" for i in range(MAX_DEPARTURES + 10)]
    settings = model.Settings(1, len(names), last_call_timeout_ms=0)
    job = Job(settings, strict=False)
    job.join("n000")
    job.join(*names[1:])
    job.stopped("n000")
    job.pass_until(job.now_ms + 2_000)
    assert len(job.seated) == len(names)
    job.away(*names[1:])
    job.fail("n000")
    job.pass_until(job.now_ms + model.RECONNECT_GRACE_MS)
    job.stopped("n000")
    assert job.seated == ["n000"]


# ------------------------------------------------------------------ 5. durability


def test_round_numbers_never_go_back_also_from_run_to_run() -> None:
    job = running("n1", "n2", settings=replace(SETTINGS, max_nodes=2))
    job.succeed("n1", "n2")
    job.crash()
    job.join("n1", "n2", incarnation=2)
    assert (job.membership.run, job.round.number) == ("run-2", 1)


def test_a_closed_run_stays_closed() -> None:
    job = running("n1", "n2")
    job.succeed("n1", "n2")
    for _ in range(2):
        with pytest.raises(RendezvousClosedError):
            job.stopped("n1")
        with pytest.raises(RendezvousClosedError):
            job.resume("n1")
        assert not job.succeed("n1")
        job.crash()
    assert job.job_state is model.JobState.SUCCEEDED


def test_a_spent_restart_stays_spent() -> None:
    job = running("n1", "n2", settings=replace(SETTINGS, max_nodes=2, max_restarts=1))
    job.fail("n1")
    job.stopped("n1", "n2")
    job.crash()
    job.back("n1", "n2")
    job.fail("n2")
    job.stopped("n1", "n2")
    assert job.job_state is model.JobState.FAILED


def test_an_unsettled_charge_survives_a_crash() -> None:
    job = running("n1", "n2", settings=replace(SETTINGS, max_nodes=2))
    job.fail("n1", report(message="ValueError: loss is nan", traceback="..."))
    job.crash()
    job.back("n1", "n2")
    job.stopped("n1", "n2")
    ended = job.membership.ended
    assert ended is not None and ended.result is model.Result.FAILED
    assert ended.failures[0].message == "ValueError: loss is nan"


def test_what_is_remembered_is_bounded() -> None:
    settings = model.Settings(1, 1)
    job = Job(settings, strict=False)
    for _ in range(MAX_EARLIER_RUNS + 9):
        job.join("n1")
        job.succeed("n1")
    assert len(job.membership.earlier) == MAX_EARLIER_RUNS
    waiting = Job(SETTINGS, strict=False)
    waiting.join("n0")
    for _ in range(MAX_DEPARTURES + 9):
        waiting.join("n1")
        waiting.lost("n1")
    assert len(waiting.membership.departures) == MAX_DEPARTURES


def test_whoever_carries_an_earlier_run_hears_how_it_ended() -> None:
    job = Job(model.Settings(1, 1))
    job.join("n1")
    job.succeed("n1")
    job.join("n1")
    job.fail("n1")
    job.stopped("n1")
    results = [ended.result for run in ("run-1", "run-2") if (ended := ended_run(job.state, run))]
    assert results == [model.Result.SUCCEEDED, model.Result.FAILED]
    stranger = ended_run(job.state, "another")
    assert stranger is not None and stranger.result is model.Result.STOPPED
    assert ended_run(job.state, "") is None


# ------------------------------------------------------------------ 6. fencing


def test_what_an_old_instance_says_changes_nothing() -> None:
    job = running("n1", "n2")
    job.do(Resume("n1", 2, "run-1", 0))
    before = job.state
    job.fail("n1")
    job.succeed("n1")
    job.leave("n1")
    job.report_stuck("n1", 4711)
    job.report_store_host("n1")
    job.away("n1")
    job.lost("n1")
    assert job.state == before
    for said in (join("n1", 1, settings=job.settings), Resume("n1", 1, "run-1", 0)):
        with pytest.raises(NodeSupersededError):
            job.do(said)


def test_what_is_said_about_another_run_or_round_changes_nothing() -> None:
    job = running("n1", "n2")
    before = job.state
    job.do(Succeed("n1", 1, "another", 0))
    job.do(Succeed("n1", 1, "run-1", 7))
    assert job.state == before


# ------------------------------------------------------------------ 7. invisible control plane


def test_a_crash_of_the_server_disturbs_no_running_worker() -> None:
    job = running("n1", "n2")
    before = job.round
    for _ in range(3):
        job.crash()
        job.pass_until(job.now_ms + 29_000)
    job.back("n1", "n2")
    job.pass_until(job.now_ms + 3_600_000)
    assert job.round == before


def test_an_agent_may_be_replaced_and_the_server_restarted() -> None:
    job = running("n1", "n2")
    job.do(Resume("n1", 5, "run-1", 0))
    job.crash()
    job.do(Resume("n1", 5, "run-1", 0))
    assert job.state.incarnation("n1") == 5
    assert not job.state.away.keys() & {"n1"}
    assert job.round.live


# ------------------------------------------------------------------ settings and newcomers


def test_a_mismatch_names_every_difference_with_both_values() -> None:
    job = running("n1", "n2")
    other = replace(SETTINGS, max_nodes=8, scale_up=model.ScaleUp.ON_RESTART)
    with pytest.raises(SettingsMismatchError) as refused:
        job.join("n3", settings=other)
    assert "max_nodes is 8 here and 3 in the job" in str(refused.value)
    assert "scale_up is on-restart here and eager in the job" in str(refused.value)


def test_a_refused_command_has_changed_nothing() -> None:
    job = running("n1", "n2")
    before = job.state
    with pytest.raises(SettingsMismatchError):
        job.join("n2", incarnation=2, settings=replace(SETTINGS, max_nodes=9))
    assert job.state == before


def test_calm_without_a_change_of_membership_the_round_number_does_not_move() -> None:
    job = running("n1", "n2")
    job.join("n1", "n2")
    job.away("n1")
    job.back("n1")
    job.pass_until(86_400_000)
    assert job.round.number == 0 and job.round.live


def test_a_spare_that_flaps_never_disturbs_a_full_round() -> None:
    job = running("n1", "n2", "n3")
    for incarnation in range(2, 20):
        job.join("s1", incarnation=incarnation)
        job.pass_until(job.now_ms + 60_000)
    assert job.round.number == 0 and job.round.live


def test_a_leaving_node_that_is_lost_is_said_to_have_left() -> None:
    job = running("n1", "n2")
    job.leave("n2")
    job.lost("n2")
    assert not any(isinstance(event, events.NodeLost) for event in job.events)
    assert job.membership.departures[-1].reason == "its agent received SIGTERM"


def test_a_stuck_node_can_be_lost_leave_or_be_replaced() -> None:
    for way in ("lost", "leave", "join"):
        job = running("n1", "n2", "n3", settings=replace(SETTINGS, max_restarts=1))
        job.fail("n2")
        job.report_stuck("n2", 4711)
        assert isinstance(job.last(events.NodeStuck), events.NodeStuck)
        job.stopped("n1", "n3")
        if way == "lost":
            job.lost("n2")
        elif way == "leave":
            job.leave("n2", left_round=0)
        else:
            job.join("n2", incarnation=2)
        assert not job.state.stuck
        assert job.job_state is model.JobState.RUNNING or way == "join"


def test_join_timeout_starts_anew_after_a_crash_but_not_with_every_join() -> None:
    job = Job(replace(SETTINGS, join_timeout_ms=60_000))
    job.join("n1")
    job.pass_until(30_000)
    job.lost("n1")
    job.join("n2")
    job.pass_until(59_999)
    assert job.membership.ended is None
    job.crash()
    job.pass_until(119_998)
    assert job.membership.ended is None
    job.pass_until(120_000)
    assert job.job_state is model.JobState.FAILED


# ------------------------------------------------------------------ what the driver relies on


def test_the_same_state_command_and_time_give_the_same_transition() -> None:
    job = running("n1", "n2")
    command = join("n3", settings=job.settings)
    assert step(job.state, command, 9_000) == step(job.state, command, 9_000)


def test_what_changes_nothing_durable_leaves_the_membership_itself() -> None:
    """The driver writes if the durable half is another object."""
    job = running("n1", "n2")
    before = job.membership
    job.away("n1")
    job.back("n1")
    job.do(Tick())
    assert job.membership is before


def test_a_success_that_was_reported_outlives_the_server() -> None:
    job = running("n1", "n2")
    job.succeed("n1")
    job.crash()
    assert job.state.seats["n1"].succeeded
    job.lost("n1")
    assert job.membership.ended is None and job.round.live
    job.succeed("n2")
    assert job.membership.ended and job.membership.ended.result is model.Result.SUCCEEDED


def test_who_was_given_up_while_it_succeeded_ends_the_run_when_it_is_heard() -> None:
    """All workers have exited 0 while one node was cut off: none of them runs again."""
    job = running("n1", "n2")
    job.succeed("n1")
    job.lost("n2")
    job.stopped("n1")
    assert not job.round.live
    assert unheard(job.state) == ("n2",)
    late = Succeed("n2", 7, job.membership.run, 0)
    assert events.NodeSucceeded("n2", 0) in job.do(late)
    assert not unheard(job.state)
    assert job.membership.ended and job.membership.ended.result is model.Result.SUCCEEDED
    assert not job.membership.restarts


def test_a_success_that_crosses_the_end_of_its_round_counts() -> None:
    """A newcomer is admitted as the last workers exit: there is nothing left to do."""
    job = running("n1", "n2", settings=replace(SETTINGS, max_nodes=3))
    job.do(Restart(job.membership.run, 0, "an operator"))
    job.succeed("n1", "n2")
    assert job.membership.ended and job.membership.ended.result is model.Result.SUCCEEDED


@pytest.mark.parametrize(
    "said",
    [
        Succeed("n2", 1, "run-1", 0),
        Succeed("n3", 9, "run-1", 0),
        Succeed("n2", 9, "run-0", 0),
        Succeed("n2", 9, "run-1", 1),
    ],
    ids=["a former instance", "no participant", "another run", "another round"],
)
def test_a_late_success_counts_for_its_participant_and_round_alone(said: Succeed) -> None:
    job = Job(replace(SETTINGS, max_nodes=2))
    job.join("n1")
    job.do(join("n2", 5, settings=job.settings))
    job.do(Succeed("n1", 1, "run-1", 0))
    job.do(MarkLost("n2", 5, "lease expired"))
    before = job.membership
    job.do(said)
    assert job.membership is before


def test_a_vacant_job_stays_vacant() -> None:
    job = Job()
    job.do(Tick())
    job.lost("n1")
    job.crash()
    assert not job.membership.run and job.wake_at_ms is None


def test_a_refused_first_join_leaves_no_run() -> None:
    job = Job()
    job.join("n1")
    kinds = [type(event) for event in job.events]
    assert kinds == [events.RunBegan, events.NodeJoined]


# ------------------------------------------------------------------ the invariants see what breaks


def broken(state: model.State, membership: model.Membership) -> list[str]:
    return violations(state, replace(state, membership=membership))


def test_the_invariants_see_every_broken_promise() -> None:
    job = running("n1", "n2", "n3")
    state, membership, round_ = job.state, job.membership, job.round
    assert broken(state, replace(membership, next_round=0)) == [
        "durability: round numbers went back"
    ]
    assert broken(state, replace(membership, round=None)) == [
        "consistency: a completed round changed or was forgotten"
    ]
    fewer = replace(round_, participants=round_.participants[:1])
    assert broken(state, replace(membership, round=fewer))
    assert "durability: run uid" in broken(state, replace(membership, run="another"))
    spent = replace(state, membership=replace(membership, restarts=(1,)))
    assert broken(spent, membership) == ["durability: a spent restart was forgotten"]
    later = replace(membership, restarts=(2,))
    assert broken(spent, later) == ["durability: a spent restart was forgotten"]
    assert violations(state, replace(state, hasty=1)) == [
        "presence: the nodes whose grace a round's end shortens are miscounted"
    ]
    twice = replace(state, waiting={"n1": next(iter(job_with("n1").state.waiting.values()))})
    assert "presence: a node has two places at once" in violations(state, twice)
    unseated = replace(state, seats={"n1": state.seats["n1"]})
    assert violations(state, unseated) == [
        "presence: a participant of the running round holds no seat"
    ]
    beside = replace(round_, number=1)
    overtaken = replace(membership, round=beside, next_round=2)
    assert broken(state, overtaken) == [
        "exclusivity: a round completed while others of the last had not stopped"
    ]
    stranger = replace(state, seats={**state.seats, "n9": model.Seat(1, 0)})
    assert "presence: a node holds a seat in a round in which it does not take part" in violations(
        state, stranger
    )


def test_of_a_large_job_the_invariants_count_the_nodes() -> None:
    job = Job(model.Settings(1, 600, last_call_timeout_ms=0), strict=False)
    job.join("n0")
    job.join(*(f"n{number}" for number in range(1, 600)))
    job.stopped("n0")
    job.pass_until(job.now_ms + 2_000)
    assert len(job.seated) == 600
    unseated = replace(job.state, seats={"n1": job.state.seats["n1"]})
    assert violations(job.state, unseated) == [
        "presence: a participant of the running round holds no seat"
    ]


def job_with(*node_ids: str) -> Job:
    job = Job()
    job.join(*node_ids)
    return job


def test_restore_gives_nobody_up_and_invents_nobody() -> None:
    job = running("n1", "n2", "n3")
    job.join("n4")
    job.lost("n1")
    job.stopped("n2")
    restored = restore(job.membership, model.Tuning(), 1_000_000)
    assert restored.seats.keys() == {"n2", "n3"}
    assert not restored.waiting
    assert all(away.firm for away in restored.away.values())


def test_who_has_stopped_its_workers_has_broken_no_round() -> None:
    job = Job()
    job.join("n0", "n1", "n2")
    number = job.round.number
    job.stopped("n0")
    assert job.round.number == number
    assert job.round.end is not None
    assert not job.round.end.broken


def test_the_last_failures_are_those_of_the_last_round_that_had_some() -> None:
    job = Job(replace(SETTINGS, max_restarts=3))
    job.join("n0", "n1", "n2")
    job.fail("n0")
    job.stopped("n0", "n1", "n2")
    found = job.membership.last_failures
    assert [failure.node_id for failure in found] == ["n0"]
    job.stopped("n0", "n1", "n2")
    assert job.membership.last_failures == found
