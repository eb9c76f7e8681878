"""A worker under torch's own rendezvous: all-reduces ones with its peers until told to end.

Writes a file that identifies it once its first all-reduce is done.
"""

import json
import os
import time
from pathlib import Path

import no_compiler  # noqa: F401
import torch
import torch.distributed as dist

FINISH = Path(os.environ["RDZV_TEST_FINISH"])


def report() -> None:
    """Write one file atomically."""
    folder = Path(os.environ["RDZV_TEST_REPORTS"])
    temporary = folder / f"{os.getpid()}.tmp"
    temporary.write_text(json.dumps({**os.environ, "pid": os.getpid()}))
    temporary.rename(folder / f"{os.getpid()}.json")


def add_ones(finish: bool) -> bool:
    """Sum, over all ranks, ones and requests to end; return whether any rank requests it."""
    value = torch.tensor([1.0, float(finish)])
    dist.all_reduce(value)
    if value[0].item() != dist.get_world_size():
        raise RuntimeError(f"{value[0].item()} ranks answered of {dist.get_world_size()}")
    return value[1].item() > 0


torch.set_num_threads(1)
dist.init_process_group("gloo")
add_ones(False)
report()
while not add_ones(FINISH.exists()):
    time.sleep(0.02)
dist.destroy_process_group()
