"""The model and the data that every form of the training script shares.

Small enough for a CPU, real enough that the loss falls: a regression on data that is the same in
every process that uses the same seed.
"""

import contextlib
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

FEATURES = 8


class ToyData(Dataset[tuple[Tensor, Tensor]]):
    """The output of a small random network, the teacher, for random points, with a little noise."""

    def __init__(self, samples: int = 1024, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        first = torch.randn(FEATURES, 6, generator=generator) / 2
        second = torch.randn(6, 1, generator=generator)
        self.inputs = torch.randn(samples, FEATURES, generator=generator)
        targets = torch.tanh(self.inputs @ first) @ second
        noise = 0.05 * torch.randn(samples, 1, generator=generator)
        self.targets = targets / targets.std() + noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def make_model(seed: int = 0) -> nn.Module:
    """Make the model; with the same seed every process begins with the same weights."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer; its momentum is state that a snapshot has to bring back."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


loss_function = nn.MSELoss()


@torch.no_grad()
def evaluate(model: nn.Module, data: ToyData, device: torch.device) -> float:
    """Return the loss over all data: a number that depends on the weights alone."""
    return float(loss_function(model(data.inputs.to(device)), data.targets.to(device)))


def report_step(step: int) -> None:
    """Let `rdzvctl status` show this worker's step; without rdzvrun, do nothing."""
    if file := os.environ.get("RDZV_PROGRESS_FILE"):
        with contextlib.suppress(OSError), Path(file).open("r+b", buffering=0) as out:
            out.write(b"%20d\n" % step)
