"""A training with a global batch, and what its workers have printed.

python any_size_training.py '{"epochs": 3}'
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from kept_training import fault, leave_if_told, make_data, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from rdzv.worker import ElasticBatchSampler, Round, State, elastic


class Augmented(TensorDataset):
    """Data that are changed at random whenever they are loaded."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        at, x, y = super().__getitem__(index)
        factor = 1 + (torch.rand(()) + random.random() + np.random.rand()) / 10
        return at, x * factor, y


def build(steps: int, *, sharded: bool) -> dict[str, Any]:
    """Build what is trained, alike on all ranks, which then draw numbers of their own."""
    torch.manual_seed(11)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 1)
    ).double()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    torch.manual_seed(int(os.environ["RANK"]))
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(
    epochs: int,
    faults: list[dict[str, Any]] | None = None,
    global_batch: int = 22,
    micro_batch: int = 6,
    pause_s: float = 0.0,
    waits: tuple[int, int] = (0, 0),
    sharded: bool = False,
    leaves: bool = False,
    **options: Any,
) -> None:
    """Train with a global batch, dropout, batch norm, augmentation, and a rate for each step.

    The size of the world varies; workers with an even rank load data in another process. `waits`
    names a step, and how many workers it waits for. With `leaves`, they look in each step whether a
    node leaves, and save then. With parts of half the size, batch norm would
    make the training unstable: rounding errors would grow a thousandfold every sixty steps.
    """
    torch.set_num_threads(1)
    at, x, y = make_data().tensors
    data = Augmented(at, x.double(), y.double())
    sampler = ElasticBatchSampler(data, global_batch=global_batch, micro_batch=micro_batch, seed=3)
    steps = epochs * -(-len(data) // global_batch)

    state = State(
        sampler=sampler, step=0, **({} if sharded else build(steps, sharded=False)), **options
    )

    @elastic
    def run(state: State, round_: Round) -> None:
        say("begin", round=round_.number, rank=round_.rank, world=round_.world_size)
        if sharded:
            state.add(**build(steps, sharded=True))
        model = state.model if sharded else DistributedDataParallel(state.model)
        parts: list[tuple[list[int], float, float]] = []
        while (epoch := state.sampler.epoch) < epochs:
            loader: DataLoader[Any] = DataLoader(
                data,
                batch_sampler=state.sampler,
                num_workers=1 - round_.rank % 2,
                multiprocessing_context="fork" if round_.rank % 2 == 0 else None,
            )
            for indices, x, y in loader:
                with state.accumulate(model) as part:
                    loss = nn.functional.mse_loss(model(x), y)
                    fault(faults or [], round_, state.step, "forward")
                    (loss * part.weight).backward()
                parts.append((indices.tolist(), part.weight, loss.item()))
                if not part.is_last:
                    continue
                rate = state.optimizer.param_groups[0]["lr"]
                state.optimizer.step()
                state.optimizer.zero_grad()
                state.scheduler.step()
                state.step += 1
                step = {"step": state.step, "round": round_.number, "epoch": epoch, "lr": rate}
                step |= {"world": round_.world_size, "rank": round_.rank, "parts": parts}
                parts = []
                try:
                    state.commit()
                finally:
                    say("step", **step)
                if leaves:
                    leave_if_told(state)
                time.sleep(pause_s)
                while state.step == waits[0] and round_.world_size != waits[1]:
                    state.check()
                    time.sleep(0.01)

    run(state)
    say("done", step=state.step)


Rows = list[Mapping[str, Any]]
"""What the ranks have printed about one step."""


def steps_of(lines: Iterable[Mapping[str, Any]]) -> dict[int, Rows]:
    """Return what the ranks did in each step; of a repeated step, in its last round."""
    steps: dict[int, Rows] = {}
    for row in lines:
        rows = steps.setdefault(row["step"], [])
        if rows and row["round"] > rows[0]["round"]:
            rows.clear()
        if not rows or row["round"] == rows[0]["round"]:
            rows.append(row)
    return steps


def loss_of(rows: Rows) -> float:
    total: float = sum(weight * loss for row in rows for _, weight, loss in row["parts"])
    return total / len(rows)


def samples_of(rows: Rows) -> list[int]:
    parts = [indices for row in rows for indices, weight, _ in row["parts"] if weight]
    return sorted(index for indices in parts for index in indices)


if __name__ == "__main__":
    train(**json.loads(sys.argv[1]))
