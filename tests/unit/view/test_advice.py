"""What other spares, snapshot intervals and nodes would have saved, beside the true answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from failing_jobs import HOUR_MS, Life, Policy, World, a_policy, a_world, lived, without
from past_events import a_summary, an_event

from rdzv.core import events
from rdzv.core.model import Cause
from rdzv.view import history
from rdzv.view.advice import Change, loss_ms
from rdzv.view.answers import Event
from rdzv.view.history import Kept
from rdzv.view.ledger import ledgers_of
from rdzv.view.reports import Report, report, spent
from tests.unit.view.test_ledger import (
    BEGAN,
    SUCCEEDED,
    Story,
    complete,
    first,
    joined,
    last,
    lost,
    over,
)

HOUR = 3_600
UNKNOWN = "no redone steps are reported"


def events_of(past: Iterable[tuple[float, Kept]], unit_ms: int = 1) -> list[Event]:
    return [an_event(kept, at_ms=round(at * unit_ms)) for at, kept in past]


def advised(
    story: Story, until_s: float, snapshot_ms: int | None = None, nodes: tuple[int, int] = (2, 2)
) -> dict[str, Change]:
    """Return the changes of one job by what they change."""
    until_ms = round(until_s * 1000)
    past = events_of([*saved(snapshot_ms), *story], 1000)
    found = spent(a_summary("a", *nodes), past, 0, until_ms)
    changes = report([found], 0, until_ms).advice
    assert [one.net_ms or 0 for one in changes] == sorted(
        (one.net_ms or 0 for one in changes), reverse=True
    )
    return {one.change: one for one in changes}


def saved(snapshot_ms: int | None) -> Story:
    return [] if snapshot_ms is None else [(0, events.SnapshotsSaved(0, 50, 50 * snapshot_ms))]


def failing(times: int, spare: bool = False) -> list[tuple[float, Kept]]:
    """Tell of a job of two nodes that loses n2 each ten hours, and gets it back an hour later.

    It makes a step each 36 s, saves each hundredth, and is stopped, formed and loaded at once. With
    a spare, n2 and n3 take turns.
    """
    story: list[tuple[float, Kept]] = [(0, BEGAN), (0, joined("n1")), (0, joined("n2"))]
    story += [(0, joined("n3"))] if spare else []
    story += [(0, complete(0, "n1", "n2")), (36, first(0, 1))]
    names, saved, at_s = ["n2", "n3"], 0, 0.0
    for number in range(times):
        broke_s, gone = at_s + 10 * HOUR, names[number % 2] if spare else "n2"
        step = saved + 1_000
        story += [(broke_s, last(number, step))]
        story += [(broke_s, lost(gone, 0)), *over(broke_s, broke_s, number, Cause.NODE_LOST, gone)]
        at_s = broke_s + (0 if spare else HOUR)
        if not spare:
            story += [(at_s, joined(gone))]
        story += [(at_s, complete(number + 1, "n1", names[(number + 1) % 2] if spare else gone))]
        story += [(at_s + 36, first(number + 1, step - 49))]
        story += [(at_s + 50 * 36, events.LostStepsRedone(number + 1, step, 0))]
        if spare:
            story += [(broke_s + HOUR, joined(gone))]
        saved = step - 50
    return [*story, (at_s + 5 * HOUR, SUCCEEDED)]


def test_a_spare_saves_the_wait_for_a_node() -> None:
    """Of the hours gained as many are lost to failures as of the others."""
    found = advised(failing(6), 100 * HOUR)["1 spare"]
    # 6 waits of an hour, in 71 hours; 6 times 51 steps are loaded and redone, in 65 hours.
    share = 1 - 6 * 50 * 36 / (65 * HOUR - 36)
    assert found.saves_ms == pytest.approx(6 * 2 * HOUR_MS * share, rel=0.01)
    assert found.costs_ms == 71 * HOUR_MS
    assert (found.rdzv_id, found.now, found.spares, found.times) == ("a", "0", 1, 6)
    assert found.net_ms == pytest.approx((found.saves_ms or 0) - (found.costs_ms or 0), abs=1)
    assert found.verdict == "not worth it"


def test_without_a_spare_each_loss_would_have_cost_the_wait() -> None:
    """Also the load and the redone steps, which come after the wait."""
    found = advised(failing(6, spare=True), 100 * HOUR)["no spare"]
    assert (found.now, found.times) == ("1", 6)
    # Two nodes wait for an hour, in which they would have loaded, redone, and trained.
    assert found.costs_ms == pytest.approx(6 * 2 * HOUR_MS, rel=0.01)
    # The spare is held for 65 hours, of which one node was away for 6.
    assert found.saves_ms == pytest.approx(65 * HOUR_MS, rel=0.01)
    assert found.verdict == "worth it"


def shrinking(spare: bool = False) -> Story:
    """Tell of a job of 1:2 nodes that loses one after 10 hours and gets it back 2 hours later.

    It takes 60 s to stop, and each new round 360 s to load. With a spare, that takes the seat.
    """
    story: list[tuple[float, Kept]] = [(0, BEGAN), (0, joined("n1")), (0, joined("n2"))]
    story += [(0, joined("n3"))] if spare else []
    story += [(0, complete(0, "n1", "n2")), (0, first(0, 1))]
    lost_s, back_s = 10 * HOUR, 12 * HOUR
    story += [(lost_s - 60, lost("n2", 0)), *over(lost_s - 60, lost_s, 0, Cause.NODE_LOST, "n2")]
    story += [(lost_s, complete(1, "n1", *(["n3"] if spare else [])))]
    story += [(lost_s + 360, first(1, 1_000)), (back_s, joined("n2"))]
    if not spare:
        story += over(back_s, back_s, 1, Cause.NODES_JOINED)
        story += [(back_s, complete(2, "n1", "n2")), (back_s + 360, first(2, 2_000))]
    return [*story, (20 * HOUR, SUCCEEDED)]


def test_a_spare_keeps_an_elastic_job_whole() -> None:
    """It trains on the second seat, and the node that comes back needs no new round."""
    found = advised(shrinking(), 20 * HOUR, nodes=(1, 2))
    good = 1 - (60 + 720) / (20 * HOUR)
    gained_s = (2 * HOUR - 360) + 2 * 360 * good
    assert found["1 spare"].saves_ms == pytest.approx(gained_s * 1_000, abs=2)
    assert found["2 spares"].saves_ms == found["1 spare"].saves_ms
    assert (found["1 spare"].costs_ms, found["1 spare"].now) == (20 * HOUR_MS, "0")


def test_a_node_more_in_a_job_that_is_never_whole_is_no_spare() -> None:
    """It trains, too, and the node that comes back does so in a new round as before."""
    found = advised(shrinking(), 20 * HOUR, nodes=(1, 4))["1 spare"]
    assert found.saves_ms == (20 * HOUR - 60 - 720) * 1_000


def test_without_its_spare_an_elastic_job_shrinks_and_forms_anew() -> None:
    found = advised(shrinking(spare=True), 20 * HOUR, nodes=(1, 2))["no spare"]
    assert found.costs_ms == (2 * HOUR - 360) * 1_000 + 2 * 360 * 1_000
    assert (found.saves_ms, found.now, found.times) == (20 * HOUR_MS, "1", 1)


def intervals(story: Story, snapshot_ms: int | None = None) -> list[Change]:
    """Return the advice on the interval between snapshots, the shortest first."""
    found = advised(story, 200 * HOUR, snapshot_ms).values()
    return sorted((one for one in found if one.steps), key=lambda one: one.steps or 0)


def test_a_failure_loses_half_an_interval() -> None:
    best, half, twice = intervals(failing(6), 1_000)
    assert (half.now, half.steps, twice.steps) == ("102", 51, 203)
    redone_ms = 6 * 2 * 49 * 36_000
    assert half.saves_ms == pytest.approx(redone_ms / 2, rel=0.03)
    assert twice.costs_ms == pytest.approx(redone_ms, rel=0.06)
    # 65 hours of steps are 65 snapshots, each of which two nodes wait for.
    assert half.costs_ms == pytest.approx(65 * 2 * 1_000, rel=0.05)
    # The root of 2 * 1 s * 10.8 h is 279 s.
    assert (best.change, best.steps) == ("snapshots every 8 steps (Young/Daly)", 8)
    assert {one.verdict for one in (best, half, twice)} == {"may be worth it"}
    assert [one.verdict for one in intervals(failing(16), 1_000)] == 2 * ["worth it"] + [
        "not worth it"
    ]


def test_without_the_cost_of_a_snapshot_it_is_told_when_a_change_pays() -> None:
    half, twice = intervals(failing(6))
    assert (half.costs_ms, half.net_ms, half.spread_ms, twice.saves_ms) == (None,) * 4
    assert half.verdict.startswith("if one takes less than ")
    assert twice.verdict.startswith("if one takes more than ")
    priced = intervals(failing(6), half.snapshot_ms)
    (even,) = (one for one in priced if one.steps == half.steps)
    assert even.net_ms == pytest.approx(0, abs=100)
    assert even.verdict == "may be worth it"


@pytest.mark.parametrize("between_ms", [1, 10_000, 10**12])
@pytest.mark.parametrize("every_ms", [1e-9, 1e-3, 1, 3_000, 1e15])
def test_a_loss_is_at_most_half_an_interval_however_rare_failures_are(
    every_ms: float, between_ms: float
) -> None:
    """Also where the formula as it is written loses all precision, or overflows."""
    assert 0 < loss_ms(every_ms, between_ms) <= min(every_ms / 2, between_ms)
    assert loss_ms(1_000, 1_000_000) == pytest.approx(500 - 1 / 12, rel=1e-6)
    assert loss_ms(10_000, 1_000_000) == pytest.approx(5_000 - 100 / 12, rel=1e-6)


def test_kept_workers_and_jobs_without_progress_get_no_interval() -> None:
    kept = [
        (at_s, events.WorkersStarted(one.round, 1, 1, 0))
        for at_s, one in failing(6)
        if isinstance(one, history.RoundCompleted) and one.round
    ]
    story = sorted([*failing(6), *kept], key=lambda one: one[0])
    found = advised(story, 100 * HOUR)["other snapshot interval"]
    assert found.verdict == UNKNOWN
    silent = [one for one in failing(6) if not isinstance(one[1], events.FirstStepMade)]
    found = advised(silent, 100 * HOUR)["other snapshot interval"]
    assert (found.verdict, found.saves_ms) == (UNKNOWN, None)


def test_the_runs_of_a_job_are_one_sum() -> None:
    """Failures of both count, so that there are enough of them."""
    story = [*saved(1_000), *failing(3)]
    once = [an_event(kept, "r1", round(at_s * 1000)) for at_s, kept in story]
    again = [an_event(kept, "r2", round((at_s + 50 * HOUR) * 1000)) for at_s, kept in story]
    one, both = (
        report([spent(a_summary("a", 2, 2), past, 0, 400 * HOUR_MS)], 0, 400 * HOUR_MS)
        for past in (once, [*once, *again])
    )
    before = {change.spares or change.steps: change for change in one.advice}
    assert both.advice
    for change in both.advice:
        half = before[change.spares or change.steps]
        assert change.net_ms == pytest.approx(2 * (half.net_ms or 0), rel=0.01)
        assert (change.times, half.times) == (6, 3)
        assert half.verdict == "too few cases: 3"
        assert not change.verdict.startswith("too few")


def test_of_few_failures_nothing_is_advised() -> None:
    found = advised(failing(4), 100 * HOUR, snapshot_ms=1_000)
    assert {one.verdict for one in found.values()} == {"too few cases: 4"}
    none = advised([*failing(0)], 100 * HOUR)
    assert {one.verdict for one in none.values()} == {
        "too few cases: 0",
        UNKNOWN,
    }


def test_a_run_that_waits_counts_until_now() -> None:
    """One that is open counts what a spare would have saved so far; without a round, nothing."""
    story = [one for one in failing(6) if one[0] <= 54.5 * HOUR]
    soon, late = (advised(story, hours * HOUR)["1 spare"] for hours in (55, 65))
    more_ms = (late.saves_ms or 0) - (soon.saves_ms or 0)
    assert more_ms == pytest.approx(10 * 2 * HOUR_MS, rel=0.05)
    assert advised([(0, BEGAN), (0, joined("n1"))], HOUR).keys() == {"other snapshot interval"}


@pytest.mark.parametrize(
    ("bad", "good", "verdict"),
    [(9, 3, "worth it"), (3, 9, "no node stands out: 5 of 14"), (2, 0, "too few")],
)
def test_a_node_that_stands_out_is_told_from_chance(bad: int, good: int, verdict: str) -> None:
    story: list[tuple[float, Kept]] = [(0, BEGAN)]
    nodes = [f"n{number}" for number in range(1, 9)]
    story += [(0, joined(node)) for node in nodes] + [(0, complete(0, *nodes)), (1, first(0, 1))]
    whose = ["n1"] * bad + [nodes[1 + number % 7] for number in range(good)]
    if good > bad:
        whose += ["n1"] * 2
    for number, node in enumerate(whose):
        at_s = (number + 1) * 1_000 + (100 if node == "n1" else 0)
        story += over(
            at_s, at_s + (200 if node == "n1" else 20), number, Cause.WORKER_FAILURE, node
        )
        story += [
            (at_s + 210, complete(number + 1, *nodes)),
            (at_s + 300, first(number + 1, 9 + number)),
        ]
    found = advised(story, 30_000)["another node in place of n1"]
    assert found.verdict.startswith(verdict)
    assert (found.node_id, found.rdzv_id, found.costs_ms) == ("n1", "", 0)
    assert (found.saves_ms or 0) > 0


def test_a_node_that_is_drained_is_not_the_worst() -> None:
    story: list[tuple[float, Kept]] = [(0, BEGAN), (0, joined("n1")), (0, joined("n2"))]
    story += [(0, complete(0, "n1", "n2")), (1, first(0, 1))]
    for number in range(6):
        at_s = 1_000.0 * (number + 1)
        story += over(at_s, at_s + 300, number, Cause.NODE_LEFT, "n2")
        story += [
            (at_s + 300, complete(number + 1, "n1", "n2")),
            (at_s + 301, first(number + 1, 9)),
        ]
    assert not any(one.node_id for one in advised(story, 9_000).values())


# ------------------------------------------------------------------ simulated histories


def reported(world: World, life: Life) -> Report:
    job = a_summary("night", world.least, world.most)
    found = spent(job, events_of(life.past), 0, world.span_ms)
    return report([found], 0, world.span_ms)


def true_net_ms(world: World, policy: Policy, life: Life, change: Change) -> int:
    """Live through the same failures with the change."""
    if change.spares is not None:
        policy = replace(policy, spares=change.spares)
    elif change.steps is not None:
        policy = replace(policy, every=change.steps)
    else:
        assert change.node_id is not None
        world = without(world, life, change.node_id)
    return life.lost_ms - lived(world, policy).lost_ms


@pytest.mark.slow
@pytest.mark.parametrize("least", [None, 2], ids=["fixed", "elastic"])
@pytest.mark.parametrize("seed", range(1, 21))
def test_the_advice_is_what_a_life_with_the_change_would_have_cost(
    seed: int, least: int | None
) -> None:
    """What is lost with each change is within a tenth of the truth; so is what the ledger holds."""
    world = a_world(seed, failures=120, least=least, bad=15)
    policy = a_policy(seed, world)
    life = lived(world, policy)
    found = reported(world, life)
    assert found.node_ms == life.held_ms
    changes = [one for one in found.advice if one.net_ms is not None]
    assert len(changes) == 7
    if least is not None:
        # Without its failures, an elastic job has a node more at other times than it had.
        changes = [one for one in changes if one.node_id is None]
    for change in changes:
        true_ms = life.lost_ms - true_net_ms(world, policy, life, change)
        told_ms = life.lost_ms - (change.net_ms or 0)
        assert told_ms == pytest.approx(true_ms, rel=0.1), change


@pytest.mark.slow
def test_the_range_has_the_truth_in_it_where_failures_are_few() -> None:
    """In nineteen of twenty cases with a verdict, in 40 histories of a dozen failures."""
    inside = outside = 0
    for seed in range(1, 41):
        world = a_world(seed, failures=12, bad=4)
        policy = a_policy(seed, world)
        life = lived(world, policy)
        for change in reported(world, life).advice:
            if change.spread_ms is not None:
                off_ms = abs(true_net_ms(world, policy, life, change) - (change.net_ms or 0))
                inside, outside = (
                    inside + (off_ms <= change.spread_ms),
                    outside + (off_ms > change.spread_ms),
                )
    assert inside > 19 * outside
    assert inside > 60


@pytest.mark.slow
def test_the_simulated_ledger_is_the_simulated_life() -> None:
    """The steps that the simulation counts take the time that the ledger reads in phases."""
    world = replace(a_world(3, failures=60), snapshot_ms=0)
    life = lived(world, a_policy(3, world))
    (ledger,) = ledgers_of(events_of(life.past), world.span_ms)
    trained_ms = sum(one.ms * one.seats for one in ledger.intervals if one.phase == "training")
    assert trained_ms == pytest.approx(life.work_ms, rel=0.01)
    assert ledger.steps_reported
    steps: Sequence[int] = [one.steps for one in ledger.intervals if one.phase == "training"]
    assert sum(steps) == pytest.approx(life.work_ms / world.step_ms / world.most, rel=0.05)
