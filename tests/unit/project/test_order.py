"""Slow tests run first, in the order of `tests/conftest.py`."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import QUICK, SLOWEST

TESTS = Path(__file__).parents[2]


def test_the_files_that_take_long_are_there() -> None:
    assert [name for name in (*SLOWEST, *QUICK) if not (TESTS / name).exists()] == []
