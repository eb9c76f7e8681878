"""A training of plain torch on gloo that hangs in one of eight ways; imports nothing of rdzv.

Each round draws the way, the rank and the step from its number and a seed, and writes them to a
file at the moment when it begins to hang.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

KINDS = (
    *("absent", "other_operation", "other_sizes", "other_order"),
    *("stopped", "loader", "uninterruptible", "gil_held"),
)


class Batches(Dataset[torch.Tensor]):
    """Batches, one of which never comes."""

    def __init__(self, stuck_at: int | None) -> None:
        self.stuck_at = stuck_at

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.stuck_at:
            time.sleep(3_600)
        return torch.ones(256)


def sleep_in_d_state(folder: Path) -> None:
    """Wait in the kernel, uninterruptibly, for a child that cannot run its program yet."""
    pipe = folder / f"pipe.{os.getpid()}"
    os.mkfifo(pipe)
    # It shares this process's memory until then, so this process waits for it in D state.
    action = (os.POSIX_SPAWN_OPEN, 3, os.fspath(pipe), os.O_WRONLY, 0)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[action])


def hang(kind: str, folder: Path, every: dist.ProcessGroup, other: dist.ProcessGroup) -> None:
    """Hang outside the collectives of this step, or in a wrong one."""
    match kind:
        case "absent":
            time.sleep(3_600)
        case "other_operation":
            dist.broadcast(torch.ones(256), src=(dist.get_rank() + 1) % dist.get_world_size())
        case "other_sizes":
            # gloo notices most differing sizes, but not an empty tensor, as of an empty batch.
            dist.all_reduce(torch.ones(0), group=every)
        case "other_order":
            dist.all_reduce(torch.ones(256), group=other)
            dist.all_reduce(torch.ones(256), group=every)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "uninterruptible":
            sleep_in_d_state(folder)
        case "gil_held":
            ctypes.PyDLL(None).sleep(3_600)


def main() -> None:
    """Train until it hangs."""
    folder, seed = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    number = int(os.environ["RDZV_ROUND"])
    draw = random.Random(f"{seed} {number}")
    kind = KINDS[number % len(KINDS)]
    victim, at = draw.randrange(world_size), draw.randrange(20, 60)
    every, other = dist.new_group(), dist.new_group()
    stuck_at = at if kind == "loader" and rank == victim else None
    for step, batch in enumerate(DataLoader(Batches(stuck_at), batch_size=None, num_workers=0)):
        time.sleep(0.005)
        if step == at - (stuck_at is not None) and rank == victim:
            said = {"round": number, "kind": kind, "rank": victim, "unix_s": time.time()}
            (folder / f"{number}.json").write_text(json.dumps(said))
            if stuck_at is None:
                hang(kind, folder, every, other)
        dist.all_reduce(batch, group=every)
        if step % 3 == 0 or kind == "other_order":
            dist.all_reduce(batch, group=other)


if __name__ == "__main__":
    main()
