"""The training of kept.py, in kept processes: dropout and batch norm, and orders to misbehave.

Run by path as a worker. It appends a JSON line for each event to `$KEPT_DIARY`, with the time by
CLOCK_MONOTONIC. Before each step it looks for an order: a file in `$KEPT_ORDERS` that is named by
its pid, and says how to block. While a file `heal` exists, a rank that heals others dies before the
send whose number the file holds.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kept_training
import numpy as np
import torch
from recovery_stages import end_with_the_bench
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from rdzv.worker import Round, State, elastic, healing

ORDERS = Path(os.environ["KEPT_ORDERS"])
PAUSE_S = float(os.environ.get("KEPT_PAUSE_S", "0"))
STEPS = int(os.environ.get("KEPT_STEPS", "0"))
"""How many steps it makes; 0: until it is killed."""
SEEDS: dict[int, int] = {}
"""By step: the seed of this rank's random numbers, as if it were new then."""


def say(what: str, **fields: Any) -> None:
    """Write a line in one write, so that other workers' lines do not split it."""
    line = {"what": what, "pid": os.getpid(), "at_s": time.monotonic(), **fields}
    diary = os.open(os.environ["KEPT_DIARY"], os.O_WRONLY | os.O_APPEND)
    try:
        os.write(diary, json.dumps(line).encode() + b"\n")
    finally:
        os.close(diary)


class _Silent(Dataset[int]):
    """Data that never come."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        time.sleep(3_600)
        return index


def obey(order: str) -> None:
    """Block in one way, forever."""
    say("blocks", order=order)
    match order:
        case "gil":
            ctypes.PyDLL(None).sleep(3_600)
        case "call":
            ctypes.CDLL(None).sleep(3_600)
        case "loader":
            next(iter(DataLoader(_Silent(), num_workers=1)))
        case _:
            # A path on a file server that does not answer: uninterruptible, in D state.
            Path(order).stat()


def reseed(step: int) -> None:
    """Reseed the generators as the library does for a new rank."""
    if (seed := SEEDS.get(step)) is not None:
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)


def weights(state: State) -> str:
    """Return a digest of the state that all ranks share; buffers are each rank's own."""
    found = hashlib.blake2b(digest_size=8)
    for parameter in state.model.parameters():
        found.update(parameter.detach().numpy().tobytes())
        for _, value in sorted(state.optimizer.state[parameter].items()):
            found.update(value.numpy().tobytes())
    return found.hexdigest()


def die_while_healing() -> None:
    """Send a few tensors at a time, and die before one of these sends if ordered."""
    healing.BUCKET_BYTES = 600
    relay, divided = healing.relay, healing.buckets_of
    sends = False

    def noted(tensors: list[torch.Tensor], before: int | None, after: int | None) -> None:
        nonlocal sends
        sends = before is None and len(tensors) > 1
        relay(tensors, before, after)

    def buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        for number, bucket in enumerate(divided(tensors)):
            order = ORDERS / "heal"
            if sends and order.exists() and int(order.read_text()) == number:
                order.unlink()
                say("dies", bucket=number)
                os.kill(os.getpid(), signal.SIGKILL)
            yield bucket

    healing.relay, healing.buckets_of = noted, buckets


@elastic
def train(state: State, round_: Round) -> None:
    """Train until killed, or to the last step."""
    say(
        "begin",
        round=round_.number,
        rank=round_.rank,
        world=round_.world_size,
        node=os.environ["KEPT_NODE"],
        kept=round_.kept,
        step=state.step,
        weights=weights(state),
        seed=torch.initial_seed(),
    )
    # Buckets rebuilt after the first step of a round would be summed in another order.
    model = DistributedDataParallel(state.model, init_sync=False, find_unused_parameters=True)
    data = kept_training.make_data()
    mine, steps = ORDERS / str(os.getpid()), 0
    progress = Path(os.environ["RDZV_PROGRESS_FILE"])
    while not STEPS or state.step < STEPS:
        for _, x, y in DataLoader(data, batch_sampler=state.sampler):
            if mine.exists():
                obey(mine.read_text())
            noise = torch.from_numpy(np.random.rand(len(x), 8).astype("float32")) * 0.01
            loss = nn.functional.mse_loss(model(x + noise), y)
            state.optimizer.zero_grad()
            loss.backward()
            state.optimizer.step()
            state.scheduler.step()
            state.step += 1
            steps += 1
            said = {"round": round_.number, "rank": round_.rank, "step": state.step}
            say("step", first=steps == 1, loss=loss.detach().double().item().hex(), **said)
            state.commit()
            progress.write_text(str(state.step))
            reseed(state.step)
            if STEPS and state.step >= STEPS:
                break
            time.sleep(PAUSE_S)


def main() -> None:
    """Train."""
    threading.Thread(target=end_with_the_bench, name="lifeline", daemon=True).start()
    # A standby has none yet. All it makes here is replaced by what its first round begins with.
    rank = -1 if os.environ["RANK"] == "standby" else int(os.environ["RANK"])
    SEEDS.update(
        (step, seed)
        for of, step, seed in json.loads(os.environ.get("KEPT_SEEDS", "[]"))
        if of == rank
    )
    die_while_healing()
    random.seed(rank)
    np.random.seed(rank % 1000)
    state = kept_training.make_state(rank % 1000)
    # After a resize the rest of an epoch may be one sample per rank, which batch norm refuses.
    state.sampler.drop_tail = True

    @state.on_park
    def parked(over: Round) -> None:
        say("parked", round=over.number)

    train(state)


if __name__ == "__main__":
    main()
