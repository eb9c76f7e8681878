"""A worker with plain torch: it forms a group by env://, then rank 1 fails under @record."""

import os
import signal

import see  # Beside this file: it writes down what a worker sees.
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    see.say(f"hello launched={dist.is_torchelastic_launched()} sum={total.item()}")
    dist.barrier()
    passed = see.SEEN / "passed"
    if dist.get_rank() == 1:
        see.wait_until(passed.exists)
        raise RuntimeError("the data is gone")
    passed.touch()
    signal.pause()


if os.environ["RANK"] == "0":
    # The effect of rank 1's failure on a connection is not under test.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
main()
