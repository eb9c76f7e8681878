"""A server that knows less than its nodes adopts the round they report, and stops no worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from builders import RUN, SETTINGS, Job, join, offer, report

from rdzv.core.commands import Fail, Join, Leave, MarkLost, Resume, Succeed
from rdzv.core.events import (
    NodeAdopted,
    RoundAdopted,
    RoundCompleted,
    RoundEnded,
    RunBegan,
    RunEnded,
)
from rdzv.core.life.failures import restarts_that_count
from rdzv.core.life.restoring import CLAIMS_QUIET_MS
from rdzv.core.model import (
    MAX_RESTART_AGES,
    Assignment,
    Away,
    Cause,
    JobState,
    KeptWorker,
    LeaveCause,
    Membership,
    RecoveryReport,
    Result,
    Settings,
    SnapshotMark,
    Spent,
    Tally,
    is_placeholder,
    placeholder,
)
from rdzv.core.rounds import recovery_reports
from rdzv.core.rounds.ranks import STOP_MARGIN_MS
from rdzv.errors import DeniedError, RendezvousClosedError, UnknownNodeError
from rdzv.structs import replace

FORMER = "former-run"
SIZES = (2, 1, 3)
"""Workers of n0, n1 and n2."""


def recovery(group_rank: int, round_: int = 7, restarts: int = 0, **given: Any) -> RecoveryReport:
    """A node's report; arguments that are no fields of it describe its assignment."""
    whole: dict[str, Any] = {
        "settings": SETTINGS,
        "offer": offer(f"n{group_rank}", local_world_size=SIZES[group_rank]),
    }
    whole |= {name: given.pop(name) for name in whole if name in given}
    assignment = Assignment(
        rdzv_id="job",
        run=FORMER,
        round=round_,
        group_rank=group_rank,
        group_world_size=len(SIZES),
        rank_first=sum(SIZES[:group_rank]),
        world_size=sum(SIZES),
        role_rank_first=sum(SIZES[:group_rank]),
        role_world_size=sum(SIZES),
        master_addr="n0.net",
        master_port=29501,
        use_agent_store=True,
        restarts=restarts,
        max_restarts=3,
    )
    return RecoveryReport(replace(assignment, **given), **whole)


def resume(group_rank: int, run: str = FORMER, incarnation: int = 1, **given: Any) -> Resume:
    made = recovery(group_rank, **given)
    return Resume(f"n{group_rank}", incarnation, run, made.assignment.round, made)


def rejoin(group_rank: int, run: str = FORMER, **given: Any) -> Join:
    made = recovery(group_rank, **given)
    wanted = join(f"n{group_rank}", run=run, left_round=made.assignment.round, local_world_size=1)
    return replace(wanted, recovery=made)


def adopted(**given: Any) -> Job:
    """A server without memory to which all three nodes of round 7 have reported it."""
    job = Job()
    for group_rank in range(3):
        job.do(resume(group_rank, **given))
    return job


class Unread(dict[str, Away]):
    """Away nodes that nobody may look through."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("each node that comes back looks at all others")


def test_a_return_to_a_round_that_was_stored_looks_at_no_other_node():
    """After a restart of the server thousands come back."""
    job = Job()
    for name in ("n1", "n2", "n3"):
        job.do(join(name))
    job.crash()
    assert job.state.away
    state = replace(job.state, away=Unread(job.state.away))
    assert not recovery_reports.adoptable(state, job.membership.run, job.round.number)


def test_a_round_that_is_not_known_goes_on_as_its_nodes_report_it():
    job = Job()
    events = job.do(resume(1))
    assert [type(event) for event in events[:-1]] == [RunBegan, RoundAdopted]
    assert events[-1] == NodeAdopted("n1", round=7, group_rank=1)
    assert job.job_state is JobState.RUNNING
    assert job.seated == [placeholder(0), "n1", placeholder(2)]
    assert [p.rank_first for p in job.round.participants] == [0, 2, 3]
    job.do(resume(2))
    job.do(resume(0))
    assert job.seated == ["n0", "n1", "n2"]
    assert job.membership.run == FORMER
    assert (job.round.number, job.membership.next_round) == (7, 8)
    assert job.round.live
    assert not job.state.away
    assert not any(isinstance(event, RoundEnded | RoundCompleted) for event in job.events)


def test_a_round_is_adopted_with_the_snapshot_that_its_workers_have_loaded():
    round_ = adopted(snapshot=SnapshotMark(4, 50, "a"), snapshot_loads=2, origin=3, lineage=5).round
    assert round_.snapshot == SnapshotMark(4, 50, "a")
    assert (round_.snapshot_loads, round_.origin, round_.lineage) == (2, 3, 5)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0), (2, 0, 1)])
def test_the_order_of_the_reports_makes_no_difference(order: tuple[int, ...]):
    job = Job()
    for group_rank in order:
        job.do(resume(group_rank))
    assert job.round.participants == adopted().round.participants


def test_an_adopted_round_is_like_any_other():
    job = adopted()
    job.fail("n1", report(rank=2))
    assert job.round.end is not None
    job.stopped("n0", "n1", "n2")
    assert job.job_state is JobState.FAILED, "max_restarts is 0"
    assert job.last(RunEnded).ended.failures[0].node_id == "n1"


def test_who_was_kept_is_known_from_the_reports():
    settings, told = replace(SETTINGS, max_restarts=3), {"source": 1, "resume_step": 70}
    job = Job(settings)
    job.do(resume(1, settings=settings, **told))
    job.do(resume(0, settings=settings, kept=(0, 1), **told))
    job.do(resume(2, settings=settings, kept=(2,), **told))
    assert [p.kept for p in job.round.participants] == [(0, 1), (), (2,)]
    assert (job.round.source, job.round.resume_step) == (1, 70)
    # So here, too, a round that fails without a step is followed by new processes.
    job.fail("n0")
    for node, size in enumerate(SIZES):
        job.stopped(f"n{node}", local_world_size=size, kept=[KeptWorker(0, 70)])
    assert job.round.number == 8
    assert [p.kept for p in job.round.participants] == [(), (), ()]


def test_restarts_spent_stay_spent():
    spent = Settings(2, 3, max_restarts=2)
    job = Job(spent)
    for group_rank in range(3):
        job.do(resume(group_rank, restarts=2, settings=spent))
    assert len(job.membership.restarts) == 2
    job.fail("n0")
    job.stopped("n0", "n1", "n2")
    assert job.membership.ended is not None
    assert job.membership.ended.result is Result.FAILED


SPENT = Spent(preemptions=2, store_failures=1, soon=3, without_progress=2, furthest_step=900)


def remembered(tally: Tally | None, restarts: int = 0, **settings: Any) -> Job:
    """A server without memory whose nodes report the budgets that they were sent."""
    asked = Settings(2, 3, **settings)
    job = Job(asked)
    job.now_ms = 100_000
    for group_rank in range(3):
        job.do(resume(group_rank, restarts=restarts, settings=asked, tally=tally))
    return job


def test_what_else_was_spent_stays_spent():
    job = remembered(Tally(SPENT), max_restarts=9, max_preemptions=2)
    assert job.membership.spent == SPENT
    # The third preemption is one too many.
    job.leave("n1", left_round=7)
    job.stopped("n0", "n2")
    assert job.membership.ended is not None
    assert "preemptions spent: 2 of 2" in job.membership.ended.reason


def test_a_restart_in_vain_is_one_more_of_those_before_the_server_had_forgotten():
    job = remembered(Tally(SPENT), restarts=3, max_restarts=9, no_progress_restarts=3)
    job.fail("n0")
    job.stopped("n0", "n1", "n2")
    assert job.membership.ended is not None
    assert job.membership.ended.no_progress
    assert "none of 3 restarts in a row got it beyond step 900" in job.membership.ended.reason


def test_restarts_that_the_window_has_forgotten_stay_forgotten():
    tally = Tally(restarts_ms=(50_000, 99_000))
    job = remembered(tally, restarts=5, max_restarts=9, restart_window_ms=60_000)
    assert len(job.membership.restarts) == 5
    assert restarts_that_count(job.membership, job.now_ms) == 2
    assert restarts_that_count(job.membership, job.now_ms + 10_000) == 1
    assert restarts_that_count(job.membership, job.now_ms + 59_000) == 0


def test_restarts_of_which_nobody_tells_when_count_as_if_spent_now():
    job = remembered(None, restarts=2, max_restarts=9, restart_window_ms=60_000)
    assert restarts_that_count(job.membership, job.now_ms + 59_999) == 2


def test_restarts_beyond_what_a_tally_holds_are_as_old_as_its_oldest():
    times = tuple(range(70_000, 70_000 + MAX_RESTART_AGES))
    job = remembered(Tally(restarts_ms=times), restarts=100, restart_window_ms=60_000)
    assert restarts_that_count(job.membership, job.now_ms + 29_999) == 100


def test_a_backup_knows_what_its_nodes_do_not():
    """A report never lowers a known count; rounds in a row are those of the later round."""
    known = Membership("job-7", RUN, 1, SETTINGS, 0, spent=Spent(5, 0, 0, 0, 1_000), restarts=(10,))
    assert recovery_reports.spent_known(known, Tally(SPENT)) == Spent(5, 1, 3, 2, 1_000)
    assert recovery_reports.spent_known(known, None) == known.spent
    assert recovery_reports.restarts_known(known, 1, Tally(restarts_ms=(95,)), 100) == (10,)
    assert recovery_reports.restarts_known(known, 2, Tally(restarts_ms=(10, 95)), 100) == (10, 95)


def test_nodes_are_told_what_a_server_without_memory_would_need():
    windowed = Settings(1, 2, max_restarts=99, restart_window_ms=60_000)
    nothing = Membership("job-7", RUN, 1, windowed, 0)
    assert recovery_reports.tally_of(nothing, 100_000) is None
    spent = replace(nothing, restarts=(10_000, 50_000, 99_000))
    assert recovery_reports.tally_of(spent, 100_000) == Tally(restarts_ms=(50_000, 99_000))
    many = replace(nothing, restarts=tuple(range(50_000, 50_100)))
    found = recovery_reports.tally_of(many, 100_000)
    assert found is not None
    assert len(found.restarts_ms) == MAX_RESTART_AGES
    assert found.restarts_ms[-1] == 50_099
    # Without a window all count, so their number is enough.
    assert recovery_reports.tally_of(replace(spent, settings=SETTINGS), 100_000) is None
    assert recovery_reports.tally_of(
        replace(spent, settings=SETTINGS, spent=SPENT), 100_000
    ) == Tally(SPENT)


def test_who_is_not_heard_within_the_grace_is_lost_and_the_others_form_again():
    job = Job()
    job.do(resume(0))
    job.do(resume(2))
    job.pass_until(29_999)
    assert job.round.live
    job.pass_until(30_000)
    assert job.round.end is not None
    assert job.round.end.cause is Cause.NODE_LOST
    assert job.round.end.reason.endswith("not heard within 30 s after this server learned of it"), (
        job.round.end.reason
    )
    job.stopped("n0", "n2")
    assert job.round.number == 8
    assert job.seated == ["n0", "n2"]
    assert not job.membership.restarts


def test_no_place_is_given_up_while_reports_come_in():
    job = Job()
    job.do(resume(0))
    job.do(resume(1), at_ms=28_000)
    quiet_ms = 28_000 + CLAIMS_QUIET_MS
    job.pass_until(quiet_ms - 1)
    assert job.round.live
    job.pass_until(quiet_ms)
    assert job.round.end is not None


def test_a_node_reports_one_place():
    job = Job()
    job.do(resume(0))
    assert job.do(replace(resume(1), node_id="n0")) == ()
    job.do(MarkLost("n0", 1, "it was not heard"))
    job.do(replace(resume(1), node_id="n0"))
    assert job.round.participants[1].node_id == placeholder(1)


def test_nobody_is_started_beside_a_node_that_has_not_been_heard():
    """Two have stopped and join again; the third may still run workers of the round."""
    job = Job()
    job.do(rejoin(0))
    job.do(rejoin(1))
    assert job.round.number == 7
    assert job.round.end is not None
    job.pass_until(20_000)
    assert job.round.number == 7
    job.do(resume(2))
    assert job.state.seats.keys() == {"n2"}
    job.stopped("n2")
    assert job.round.number == 8
    assert sorted(job.seated) == ["n0", "n1", "n2"]


def test_a_failure_that_happened_meanwhile_is_charged():
    patient = Settings(2, 3, max_restarts=3)
    job = Job(patient)
    job.do(resume(0, settings=patient))
    job.do(resume(1, settings=patient))
    job.do(Fail("n1", 1, FORMER, 7, (report(rank=2),)))
    job.do(resume(2, settings=patient))
    job.stopped("n0", "n1", "n2")
    assert job.round.number == 8
    assert len(job.membership.restarts) == 1


def test_a_success_that_happened_meanwhile_counts():
    job = adopted()
    for group_rank in range(3):
        job.do(Succeed(f"n{group_rank}", 1, FORMER, 7))
    assert job.job_state is JobState.SUCCEEDED


def test_a_node_that_leaves_is_adopted_and_leaves():
    job = adopted()
    job.do(Leave("n1", 1, FORMER, LeaveCause.SIGNAL, "SIGTERM", left_round=7))
    job.stopped("n0", "n2")
    assert job.seated == ["n0", "n2"]


def test_a_crash_in_the_middle_loses_no_report():
    job = Job()
    job.do(resume(0))
    job.crash()
    assert job.seated == ["n0", placeholder(1), placeholder(2)]
    for group_rank in range(3):
        job.do(resume(group_rank))
    assert job.seated == ["n0", "n1", "n2"]
    assert not job.state.away


def test_a_restored_backup_continues_above_the_highest_round_heard():
    job = Job()
    job.join("n0", "n1", "n2")
    assert job.round.number == 0
    run = job.membership.run
    job.crash()
    job.do(resume(0, run))
    assert job.round.number == 7
    assert job.membership.next_round == 8
    assert job.membership.run == run


def test_a_round_may_be_adopted_and_followed_by_the_next_in_one_step():
    """The only node of a later round has stopped; the server still holds seats of an older one."""
    settings = Settings(1, 3)
    job = Job(settings)
    job.join("n1", "n2", "n3")
    run = job.membership.run
    job.pass_until(1_000)
    job.crash()
    alone = {"group_world_size": 1, "world_size": SIZES[0], "settings": settings}
    job.do(replace(rejoin(0, run, **alone), settings=settings))
    assert job.round.number == 8
    assert job.seated == ["n0"]


def test_the_highest_round_wins():
    """A spare that was left out of the last rounds reports first."""
    job = Job()
    job.do(replace(rejoin(1, round_=3), node_id="n9"))
    assert job.round.number == 3
    for group_rank in range(3):
        job.do(resume(group_rank))
    assert job.round.number == 7
    assert job.round.live
    assert job.seated == ["n0", "n1", "n2"]
    assert job.state.waiting.keys() == {"n9"}


def test_who_has_left_a_later_round_starts_beside_no_worker_of_an_earlier_one():
    """After its grace a server without memory has formed a round; then a node returns late."""
    settings = Settings(1, 3, last_call_timeout_ms=0)
    job = Job(settings)
    job.join("n9", run=FORMER)
    job.pass_until(30_000)
    assert (job.seated, job.round.number) == (["n9"], 0)
    alone = {"group_world_size": 1, "world_size": SIZES[0], "settings": settings}
    job.do(replace(rejoin(0, **alone), settings=settings))
    assert (job.seated, job.round.number) == (["n9"], 0)
    job.pass_until(60_000)
    assert job.round.end is not None, "there is room for the newcomer"
    assert job.seated == ["n9"], "its workers may not be gone yet"
    job.stopped("n9")
    assert (job.seated, job.round.number) == (["n9", "n0"], 8)


def superseded() -> Job:
    """After its grace a server without memory has formed a round; then a later one turns up."""
    settings = Settings(1, 3, last_call_timeout_ms=0)
    job = Job(settings)
    job.join("n9", run=FORMER)
    job.pass_until(30_000)
    assert (job.seated, job.round.number) == (["n9"], 0)
    job.do(resume(0, group_world_size=1, world_size=SIZES[0], settings=settings))
    assert (job.seated, job.round.number) == (["n0"], 7)
    job.join("n5")
    job.pass_until(job.now_ms + 10_000)
    assert job.round.end is not None, "there is room for the newcomer"
    job.stopped("n0")
    return job


def test_no_round_begins_beside_workers_of_one_that_a_later_one_has_followed():
    """The nodes that run them were told to stop, which takes a while."""
    job = superseded()
    assert job.round.number == 7
    assert "waiting for n9 to stop" in job.reason
    job.stopped("n9", round_=0)
    assert (job.round.number, sorted(job.seated)) == (8, ["n0", "n5", "n9"])


def test_who_has_no_seat_any_more_is_not_waited_for_without_end():
    job = superseded()
    until_ms = job.state.superseded["n9"].until_ms
    assert until_ms == 30_000 + 30_000 + STOP_MARGIN_MS
    job.pass_until(until_ms - 1)
    assert job.round.number == 7
    job.pass_until(until_ms)
    assert (job.round.number, job.seated) == (8, ["n0", "n5"])
    assert not job.state.superseded


def test_a_late_word_from_before_the_line_says_nothing_of_its_workers():
    job = superseded()
    job.join("n9", run=FORMER)
    assert job.round.number == 7
    job.join("n9", incarnation=2, run=FORMER)
    assert job.round.number == 8, "a new instance has no workers of the former one"


def test_a_later_run_follows_one_whose_nodes_are_gone():
    job = Job()
    job.join("n0", "n1", "n2")
    old = job.membership.run
    job.crash()
    job.do(resume(0))
    assert job.membership.run == FORMER
    assert [earlier.run for earlier in job.membership.earlier] == [old]


def test_a_run_that_is_not_known_has_no_place_beside_one_that_lives():
    job = Job()
    job.join("n7", "n8", "n9")
    with pytest.raises(RendezvousClosedError, match="is not known here"):
        job.do(resume(0))
    assert job.seated == ["n7", "n8", "n9"]


def test_a_fresh_node_that_was_faster_waits_for_the_next_round_of_the_adopted_run():
    job = Job()
    job.join("n8")
    job.do(resume(0))
    assert job.membership.run == FORMER
    assert job.state.waiting.keys() == {"n8"}
    job.do(resume(1))
    job.do(resume(2))
    job.pass_until(60_000)
    assert job.round.number == 7, "all seats are taken"


def test_who_waits_in_an_adopted_run_may_still_call_it_by_the_name_of_its_own():
    job = Job()
    job.join("n8", "n9", run="own")
    job.do(resume(0))
    job.join("n8", run="own", local_world_size=5)
    assert job.state.waiting["n8"].offer.local_world_size == 5
    for node_id, incarnation in (("n8", 2), ("n7", 1)):
        with pytest.raises(RendezvousClosedError, match="is not known here"):
            job.join(node_id, incarnation=incarnation, run="own")
    job.do(Leave("n9", 1, "own", LeaveCause.SIGNAL, "bye"))
    assert job.state.waiting.keys() == {"n8"}


def test_who_waits_hears_of_a_run_that_has_ended_as_ever():
    job = Job()
    job.join("n8", run="own")
    job.leave("n8")
    job.join("n8")
    assert job.membership.run == "run-2"
    with pytest.raises(RendezvousClosedError, match="all nodes left"):
        job.join("n8", run="own")


def test_a_fresh_node_with_other_settings_is_told_that_the_run_is_alive():
    job = Job()
    job.join("n8", settings=Settings(1, 9))
    job.do(resume(0))
    assert job.membership.run == FORMER
    assert not job.state.waiting
    assert job.membership.earlier[-1].ended.retry_sensible


def test_a_run_that_is_adopted_keeps_its_secret():
    job = Job()
    job.do(replace(resume(0), secret="aa"))
    with pytest.raises(DeniedError):
        job.do(resume(1))
    job.do(replace(resume(1), secret="aa"))
    assert job.seated == ["n0", "n1", placeholder(2)]


def test_an_ended_run_is_not_raised_from_the_dead():
    job = adopted()
    for group_rank in range(3):
        job.do(Succeed(f"n{group_rank}", 1, FORMER, 7))
    with pytest.raises(RendezvousClosedError):
        job.do(resume(0))
    job.join("n5", "n6", "n7")
    assert job.membership.run == f"run-{job.membership.run_number}"
    with pytest.raises(RendezvousClosedError):
        job.do(resume(0, round_=99))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank_first": 0},
        {"world_size": 2},
        {"group_world_size": 9, "world_size": 5},
    ],
)
def test_a_report_of_an_impossible_round_changes_nothing(wrong: dict[str, Any]):
    job = Job()
    with pytest.raises(UnknownNodeError):
        job.do(resume(1, **wrong))
    assert not job.membership.run


@pytest.mark.parametrize(
    "wrong", [{"master_port": 1}, {"master_addr": "elsewhere"}, {"world_size": 7}]
)
def test_a_report_that_does_not_fit_gets_no_seat(wrong: dict[str, Any]):
    job = Job()
    job.do(resume(0))
    job.do(resume(1, **wrong))
    assert "n1" not in job.state.seats


def test_a_round_that_only_a_leaver_has_reported_may_still_be_reported():
    """The nodes that left it reported no more than its number."""
    job = Job()
    job.join("n9", run=FORMER, left_round=7)
    assert job.membership.next_round == 8
    for group_rank in range(3):
        job.do(resume(group_rank))
    assert job.round.number == 7
    assert job.membership.next_round == 8
    assert job.round.live


@pytest.mark.parametrize(("nodes", "scaled"), [(3, None), (5, (2, 5)), (1, (1, 3))])
def test_a_round_outside_the_launched_bounds_was_scaled(
    nodes: int, scaled: tuple[int, int] | None
) -> None:
    """The server does not know which bounds an operator has set, only that some were set."""
    job = Job()
    job.do(resume(0, group_world_size=nodes, world_size=2 * nodes))
    assert job.membership.scaled == scaled
    assert len(job.round.participants) == nodes


def test_a_run_that_others_may_still_run_forms_no_round_before_they_had_time_to_say_so():
    """A spare is the first to report to a server without memory."""
    job = Job(Settings(1, 3, last_call_timeout_ms=0))
    job.join("n9", run=FORMER)
    job.pass_until(29_999)
    assert job.membership.round is None
    job.pass_until(30_000)
    assert job.round.number == 0


def test_who_runs_it_after_all_goes_on_while_the_spare_waits():
    job = Job(Settings(1, 3, last_call_timeout_ms=0))
    job.join("n9", run=FORMER)
    job.pass_until(5_000)
    for group_rank in range(3):
        job.do(resume(group_rank))
    job.pass_until(100_000)
    assert job.round.number == 7
    assert job.round.live


def test_a_fresh_job_waits_for_nobody():
    job = Job(Settings(1, 3, last_call_timeout_ms=0))
    job.join("n9")
    assert job.round.number == 0


def test_a_place_is_reported_once():
    job = Job()
    job.do(resume(0))
    job.do(replace(resume(0), node_id="n9"))
    assert job.seated[0] == "n0"
    assert "n9" not in job.state.seats


def test_a_place_that_was_given_up_stays_so():
    job = Job()
    job.do(resume(0))
    job.do(resume(1))
    job.pass_until(30_000)
    job.do(resume(2))
    assert job.round.gone == (placeholder(2),)
    assert "n2" not in job.state.seats


def test_a_round_of_another_size_has_other_participants():
    job = Job()
    job.do(resume(0))
    smaller = replace(job.round, participants=job.round.participants[:-1])
    assert not recovery_reports.same_participants(job.round, smaller)


def test_placeholders_have_names_that_no_node_has():
    assert is_placeholder(placeholder(0))
    assert not is_placeholder("n0")


def test_the_first_run_of_a_job_that_nobody_claims_is_as_ever():
    job = Job()
    job.join("n0", "n1", "n2")
    assert job.membership.run == RUN
