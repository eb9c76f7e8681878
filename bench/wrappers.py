"""What a new DistributedDataParallel costs in each round of workers that stay.

Real processes over gloo wrap a model of `--mb`, `--times` times in turn with DDP's own exchange and
without it. `made`: the wall clock of its constructor, median of all ranks. Steps: CPU time of the
forward and backward passes, of the new wrapper's first three; the third is like any later one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import load
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 1024


def wrap(rank: int, ranks: int, megabytes: int, times: int, store: str) -> None:
    """Wrap and step, as one process; RANK 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(max(megabytes // 4, 1))]
    net, inputs = nn.Sequential(*layers), torch.randn(2, WIDTH)
    DistributedDataParallel(net)  # The first one in a process imports torch's compiler.
    found: dict[bool, list[list[float]]] = {True: [], False: []}
    for _ in range(times):
        for init_sync, rows in found.items():
            dist.barrier()
            begun = time.monotonic()
            wrapper = DistributedDataParallel(net, init_sync=init_sync)
            row = [time.monotonic() - begun]
            for _ in range(3):
                net.zero_grad()
                begun = time.process_time()
                wrapper(inputs).sum().backward()
                row.append(time.process_time() - begun)
            rows.append(row)
            del wrapper
    for init_sync, rows in found.items():
        all_rows = [None] * ranks
        dist.all_gather_object(all_rows, rows)
        columns = zip(*(row for of in all_rows for row in of or []), strict=True)
        made, *steps = (f"{statistics.median(column) * 1000:.1f}" for column in columns)
        if rank == 0:
            print(
                f"wrappers  init_sync={init_sync}  mb={megabytes} ranks={ranks}: "
                f"made {made} ms; steps {', '.join(steps)} ms of CPU"
            )
    dist.destroy_process_group()


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    print(load(), f"torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")  # noqa: PTH118
        mp.spawn(wrap, (args.ranks, args.mb, args.times, store), nprocs=args.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
