"""Train with Lightning, and go on from the last checkpoint after every restart.

    rdzvrun --standalone --nproc-per-node=2 --max-restarts=3 \\
        examples/train_lightning.py --folder out

With --kept, workers stay when others fail, and read the checkpoint in the same process.
docs/frameworks.md.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from toy import ToyData, loss_function, make_model, make_optimizer

from rdzv.worker import Round, State, elastic
from rdzv.worker.integrations.lightning import RdzvCallback, this_round


class Model(LightningModule):
    """The model, its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        inputs, targets = batch
        return loss_function(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.net)


class Slow(Callback):
    """Sleeps after each step, so that there is time to kill something."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(self.seconds)


def train(args: argparse.Namespace, state: State | None = None) -> None:
    """Train from the last checkpoint to the last step."""
    trainer = Trainer(
        **this_round(),
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        strategy="ddp",
        max_epochs=-1,
        max_steps=args.steps,
        callbacks=[
            ModelCheckpoint(
                dirpath=args.folder, every_n_train_steps=args.save_every, save_last=True
            ),
            RdzvCallback(state),
            Slow(args.step_seconds),
        ],
        logger=False,
        enable_progress_bar=False,
    )
    if trainer.is_global_zero:
        found = "last.ckpt" if (args.folder / "last.ckpt").exists() else None
        print(f"pid {os.getpid()} goes on from {found}", flush=True)
    trainer.fit(Model(), DataLoader(ToyData(), batch_size=32), ckpt_path="last")
    if trainer.is_global_zero:
        print(f"training finished: step {trainer.global_step}", flush=True)


@elastic
def train_kept(state: State, round: Round, args: argparse.Namespace) -> None:
    """Train; called once in each round."""
    train(args, state)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training with Lightning that outlives failures.")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints; shared")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=5, help="steps")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="sleep so long each step")
    parser.add_argument("--kept", action="store_true", help="keep the processes of the others")
    return parser.parse_args()


if __name__ == "__main__":
    given = parse_args()
    torch.set_num_threads(1)
    if given.kept:
        train_kept(State(), given)
    else:
        train(given)
