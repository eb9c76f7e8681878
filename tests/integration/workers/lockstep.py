"""Steps of 40 ms, each with an all-reduce; RANK 1 takes 120 ms until `hurry` exists."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

FINISH = Path(os.environ["RDZV_TEST_FINISH"])
HURRY = FINISH.with_name("hurry")

dist.init_process_group("gloo")
rank = dist.get_rank()
while True:
    time.sleep(0.12 if rank == 1 and not HURRY.exists() else 0.04)
    done = torch.tensor(int(FINISH.exists()))
    dist.all_reduce(done)
    if done:
        break
# Without this, torch aborts some processes at their end.
dist.destroy_process_group()
