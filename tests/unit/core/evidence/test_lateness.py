"""The rank that the others wait for is found in time, with its lateness; no other is named."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from rdzv.core.evidence.stragglers import (
    LOOKS,
    Arrival,
    GroupLook,
    RecentArrivals,
    arrivals,
    chosen,
    follow_arrivals,
)

MS = 1_000


def look(*rows_ms: tuple[float, ...], error_ms: int | None = 0, rate: float = 10.0) -> GroupLook:
    """Return a sequence of collectives, each with the times of RANK 0, 1, ..."""
    entered = {
        n: {rank: round(at * MS) for rank, at in enumerate(row)}
        for n, row in enumerate(rows_ms, start=1)
    }
    return GroupLook(entered, rate, None if error_ms is None else error_ms * MS)


ONE = dict.fromkeys(range(8), "n1")
TWO = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


@pytest.mark.parametrize(
    ("found", "nodes", "late_ms"),
    [
        pytest.param(look((0, 0, 9), (100, 100, 109)), ONE, [0, 0, 9], id="of three"),
        pytest.param(look((0, 7), (100, 107)), ONE, [-7, 7], id="of two, each to the other"),
        pytest.param(
            look((0, 0, 9, 9), (100, 100, 109, 109), error_ms=3),
            TWO,
            [0, 0, 3, 3],
            id="a whole node, beyond twice the error of the clocks",
        ),
        pytest.param(
            look((0, 0, 9, 9), (100, 100, 109, 109), error_ms=5),
            TWO,
            [0, 0, 0, 0],
            id="less than that is nothing",
        ),
        pytest.param(
            look((0, 0, 1, 9), (100, 100, 101, 109), error_ms=50),
            TWO,
            [0, 0, 0, 8],
            id="on one node there is no such error",
        ),
        pytest.param(
            look((0, 0, 1, 9), (100, 100, 101, 109), error_ms=None),
            TWO,
            [0, 0, -8, 8],
            id="nor where nobody knows it",
        ),
    ],
)
def test_how_late_each_is(found: GroupLook, nodes: dict[int, str], late_ms: list[float]) -> None:
    seen = arrivals([found], nodes)
    assert [max(seen[rank].late_us) / MS for rank in sorted(seen)] == late_ms
    assert {one.error_us for one in seen.values()} == {found.error_us or 0}


def test_lateness_that_is_carried_on_counts_once() -> None:
    """The second and third are entered late because of the first: no rank waited in between."""
    ramp = [(step * 100 + n, step * 100 + n + 3 * n) for step in range(5) for n in (1, 2, 3, 4)]
    seen = arrivals([look(*ramp, rate=40.0)], ONE)
    assert seen[1].share == pytest.approx(0.12, abs=0.02)


def test_a_rank_that_waits_for_another_itself_is_not_the_one() -> None:
    """RANK 1 delays RANK 0 in their group, so RANK 0 is late in its group with RANK 2."""
    inner = GroupLook({n: {0: n * 100_000, 1: n * 100_000 + 30_000} for n in (1, 2, 3)}, 10.0, 0)
    outer = GroupLook({n: {0: n * 100_000 + 31_000, 2: n * 100_000} for n in (1, 2, 3)}, 10.0, 0)
    seen = arrivals([inner, outer], ONE)
    assert seen[1].share > 0.2
    assert seen[0].share < 0.05


def test_what_some_rank_is_missing_in_is_not_compared() -> None:
    assert arrivals([GroupLook({1: {0: 0}, 2: {0: 1}}, 1.0, 0)], ONE) == {}
    assert arrivals([GroupLook({1: {0: 0, 1: 5}, 3: {0: 1, 1: 9}}, 1.0, 0)], ONE) == {}
    assert arrivals([], ONE) == {}


def test_nodes_that_look_at_different_moments_choose_the_same_collectives() -> None:
    all_of, half = set(chosen(1, 2_000, 64)), set(chosen(500, 1_499, 64))
    assert 32 <= len(all_of) <= 64
    assert {n for n in all_of if 500 <= n < 1_500} <= half
    # Each of ten collectives of a step is compared.
    assert {n % 10 for n in chosen(1, 2_000, 64)} == set(range(10))


# ------------------------------------------------------------------ a training, by its clock

STEP_S, RANKS, PAUSES_S = 0.5, 4, (0.05, 0.2, 0.5)


def training(
    seed: int, seconds: int, slow: int | None, *, factor: float = 1.2
) -> Iterator[tuple[float, RecentArrivals]]:
    """Yield every 5 s the records of a lock-step training on two nodes whose clocks differ.

    Steps vary by a tenth; now and then a rank pauses, or is slow for some seconds as if another
    program ran there; RANK 0 saves a checkpoint for 4 s every five minutes. One may be slow from
    the first minute on.
    """
    draw = random.Random(seed)
    now_s, number, told = 0.0, 0, RecentArrivals()
    disturbed_until_s, disturbed, saves_s = 0.0, 0, 300.0
    entered: dict[int, dict[int, int]] = {}
    looked_s, looked = 0.0, 0
    while now_s < seconds:
        number += 1
        if draw.random() < STEP_S / 120:
            disturbed, disturbed_until_s = draw.randrange(RANKS), now_s + draw.uniform(3, 9)
        ends_s = [now_s + STEP_S * draw.lognormvariate(0, 0.1) for _ in range(RANKS)]
        for rank in range(RANKS):
            took_s = ends_s[rank] - now_s
            took_s *= factor if rank == slow and now_s >= 60 else 1
            took_s *= 1.3 if rank == disturbed and now_s < disturbed_until_s else 1
            took_s += draw.choice(PAUSES_S) if draw.random() < 0.002 else 0
            took_s += 4 if rank == 0 and now_s >= saves_s else 0
            ends_s[rank] = now_s + took_s
        saves_s += 300 if now_s >= saves_s else 0
        entered[number] = {
            rank: round(end_s * 1e6) + (2 * MS if rank >= RANKS // 2 else 0)
            for rank, end_s in enumerate(ends_s)
        }
        now_s = max(ends_s)
        if now_s - looked_s >= 5:
            rate = (number - looked) / (now_s - looked_s)
            seen = arrivals([GroupLook(entered, rate, 3 * MS)], TWO)
            told, entered, looked_s, looked = (
                follow_arrivals(told, seen, round(now_s * 1e3)),
                {},
                now_s,
                number,
            )
            yield now_s, told


@pytest.mark.parametrize("slow", range(RANKS))
def test_a_rank_that_is_a_fifth_slower_is_named_within_a_minute(slow: int) -> None:
    now_s, told = next(one for one in training(slow, 240, slow) if one[1].stragglers)
    (found,) = told.stragglers.values()
    assert (found.rank, now_s > 60, now_s <= 120) == (slow, True, True)
    assert 40 < (found.late_ms or 0) < 130
    assert (found.late_p95_ms or 0) > (found.late_ms or 0)
    assert found.clock_error_ms == 3
    assert 0.05 < (found.wait_share or 0) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_none_is_named_in_an_hour_without(seed: int) -> None:
    assert not any(told.stragglers for _, told in training(seed, 3_600, None))


def test_nor_is_one_that_is_hardly_slower() -> None:
    assert not any(told.stragglers for _, told in training(1, 900, 2, factor=1.03))


# ------------------------------------------------------------------ over several looks


def after(*shares: float) -> RecentArrivals:
    told = RecentArrivals()
    for at, share in enumerate(shares):
        times = (round(share * 100 * MS), round(share * 120 * MS), round(share * 110 * MS))
        told = follow_arrivals(told, {1: Arrival(share, times), 2: Arrival(0.0, (0, 0, 0))}, at)
    return told


@pytest.mark.parametrize(
    ("shares", "named"),
    [
        pytest.param([0.1] * (LOOKS - 1), False, id="too few looks"),
        pytest.param([0.1] * LOOKS, True, id="late in each"),
        pytest.param([0.1, 0.1, 0.0, 0.1, 0.1, 0.1], True, id="late in all but one"),
        pytest.param([0.1, 0.1, 0.0, 0.1, 0.0, 0.1], False, id="late in all but two"),
        pytest.param([0.0, 0.0, 0.9, 0.0, 0.0, 0.0], False, id="late once, for long"),
        pytest.param([0.05] * LOOKS, False, id="hardly late"),
        pytest.param([*[0.1] * LOOKS, 0.04, 0.04, 0.04, 0.04], True, id="less late, once named"),
        pytest.param([*[0.1] * LOOKS, 0.0, 0.0, 0.0], True, id="in time for a moment"),
        pytest.param([*[0.1] * LOOKS, 0.0, 0.0, 0.0, 0.0], False, id="in time again"),
    ],
)
def test_when_it_is_named(shares: list[float], named: bool) -> None:
    assert (1 in after(*shares).stragglers) is named
    assert 2 not in after(*shares).stragglers


def test_it_is_late_since_it_was_named_first() -> None:
    assert after(*[0.1] * (LOOKS + 3)).slow_since_ms[1] == LOOKS - 1
