"""The training whose goodput is measured: a small DDP model that saves itself, under any launcher.

Run by path as a worker, since it imports torch. RANK 0 appends the time and the number of each step
to `steps`, beside `$RDZV_BENCH_STAGES`, where it also saves the model every `SAVE_EVERY` steps; a
worker that starts loads it, and continues from there. Times are by CLOCK_MONOTONIC, which all
processes of one machine share.
"""

import contextlib
import fcntl
import json
import os
import threading
import time
from pathlib import Path

SAVE_EVERY = 40
PAUSE_S = 0.05
"""The pause between two steps, which simulates a larger model."""

STAGES = Path(os.environ["RDZV_BENCH_STAGES"])
SAVED = STAGES.with_name("model.pt")


def end_with_the_bench() -> None:
    """End this process once nothing holds the lock any more."""
    lifeline = os.open(os.environ["RDZV_BENCH_LIFELINE"], os.O_RDONLY)
    fcntl.flock(lifeline, fcntl.LOCK_SH)
    os._exit(0)


def append(path: Path, line: str) -> None:
    """Append a line in one write, so that other workers' lines do not split it."""
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(out, line.encode())
    finally:
        os.close(out)


def report_step(step: int) -> None:
    """Report this worker's progress, as described in docs/progress.md."""
    if file := os.environ.get("RDZV_PROGRESS_FILE"):
        with contextlib.suppress(OSError), open(file, "r+b", buffering=0) as out:  # noqa: PTH123
            out.write(b"%20d\n" % step)


threading.Thread(target=end_with_the_bench, name="lifeline", daemon=True).start()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

torch.set_num_threads(1)
dist.init_process_group("gloo")
inner = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
step = 0
if SAVED.exists():
    saved = torch.load(SAVED)
    inner.load_state_dict(saved["model"])
    step = saved["step"]
model = DistributedDataParallel(inner)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rank, first = dist.get_rank(), True
while True:
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    step += 1
    report_step(step)
    if rank == 0:
        append(STAGES.with_name("steps"), f"{time.monotonic()} {os.getpid()} {step}\n")
        if step % SAVE_EVERY == 0:
            half = SAVED.with_suffix(".new")
            torch.save({"model": inner.state_dict(), "step": step}, half)
            half.rename(SAVED)
    if first:
        first = False
        stage = {
            **{"stage": "steady", "at_s": time.monotonic(), "pid": os.getpid()},
            **{"seat": f"{os.environ['RDZV_BENCH_NODE']}/0", "world_size": dist.get_world_size()},
        }
        append(STAGES, json.dumps(stage) + "\n")
    time.sleep(PAUSE_S)
