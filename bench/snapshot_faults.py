"""What snapshots in memory promise, tried: nothing torn is loaded, damage is found, and how soon.

* kills: writers get SIGKILL at random moments; what they leave is looked at (killed_writers.py of
  the tests). The same for processes that fetch a copy while its source is overwritten.
* flips: one bit of the newest of two snapshots is flipped; a new process must go on from the older.
* load: how fast a new process comes to a snapshot of `--gb`, mapped, verified and copied into the
  model, with one CPU and with all; beside it a bare copy of as much memory by as many threads.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import statistics
import subprocess
import sys
import time

import torch
from measure import ROOT, load
from snapshots import Memory
from torch import nn
from torch._C._distributed_c10d import HashStore

from rdzv.worker import staging
from rdzv.worker.link import GivenSlots
from rdzv.worker.resuming import Resuming
from rdzv.worker.rounds import Round
from rdzv.worker.sealing import Sealing
from rdzv.worker.snapshot_slot import TENSORS_AT
from rdzv.worker.snapshots import Snapshots

SUPPORT = ROOT / "tests" / "support"
SEAL_BYTES = 48


class Runner(Memory):
    """Slots that outlive a worker."""

    def __init__(self) -> None:
        self.size, self.fds = 0, list[int]()

    def reserve(self, size: int, *, copies: bool = False) -> GivenSlots:
        """Give those that are there, or make two."""
        if size > self.size:
            self.size, self.fds = size, super().reserve(size).fds
        return GivenSlots(self.size, [os.dup(fd) for fd in self.fds])


def state_of(size: int, parameters: int) -> Sealing:
    """Make a state as a new process has it."""
    torch.manual_seed(1)
    model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(parameters)])
    return Sealing({"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)})


def saved(runner: Runner, size: int, parameters: int, steps: int) -> None:
    """Save some steps."""
    sealing, round_ = state_of(size, parameters), Round(0, 0, 1, 0, 0, "")
    sealing.begin_round(0, 1, lambda: None)
    saving = Snapshots(sealing, runner, 1)  # type: ignore[arg-type]
    saving.begin_round(round_)
    for step in range(steps):
        with torch.no_grad():
            sealing.contents.modules["model"][0].fill_(step + 1)
        sealing.commit()
        saving.committed()
        saving.finish()


def loaded(runner: Runner, size: int, parameters: int) -> tuple[Sealing, float]:
    """Load as a new process does; return its state, and how long that took."""
    sealing = state_of(size, parameters)
    held = Snapshots(sealing, runner, None).held  # type: ignore[arg-type]
    begun = time.perf_counter()
    Resuming(held, sealing, Round(1, 0, 1, 0, 0, "")).load(HashStore())
    return sealing, time.perf_counter() - begun


def flip_bits(count: int, chance: random.Random) -> None:
    """Flip one bit after the other, anywhere in what belongs to the snapshot."""
    runner = Runner()
    saved(runner, 1_000, 4, 3)
    slots = [os.pread(fd, runner.size, 0) for fd in runner.fds]
    with contextlib.redirect_stderr(io.StringIO()):
        newest, _ = loaded(runner, 1_000, 4)
    number = 0 if newest.step == 3 and _step_of(slots[0]) == 3 else 1
    header_bytes = int.from_bytes(slots[number][12:16], "big")
    content = len(slots[number].rstrip(b"\0")) - TENSORS_AT
    said = 0
    for flip in range(count):
        # A quarter in seal and header, which are small.
        at = chance.randrange(SEAL_BYTES + header_bytes)
        if flip % 4:
            at = TENSORS_AT + chance.randrange(content)
        changed = bytearray(slots[number])
        changed[at] ^= 1 << chance.randrange(8)
        os.pwrite(runner.fds[number], changed, 0)
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            resumed, _ = loaded(runner, 1_000, 4)
        assert resumed.step == 2, f"byte {at}: step {resumed.step} was loaded"
        assert resumed.contents.modules["model"][0][0].item() == 2.0
        assert "resumed from the snapshot of step 2 in memory" in errors.getvalue()
        said += "is damaged, so it is ignored" in errors.getvalue()
        os.pwrite(runner.fds[number], slots[number], 0)
    print(
        f"{count} flipped bits: all found, and the step before loaded; {said} in the content, of "
        "which stderr says that it is damaged, the others in seal or header: no snapshot"
    )


def _step_of(slot: bytes) -> int:
    said = slot[SEAL_BYTES : SEAL_BYTES + int.from_bytes(slot[12:16], "big")]
    return int(said.split(b'"step": ')[1].split(b",")[0])


def measure_loads(gb: float, runs: int) -> None:
    """Measure how fast a snapshot is loaded."""
    parameters = 64
    size = int(gb * 1e9 / 4 / parameters)
    runner = Runner()
    saved(runner, size, parameters, 2)
    cpus = os.sched_getaffinity(0)
    tensors = [torch.ones(size) for _ in range(parameters)]
    places = [torch.zeros(size) for _ in range(parameters)]
    for used in ({min(cpus)}, cpus):
        os.sched_setaffinity(0, used)
        times, bare = list[float](), list[float]()
        with contextlib.redirect_stderr(io.StringIO()):
            for _ in range(runs):
                times.append(loaded(runner, size, parameters)[1])
                begun = time.perf_counter()
                staging.copy_all(tensors, places, [], staging.copiers())
                bare.append(time.perf_counter() - begun)
        print(
            f"load of {gb:g} GB, {len(used)} CPUs, n={runs}: median "
            f"{gb / statistics.median(times):.1f} GB/s, best {gb / min(times):.1f} GB/s; a bare "
            f"copy: median {gb / statistics.median(bare):.1f} GB/s, best {gb / min(bare):.1f} "
            f"GB/s; a load takes {statistics.median(times) / statistics.median(bare):.1f} times "
            f"as long (best: {min(times) / min(bare):.1f})",
            flush=True,
        )


def kill(program: str, count: int) -> None:
    """Run one of the tests' programs."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("worker", "agent", "rendezvous"))
    command = [sys.executable, str(SUPPORT / program), str(count)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True)


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10_000)
    parser.add_argument("--copy-kills", type=int, default=2_000)
    parser.add_argument("--flips", type=int, default=1_000)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--loads", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)  # As rdzvrun sets it for several workers.
    print(load(), flush=True)
    if args.loads:
        measure_loads(args.gb, args.loads)
    if args.flips:
        flip_bits(args.flips, random.Random(0))
    sys.stdout.flush()
    for program, count in (
        ("killed_copies.py", args.copy_kills),
        ("killed_writers.py", args.kills),
    ):
        if count:
            kill(program, count)
    print(load())


if __name__ == "__main__":
    main()
