"""The training of `recovery_worker.py` under NVIDIA's in-process wrapper, with one spare rank.

The wrapper's timings are lowered to the least that its documentation suggests for tests, since its
own (a second for each look, a last call of one) are for large jobs.
"""

import time

STARTED_S = time.monotonic()

import os  # noqa: E402
import threading  # noqa: E402
from datetime import timedelta  # noqa: E402

from recovery_stages import PAUSE_S, STEPS_OF_STEADY, end_with_the_bench, reach  # noqa: E402

threading.Thread(target=end_with_the_bench, name="lifeline", daemon=True).start()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from nvidia_resiliency_ext import inprocess  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

IMPORTED_S = time.monotonic()


class AbortGloo(inprocess.abort.Abort):
    """The wrapper's own abort asks for NCCL, which a torch for CPUs does not have."""

    def __call__(self, state):  # type: ignore[no-untyped-def]
        """Destroy the groups; a killed peer has closed its connections."""
        if dist.is_initialized():
            dist.destroy_process_group()
        return state


torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
said = set()


def train(wrapper: inprocess.CallWrapper | None = None) -> None:
    """Train until killed."""
    assert wrapper is not None
    here = (wrapper.iteration, int(os.environ["RDZV_BENCH_ACTIVE"]))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # The wrapper's own store is at MASTER_PORT.
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]) + 1,
        world_size,
        is_master=rank == 0,
        multi_tenant=True,
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(str(wrapper.iteration), store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    if world_size != here[1]:
        raise RuntimeError(f"{world_size} ranks are active, not {here[1]}")
    reach("grouped", time.monotonic(), *here)
    if not said:
        reach("started", STARTED_S, *here)
        reach("imported", IMPORTED_S, *here)
    said.add(here)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    reach("reduced", time.monotonic(), *here)
    model = DistributedDataParallel(net)
    steps = 0
    while True:
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        steps += 1
        wrapper.ping()
        if steps == 1:
            reach("stepped", time.monotonic(), *here)
        if steps == STEPS_OF_STEADY:
            reach("steady", time.monotonic(), *here)
        time.sleep(PAUSE_S)


soon = timedelta(seconds=0.1)
inprocess.Wrapper(
    initialize=None,
    abort=AbortGloo(),
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(int(os.environ["RDZV_BENCH_ACTIVE"])),
        inprocess.rank_assignment.ShiftRanks(),
    ),
    monitor_thread_interval=soon,
    monitor_process_interval=soon,
    heartbeat_interval=soon,
    progress_watchdog_interval=soon,
    last_call_wait=soon,
)(train)()
