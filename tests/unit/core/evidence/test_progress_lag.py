"""How far workers lag behind each other, by reports made at different moments."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import SETTLED
from rdzv.core.evidence.progress_lag import RankProgress, lags

word = partial(RankProgress, 0)


def test_lock_step_workers_of_different_nodes_are_in_step() -> None:
    # Nodes report once a second: one has just done so, the others a while ago.
    words = [word(1300 - 13 * tenths // 10, 100 * tenths, 13.0) for tenths in range(15)]
    assert lags(words) == (0,) * 15


@pytest.mark.slow
@SETTLED
@given(
    rate=st.floats(0.01, 200),
    ages_ms=st.lists(st.integers(0, 9_000), min_size=1, max_size=20),
)
def test_whoever_takes_each_step_with_the_others_is_never_behind(
    rate: float, ages_ms: list[int]
) -> None:
    words = [word(int(10_000 - rate * age_ms / 1000), age_ms, rate) for age_ms in ages_ms]
    assert lags(words) == (0,) * len(words)


def test_a_worker_that_is_behind_is_so_by_as_much_at_any_age_of_its_word() -> None:
    for age_ms in (0, 500, 2_000):
        behind = word(960 - 10 * age_ms // 1000, age_ms, 10.0)
        assert lags([word(1_000, 0, 10.0), behind]) == (0, 40)
    # The foremost may or may not have continued since its report.
    assert lags([word(990, 1_000, 10.0), word(960, 0, 10.0)]) == (0, 30)


def test_a_single_step_is_no_lag() -> None:
    assert lags([word(8, 0, 1.0), word(7, 0, 1.0)]) == (0, 0)
    assert lags([word(9, 0, 1.0), word(7, 0, 1.0)]) == (0, 2)


def test_a_rate_that_is_not_steady_proves_no_lag() -> None:
    # Over the last minute it made 10 steps a second, in this one 12.
    assert lags([word(1_012, 0, 10.0), word(1_000, 1_000, 10.0)]) == (0, 0)


def test_a_worker_that_is_silent_is_where_it_said_it_is() -> None:
    assert lags([word(200, 0, 10.0), word(100, 10_000, 10.0)]) == (0, 100)
    # It does not lag yet: it may be waiting for another.
    assert lags([word(200, 0, 10.0), word(101, 9_900, 10.0)]) == (0, 0)
    # One step takes twenty seconds.
    assert lags([word(8, 0, 0.05), word(7, 19_000, 0.05)]) == (0, 0)


def test_where_all_are_silent_alike_nobody_is_behind() -> None:
    assert lags([word(50, 600_000, 10.0), word(50, 600_900, 10.0)]) == (0, 0)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        # How far the first was a second ago is not known.
        ([word(5, 0, None), word(0, 1_000, None)], (0, 0)),
        # This one lags: its report is the later one, and still behind.
        ([word(5, 1_000, None), word(2, 0, None)], (0, 3)),
        ([], ()),
        ([word(7, 0, None)], (0,)),
    ],
)
def test_what_is_not_known_is_not_claimed(
    words: list[RankProgress], wanted: tuple[int, ...]
) -> None:
    assert lags(words) == wanted
