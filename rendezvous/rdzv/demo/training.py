"""The training script for `rdzvctl demo`: small, running on the CPU, and resumed from its snapshot.

    rdzvrun --standalone --nproc-per-node=2 training.py --snapshot=/tmp/snapshot.pt

It runs with the job's interpreter, so it needs torch but no part of rdzv, and supports older
versions of Python than rdzv does.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 16
SAMPLES = 32


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model on CPUs.")
    parser.add_argument("--snapshot", required=True, help="resume from this file, and save to it")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--until", default="", help="end with the epoch in which this file appears")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="sleep this long each step")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # Several workers share the cores.
    dist.init_process_group("gloo")
    train(asked.snapshot, asked.epochs, asked.until, asked.step_seconds)
    dist.destroy_process_group()


def train(snapshot: str, epochs: int, until: str, step_s: float) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    # Rank 0 reads the file, so that all ranks resume from the same snapshot.
    found: list[Any] = [load(snapshot) if rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    first = 0
    if found[0] is not None:
        first = found[0]["epoch"]
        model.load_state_dict(found[0]["model"])
        optimizer.load_state_dict(found[0]["optimizer"])
    start = "starting afresh" if first == 0 else f"resuming from epoch {first}"
    say(rank, f"rank 0 of {world_size}: {start}")
    parallel = DistributedDataParallel(model)
    epoch = first
    for epoch in range(first + 1, epochs + 1):
        total = 0.0
        for step in range(STEPS):
            # Each rank and step has its own samples, and a redone step uses the same ones again.
            torch.manual_seed(((epoch * STEPS) + step) * 4096 + rank)
            inputs = torch.randn(SAMPLES, 8)
            loss = nn.functional.mse_loss(parallel(inputs), teacher(inputs).detach())
            optimizer.zero_grad()
            loss.backward()  # DDP averages the gradients of all ranks here.
            optimizer.step()
            total += loss.item()
            report((epoch - 1) * STEPS + step + 1)
            time.sleep(step_s)
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(snapshot, {**state, "epoch": epoch})
        say(rank, f"epoch {epoch} | loss {total / STEPS:.4f} | world_size {world_size}")
        # Rank 0 looks for the file, so that all ranks end with the same epoch.
        last = torch.tensor(os.path.exists(until))  # noqa: PTH110
        dist.broadcast(last, src=0)
        if last:
            break
    say(rank, f"training finished: epoch {epoch}")


def load(file: str) -> Any:
    return torch.load(file, weights_only=True) if os.path.exists(file) else None  # noqa: PTH110


def save(file: str, state: dict[str, Any]) -> None:
    """Replace the snapshot; a crash during this leaves the previous one intact."""
    torch.save(state, f"{file}.new")
    os.replace(f"{file}.new", file)  # noqa: PTH105


def report(step: int) -> None:
    """Report the step to the launcher, so that `rdzvctl status` can show it."""
    if file := os.environ.get("RDZV_PROGRESS_FILE"):
        with open(file, "r+b", buffering=0) as out:  # noqa: PTH123
            out.write(b"%20d\n" % step)


def say(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
