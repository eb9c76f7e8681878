"""The training whose recovery is timed: a small DDP model, the same under every launcher.

Run by path as a worker, since it imports torch. It appends one JSON line for each stage that it
reaches to `$RDZV_BENCH_STAGES`, with the time by CLOCK_MONOTONIC, which all processes of one
machine share. It trains until it is killed, or until the bench that holds the lock on
`$RDZV_BENCH_LIFELINE` is gone: a worker outlives a torchrun that was killed, but not the bench.
"""

import time

STARTED_S = time.monotonic()

import threading  # noqa: E402

from recovery_stages import PAUSE_S, STEPS_OF_STEADY, end_with_the_bench, reach  # noqa: E402

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
