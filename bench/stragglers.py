"""Whether the slow rank of a lock-step training is named, and how soon; and none without one.

    python bench/stragglers.py [--slow N] [--calm MINUTES] [--step SECONDS] [--factor F]

One job of four gloo ranks on two nodes of this machine, each step of which ends in an all-reduce.
N times by turns, one rank is F times as slow until it is named, and then as fast as the others
until nothing is named. Printed is how long that took each time, and what was said. Then nothing is
slow for some minutes, and whoever is named is named wrongly. The script reports no progress and
imports nothing of rdzv.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import measure  # noqa: F401  (its path to `ports`)
from ports import free_port
from processes import BIN, Rdzvd, guard

from rdzv.client import ControlClient, parse_endpoints
from rdzv.core.evidence.stragglers import Straggler
from rdzv.view.sentences import slowness

WORKER = Path(__file__).with_name("stragglers_worker.py")
JOB, NODES, RANKS = "bench", 2, 4
GIVEN_UP_S = 180.0


class Training:
    """The job, its server, and its nodes."""

    def __init__(self, folder: Path, step_s: float, jitter: float, factor: float) -> None:
        self._slow = folder / "slow"
        self._address = f"127.0.0.1:{free_port()}"
        self.server = Rdzvd(self._address, ("--store=memory",), folder / "rdzvd.log")
        self.server.start()
        self._nodes = [
            subprocess.Popen(
                [
                    *(BIN / "rdzvrun", f"--rdzv-endpoint={self._address}", f"--rdzv-id={JOB}"),
                    *(f"--nnodes={NODES}", f"--nproc-per-node={RANKS // NODES}"),
                    *(f"--node-id=n{number}", "--rdzv-backend=rdzv", WORKER, folder),
                    *map(str, (step_s, jitter, factor)),
                ],
                stdout=subprocess.DEVNULL,
                stderr=(folder / f"n{number}.log").open("w"),
                preexec_fn=guard(),  # noqa: PLW1509  # There is one thread.
            )
            for number in range(NODES)
        ]

    def slow_down(self, rank: int | None) -> None:
        """Let one rank be slow, and no other."""
        new = self._slow.with_suffix(".new")
        new.write_text("" if rank is None else str(rank))
        new.rename(self._slow)

    def stragglers(self) -> tuple[Straggler, ...]:
        """Return the stragglers, as status shows them."""
        with ControlClient(parse_endpoints(self._address)) as client:
            return client.status(JOB).stragglers

    def end(self) -> None:
        """End everything."""
        for node in self._nodes:
            node.terminate()
        for node in self._nodes:
            node.wait()
        self.server.kill()


def await_s(condition: Callable[[], bool]) -> float:
    """Return how long it took until a condition held."""
    begun_s = time.monotonic()
    while not condition():
        if time.monotonic() - begun_s > GIVEN_UP_S:
            return GIVEN_UP_S
        time.sleep(0.5)
    return time.monotonic() - begun_s


def measure_naming(training: Training, slow: int, calm_s: float, draw: random.Random) -> None:
    """Print what is named with a slow rank, and without."""
    named, gone, wrong = [], [], 0
    for number in range(slow):
        rank = draw.randrange(RANKS)
        training.slow_down(rank)
        named.append(await_s(lambda: bool(training.stragglers())))
        found = training.stragglers()
        wrong += any(one.rank != rank for one in found)
        said = "; ".join(f"RANK {one.rank}: {slowness(one)}" for one in found)
        print(f"{number}: RANK {rank} is slow; after {named[-1]:.0f} s {said}", flush=True)
        training.slow_down(None)
        gone.append(await_s(lambda: not training.stragglers()))
    if named:
        print(f"| slow | wrong | named after, median | most | over after, median |\n{'|---' * 5}|")
        print(
            f"| {slow} | {wrong} | {statistics.median(named):.0f} s | {max(named):.0f} s | "
            f"{statistics.median(gone):.0f} s |"
        )
    until_s, seen = time.monotonic() + calm_s, set()
    while time.monotonic() < until_s:
        seen |= {one.rank for one in training.stragglers()}
        time.sleep(1.0)
    print(f"in {calm_s / 60:.0f} minutes without a slow rank were named: {sorted(seen) or 'none'}")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", type=int, default=8)
    parser.add_argument("--calm", type=float, default=10.0)
    parser.add_argument("--step", type=float, default=0.1)
    parser.add_argument("--jitter", type=float, default=0.05)
    parser.add_argument("--factor", type=float, default=1.2)
    parser.add_argument("--seed", default="1")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rdzv-stragglers-"))
    training = Training(folder, args.step, args.jitter, args.factor)
    try:
        time.sleep(20.0)
        measure_naming(training, args.slow, args.calm * 60, random.Random(args.seed))
    finally:
        training.end()
    print(f"load {os.getloadavg()[0]:.1f}; logs are in {folder}")


if __name__ == "__main__":
    main()
