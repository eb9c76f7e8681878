"""Which parked workers are kept, and which state is the newest, as a table."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from rdzv.core.commands import Restart
from rdzv.core.events import RoundCompleted, RoundEnded, RoundSettled, WorkerFailed
from rdzv.core.invariants import violations
from rdzv.core.kept_ranks import WHY_NEW, NotKept, WhyNew, keep
from rdzv.core.model import (
    Cause,
    Failure,
    KeptWorker,
    Moved,
    Offer,
    Participant,
    Round,
    RoundEnd,
    WaitingNode,
)
from rdzv.core.root_cause import MAX_FAILURES, charged_failures, keep_earliest
from rdzv.core.rounds.ranks import assign_seats
from rdzv.structs import replace
from tests.support.builders import SETTINGS, Job, join, odd_replica, report, running

SIZE = 2
"""Workers of each node: n1 has RANK 0 and 1, n2 has 2 and 3."""


def parked(text: str) -> tuple[KeptWorker, ...]:
    """Read `0:7 1:7torn 2 3:7@1/4 4:6-7@1/4`.

    LOCAL_RANK, sealed steps from the oldest on, whether the state is torn, and which part of a
    sharded state it is.
    """
    found = []
    for said in text.split():
        word, _, part = said.partition("@")
        shard, _, shards = (part or "0/1").partition("/")
        rank, _, steps = word.removesuffix("torn").partition(":")
        oldest, _, step = steps.rpartition("-")
        found.append(
            KeptWorker(
                int(rank),
                int(step) if step else None,
                word.endswith("torn"),
                int(shard),
                int(shards),
                int(oldest) if oldest else None,
            )
        )
    return tuple(found)


def waits(text: str, left_round: int | None = 4, size: int = SIZE) -> WaitingNode:
    offer = Offer("h", local_world_size=size)
    return WaitingNode(1, offer, 0, left_round=left_round, kept=parked(text))


def failure(node_id: str, local_rank: int, at_ms: int = 0, *, suspect: bool = False) -> Failure:
    code = None if suspect else 1
    return Failure(local_rank, 0, 9, code, None, "m", "", at_ms, suspect, node_id)


BEFORE = assign_seats((), {n: waits("") for n in ("n1", "n2")}, 2)


def ended(
    cause: Cause = Cause.NODE_LEFT,
    failures: Iterable[Failure] = (),
    *,
    keeps: bool = True,
    kept: str = "",
    resume_step: int | None = None,
    gone: tuple[str, ...] = (),
    succeeded: tuple[str, ...] = (),
    broken: bool = True,
    fruitless: bool = False,
) -> Round:
    """Return round 4 of n1 and n2, and how it has ended."""
    end = RoundEnd(cause, "why", 9, broken, tuple(failures), settled=True, keep=keeps)
    participants = tuple(
        replace(p, kept=tuple(map(int, kept.split())) if p.node_id == "n1" else ()) for p in BEFORE
    )
    round_ = Round(4, participants, "h", 1, True, 0, 5, gone=gone, succeeded=succeeded, end=end)
    source = None if resume_step is None else 0
    return replace(round_, source=source, resume_step=resume_step, fruitless=fruitless)


def decide(prior: Round | None, joins: dict[str, WaitingNode]) -> tuple[Round, tuple[NotKept, ...]]:
    prior_places = prior.participants if prior is not None else ()
    return keep(prior, Round(5, assign_seats(prior_places, joins, 9), "h", 1, True, 0, 9), joins)


def kept_ranks(round_: Round) -> list[int]:
    return [p.rank_first + rank for p in round_.participants for rank in p.kept]


FAILED = (Cause.WORKER_FAILURE, (failure("n2", 1),))
ODD = replace(odd_replica(3), local_rank=1, node_id="n2")


@pytest.mark.parametrize(
    ("story", "prior", "n1", "n2", "kept", "source", "new"),
    [
        ("nobody offers anything", ended(), "", "", [], None, {}),
        ("all are where they were", ended(), "0:7 1:7", "0:7 1:7", [0, 1, 2, 3], (0, 7), {}),
        ("the furthest heals", ended(), "0:7 1:8", "0:8 1:7", [0, 1, 2, 3], (1, 8), {}),
        (
            "a torn state is never a source",
            ended(),
            "0:8torn 1:7torn",
            "0:7 1:7",
            [0, 1, 2, 3],
            (2, 7),
            {},
        ),
        (
            "the failed one is new, whether it is offered or not",
            ended(*FAILED),
            "0:7 1:7",
            "0:7 1:7",
            [0, 1, 2],
            (0, 7),
            {WhyNew.FAILED: (3,)},
        ),
        (
            "one that died while it was parked is new",
            ended(*FAILED),
            "1:7",
            "0:7",
            [1, 2],
            (1, 7),
            {WhyNew.NOT_OFFERED: (0,), WhyNew.FAILED: (3,)},
        ),
        (
            "one step behind is healed, two are not in lock-step",
            ended(),
            "0:7 1:6",
            "0:5 1",
            [0, 1],
            (0, 7),
            {WhyNew.OUT_OF_STEP: (2, 3)},
        ),
        (
            "a torn one two steps ahead is not in lock-step either",
            ended(),
            "0:9torn 1:8torn",
            "0:7 1:7",
            [1, 2, 3],
            (2, 7),
            {WhyNew.OUT_OF_STEP: (0,)},
        ),
        ("no step sealed, none begun", ended(), "0 1:0", "0 1", [0, 1, 2, 3], None, {}),
        ("the first step is sealed", ended(), "0 1:1", "0torn 1", [0, 1, 2, 3], (1, 1), {}),
        (
            "the first step is half done, and sealed nowhere",
            ended(),
            "0 1",
            "0torn 1",
            [],
            None,
            {WhyNew.TORN: (0, 1, 2, 3)},
        ),
        (
            "no whole state is left",
            ended(),
            "0:7torn 1:7torn",
            "0:7torn 1",
            [],
            None,
            {WhyNew.TORN: (0, 1, 2, 3)},
        ),
        (
            "an operator wants new processes",
            ended(Cause.OPERATOR, keeps=False),
            "0:7 1:7",
            "0:7",
            [],
            None,
            {WhyNew.NOT_OFFERED: (3,), WhyNew.NOBODY: (0, 1, 2)},
        ),
        (
            "kept workers have failed without a step",
            ended(*FAILED, kept="0", resume_step=7),
            "0:7 1:7torn",
            "0:7",
            [],
            None,
            {WhyNew.FAILED: (3,), WhyNew.NO_STEP: (0, 1, 2)},
        ),
        (
            "kept workers without any step have failed without a step",
            ended(*FAILED, kept="0"),
            "0 1",
            "0",
            [],
            None,
            {WhyNew.FAILED: (3,), WhyNew.NO_STEP: (0, 1, 2)},
        ),
        (
            "kept workers have gone back before an odd replica's steps",
            ended(Cause.WORKER_FAILURE, (ODD,), kept="0", resume_step=7),
            "0:6 1:6torn",
            "0:6",
            [0, 1, 2],
            (0, 6),
            {WhyNew.FAILED: (3,)},
        ),
        (
            "kept workers have sealed a step, and failed",
            ended(*FAILED, kept="0", resume_step=7),
            "0:8 1:7torn",
            "0:7",
            [0, 1, 2],
            (0, 8),
            {WhyNew.FAILED: (3,)},
        ),
        (
            "new workers have failed without a step",
            ended(*FAILED),
            "0 1",
            "0",
            [0, 1, 2],
            None,
            {WhyNew.FAILED: (3,)},
        ),
        (
            "kept workers were cut short before a step by a lost node",
            ended(Cause.NODE_LOST, kept="0", resume_step=7),
            "0:7 1:7",
            "",
            [0, 1],
            (0, 7),
            {WhyNew.NOT_OFFERED: (2, 3)},
        ),
        (
            "suspects alone: the earliest is charged",
            ended(
                Cause.WORKER_FAILURE,
                (failure("n2", 0, 8, suspect=True), failure("n1", 1, 3, suspect=True)),
            ),
            "0:7 1:7",
            "0:7 1:7",
            [0, 2, 3],
            (0, 7),
            {WhyNew.CHARGED: (1,)},
        ),
        (
            "a suspect beside a failure is innocent",
            ended(Cause.WORKER_FAILURE, (failure("n1", 0, 1, suspect=True), failure("n2", 1, 900))),
            "0:7 1:7",
            "0:7",
            [0, 1, 2],
            (0, 7),
            {WhyNew.FAILED: (3,)},
        ),
        (
            "a suspect beside a lost node is innocent",
            ended(Cause.NODE_LOST, (failure("n1", 0, suspect=True),), gone=("n2",)),
            "0:7 1:7",
            "",
            [0, 1],
            (0, 7),
            {WhyNew.NOT_OFFERED: (2, 3)},
        ),
        (
            "a suspect beside workers that survive SIGKILL is innocent",
            ended(Cause.WORKER_FAILURE, (failure("n1", 0, suspect=True),), gone=("n2",)),
            "0:7 1:7",
            "",
            [0, 1],
            (0, 7),
            {WhyNew.NOT_OFFERED: (2, 3)},
        ),
        (
            "a node that was done and has gone excuses no suspect",
            ended(
                Cause.WORKER_FAILURE,
                (failure("n1", 0, suspect=True),),
                gone=("n2",),
                succeeded=("n2",),
            ),
            "0:7 1:7",
            "",
            [1],
            (1, 7),
            {WhyNew.NOT_OFFERED: (2, 3), WhyNew.CHARGED: (0,)},
        ),
    ],
)
def test_who_is_kept(
    story: str,
    prior: Round,
    n1: str,
    n2: str,
    kept: list[int],
    source: tuple[int, int] | None,
    new: dict[WhyNew, tuple[int, ...]],
) -> None:
    decided, not_kept = decide(prior, {"n1": waits(n1), "n2": waits(n2)})
    assert kept_ranks(decided) == kept, story
    assert (decided.source, decided.resume_step) == (source or (None, None)), story
    assert {one.why: one.ranks for one in not_kept} == new, story
    assert all(WHY_NEW[one.why] for one in not_kept)


LOST = {WhyNew.SHARD_LOST: (0, 1, 2, 3)}


@pytest.mark.parametrize(
    ("story", "n1", "n2", "kept", "source", "new"),
    [
        ("all stay", "0:7@0/4 1:7@1/4", "0:7@2/4 1:7@3/4", [0, 1, 2, 3], (0, 7), {}),
        (
            "one a step ahead can go back",
            "0:6-7@0/4 1:6@1/4",
            "0:6@2/4 1:6-7@3/4",
            [0, 1, 2, 3],
            (1, 6),
            {},
        ),
        ("one a step ahead cannot go back", "0:7@0/4 1:6@1/4", "0:6@2/4 1:6@3/4", [], None, LOST),
        ("nobody goes back two steps", "0:5-7@0/4 1:5@1/4", "0:5@2/4 1:5@3/4", [], None, LOST),
        (
            "one is gone, and its part",
            "0:7@0/4 1:7@1/4",
            "0:7@2/4",
            [],
            None,
            {WhyNew.NOT_OFFERED: (3,), WhyNew.SHARD_LOST: (0, 1, 2)},
        ),
        ("one is torn, and its part", "0:7@0/4 1:7@1/4", "0:7@2/4 1:7torn@3/4", [], None, LOST),
        ("one holds all of another", "0:7@0/4 1:7@1/4", "0:7@2/4 1:7", [], None, LOST),
        ("no step was sealed", "0@0/4 1@1/4", "0@2/4 1@3/4", [0, 1, 2, 3], None, {}),
        (
            "each part is held twice, and one holder is gone",
            "0:7@0/2 1:7@1/2",
            "0:7@0/2",
            [0, 1, 2],
            (0, 7),
            {WhyNew.NOT_OFFERED: (3,)},
        ),
        (
            "each part is held twice, once at the step ahead",
            "0:7@0/2 1:8@1/2",
            "0:8@0/2 1:8torn@1/2",
            [0, 1, 2, 3],
            (1, 8),
            {},
        ),
    ],
)
def test_a_sharded_state_is_kept_if_every_part_has_a_holder(
    story: str,
    n1: str,
    n2: str,
    kept: list[int],
    source: tuple[int, int] | None,
    new: dict[WhyNew, tuple[int, ...]],
) -> None:
    decided, not_kept = decide(ended(), {"n1": waits(n1), "n2": waits(n2)})
    assert kept_ranks(decided) == kept, story
    assert (decided.source, decided.resume_step) == (source or (None, None)), story
    assert {one.why: one.ranks for one in not_kept} == new, story


def test_a_sharded_state_is_kept_by_another_number_of_workers() -> None:
    """They divide it anew, unless a part is lost."""
    whole = waits("0:7@0/2 1:7@1/2")
    for joins in ({"n1": whole}, {"n1": whole, "n2": waits(""), "n3": waits("")}):
        decided, _ = decide(ended(), joins)
        assert (kept_ranks(decided), decided.source, decided.resume_step) == ([0, 1], 0, 7)
    decided, not_kept = decide(ended(), {"n1": waits("0:7@0/4 1:7@1/4"), "n3": waits("")})
    assert kept_ranks(decided) == []
    assert NotKept(WhyNew.SHARD_LOST, (0, 1)) in not_kept


def test_every_reason_has_words() -> None:
    assert set(WHY_NEW) == set(WhyNew)


def test_what_is_offered_counts_only_of_the_last_round() -> None:
    """A node that was in an earlier round, in another job's, or has other workers now."""
    for joined in (waits("0:7", left_round=3), waits("0:7", left_round=None), waits("0:7", size=1)):
        decided, not_kept = decide(ended(), {"n1": joined, "n2": waits("0:7 1:7")})
        first = joined.offer.local_world_size
        assert kept_ranks(decided) == [first, first + 1]
        assert not_kept == (NotKept(WhyNew.OTHER_ROUND, (0,)),)
    assert kept_ranks(decide(None, {"n1": waits("0:7")})[0]) == []
    stranger, not_kept = decide(ended(), {"n1": waits("0:7 1:7"), "n3": waits("1:7")})
    assert kept_ranks(stranger) == [0, 1]
    # Nothing is expected of an absent node: only the offers it makes have a reason.
    assert not_kept == (NotKept(WhyNew.OTHER_ROUND, (3,)),)


def test_a_kept_worker_may_get_another_rank() -> None:
    decided, _ = decide(ended(Cause.NODE_LOST, gone=("n1",)), {"n2": waits("0:7 1:6torn")})
    assert [(p.node_id, p.rank_first, p.kept) for p in decided.participants] == [("n2", 0, (0, 1))]
    assert (decided.source, decided.resume_step) == (0, 7)


def test_only_a_charged_suspect_is_released() -> None:
    suspects = (failure("n1", 0, 8, suspect=True), failure("n2", 1, 3, suspect=True))
    decided, not_kept = decide(
        ended(Cause.WORKER_FAILURE, suspects), {"n1": waits("0:7 1:7"), "n2": waits("0:7 1:7")}
    )
    released = {p.node_id: p.charged_suspects for p in decided.participants}
    assert released == {"n1": (), "n2": (1,)}
    # A worker that has died since is only gone.
    decided, not_kept = decide(
        ended(Cause.WORKER_FAILURE, suspects), {"n1": waits("0:7 1:7"), "n2": waits("0:7")}
    )
    assert [p.charged_suspects for p in decided.participants] == [(), ()]
    assert not_kept == (NotKept(WhyNew.NOT_OFFERED, (3,)),)


# ------------------------------------------------------------------ suspects and failures


def test_a_crowd_of_suspects_never_hides_the_failure() -> None:
    crowd = [failure("n1", rank, rank, suspect=True) for rank in range(MAX_FAILURES + 9)]
    own = failure("n2", 1, 99_999)
    remembered = keep_earliest((*crowd, own))
    assert len(remembered) == MAX_FAILURES and own in remembered
    round_ = ended(Cause.WORKER_FAILURE, remembered)
    assert charged_failures(round_) == (own,)


def test_a_suspect_that_fails_of_its_own_is_no_suspect_any_more() -> None:
    suspect, own = failure("n1", 0, 3, suspect=True), failure("n1", 0, 900)
    assert keep_earliest((suspect, own)) == keep_earliest((own, suspect)) == (own,)


def test_suspects_are_charged_the_earliest_first() -> None:
    later, earliest = failure("n1", 0, 30, suspect=True), failure("n2", 0, 3, suspect=True)
    round_ = ended(Cause.WORKER_FAILURE, (later, earliest))
    assert charged_failures(round_) == (earliest, later)


# ------------------------------------------------------------------ in the life of a job


def two_of_two(**settings: int) -> Job:
    return running("n1", "n2", settings=replace(SETTINGS, max_nodes=2, max_restarts=9, **settings))


def test_a_worker_that_fails_while_parked_is_the_root_cause_instead() -> None:
    job = two_of_two()
    job.fail("n1", report(0, None, suspect=True))
    job.fail("n1", report(0, 139))
    failed = [event for event in job.events if isinstance(event, WorkerFailed)]
    assert [event.failure.suspect for event in failed] == [True, False]
    job.stopped("n1", "n2", kept=parked("0:7"))
    settled = job.last(RoundSettled)
    assert settled.root_cause is not None and settled.root_cause.exit_code == 139
    assert (settled.root_cause.node_id, settled.root_cause.address) == ("n1", "n1.net")
    assert job.last(RoundCompleted).not_kept == (NotKept(WhyNew.FAILED, (0,)),)


@pytest.mark.parametrize(
    ("broken", "fruitless", "sealed", "keeps", "again"),
    [
        (True, False, 7, True, True),
        (True, True, 7, False, False),
        (True, True, 8, True, False),
        (False, True, 7, True, True),
        (False, False, 7, True, False),
    ],
    ids=["once", "twice", "a step was sealed", "nothing broke since", "nothing broke"],
)
def test_two_rounds_that_break_before_kept_workers_have_sealed_a_step_end_them(
    *, broken: bool, fruitless: bool, sealed: int, keeps: bool, again: bool
) -> None:
    prior = ended(Cause.NODE_LOST, kept="0 1", resume_step=7, broken=broken, fruitless=fruitless)
    keeping, not_kept = decide(prior, {n: waits(f"0:{sealed} 1:{sealed}") for n in ("n1", "n2")})
    assert bool(kept_ranks(keeping)) == keeps
    assert [one.why for one in not_kept] == ([] if keeps else [WhyNew.NO_STEP])
    assert keeping.fruitless == again


def test_a_round_knows_when_an_operator_last_asked_for_new_processes() -> None:
    job = two_of_two(restart_backoff_ms=0)
    assert job.round.renewed == 0
    job.fail("n1", report(0, 1))
    job.stopped("n1", "n2")
    assert (job.round.number, job.round.renewed) == (1, 0)
    job.do(Restart(job.membership.run, 1, "new code"))
    job.stopped("n1", "n2")
    job.fail("n1", report(0, 1))
    job.stopped("n1", "n2")
    assert (job.round.number, job.round.renewed) == (3, 2)


def test_ends_that_ask_for_new_processes() -> None:
    """Only an operator can do that, and a job whose agents restart workers by themselves."""
    job = two_of_two()
    job.fail("n1")
    assert job.last(RoundEnded).end.keep
    own = running("n1", "n2", settings=replace(SETTINGS, max_nodes=2, max_restarts=None))
    own.lost("n2")
    assert not own.last(RoundEnded).end.keep


def test_a_fence_keeps_nobody() -> None:
    job = two_of_two()
    fenced = join(
        "n1", run=job.membership.run, settings=job.settings, left_round=0, kept=parked("0:7")
    )
    job.do(replace(fenced, fenced=True))
    job.stopped("n2", kept=parked("0:7"))
    assert [p.kept for p in job.round.participants] == [(), (0,)]


def test_a_later_offer_replaces_an_earlier_one_and_never_the_reverse() -> None:
    job = two_of_two()
    job.fail("n2", report(1))
    job.stopped("n1", kept=parked("0:7"))
    job.join("n1")  # It was sent before the first round.
    assert job.state.waiting["n1"].kept == parked("0:7")
    job.stopped("n1")
    assert job.state.waiting["n1"].kept == ()
    job.stopped("n2")
    assert [p.kept for p in job.round.participants] == [(), ()]


def test_sealed_steps_end_a_crash_loop() -> None:
    """A job that is kept alive by its workers moves on, although it fails again and again."""
    job = two_of_two()
    for step in range(1, 7):
        job.fail("n2", report(1))
        at_ms = job.now_ms
        job.stopped("n1", kept=[KeptWorker(0, step)])
        job.stopped("n2")
        job.pass_until(at_ms + 10)
        assert job.round.resume_step == step
        assert job.membership.spent.soon <= 1


def test_steps_of_new_processes_do_not_end_a_crash_loop() -> None:
    """They start from the snapshot each time; only the reported steps count."""
    job = two_of_two()
    for _ in range(3):
        job.fail("n2", report(1))
        job.stopped("n1", "n2", moved=Moved())
        job.pass_until(job.now_ms + 120)
    assert job.membership.spent.soon >= 2


def test_the_invariants_name_what_must_not_be_kept() -> None:
    job = two_of_two()
    job.fail("n2", report(1))
    before = job.state
    job.stopped("n1", kept=parked("0:7"))
    job.stopped("n2")
    state, round_ = job.state, job.round
    n1, n2 = round_.participants

    def found(**changes: object) -> list[str]:
        changed = replace(round_, **changes)
        return violations(
            before, replace(state, membership=replace(state.membership, round=changed), waiting={})
        )

    assert round_.source == 0 and not any("keeping" in one for one in found())
    wrong: tuple[tuple[str, dict[str, object]], ...] = (
        ("does not have this worker", {"participants": (replace(n1, kept=(0, 1)), n2)}),
        ("named twice", {"participants": (replace(n1, charged_suspects=(0,)), n2)}),
        ("the source is not kept", {"source": 1}),
        ("a step without a source", {"source": None}),
        ("whose failure ended", {"participants": (n1, replace(n2, kept=(0,)))}),
        (
            "did not take part in the round before",
            {"participants": (n1, Participant("n9", 1, n2.offer, 1, 1, 2, kept=(0,)))},
        ),
    )
    for says, changes in wrong:
        assert any(says in one for one in found(**changes)), says
