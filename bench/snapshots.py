"""What saving snapshots costs a training on the CPU, and where that time goes.

One process without a runner: the slots are its own. A state of `--gb`, of which each step touches a
little, and a step that computes on one thread for `--step-ms`. Each case trains as long with saves
as without.

* cost: how much longer a step takes on average.
* copy: how long the thread copies the tensors; until then the next optimizer step waits.
* waited: the part of it for which the optimizer has waited, for each save.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import load
from torch import nn

from rdzv.worker import snapshots, staging
from rdzv.worker.link import Announced, GivenSlots
from rdzv.worker.rounds import Round
from rdzv.worker.sealing import Sealing
from rdzv.worker.snapshots import Snapshots

PARAMETERS = 64


class Memory:
    """Slots, as a runner gives them."""

    announced = Announced()

    def reserve(self, size: int, *, copies: bool = False) -> GivenSlots:
        """Make two."""
        fds = [os.memfd_create(f"slot {number}") for number in range(2)] if size else []
        for fd in fds:
            os.ftruncate(fd, size)
        return GivenSlots(size, fds)

    def saved(self, slot: int, **what: Any) -> None:
        """Nobody is told."""


def timed(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    """Return the same function, which notes how long it takes."""

    def wrapped(*args: Any) -> Any:
        begun = time.perf_counter()
        try:
            return call(*args)
        finally:
            times.append(1000 * (time.perf_counter() - begun))

    return wrapped


def model_of(gb: float) -> nn.ParameterList:
    """Make a model of that size."""
    torch.manual_seed(1)
    size = int(gb * 1e9 / 4 / PARAMETERS)
    return nn.ParameterList([nn.Parameter(torch.ones(size)) for _ in range(PARAMETERS)])


class Training:
    """Steps that compute for `step_ms` on one thread, and change one parameter of a model."""

    def __init__(self, gb: float, step_ms: float) -> None:
        torch.set_num_threads(1)  # As rdzvrun sets it for several workers.
        self.model = model_of(gb)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self._matrix, self._step_s = torch.randn(256, 256), step_ms / 1000

    def mean_ms(self, steps: int, save: Callable[[int], object]) -> float:
        """Make steps; after each, call `save` with its number. Return a step's mean time."""
        begun = time.perf_counter()
        for number in range(steps):
            end = time.perf_counter() + self._step_s
            while time.perf_counter() < end:
                self._matrix @ self._matrix
            self.model[0].grad = torch.zeros_like(self.model[0])
            self.optimizer.step()
            save(number)
        return 1000 * (time.perf_counter() - begun) / steps


def train(gb: float, steps: int, step_ms: float, every: int | None) -> tuple[float, list[float]]:
    """Train; return the mean time of a step, and how long the optimizer has waited in each."""
    training, waits = Training(gb, step_ms), list[float]()

    def wait(optimizer: Any, args: Any, kwargs: Any) -> None:
        timed(sealing.wait_for_copy, waits)()

    training.optimizer.register_step_pre_hook(wait)  # Before the state's own.
    sealing = Sealing({"model": training.model, "optimizer": training.optimizer})
    sealing.begin_round(0, 1, lambda: None)
    saving = Snapshots(sealing, Memory(), every)  # type: ignore[arg-type]
    saving.begin_round(Round(0, 0, 1, 0, 0, ""))

    def save(number: int) -> None:
        sealing.commit()
        saving.committed()

    training.mean_ms(2 * (every or 1) + 2, save)  # The memory is there from then on.
    saving.finish()
    waits.clear()
    mean_ms = training.mean_ms(steps, save)
    saving.finish()
    return mean_ms, waits


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[20, 50, 100])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    print(f"{load()}; {args.gb:g} GB, a save each {args.every} steps")
    for step_ms in args.step_ms:
        plain, _ = train(args.gb, args.steps, step_ms, None)
        for threads in args.threads:
            copies: list[float] = []
            snapshots.copiers = lambda threads=threads: threads
            snapshots.copy_all = timed(staging.copy_all, copies)
            saved, waits = train(args.gb, args.steps, step_ms, args.every)
            print(
                f"steps of {plain:.1f} ms, {threads} threads: cost {saved / plain - 1:.1%}, "
                f"copy {statistics.median(copies):.0f} ms, "
                f"waited {sum(waits) / (args.steps / args.every):.0f} ms"
            )


if __name__ == "__main__":
    main()
