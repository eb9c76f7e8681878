"""How long it takes to divide a sharded state anew among another number of ranks, in memory.

    python bench/resize.py [--gb N]

A model of N GB of parameters and optimizer state is sharded (FSDP2) among 2 ranks of one machine,
then 3, then 4; kept ranks hold it. What is timed, for each resize, is `state.add()` on the slowest
rank, and the same in a round of as many ranks as before, which moves nothing between them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from measure import emit, end_on_sigterm, say_conditions
from torch import nn

from rdzv.worker import Round, State, elastic

from kept_training import say  # isort: skip  (their path comes from measure)
from kept_workers import Worker, world  # isort: skip

SIZES = (2, 2, 3, 4)
WIDTH = 1000


def train(rows: int) -> None:
    """Make one step in the first round; in each, time how long the state takes to come back."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)

    @elastic
    def run(state: State, round_: Round) -> None:
        model = nn.Sequential(*(nn.Linear(WIDTH, rows // 8, bias=False) for _ in range(8)))
        for layer in model:
            fully_shard(layer)
        optimizer = torch.optim.AdamW(model.parameters())
        dist.barrier()
        begun = time.monotonic()
        state.add(model=model, optimizer=optimizer, hold_last=False)
        say("added", round=round_.number, seconds=time.monotonic() - begun)
        if not state.committed:
            sum(layer(torch.ones(1, WIDTH)).sum() for layer in model).backward()
            optimizer.step()
            optimizer.zero_grad()
            state.commit()
        say("ready", round=round_.number)
        while True:
            state.check()
            time.sleep(0.01)

    run(State(step=0))


def main() -> None:
    """Time it, and print one line for each round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1.0, help="of parameters and optimizer state")
    chosen = parser.parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="rdzv-bench-") as temporary:
        say_conditions("resize", Path(temporary))
        rows = round(chosen.gb * 1e9 / 12 / WIDTH)  # Parameters and two moments, of 4 bytes.
        with world(Path(temporary), "resize.train", rows=rows) as made:
            kept: list[Worker] = []
            for number, size in enumerate(SIZES):
                made.begin(size, kept)
                kept = made.workers
                seconds = max(one.wait_line("added", round=number)["seconds"] for one in kept)
                for one in kept:
                    one.wait_line("ready", round=number)
                made.end(kept)
                if number:
                    emit(
                        f"resize: from {SIZES[number - 1]} to {size} ranks: {seconds:.2f} s for "
                        f"{chosen.gb:g} GB",
                        bench="resize",
                        ranks=[SIZES[number - 1], size],
                        gb=chosen.gb,
                        seconds=seconds,
                    )


if __name__ == "__main__":
    main()
