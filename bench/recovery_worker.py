"""The training whose recovery is timed: a small DDP model, the same under every launcher.

Run by path as a worker, since it imports torch. It appends one JSON line for each stage that it
reaches to `$RDZV_BENCH_STAGES`, with the time by CLOCK_MONOTONIC, which all processes of one
machine share. It trains until it is killed, or until the bench that holds the lock on
`$RDZV_BENCH_LIFELINE` is gone: a worker outlives a torchrun that was killed, but not the bench.
"""

import time

STARTED_S = time.monotonic()

import fcntl  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import threading  # noqa: E402

STEPS_OF_STEADY = 5
PAUSE_S = 0.05
"""Between two steps: a machine on which many train must not be busy with training."""


def reach(stage: str, at_s: float) -> None:
    """Say that a stage is reached, in one write, which no other worker's can cut in two."""
    line = {
        "stage": stage,
        "at_s": at_s,
        "pid": os.getpid(),
        "node": os.environ["RDZV_BENCH_NODE"],
        "world_size": int(os.environ["WORLD_SIZE"]),
    }
    stages = os.open(os.environ["RDZV_BENCH_STAGES"], os.O_WRONLY | os.O_APPEND)
    try:
        os.write(stages, json.dumps(line).encode() + b"\n")
    finally:
        os.close(stages)


def end_with_the_bench() -> None:
    """End this process once nobody holds the lock any more."""
    lifeline = os.open(os.environ["RDZV_BENCH_LIFELINE"], os.O_RDONLY)
    fcntl.flock(lifeline, fcntl.LOCK_SH)
    os._exit(0)


threading.Thread(target=end_with_the_bench, name="lifeline", daemon=True).start()
reach("started", STARTED_S)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

reach("imported", time.monotonic())

torch.set_num_threads(1)
dist.init_process_group("gloo")
reach("grouped", time.monotonic())

ones = torch.ones(1)
dist.all_reduce(ones)
if ones.item() != dist.get_world_size():
    raise RuntimeError(f"{ones.item()} ranks answered of {dist.get_world_size()}")
reach("reduced", time.monotonic())

model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
steps = 0
while True:
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    steps += 1
    if steps == 1:
        reach("stepped", time.monotonic())
    if steps == STEPS_OF_STEADY:
        reach("steady", time.monotonic())
    time.sleep(PAUSE_S)
