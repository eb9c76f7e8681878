"""The training of `recovery_worker.py` under torchft, each worker under a torchrun of its own.

A world is a quorum. The first step of a quorum is its first all-reduce as well.
"""

import time

STARTED_S = time.monotonic()

import os  # noqa: E402
import threading  # noqa: E402
from datetime import timedelta  # noqa: E402

from recovery_stages import PAUSE_S, STEPS_OF_STEADY, end_with_the_bench, reach  # noqa: E402

threading.Thread(target=end_with_the_bench, name="lifeline", daemon=True).start()

import torch  # noqa: E402
from torchft import (  # noqa: E402
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)

IMPORTED_S = time.monotonic()

torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))


def load(state: dict) -> None:  # type: ignore[type-arg]
    """Load the state of a peer."""
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def held() -> dict:  # type: ignore[type-arg]
    """Return it for a peer."""
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=load,
    state_dict=held,
    replica_id=f"bench_{os.environ['REPLICA_GROUP_ID']}",
    timeout=timedelta(seconds=30),
)
model = DistributedDataParallel(manager, net)
optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.01))

world, steps = None, 0
while True:
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    # A quorum that only this step has seen has no number in the public interface.
    here = (manager._quorum_id, manager.num_participants())
    if here != world:
        if world is None:
            reach("started", STARTED_S, *here)
            reach("imported", IMPORTED_S, *here)
        world, steps = here, 0
    steps += 1
    if steps == 1:
        reach("reduced", time.monotonic(), *here)
        reach("stepped", time.monotonic(), *here)
    if steps == STEPS_OF_STEADY:
        reach("steady", time.monotonic(), *here)
    time.sleep(PAUSE_S)
