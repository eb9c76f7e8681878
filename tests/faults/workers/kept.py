"""A worker that stays: small steps over gloo under `@elastic`, in one process for all rounds.

In each step all ranks average a gradient, and check that they have the same parameters: a rank that
continued with a mixture of two states would be detected at once.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from diary import Diary, load_step, save_step

from rdzv.worker import Round, State, elastic

PAUSE_S = float(os.environ.get("RDZV_FAULTS_PAUSE_S", "0.02"))
FINISH = Path(os.environ["RDZV_FAULTS_FINISH"])


@elastic
def train(state: State, round: Round, diary: Diary) -> None:
    diary.begin_round()
    while True:
        finishes = float(round.rank == 0 and FINISH.exists())
        votes = torch.tensor([1.0, finishes, float(state.step)])
        dist.all_reduce(votes)
        if votes[0].item() != round.world_size or votes[2].item() != state.step * round.world_size:
            raise ValueError(f"the sum of all ranks is {votes.tolist()} at step {state.step}")
        if votes[1].item() > 0:
            return
        one_step(state, round)
        state.step += 1
        state.commit()
        if round.rank == 0:
            save_step(state.step)
        diary.step = state.step
        time.sleep(PAUSE_S)


def one_step(state: State, round: Round) -> None:
    """Step by the average of all ranks' gradients; the parameters are the same on all."""
    (weight,) = state.model.parameters()
    mine = weight.detach().sum()
    both = torch.stack([mine, -mine])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    if both.sum().item() != 0:
        raise ValueError(f"parameters differ between ranks at step {state.step}")
    state.optimizer.zero_grad()
    state.model(torch.ones(1, weight.shape[1]) * (round.rank + state.step % 7)).sum().backward()
    dist.all_reduce(weight.grad)
    weight.grad /= round.world_size
    state.optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    diary = Diary()
    model = torch.nn.Linear(8, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    state = State(model=model, optimizer=optimizer, step=load_step())
    state.on_park(lambda _: diary.park())
    try:
        train(state, diary)
    except Exception as error:
        diary.end(f"failed: {str(error).splitlines()[0][:200]}")
        raise
    diary.end("succeeded")


main()
