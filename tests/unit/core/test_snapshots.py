"""Which snapshots are complete, and whether a round loads them, as tables."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rdzv.core import model
from rdzv.core.events import RoundCompleted, RoundSettled
from rdzv.core.rounds.ranks import assign_seats
from rdzv.core.snapshots import (
    MAX_LOADS,
    BlockedSaves,
    HeldByNodes,
    WhyNotLoaded,
    base,
    newest_whole,
)
from rdzv.structs import replace
from tests.support.builders import SETTINGS, Job, running


def mark(text: str) -> model.SnapshotMark:
    """Read `4@50`, `4@50b` or `4@50/2`: lineage, step, series (`a` by default) and parts."""
    at, _, shards = text.partition("/")
    lineage, _, step = at.partition("@")
    series = step[-1] if step[-1].isalpha() else "a"
    number = int(step.removesuffix(series))
    return model.SnapshotMark(int(lineage), number, series, int(shards or 1))


def holds(text: str) -> tuple[model.Snapshot, ...]:
    """Read `4@50/2:1`: the mark, and which part it is."""
    found = []
    for local_rank, said in enumerate(text.split()):
        at, _, shard = said.partition(":")
        found.append(model.Snapshot(local_rank, mark(at), int(shard or 0)))
    return tuple(found)


@pytest.mark.parametrize(
    ("held", "newest"),
    [
        ([], None),
        ([""], None),
        (["4@40", "4@50"], "4@50"),
        (["4@40 4@50", "4@40"], "4@50"),
        # A part is missing.
        (["4@50/2:0"], None),
        (["4@50/2:0 4@50/2:0", "4@50/2:0"], None),
        (["4@40/2:0 4@50/2:0", "4@40/2:1"], "4@40/2"),
        # The same step of two lineages is not the same state.
        (["4@50/2:0", "5@50/2:1"], None),
        (["4@50/2:0 5@50/2:0", "4@50/2:1"], "4@50/2"),
        # Other series, other numbers of parts: never mixed.
        (["4@50a/2:0", "4@50b/2:1"], None),
        (["4@50/2:0", "4@50/3:1 4@50/3:2"], None),
        # The newest is that of the latest lineage, whatever its step.
        (["4@90", "5@60"], "5@60"),
        (["4@90/2:0 5@60/2:0", "4@90/2:1"], "4@90/2"),
        # Lineages before the origin, and those that never existed.
        (["2@50"], None),
        (["7@50"], None),
    ],
)
def test_the_newest_whole_mark(held: list[str], newest: str | None) -> None:
    expected = None if newest is None else mark(newest)
    assert newest_whole(map(holds, held), range(3, 7)) == expected


def waits(text: str) -> model.WaitingNode:
    return model.WaitingNode(
        1, model.Offer("h", local_world_size=2), 0, left_round=4, snapshots=holds(text)
    )


LEFT_ASIDE = (None, 0, 5, 5, WhyNotLoaded.IN_VAIN)
NODES = {"n1": "4@50", "n2": ""}
SEATED = assign_seats((), {n: waits("") for n in NODES}, 2)


Begin = tuple[model.SnapshotMark | None, int, int, int, WhyNotLoaded | None]


def begin(
    membership: model.Membership, source: int | None, joins: list[model.WaitingNode]
) -> Begin:
    round_ = model.Round(5, SEATED, "h", 1, True, 0, 9, source=source)
    round_, why_not = base(membership, round_, joins)
    return round_.snapshot, round_.snapshot_loads, round_.origin, round_.lineage, why_not


def decided(
    held: Mapping[str, str],
    *,
    source: int | None = None,
    loaded: tuple[str, int] | None = None,
    soon: int = 0,
    cause: model.Cause = model.Cause.WORKER_FAILURE,
    origin: int = 0,
) -> Begin:
    """Decide on round 5's snapshots, after round 4 had `loaded` some, this many times in a row."""
    end = model.RoundEnd(cause, "why", 9, broken=True, settled=True)
    prior = model.Round(4, SEATED, "h", 1, True, 0, 5, end=end, origin=origin, lineage=3)
    if loaded is not None:
        prior = replace(prior, snapshot=mark(loaded[0]), snapshot_loads=loaded[1])
    membership = model.Membership(
        "job", "run", 1, SETTINGS, 0, prior, 5, spent=model.Spent(soon=soon)
    )
    joins = [waits(text) for text in held.values()]
    return begin(membership, source, joins)


def test_snapshots_are_loaded_where_no_kept_worker_has_a_state() -> None:
    assert decided(NODES) == (mark("4@50"), 1, 0, 5, None)
    # They are only pinned beside a kept worker, which is never older.
    assert decided(NODES, source=0) == (mark("4@50"), 0, 0, 3, None)


def test_a_round_without_a_state_begins_anew() -> None:
    assert decided({}) == (None, 0, 5, 5, None)
    # Snapshots from before the last such round are not loaded, even if complete again.
    assert decided({"n1": "3@90"}, origin=4) == (None, 0, 5, 5, WhyNotLoaded.OUTDATED)
    assert decided({"n1": "3@90 4@60"}, origin=4) == (mark("4@60"), 1, 4, 5, None)


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ("", None),
        ("4@50/2:0", WhyNotLoaded.NOT_WHOLE),
        ("2@50", WhyNotLoaded.OUTDATED),
    ],
)
def test_it_is_said_why_none_is_loaded(held: str, why: WhyNotLoaded | None) -> None:
    assert decided({"n1": held}, origin=3) == (None, 0, 5, 5, why)


def test_the_first_round_loads_nothing() -> None:
    membership = model.Membership("job", "run", 1, SETTINGS, 0, None, 5)
    assert begin(membership, None, [waits("")]) == (None, 0, 5, 5, None)


@pytest.mark.parametrize(
    ("loads", "soon", "cause", "loads_again"),
    [
        (1, MAX_LOADS, model.Cause.WORKER_FAILURE, True),
        (MAX_LOADS, MAX_LOADS - 1, model.Cause.WORKER_FAILURE, True),
        (MAX_LOADS, MAX_LOADS, model.Cause.NODE_LOST, True),
        (MAX_LOADS, MAX_LOADS, model.Cause.WORKER_FAILURE, False),
    ],
)
def test_snapshots_with_which_rounds_keep_failing_soon_are_left_aside(
    loads: int, soon: int, cause: model.Cause, loads_again: bool
) -> None:
    found = decided(NODES, loaded=("4@50", loads), soon=soon, cause=cause)
    assert found == ((mark("4@50"), loads + 1, 0, 5, None) if loads_again else LEFT_ASIDE)
    # Other ones have not been tried.
    newer = decided({"n1": "4@60"}, loaded=("4@50", loads), soon=soon, cause=cause)
    assert newer == (mark("4@60"), 1, 0, 5, None)


ROUND = model.Round(5, SEATED, "h", 1, True, 0, 5, lineage=5)


def held_by_two(pinned: str | None = None) -> HeldByNodes:
    return HeldByNodes(replace(ROUND, snapshot=None if pinned is None else mark(pinned)))


def test_a_mark_becomes_whole_with_its_last_part() -> None:
    held = held_by_two("4@50/2")
    assert not held.note("n1", holds("4@50/2:0 5@60/2:0"))
    assert held.note("n2", holds("4@50/2:1 5@60/2:1"))
    assert held.whole == mark("5@60/2")
    # A repeated report is nothing new; a lost part takes nothing back.
    assert not held.note("n2", holds("4@50/2:1 5@60/2:1"))
    assert not held.note("n2", ())
    assert held.whole == mark("5@60/2")
    assert not held.note("n1", holds("5@60/2:0 5@70/2:0"))
    assert held.held_by("n1") == holds("5@60/2:0 5@70/2:0")
    assert held.note("n2", holds("5@70/2:1"))


def test_a_part_that_was_lost_does_not_count() -> None:
    held = held_by_two()
    assert not held.note("n1", holds("5@60/2:0"))
    assert not held.note("n1", holds("5@70/2:0"))
    assert not held.note("n2", holds("5@60/2:1"))
    assert held.whole is None


@pytest.mark.parametrize("other", ["4@90", "4@90/2:0 4@90/2:1", "6@90"])
def test_only_the_lineage_of_the_live_round_has_new_marks(other: str) -> None:
    held = held_by_two("4@50")
    assert not held.note("n1", holds(other))
    assert held.whole == mark("4@50")


def test_a_lineage_goes_on_in_the_next_round_with_those_who_take_part_in_it() -> None:
    held = held_by_two()
    held.note("n1", holds("5@60/2:0"))
    held.note("n9", holds("5@70/2:1"))
    carried = HeldByNodes(replace(ROUND, number=6, source=0, resume_step=70), held)
    assert not carried.note("n2", holds("5@70/2:0"))
    assert carried.note("n2", holds("5@60/2:1"))
    assert carried.whole == mark("5@60/2")


def test_a_step_that_kept_workers_do_again_does_not_count() -> None:
    held = held_by_two()
    held.note("n1", holds("5@49/2:0 5@50/2:0"))
    held.note("n2", holds("5@49/2:1"))
    again = replace(ROUND, number=6, source=0, resume_step=49, snapshot=mark("5@49/2"))
    carried = HeldByNodes(again, held)
    # The other node's part belongs to the repeated step.
    assert not carried.note("n2", holds("5@49/2:1 5@50/2:1"))
    assert carried.note("n1", holds("5@49/2:0 5@50/2:0"))


@pytest.mark.parametrize(
    ("held", "newest", "survives", "sole"),
    [
        # All nodes hold the whole state.
        (["5@50", "5@50"], "5@50", "5@50", ""),
        # Each has its own part, and nothing else.
        (["5@50/2:0", "5@50/2:1"], "5@50/2", None, "n1 n2"),
        (["5@50/2:0 5@50/2:1", "5@50/2:1 5@50/2:0"], "5@50/2", "5@50/2", ""),
        # One of them has no copy of the other's part.
        (["5@50/2:0 5@50/2:1", "5@50/2:1"], "5@50/2", None, "n1"),
        # Copies of the newest step are still on their way.
        (
            ["5@50/2:0 5@50/2:1 5@60/2:0", "5@50/2:1 5@50/2:0 5@60/2:1"],
            "5@60/2",
            "5@50/2",
            "n1 n2",
        ),
        # Whoever is lost, some step is left: the older one without n1, the newer one without n2.
        (["5@60", "5@50"], "5@60", "5@50", "n1"),
        # What the round has loaded is from the lineage before.
        (["4@50", "4@50"], "4@50", "4@50", ""),
        # It is not known yet who holds it.
        (["", ""], "4@50", None, None),
    ],
)
def test_what_the_loss_of_one_node_would_leave(
    held: list[str], newest: str, survives: str | None, sole: str | None
) -> None:
    known = held_by_two("4@50")
    for node_id, said in zip(("n1", "n2"), held, strict=True):
        known.note(node_id, holds(said))
    assert known.whole == mark(newest)
    assert known.whole_without_a_node() == (None if survives is None else mark(survives))
    assert known.sole_holders(mark(newest)) == (None if sole is None else set(sole.split()))


# ------------------------------------------------------------------ in a job


LASTING = replace(SETTINGS, max_nodes=2, max_restarts=9, restart_backoff_ms=0)
"""The settings of a job that survives its failures."""


def killed(job: Job, n1: str, n2: str, *, at_ms: int = 0) -> None:
    """End the live round: all workers are killed; both nodes join again with their snapshots."""
    job.pass_until(job.now_ms + at_ms)
    job.fail("n1")
    job.stopped("n1", snapshots=holds(n1))
    job.stopped("n2", snapshots=holds(n2))


def test_a_round_of_new_workers_loads_what_is_whole() -> None:
    job = running("n1", "n2", settings=LASTING)
    killed(job, "0@40/2:0 0@50/2:0", "0@40/2:1")
    first = mark("0@40/2")
    assert (job.round.snapshot, job.round.snapshot_loads, job.round.origin) == (first, 1, 0)
    # It is in the record: another server announces the same.
    job.crash()
    assert (job.round.snapshot, job.round.snapshot_loads) == (first, 1)
    job.resume("n1")
    job.resume("n2")
    killed(job, "0@40/2:0 1@60/2:0", "0@40/2:1 1@60/2:1")
    assert job.round.snapshot == mark("1@60/2")
    killed(job, "", "1@60/2:1")
    assert (job.round.snapshot, job.round.origin) == (None, 3)
    # The node with the other part returns; the job has continued without it.
    killed(job, "1@60/2:0", "1@60/2:1")
    assert (job.round.snapshot, job.round.origin) == (None, 4)


def test_whole_snapshots_count_as_progress() -> None:
    """Rounds that fail soon load them again as long as each leaves newer ones."""
    job = running("n1", "n2", settings=LASTING)
    for number in range(2 * MAX_LOADS):
        killed(job, f"{number}@{number + 1}", "")
        assert (job.round.snapshot_loads, job.membership.spent.soon) == (1, 0)
    last = job.round.snapshot
    assert last is not None
    tries = []
    for _ in range(MAX_LOADS + 1):
        killed(job, f"{last.lineage}@{last.step}", "")
        tries.append(job.round.snapshot_loads)
    assert tries == [2, 3, 0, 0]


def test_kept_workers_win() -> None:
    job = running("n1", "n2", settings=LASTING)
    job.fail("n1")
    job.stopped("n1", snapshots=holds("0@50"))
    job.stopped("n2", snapshots=holds("0@50"), kept=(model.KeptWorker(0, 50),))
    assert (job.round.source, job.round.resume_step) == (1, 50)
    assert (job.round.snapshot, job.round.snapshot_loads) == (holds("0@50")[0].mark, 0)
    # If they repeat the last step, snapshots of it no longer have the same state.
    job.fail("n1")
    job.stopped("n1", snapshots=holds("0@50 0@60"))
    job.stopped("n2", snapshots=holds("0@50"), kept=(model.KeptWorker(0, 59),))
    assert job.round.snapshot == holds("0@50")[0].mark
    # The next round has no kept workers. Its own lineage began with the first.
    killed(job, "0@50", "0@50")
    assert (job.round.snapshot_loads, job.round.origin) == (1, 0)


def test_a_lost_shard_of_kept_workers_comes_from_snapshots() -> None:
    job = running("n1", "n2", settings=LASTING)
    job.fail("n1")
    job.stopped("n1", snapshots=holds("0@40/2:0"))
    job.stopped(
        "n2", snapshots=holds("0@40/2:1"), kept=(model.KeptWorker(0, 49, shard=1, shards=2),)
    )
    assert job.round.source is None
    assert not any(p.kept for p in job.round.participants)
    assert (job.round.snapshot_loads, job.round.snapshot) == (1, holds("0@40/2:0")[0].mark)


def test_snapshots_of_another_run_are_not_taken() -> None:
    job = Job(LASTING)
    job.join("n1", "n2", run="", snapshots=holds("0@50"))
    job.pass_until(LASTING.last_call_timeout_ms)
    assert job.round.snapshot is None


def test_spares_hold_nothing_for_the_participants() -> None:
    job = running("n1", "n2", settings=LASTING)
    job.join("n3")
    job.fail("n1")
    job.join("n3", run=job.membership.run, snapshots=holds("0@50"))
    job.stopped("n1", "n2")
    assert job.round.snapshot is None
    assert job.seated == ["n1", "n2"]


def test_a_later_join_replaces_what_is_held() -> None:
    job = running("n1", "n2", settings=LASTING)
    job.fail("n1")
    job.stopped("n1", snapshots=holds("0@40"))
    job.stopped("n1", round_=0, snapshots=holds("0@50"))
    job.stopped("n2")
    assert job.round.snapshot == holds("0@50")[0].mark
    assert job.last(RoundCompleted).round == job.round
    assert job.last(RoundSettled).round == 0


def in_slots(*ranks: tuple[int, ...]) -> list[model.Snapshot]:
    """Return what the ranks of a node hold: of each, the steps in its slots."""
    return [
        model.Snapshot(local_rank, model.SnapshotMark(1, step, "a", 4), 0, 1_000)
        for local_rank, steps in enumerate(ranks)
        for step in steps
    ]


@pytest.mark.parametrize(
    ("announced", "n1", "n2", "given_up"),
    [
        (20, [(20, 30)], [(20, 40)], 40),
        # Nothing that is announced is left: ranks saved without waiting before.
        (5, [(10, 15)], [(20, 25)], 25),
        (20, [(20, 30), (20, 30)], [(20, 40), (20, 50)], 50),
        # A rank may save: its other slot is free, or its newer snapshot is announced.
        (20, [(20, 30)], [(20,)], None),
        (20, [(20, 30)], [(10, 20)], None),
        (20, [(20, 30), (20, 30)], [(20, 40), (20,)], None),
        # Nothing was announced yet, so ranks do not wait.
        (None, [(20, 30)], [(20, 40)], None),
        # A node that saves nothing holds nobody up, but one that has not said so may save.
        (20, [(20, 30)], [], 30),
        (20, [(20, 30)], None, None),
        (20, [], [], None),
    ],
)
def test_steps_are_given_up_once_no_rank_can_save(
    announced: int | None,
    n1: list[tuple[int, ...]],
    n2: list[tuple[int, ...]] | None,
    given_up: int | None,
) -> None:
    mark = None if announced is None else model.SnapshotMark(1, announced, "a", 4)
    blocked = BlockedSaves(("n1", "n2"), mark)
    for name, ranks in (("n1", n1), ("n2", n2)):
        if ranks is not None:
            blocked.note(name, in_slots(*ranks))
    found = blocked.given_up()
    assert (found and found.step) == given_up
    if found is not None:
        blocked.advance(found)
        assert blocked.given_up() is None
        # One saves again, but the other has not yet.
        blocked.note("n1", in_slots((20, 90)))
        assert (blocked.given_up() is None) == bool(n2)
