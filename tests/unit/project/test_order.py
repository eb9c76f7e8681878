"""The tests begin with what takes long, as `tests/conftest.py` has it."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import QUICK, SLOWEST

TESTS = Path(__file__).parents[2]


def test_the_files_that_take_long_are_there() -> None:
    assert [name for name in (*SLOWEST, *QUICK) if not (TESTS / name).exists()] == []
