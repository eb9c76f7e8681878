"""Trains whole numbers, whose sums over ranks are exact in any order, and verifies them.

    verified.py STEPS VERIFY_EVERY DIARY [RANK:STEP]...

Appends `STEP RANK ROUND SUM` to the diary after each step, SUM being that of the weights before it.
At each RANK:STEP, one bit of a weight is changed on that rank in the first round.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from rdzv.worker import Round, State, elastic

STEPS, EVERY, DIARY, *FLIPS = sys.argv[1:]


def flip(weight: torch.Tensor, bit: int) -> None:
    weight.detach().view(torch.int32).view(-1)[5] ^= 1 << bit


@elastic
def train(state: State, round_: Round) -> None:
    weight = state.model.weight
    while state.step < int(STEPS):
        if round_.number == 0 and f"{round_.rank}:{state.step}" in FLIPS:
            flip(weight, bit=20)
        before = int(weight.detach().double().sum())
        grown = torch.remainder(weight.detach().round(), 5) + round_.rank + 1
        weight.grad = -grown
        dist.all_reduce(weight.grad)
        state.optimizer.step()
        state.step += 1
        with Path(DIARY).open("a") as diary:
            diary.write(f"{state.step} {round_.rank} {round_.number} {before}\n")
        state.commit()


def main() -> None:
    torch.set_num_threads(1)
    model = nn.Linear(8, 8, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    train(State(model=model, optimizer=optimizer, step=0, verify_every=int(EVERY)))
    print(f"RANK {os.environ['RANK']} has trained", flush=True)


main()
