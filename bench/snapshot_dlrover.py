"""DLRover's flash checkpoint beside our snapshots: what a save costs, and how fast it is loaded.

DLRover (0.6.1) keeps a checkpoint in memory of a process that outlives the worker, as our runner
keeps snapshots. Both save the same state on the CPU each ten steps, and after a SIGKILL new
processes load it, one after another. Ours is verified before; DLRover has no digest.

* cost: how much longer a step takes on average than one without saves.
* load: until the state is in the model.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from measure import ROOT
from measure import load as conditions
from snapshot_faults import measure_loads
from snapshots import Training, model_of, train

PEERS = ROOT / "build" / "peers" / "bin" / "python"
LOGS = ROOT / "build" / "bench"
EVERY = 10


def hold_memory() -> None:
    """Be the process that holds the memory, as DLRover's agent is."""
    from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver

    AsyncCheckpointSaver.start_async_saving_ckpt()
    print("ready", flush=True)
    sys.stdin.read()


def save(folder: str, gb: float, steps: int, step_ms: float) -> None:
    """Print the mean time of a step without and with saves, and how long a save blocks; wait."""
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

    training, checkpointer, blocked = Training(gb, step_ms), DdpCheckpointer(folder), list[float]()

    def save_each_tenth(number: int) -> None:
        if number % EVERY == 0:
            begun = time.perf_counter()
            state = training.model.state_dict()
            checkpointer.save_checkpoint(number + 1, state, storage_type=StorageType.MEMORY)
            blocked.append(1000 * (time.perf_counter() - begun))

    training.mean_ms(2 * EVERY + 2, save_each_tenth)  # The memory is there from then on.
    blocked.clear()
    plain = training.mean_ms(steps, lambda number: None)
    saved = training.mean_ms(steps, save_each_tenth)
    print(plain, saved, statistics.mean(blocked), flush=True)
    sys.stdin.read()


def load(folder: str, gb: float) -> None:
    """Print how long it takes until the state is in a new model."""
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

    model, checkpointer = model_of(gb), DdpCheckpointer(folder)
    begun = time.perf_counter()
    state = checkpointer.load_checkpoint()
    assert state, "there is no checkpoint"
    model.load_state_dict(state)
    print(time.perf_counter() - begun, flush=True)
    os._exit(0)  # Its threads do not end.


@contextmanager
def started(what: str, *args: object) -> Iterator[IO[str]]:
    """Run one of the above in a process of its own; give its output, and kill it at the end."""
    names = {"ROLE_NAME": "dlrover-trainer", "TORCHELASTIC_RUN_ID": "bench"}
    names |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    pipe = subprocess.PIPE
    LOGS.mkdir(parents=True, exist_ok=True)
    with (LOGS / f"dlrover-{what}.log").open("w") as log:
        process = subprocess.Popen(
            [PEERS, __file__, what, *map(str, args)],
            env={**os.environ, **names},
            stdin=pipe,
            stdout=pipe,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        process.kill()
        process.wait()


def numbers(output: IO[str]) -> list[float]:
    """Read the next line of numbers; DLRover's log is on the same stream."""
    for line in output:
        try:
            return [float(word) for word in line.split()]
        except ValueError:
            continue
    raise RuntimeError(f"the process has ended without its figures: see {LOGS}/dlrover-*.log")


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[20, 100])
    parser.add_argument("--loads", type=int, default=4)
    args = parser.parse_args()
    if not PEERS.exists():
        sys.exit("there is no build/peers: make build/peers/.ready")
    print(f"{conditions()}; {args.gb:g} GB, a save each {EVERY} steps")
    with tempfile.TemporaryDirectory() as folder, started("hold_memory") as holder:
        if not any(line.strip() == "ready" for line in holder):
            raise RuntimeError(f"DLRover's saver has not started: see {LOGS}/dlrover-*.log")
        for step_ms in args.step_ms:
            with started("save", folder, args.gb, args.steps, step_ms) as output:
                plain, saved, blocked = numbers(output)
            theirs = saved / plain - 1
            plain, _ = train(args.gb, args.steps, step_ms, None)
            saved, waits = train(args.gb, args.steps, step_ms, EVERY)
            ours = saved / plain - 1
            print(
                f"steps of {plain:.0f} ms: a save costs {theirs:.0%} with DLRover, which blocks "
                f"{blocked:.0f} ms, and {ours:.0%} with rdzv, whose next step waits "
                f"{sum(waits) / (args.steps / EVERY):.0f} ms: {theirs / ours:.1f} times",
                flush=True,
            )
        seconds = []
        for _ in range(args.loads):
            with started("load", folder, args.gb) as output:
                seconds += numbers(output)
        print(
            f"DLRover, n={args.loads}: {args.gb / statistics.median(seconds):.1f} GB/s, best "
            f"{args.gb / min(seconds):.1f}; in {statistics.median(seconds):.2f} s; rdzv:"
        )
        measure_loads(args.gb, 1, args.loads, adam=False)


if __name__ == "__main__":
    if sys.argv[1:2] == ["hold_memory"]:
        hold_memory()
    elif sys.argv[1:2] == ["save"]:
        save(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
    elif sys.argv[1:2] == ["load"]:
        load(sys.argv[2], float(sys.argv[3]))
    else:
        main()
