"""Slow tests run first, in the order of `tests/support/forked.py`."""

from __future__ import annotations

from pathlib import Path

from tests.support.forked import QUICK, SLOWEST

ROOT = Path(__file__).parents[3]


def test_the_files_that_take_long_are_there() -> None:
    assert [name for name in (*SLOWEST, *QUICK) if not (ROOT / name).exists()] == []
