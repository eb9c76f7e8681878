"""What it costs to verify a state, and whether each changed bit is found.

* cost: real processes over gloo, each with a state of `--mb`, verify it as `State(verify_every=N)`
  does: digest, all-gather, and a copy on the first process, each process being a node. The share is
  that of the slowest process in `--every` steps of `--step-ms`.
* found: of three replicas in one process that verify themselves each fifth step, one gets a flipped
  bit, `--flips` times; then as many undisturbed steps as `--checks` are verified.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from measure import load
from torch import nn

from rdzv.worker import OddReplicaError
from rdzv.worker.healing import StateOffer
from rdzv.worker.rounds import Round
from rdzv.worker.sealing import Sealing
from rdzv.worker.verifying import Verifying
from tests.support.replicas import LeftError, Replicas, plant

TIMES = 20
SHARED = ("mb", "processes", "step-ms")
"""The options that the processes are given, too."""


def differs(reason: str) -> None:
    raise AssertionError(reason)


def verify_state(
    rank: int, processes: int, megabytes: float, step_ms: float, port: int
) -> list[float]:
    """Verify each step of a training, as one process.

    Returns how long each verification took, and how long the next optimizer step has waited, in ms.

    A third of it are parameters in tensors of 1 MB, the rest is AdamW's.
    """
    torch.set_num_threads(1)
    torch.manual_seed(1)
    count = max(round(megabytes / 3), 1)
    model = nn.ParameterList([nn.Parameter(torch.randn(250, 1000)) for _ in range(count)])
    optimizer = torch.optim.AdamW(model.parameters())
    sealing = Sealing({"model": model, "optimizer": optimizer})
    one = Verifying(sealing, 1, lambda: None, differs)  # type: ignore[arg-type]
    store = dist.TCPStore("127.0.0.1", port, processes, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    offers = [StateOffer(False, 0, False, "", "", **one.offered())] * processes
    one.compare(offers, Round(0, rank, processes, 0, 0, ""), store)
    sealing.begin_round(rank, processes, lambda: None)
    one.begin_round()
    matrix, took = torch.randn(256, 256), []
    for number in range(TIMES + 2):
        end = time.perf_counter() + step_ms / 1000
        while time.perf_counter() < end:
            matrix @ matrix
        waits = time.perf_counter()
        sealing.wait_for_copies()  # As an optimizer does before its step.
        waited = time.perf_counter() - waits
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        sealing.commit()
        dist.barrier()
        begun = time.perf_counter()
        one.committed()
        if number > 1:  # The first has no optimizer state yet, the second no memory.
            took += [1000 * (time.perf_counter() - begun), 1000 * waited]
    dist.barrier()
    return took


def cost(args: argparse.Namespace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = (f"--{name}={getattr(args, name.replace('-', '_'))}" for name in SHARED)
    command = [sys.executable, __file__, *given]
    started = [
        subprocess.Popen(
            [*command, "--as", str(rank), str(port)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LOCAL_WORLD_SIZE": str(args.processes)},
        )
        for rank in range(args.processes)
    ]
    took = [[float(word) for word in one.communicate()[0].split()] for one in started]
    if any(one.returncode for one in started):
        sys.exit("a process has failed, as it says above")
    slowest = [max(times) for times in zip(*took, strict=True)]
    blocked = [sum(times) for times in zip(slowest[::2], slowest[1::2], strict=True)]
    median, waited = statistics.median(blocked), statistics.median(slowest[1::2])
    print(
        f"cost: {args.processes} processes, {args.mb:g} MB, n={TIMES}: {median:.1f} ms "
        f"({min(blocked):.1f} to {max(blocked):.1f}), of which {waited:.1f} in the next optimizer "
        f"step; {median / (args.every * args.step_ms):.2%} of {args.every} steps of "
        f"{args.step_ms:g} ms"
    )


def find(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    chosen, replicas = random.Random(args.seed), Replicas(3, every=5)
    named = wrong = rounded = 0
    for _ in range(args.flips):
        rank, raised = plant(replicas, chosen, every=5)
        if not any(raised):
            rounded, replicas = rounded + 1, Replicas(3, every=5)
            continue
        kinds = [type(one) for one in raised]
        is_right = kinds.pop(rank) is OddReplicaError and set(kinds) == {LeftError}
        named, wrong = named + is_right, wrong + (not is_right)
    undisturbed, blamed = Replicas(3, every=1), 0
    for _ in range(args.checks):
        undisturbed.step()
        blamed += any(undisturbed.commit())
    print(
        f"found: of {args.flips} flipped bits {named} named within 5 steps, {wrong} wrongly, "
        f"{rounded} rounded away by then; in {args.checks} undisturbed checks {blamed} blamed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", type=float, default=100.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--checks", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--as", dest="rank", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank, port = args.rank
        print(*verify_state(rank, args.processes, args.mb, args.step_ms, port))
        return
    print(f"load {load()}")
    cost(args)
    find(args)


if __name__ == "__main__":
    main()
