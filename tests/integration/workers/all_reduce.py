"""A worker that all-reduces ones with all its peers repeatedly, until it is told to end.

Reports once its first all-reduce is done. `die=N` makes RANK 0 die of SIGKILL after that in the
first N attempts, `boom` makes RANK 1 raise an exception that `@record` writes down.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import no_compiler  # noqa: F401
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

OPTIONS = dict(arg.partition("=")[::2] for arg in sys.argv[1:])
FINISH = Path(os.environ["RDZV_TEST_FINISH"])


def report() -> None:
    """Write one file atomically; `callers` is how many have used this store so far."""
    callers = dist.distributed_c10d._get_default_store().add("rdzv_test_callers", 1)
    folder = Path(os.environ["RDZV_TEST_REPORTS"])
    temporary = folder / f"{os.getpid()}.tmp"
    temporary.write_text(json.dumps({**os.environ, "pid": os.getpid(), "callers": callers}))
    temporary.rename(folder / f"{os.environ['RDZV_ROUND']}-{os.environ['RANK']}-{os.getpid()}.json")


def add_ones(finish: bool) -> bool:
    """Sum, over all ranks, ones and requests to end; return whether any rank requests it."""
    value = torch.tensor([1.0, float(finish)])
    dist.all_reduce(value)
    if value[0].item() != dist.get_world_size():
        raise RuntimeError(f"{value[0].item()} ranks answered of {dist.get_world_size()}")
    return value[1].item() > 0


@record
def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    add_ones(False)
    report()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.barrier()
    if dist.get_rank() == 0 and attempt < int(OPTIONS.get("die", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1 and "boom" in OPTIONS:
        raise ValueError("boom, said rank 1")
    while not add_ones(FINISH.exists()):
        time.sleep(0.02)
    dist.destroy_process_group()


main()
