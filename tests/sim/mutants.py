"""Planted bugs: if the simulator does not catch each of them, it is blind at that place.

A mutant is one small change to the code, at least one for each rule of the three cores and for each
guarantee. Each is applied to a copy of the packages and run by a child process, until a history
fails; those that a single history cannot show name the tests that catch them instead. A mutant that
survives means that the simulator lacks a fault or a check: it fails the run. A change that fits no
code, or several places, fails it, too: the list (`planted_bugs`) follows the code, by symbols and
tokens (`planting`).

`make sim-mutants`, or `python -m tests.sim.mutants --only WORD` for some of them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rdzv.structs import struct
from tests.sim.planted_bugs import MUTANTS, SIMULATOR, Mutant
from tests.sim.planting import SOURCES, StaleError, planted

ROOT = Path(__file__).parents[2]


@struct(frozen=True)
class Verdict:
    """The result for a mutant."""

    mutant: Mutant
    caught: bool
    how: str
    took_s: float


def copy_packages(origin: Path, folder: Path) -> None:
    """Copy the packages, including compiled code."""
    for source in SOURCES:
        shutil.copytree(origin / source, folder / source)


NONE = Mutant("no planted bug", "", "", "")
"""The unchanged code: if its histories fail, those of changed code show nothing."""


def run(mutant: Mutant, origin: Path, seeds: int) -> Verdict:
    """Plant a bug and see whether it is caught."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rdzv-mutant-") as name:
        folder = Path(name)
        copy_packages(origin, folder)
        if mutant is not NONE:
            path, text = planted(folder, mutant.where, mutant.old, mutant.new)
            path.write_text(text)
        command = _command(mutant, seeds)
        paths = os.pathsep.join(str(folder / source) for source in SOURCES)
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    return Verdict(mutant, *_judge(mutant, done), time.monotonic() - began_s)


def _command(mutant: Mutant, seeds: int) -> list[str]:
    if mutant.by == SIMULATOR:
        options = ["--seeds", f"0:{seeds}", "--processes", "1", "--first", "--brief"]
        return [sys.executable, "-m", "tests.sim", *options]
    options = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "-W", "ignore"]
    return [sys.executable, "-m", "pytest", *options, *mutant.by.split()]


def _judge(mutant: Mutant, done: subprocess.CompletedProcess[str]) -> tuple[bool, str]:
    if mutant.by == SIMULATOR:
        found = re.search(r"^seed (\d+) \((\d)\): (.*)$", done.stdout, re.MULTILINE)
        if found is None:
            return False, done.stderr.strip()[-200:]
        return True, f"seed {found[1]}: {found[3][:90]}"
    found = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    return done.returncode == 1, found[1] if found else done.stdout.strip()[-200:]


def main() -> int:
    """Run the planted bugs selected by the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants with this word in name or symbol")
    parser.add_argument("--seeds", type=int, default=2_000, help="how many histories to try")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="only check that each can be planted")
    parser.add_argument(
        "--by-sim", action="store_true", help="run the simulator even for those caught by tests"
    )
    options = parser.parse_args()
    mutants = [m for m in MUTANTS if options.only in f"{m.name} {m.where}"]
    stale = _check(mutants)
    if stale or options.check:
        return stale
    if options.by_sim:
        mutants = [Mutant(m.name, m.where, m.old, m.new) for m in mutants]
    with tempfile.TemporaryDirectory(prefix="rdzv-mutants-") as name:
        # The code as it is now: it may be edited while this runs.
        copy_packages(ROOT, Path(name))
        return _run_all(mutants, Path(name), options.seeds, options.processes)


def _run_all(mutants: list[Mutant], origin: Path, seeds: int, processes: int) -> int:
    healthy = run(NONE, origin, seeds)
    if healthy.caught:
        print(f"a history fails without any planted bug: {healthy.how}")
        return 1
    with ThreadPoolExecutor(processes) as pool:
        survivors = 0
        for verdict in pool.map(lambda mutant: run(mutant, origin, seeds), mutants):
            survivors += not verdict.caught
            word = "caught  " if verdict.caught else "SURVIVED"
            name = f"{verdict.mutant.where}: {verdict.mutant.name}"
            print(f"{word} {verdict.took_s:5.1f} s  {name}  [{verdict.how}]", flush=True)
    print(f"{len(mutants)} mutants, {survivors} survived")
    return 1 if survivors else 0


def _check(mutants: list[Mutant]) -> int:
    stale = 0
    for mutant in mutants:
        try:
            planted(ROOT, mutant.where, mutant.old, mutant.new)
        except StaleError as error:
            stale += 1
            print(f"{mutant.name!r}: {error}")
    print(f"{len(mutants)} mutants, {stale} do not fit the code")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
