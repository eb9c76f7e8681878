"""The guarantees of workers that stay, checked several times; `make bench-kept` does hundreds."""

from pathlib import Path

import bench_path  # noqa: F401
import kept
import pytest
from recovery import lifeline_in

TIMES = {"worker": 20, "blocked": 9, "source": 5}


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", kept.CASES)
def test_a_promise_holds_again_and_again(tmp_path: Path, case: str) -> None:
    times = TIMES.get(case, 2)
    with lifeline_in(tmp_path) as lifeline:
        found = kept.run(case, times, kept.Place(tmp_path, lifeline))
    assert not found.broken, found
    assert found.held == times
