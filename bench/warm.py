"""What --warm saves at a restart: from the request to the runner until the script runs.

    python bench/warm.py [--workers N] [--times N]

For cold and warm workers alike, the median over the restarts, of the slowest worker of each:

* first line: until the script's first statement;
* all-reduce: until a gloo process group of all has added up a tensor, and rank 0 has served its
  store; so without what a store host takes;
* DDP: until a DistributedDataParallel has done its first backward pass.

Before each warm restart there is time to park forks, as in a job that has trained for a while.

And what the zygote costs: its import, its memory, and what of that a worker shares with it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rdzv.agent.core.events import RunnerEvent, WorkerExited, WorkersGone, ZygoteReady
from rdzv.agent.runner.requests import StopWorkers, WorkerSpec, ZygoteSpec
from rdzv.agent.runner.warm_forks import SPARE_FORKS_AFTER_S
from rdzv.agent.runner_link.runner_link import RunnerLink

SPARE_WITHIN_S = 1.0
"""How long forking ahead may take, once it begins."""

SCRIPT = """
import time
times = [time.monotonic()]
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
times.append(time.monotonic())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
times.append(time.monotonic())
lines = dict(line.split()[:2] for line in open("/proc/self/smaps_rollup") if "kB" in line)
shared = int(lines["Shared_Clean:"]) + int(lines["Shared_Dirty:"])
started = float(os.environ["STARTED"])
print(*(t - started for t in times), int(lines["Rss:"]), shared)
dist.barrier()
os._exit(0)
"""


async def measure(workers: int, times: int, folder: Path) -> None:
    """Print one line for cold and one for warm workers."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    events: asyncio.Queue[RunnerEvent] = asyncio.Queue()
    link = await RunnerLink.spawn(events.put_nowait)
    argv = (sys.executable, "-u", str(script))
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    zygote = ZygoteSpec(argv, common, None, ("torch", "torch._dynamo"), spare_forks=workers)
    print(f"{workers} workers, {times} restarts of each kind, {os.cpu_count()} CPUs")
    try:
        for kind in ("cold", "warm"):
            if kind == "warm":
                link.ask(zygote)
                while not isinstance(ready := await events.get(), ZygoteReady):
                    pass
                print(f"zygote: {ready.seconds:.2f} s, {ready.memory_kb / 1024:.0f} MiB")
            kept = zygote if kind == "warm" else None
            seen = []
            for number in range(times):
                if kept is not None:
                    await asyncio.sleep(SPARE_FORKS_AFTER_S + SPARE_WITHIN_S)
                seen.append(
                    await restart(link, events, number, argv, common, workers, folder, kept)
                )
            first, reduce, ddp, rss, shared = (
                statistics.median(each) for each in zip(*seen, strict=True)
            )
            print(
                f"{kind}: first line {first:.3f} s, all-reduce {reduce:.3f} s, DDP {ddp:.3f} s; "
                f"a worker has {rss / 1024:.0f} MiB, shares {shared / 1024:.0f}"
            )
    finally:
        await link.close(10.0)


async def restart(
    link: RunnerLink,
    events: asyncio.Queue[RunnerEvent],
    number: int,
    argv: tuple[str, ...],
    common: dict[str, str],
    workers: int,
    folder: Path,
    zygote: ZygoteSpec | None,
) -> list[float]:
    """Run one round; return the slowest worker's times, and the largest memory."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outs = [folder / f"{rank}.out" for rank in range(workers)]
    for out in outs:
        out.unlink(missing_ok=True)
    env = {**common, "MASTER_PORT": str(port), "WORLD_SIZE": str(workers)}
    env["STARTED"] = str(time.monotonic())
    specs = [
        WorkerSpec(
            rank, argv, {**env, "RANK": str(rank)}, None, str(outs[rank]), warm=zygote is not None
        )
        for rank in range(workers)
    ]
    link.start_workers(number, specs)
    left = workers
    while left:
        event = await events.get()
        if isinstance(event, WorkerExited):
            assert event.exit_code == 0, event
            left -= 1
    link.ask(StopWorkers(number, 0, 15))
    while not isinstance(await events.get(), WorkersGone):
        pass
    found = [[float(word) for word in out.read_text().split()] for out in outs]
    return [max(each) for each in zip(*found, strict=True)]


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description="What --warm saves at a restart.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options.workers, options.times, Path(folder)))


if __name__ == "__main__":
    main()
