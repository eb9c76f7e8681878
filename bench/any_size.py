"""Whether a training with a global batch is the same for any number of workers.

    python bench/any_size.py [--epochs N] [--sharded]

Five steps an epoch of a small model with dropout, batch norm and augmentation, in float64: once in
one process without a launcher, and once by rdzvrun on four nodes of one worker. Of these one is
lost, a worker is killed and replaced, another node is lost, and two come. Global batches of 22
samples, the last of 8, are cut into parts of at most 6. What is compared, for each step: samples,
learning rate, and loss. The script fails if any differ, the losses by more than 1e-5. Also shown is
what it costs to seed the generators, once for each sample and micro-batch.

With --sharded, the model is divided among the ranks (FSDP2) and saved in memory in each step, with
copies on other nodes, and nodes are drained instead of lost. Then the steps that each new round has
redone are shown, too: the round after the killed worker's may redo some.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import timeit
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from measure import emit, end_on_sigterm, say_conditions

from rdzv.worker.contents import derive_rng

from cluster import QUICK_TORCH, Cluster, cluster  # isort: skip  (its path comes from measure)

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
sys.path.insert(0, str(SUPPORT))
from any_size_training import Rows, loss_of, samples_of, steps_of  # noqa: E402

SCRIPT = SUPPORT / "any_size_training.py"
EPOCH_STEPS = 5
SAMPLES = 96
LIMIT = 1e-5
SHARDED = {"sharded": True, "leaves": True, "snapshot_every": 1}


def lines_in(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the steps that workers have printed, from the files in a folder."""
    for path in sorted(folder.rglob("stdout*")):
        for line in path.read_text().splitlines(keepends=True):
            if line.startswith('{"what": "step"') and line.endswith("}\n"):
                yield json.loads(line)


def disturbed(made: Cluster, steps: int, *, sharded: bool) -> None:
    """Train with 4, 3, 2, and 4 nodes."""
    warm = "--warm=torch,torch.distributed.fsdp" if sharded else "--warm"
    options = (warm, "--max-restarts=9", "--restart-backoff=0", "--redirects=3")
    options += ("--rdzv-conf=last_call_timeout=1",)
    how = {"epochs": steps // EPOCH_STEPS, "pause_s": 0.02, "waits": (steps * 4 // 5, 4)}
    arguments = json.dumps({**how, **(SHARDED if sharded else {})})
    environ = {"OMP_NUM_THREADS": "1", **({} if sharded else QUICK_TORCH)}
    nodes = {}

    def start(*names: str) -> None:
        for name in names:
            nodes[name] = made.start_node(
                name,
                *options,
                f"--topology={name}",
                worker=str(SCRIPT),
                args=(arguments,),
                nnodes="2:4",
                environ=environ,
            )

    def train(share: float, world: int) -> dict[str, Any]:
        """Wait until a world of this size has made a share of all steps."""
        return made.wait_until(
            f"{world} workers make step {share * steps:g}",
            lambda: [
                row
                for row in lines_in(made.folder / "logs")
                if row["step"] >= share * steps and row["world"] == world
            ],
        )[0]

    def end(name: str) -> None:
        if sharded:
            made.run("rdzvctl", f"--server={made.endpoint}", "drain", name, "--deadline=60s")
        else:
            nodes[name].kill_tree()

    start("n1", "n2", "n3", "n4")
    train(0.2, 4)
    end("n4")
    before = train(0.3, 3)["round"]
    os.kill(nodes["n2"].workers()[0], signal.SIGKILL)
    made.wait_until(
        "a new worker trains",
        lambda: any(row["round"] > before for row in lines_in(made.folder / "logs")),
    )
    train(0.4, 3)
    end("n3")
    train(0.6, 2)
    start("n5", "n6")
    for name in ("n1", "n2", "n5", "n6"):
        if code := nodes[name].wait():
            raise SystemExit(f"{name} ended with {code}: {nodes[name].text[-2000:]}")


def main() -> None:
    """Run both trainings, compare them, and print how far they differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=60, help=f"of {EPOCH_STEPS} steps")
    parser.add_argument("--sharded", action="store_true", help="divide the model among the ranks")
    chosen = parser.parse_args()
    steps = chosen.epochs * EPOCH_STEPS
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="rdzv-bench-") as temporary:
        say_conditions("any_size", Path(temporary))
        seed_us = min(timeit.repeat(partial(derive_rng, 1, 2, is_frequent=True), number=1000)) * 1e3
        emit(f"any_size: {seed_us:.0f} us to seed", bench="any_size", case="seed", us=seed_us)
        alone = Path(temporary) / "alone"
        alone.mkdir()
        with (alone / "stdout").open("w") as out:
            subprocess.run(
                [
                    *(sys.executable, SCRIPT),
                    json.dumps({"epochs": chosen.epochs, "sharded": chosen.sharded}),
                ],
                env={**os.environ, "RANK": "0", **({} if chosen.sharded else QUICK_TORCH)},
                stdout=out,
                check=True,
            )
        with cluster(Path(temporary)) as made:
            disturbed(made, steps, sharded=chosen.sharded)
            lines = list(lines_in(made.folder / "logs"))
            found = steps_of(lines)
        expected = steps_of(lines_in(alone))
    workers = [size for size, _ in groupby(len(found[step]) for step in sorted(found))]
    different = compare(found, expected)
    emit(
        f"any_size: {len(found)} steps with {', '.join(map(str, workers))} workers; different from "
        f"one worker: {', '.join(f'{count:.2g} {what}' for what, count in different.items())}",
        bench="any_size",
        steps=len(found),
        workers=workers,
        different=different,
    )
    loss = different.pop("of a loss")
    if chosen.sharded:
        redone = redone_steps(lines)
        text = ", ".join(f"{count} in round {number}" for number, count in redone.items())
        emit(f"any_size: steps redone: {text}", bench="any_size", redone=redone)
    if any(different.values()) or loss > LIMIT or not {4, 3, 2} <= set(workers):
        raise SystemExit("the training was not the same")


def redone_steps(lines: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Return how many committed steps each round has made again."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for row in lines:
        number, step = row["round"], row["step"]
        first[number] = min(step, first.get(number, step))
        last[number] = max(step, last.get(number, step))
    return {
        number: max(last[before] + 1 - first[number], 0)
        for before, number in pairwise(sorted(first))
    }


def compare(found: Mapping[int, Rows], expected: Mapping[int, Rows]) -> dict[str, float]:
    """Count what differs; of the losses, return the largest relative difference."""
    epochs: dict[int, Counter[int]] = {}
    for rows in found.values():
        epochs.setdefault(rows[0]["epoch"], Counter()).update(samples_of(rows))
    both = [(found[step], rows) for step, rows in expected.items() if step in found]
    return {
        "steps": len(found.keys() ^ expected.keys()),
        "batches": sum(samples_of(one) != samples_of(other) for one, other in both),
        "epochs": sum(samples != Counter(range(SAMPLES)) for samples in epochs.values()),
        "rates": sum({row["lr"] for row in one} != {other[0]["lr"]} for one, other in both),
        "of a loss": max(abs(loss_of(one) / loss_of(other) - 1) for one, other in both),
    }


if __name__ == "__main__":
    main()
