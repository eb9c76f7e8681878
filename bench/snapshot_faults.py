"""What snapshots in memory promise, tried: nothing torn is loaded, damage is found, and how soon.

* kills: writers get SIGKILL at random moments; what they leave is looked at (killed_snapshots.py of
  the tests). The same for processes that fetch a copy while its source is overwritten.
* flips: one bit of the newest of two snapshots is flipped; a new process must go on from the older.
* load: how fast new processes come to snapshots of `--gb` each, which one or two ranks of a node
  load at once: with parameters only, which are there, and with Adam's state, which is not, and by
  part; beside it a bare copy of as much memory by as many threads.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

import torch
from measure import ROOT
from measure import load as conditions
from snapshots import Memory, timed
from torch import nn
from torch._C._distributed_c10d import HashStore

from rdzv.worker import healing, staging
from rdzv.worker.link import GivenSlots
from rdzv.worker.resuming import Resuming
from rdzv.worker.rounds import Round
from rdzv.worker.sealing import Sealing
from rdzv.worker.slot_format import SEAL_BYTES, TENSORS_AT
from rdzv.worker.snapshot_slot import Slot
from rdzv.worker.snapshots import HeldSlots, Snapshots
from rdzv.worker.verifying import Verifying

SUPPORT = ROOT / "tests" / "support"


class Runner(Memory):
    """Slots that outlive a worker."""

    def __init__(self) -> None:
        self.size, self.fds = 0, list[int]()

    def reserve(self, size: int, *, copies: bool = False) -> GivenSlots:
        """Give those that are there, or make two."""
        if size > self.size:
            self.size, self.fds = size, super().reserve(size).fds
        return GivenSlots(self.size, [os.dup(fd) for fd in self.fds])


def state_of(size: int, parameters: int, *, adam: bool = False) -> Sealing:
    """Make a state as a new process has it."""
    torch.manual_seed(1)
    model = nn.ParameterList([nn.Parameter(torch.ones(size)) for _ in range(parameters)])
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), 0.1)
    return Sealing({"model": model, "optimizer": optimizer})


def saved(runner: Runner, sealing: Sealing, steps: int) -> None:
    """Save some steps."""
    sealing.begin_round(0, 1, lambda: None)
    saving = Snapshots(sealing, runner, 1)  # type: ignore[arg-type]
    saving.begin_round(Round(0, 0, 1, 0, 0, ""))
    for step in range(steps):
        with torch.no_grad():
            sealing.contents.modules["model"][0].fill_(step + 1)
        sealing.commit()
        saving.committed()
        saving.finish()


def load(runner: Runner, sealing: Sealing) -> None:
    """Heal as a new process does in a round of new processes."""
    held = Snapshots(sealing, runner, None).held  # type: ignore[arg-type]
    round_ = Round(1, 0, 1, 0, 0, "")
    verifying = Verifying(sealing, None, lambda: None, sys.exit)
    resuming = partial(Resuming, held, sealing, round_)
    healing.heal(sealing, "", round_, HashStore(), None, resuming, verifying)


def flip_bits(count: int, chance: random.Random) -> None:
    """Flip one bit after the other, anywhere in what belongs to the snapshot."""
    runner = Runner()
    saved(runner, state_of(1_000, 4), 3)
    slots = [os.pread(fd, runner.size, 0) for fd in runner.fds]
    with contextlib.redirect_stderr(io.StringIO()):
        load(runner, newest := state_of(1_000, 4))
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
            load(runner, resumed := state_of(1_000, 4))
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


PARTS = {
    "map": (HeldSlots, "find"),
    "verify": (Slot, "is_sound"),
    "copy": (Resuming, "_read"),
    "compare": (healing, "digest"),
}
"""The parts of a load: mapping memory, verifying digests, copying into the state's objects, and a
digest of the result, by which ranks learn whether all have the same."""
PARAMETERS = 64


def measure_load(
    gb: float, adam: bool, ranks: int, runs: int, barrier: Barrier, results: Queue[list[float]]
) -> None:
    """Load `runs` times at the same moments as the other ranks; send the times."""
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    torch.set_num_threads(1)  # As rdzvrun sets it for several workers.
    parts = {name: list[float]() for name in PARTS}
    for name, (of, attribute) in PARTS.items():
        setattr(of, attribute, timed(getattr(of, attribute), parts[name]))
    runner, size = Runner(), int(gb * 1e9 / 4 / PARAMETERS / (3 if adam else 1))
    state = state_of(size, PARAMETERS, adam=adam)
    if adam:
        for parameter in state.contents.modules["model"]:
            parameter.grad = torch.ones(size)
        state.contents.optimizers["optimizer"].step()
    saved(runner, state, 2)
    del state
    copied = [torch.ones(size) for _ in range(PARAMETERS)]
    places = [torch.zeros(size) for _ in range(PARAMETERS)]
    for _ in range(runs):
        state = state_of(size, PARAMETERS, adam=adam)
        for times in parts.values():
            times.clear()
        barrier.wait()
        begun = time.perf_counter()
        with contextlib.redirect_stderr(io.StringIO()):
            load(runner, state)
        taken = time.perf_counter() - begun
        assert state.step == 2
        del state
        barrier.wait()
        begun = time.perf_counter()
        staging.copy_all(copied, places, [], staging.readers())
        bare = (time.perf_counter() - begun) * (3 if adam else 1)
        results.put([taken, bare, *(sum(times) / 1000 for times in parts.values())])


def measure_loads(gb: float, ranks: int, runs: int, *, adam: bool) -> None:
    """Measure how fast the ranks of a node load a snapshot of `gb` each."""
    fork = multiprocessing.get_context("fork")
    barrier, results = fork.Barrier(ranks), fork.Queue()
    args = (gb, adam, ranks, runs, barrier, results)
    processes = [fork.Process(target=measure_load, args=args) for _ in range(ranks)]
    for process in processes:
        process.start()
    times = [results.get() for _ in range(ranks * runs)]
    for process in processes:
        process.join()
    loads, bares = ([one[n] for one in times] for n in range(2))
    parts = ", ".join(
        f"{name} {statistics.median(one[2 + n] for one in times):.2f}"
        for n, name in enumerate(PARTS)
    )
    node = gb * ranks
    print(
        f"{ranks} ranks of {gb:g} GB, {'Adam' if adam else 'parameters only'}, n={runs}: median "
        f"{node / statistics.median(loads):.1f} GB/s a node, best {node / min(loads):.1f}; of "
        f"{statistics.median(loads):.2f} s: {parts}; a bare copy: median "
        f"{node / statistics.median(bares):.1f}, best {node / min(bares):.1f}",
        flush=True,
    )


def kill(what: str, count: int) -> None:
    """Kill writers or copies, by the tests' program."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("worker", "agent", "rendezvous"))
    command = [sys.executable, str(SUPPORT / "killed_snapshots.py"), what, str(count)]
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
    print(conditions(), flush=True)
    for ranks, adam in ((1, False), (1, True), (2, False), (2, True)) if args.loads else ():
        measure_loads(args.gb, ranks, args.loads, adam=adam)
    torch.set_num_threads(1)  # As rdzvrun sets it for several workers.
    if args.flips:
        flip_bits(args.flips, random.Random(0))
    sys.stdout.flush()
    for what, count in (("copies", args.copy_kills), ("writers", args.kills)):
        if count:
            kill(what, count)
    print(conditions())


if __name__ == "__main__":
    main()
