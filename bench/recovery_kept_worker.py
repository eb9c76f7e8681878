"""The training of `recovery_worker.py`, in processes that stay while others fail.

Steps that a kept worker need not repeat (its first line, the import of torch) are not among its
stages.
"""

import time

STARTED_S = time.monotonic()

import threading  # noqa: E402

from recovery_stages import PAUSE_S, STEPS_OF_STEADY, end_with_the_bench, reach  # noqa: E402

threading.Thread(target=end_with_the_bench, name="lifeline", daemon=True).start()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from rdzv.worker import Round, State, elastic  # noqa: E402

IMPORTED_S = time.monotonic()


@elastic
def train(state: State, round: Round) -> None:
    """Train until killed."""
    reach("grouped", time.monotonic(), round.number)
    if not round.kept:
        reach("started", STARTED_S, round.number)
        reach("imported", IMPORTED_S, round.number)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    if ones.item() != dist.get_world_size():
        raise RuntimeError(f"{ones.item()} ranks answered of {dist.get_world_size()}")
    reach("reduced", time.monotonic(), round.number)
    model = DistributedDataParallel(state.model, init_sync=False)
    steps = 0
    while True:
        state.optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        state.optimizer.step()
        steps += 1
        if steps == 1:
            reach("stepped", time.monotonic(), round.number)
        if steps == STEPS_OF_STEADY:
            reach("steady", time.monotonic(), round.number)
        state.commit()
        time.sleep(PAUSE_S)


torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
held = State(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.01))


@held.on_park
def parked(over: Round) -> None:
    """Report that this worker has left the round."""
    reach("parked", time.monotonic(), over.number)


train(held)
