"""Every program of bench/ starts, at the smallest size that it has, and prints its figures."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCH = Path(__file__).parents[2] / "bench"

QUICK = {
    "commits": ("--nodes=2", "commits succeed  nodes=2 "),
    "floor": ("--nodes=16", "floor plain  clients=16 "),
    "store": ("--stores=memory --nodes=3 --writers=1 --seconds=0.05", "store memory"),
}
"""What takes a second or two: a program's options, and a part of what it prints."""

LONG = {
    "any_size": ("--epochs=12", "any_size: 60 steps with 4, 3, "),
    "device": ("kept snapshot --rounds=1", '"kills": 1'),
    "goodput": ("--minutes=0.1 --every=2 --launchers=rdzvrun", '"failures": 1'),
    "hangs": ("--hangs=1 --limit=2 --nodes=1 --ranks=2", "| 1 |"),
    "hangs_cost": ("", "us an all-reduce"),
    "kept": ("--cases=worker --times=1", "| worker | 1 of 1 |"),
    "launch": ("--starts=1 --idle=1 --launchers=rdzvrun", '"case": "idle"'),
    "recovery": ("--cases=worker --runs=1 --nodes=2 --launchers=rdzvrun", "1 of 1"),
    "scale": ("--nodes=8 --no-peer --repetitions=1", "scale rdzvd   nodes=8 "),
    "resize": ("--gb=0.01", "resize: from 2 to 3 ranks: "),
    "snapshots": ("--gb=0.01 --steps=20 --step-ms=2 --threads=1", "1 threads: cost "),
    "snapshot_faults": (
        "--kills=1 --copy-kills=1 --flips=1 --gb=0.01 --loads=1",
        "1 kills",
    ),
    "store_ranks": ("--kinds=lazy --ranks=8", '"ranks": 8'),
    "stragglers": ("--slow=1 --calm=0.01 --step=0.02", "| 1 |"),
    "takeover": ("--cases=memory --nodes=2 --repetitions=1 --no-peer", '"failed": []'),
    "verify": ("--mb=3 --flips=1 --checks=1", "found: of 1 flipped bits 1 named"),
    "warm": ("--workers=1 --times=1", "warm"),
    "wrappers": ("--mb=4 --ranks=2 --times=1", "init_sync=False  mb=4 ranks=2: made "),
}

PICTURES = {"dashboard": ("prometheus", "picture.svg"), "page": ("chromium", "picture.png")}
"""The program that each needs, and its file."""

PEERS = {"snapshot_dlrover": ("--gb=0.01 --steps=20 --step-ms=2 --loads=1", "DLRover, n=1")}
"""What needs the environment of `make build/peers/.ready`."""

STARTED_BY_OTHERS = re.compile(r"c10d_crowd|c10d_peer|crowd|\w+_worker|sections")
"""Children of the others; and what writes RESULTS.md, which test_bench.py tests."""


def run(name: str, options: list[str], says: str) -> None:
    done = subprocess.run(
        [sys.executable, BENCH / f"{name}.py", *options],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        # As a user starts it: with the tests' default of cold workers, recovery.py has no end.
        env={n: v for n, v in os.environ.items() if not n.startswith(("PET_", "RDZV_"))},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert says in done.stdout
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert all("bench" in line for line in lines)


def test_no_program_is_left_out() -> None:
    text = {path.stem: path.read_text() for path in BENCH.glob("*.py")}
    programs = {name for name, code in text.items() if '__name__ == "__main__"' in code}
    programs = {name for name in programs if not STARTED_BY_OTHERS.fullmatch(name)}
    assert programs == {*QUICK, *LONG, *PICTURES, *PEERS}


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.campaign) for name in (LONG | PEERS))]
)
def test_a_program_measures_the_smallest_that_it_can(name: str) -> None:
    if name in PEERS and not (BENCH.parent / "build/peers/.ready").exists():
        pytest.skip("there is no build/peers (make build/peers/.ready)")
    options, says = (QUICK | LONG | PEERS)[name]
    run(name, options.split(), says)


@pytest.mark.campaign
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn(name: str, tmp_path: Path) -> None:
    program, file = PICTURES[name]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed (Debian's package {program} has it)")
    run(name, [str(tmp_path / file)], "written: ")
    assert (tmp_path / file).stat().st_size > 0
