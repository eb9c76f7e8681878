"""A worker with torch: small all-reduces over gloo, many a second; RANK 0 saves each step."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from diary import Diary, load_step, save_step

PAUSE_S = float(os.environ.get("RDZV_FAULTS_PAUSE_S", "0.02"))
FINISH = Path(os.environ["RDZV_FAULTS_FINISH"])


def train(diary: Diary) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    start = torch.tensor([load_step() if rank == 0 else 0])
    dist.broadcast(start, src=0)
    step = int(start.item())
    while True:
        votes = torch.tensor([1.0, float(rank == 0 and FINISH.exists()), float(step)])
        dist.all_reduce(votes)
        if votes[0].item() != world_size or votes[2].item() != step * world_size:
            raise RuntimeError(f"the sum of all ranks is {votes.tolist()} at step {step}")
        if rank == 0:
            save_step(step)
        diary.step = step
        if votes[1].item() > 0:
            dist.destroy_process_group()
            return
        step += 1
        time.sleep(PAUSE_S)


def main() -> None:
    diary = Diary()
    try:
        train(diary)
    except RuntimeError as error:
        diary.end(f"failed: {str(error).splitlines()[0][:200]}")
        raise
    diary.end("succeeded")


main()
