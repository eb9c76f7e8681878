"""What all tests share: the repository's root on the path, and `--rewrite` for scenarios."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:
    # So that helpers are `tests.unit.builders` here and under `python -m tests...` alike.
    sys.path.insert(0, ROOT)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write the present answers into tests/scenarios/*.txt; then review the diff",
    )
