"""A map that shares unchanged parts reads like a dict, also in its order."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections.abc import Mapping

import pytest

from rdzv.core import shared_map
from rdzv.core.shared_map import SharedMap, put, put_all, without


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_map, "LARGE", 0)
    monkeypatch.setattr(shared_map, "CHANGES", 5)


def same(made: Mapping[int, int], expected: dict[int, int]) -> bool:
    return (
        list(made) == list(expected)
        and list(made.items()) == list(expected.items())
        and list(made.values()) == list(expected.values())
        and list(made.keys()) == list(expected.keys())
        and made == expected
        and expected == made
        and len(made) == len(expected)
        and bool(made) == bool(expected)
        and repr(made) == repr(expected)
        and all(made[key] == expected[key] for key in expected)
        and all((key in made) == (key in expected) for key in range(-1, 25))
        and all(made.get(key, -1) == expected.get(key, -1) for key in range(-1, 25))
    )


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[pytest.mark.slow] if seed >= 2 else []) for seed in range(30)],
)
def test_it_is_the_dict_that_was_changed_in_the_same_way(seed: int) -> None:
    draw = random.Random(seed)
    made: Mapping[int, int] = {key: key for key in range(draw.randrange(12))}
    expected = dict(made)
    former = []
    for _ in range(120):
        former.append((made, dict(expected)))
        key = draw.randrange(20)
        if draw.random() < 0.5:
            made = put(made, key, draw.random())  # type: ignore[arg-type]
            expected[key] = made[key]
        else:
            made = without(made, key)
            expected.pop(key, None)
        assert same(made, expected)
    # The map that it was made from has not changed.
    assert all(same(old, then) for old, then in former)


def test_a_change_copies_no_more_than_the_changes_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_map, "CHANGES", 64)
    base = dict.fromkeys(range(100_000), 0)
    tracemalloc.start()
    try:
        changed = without(put(put(base, 7, 1), 100_000, 2), 8)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(changed, SharedMap)
    assert peak < 20_000 < sys.getsizeof(base)


def test_without_a_key_that_it_lacks_it_is_itself() -> None:
    made = put({1: 1}, 2, 2)
    assert without(made, 3) is made
    with pytest.raises(KeyError):
        without(made, 1)[1]


def test_many_changes_at_once() -> None:
    made = without(put({1: 1, 2: 2}, 3, 3), 1)
    assert list(put_all(made, {2: 20, 4: 4}).items()) == [(2, 20), (3, 3), (4, 4)]
