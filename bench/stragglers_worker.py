"""A lock-step training of plain torch on gloo; one rank may be slower. Imports nothing of rdzv.

    stragglers_worker.py FOLDER STEP_S JITTER FACTOR

A step takes STEP_S, more or less by JITTER (the deviation of its logarithm), and ends in an
all-reduce. The rank whose number is in FOLDER/slow takes FACTOR times as long; it looks once in a
while, so that it can be changed.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    """Train until it is ended."""
    slow_file = Path(sys.argv[1]) / "slow"
    step_s, jitter, factor = map(float, sys.argv[2:5])
    dist.init_process_group("gloo")
    rank, step, slow, done = dist.get_rank(), 0, False, torch.ones(256)
    while True:
        if step % 10 == 0:
            slow = slow_file.exists() and slow_file.read_text() == str(rank)
        time.sleep(step_s * random.lognormvariate(0, jitter) * (factor if slow else 1))
        dist.all_reduce(done)
        step += 1


if __name__ == "__main__":
    main()
