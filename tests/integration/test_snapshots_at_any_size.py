"""A sharded model's snapshot is loaded by other numbers of ranks, from disk and from memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "sharded_checkpoints.py"


def run(folder: Path, how: str, *counts: int) -> tuple[list[str], str]:
    paths = (*(str(ROOT / name) for name in ("worker", "agent", "rendezvous")),)
    done = subprocess.run(
        [sys.executable, SCRIPT, folder, how, *map(str, counts)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("how", "counts"),
    [
        ("4,1,0", (2, 3)),
        # Two replicas of two parts; the same number of ranks also have their own random numbers.
        pytest.param("4,2,0", (3, 4), marks=pytest.mark.campaign),
        pytest.param("3,1,0", (5, 3), marks=pytest.mark.campaign),
    ],
)
def test_any_number_of_ranks_loads_the_same_bits(
    tmp_path: Path, how: str, counts: tuple[int, ...]
) -> None:
    said, errors = run(tmp_path, how, *counts)
    by = ("torch alone", "under @elastic", "from memory")
    assert said == [f"{one}, {n} ranks: {[0] * n}" for n in counts for one in by], errors


@pytest.mark.campaign
@pytest.mark.timeout(500)
def test_tensors_that_each_rank_has_for_itself_need_as_many_ranks(tmp_path: Path) -> None:
    # In this order, since ranks that cannot load what is in memory clear it.
    said, errors = run(tmp_path, "4,1,1", 4, 3)
    codes = ("4 ranks: [0, 0, 0, 0]", "3 ranks: [1, 1, 1]")
    assert said == [f"{how}, {one}" for one in codes for how in ("under @elastic", "from memory")]
    assert errors.count("part 0 of 3, which rank 0 needs: it is not sharded, and differs") == 3
    refused = "not sharded differ between the 4 ranks that saved it, but this round has 3: start 4"
    assert errors.count(refused) == 3
