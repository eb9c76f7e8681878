"""Train with Hugging Face's Trainer, and go on from the newest checkpoint after every restart.

    rdzvrun --standalone --nproc-per-node=2 --max-restarts=3 \\
        examples/train_trainer.py --folder out

With --kept, workers stay when others fail, and read the checkpoint in the same process.
docs/frameworks.md.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from toy import ToyData, loss_function, make_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from rdzv.worker import Round, State, elastic
from rdzv.worker.integrations.transformers import RdzvCallback, newest_checkpoint


class Model(nn.Module):
    """Returns the loss beside the output, as the Trainer expects of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.net(inputs)
        return {"loss": loss_function(outputs, labels), "logits": outputs}


class Data(Dataset[dict[str, Tensor]]):
    """The samples, by the names of the model's arguments."""

    def __init__(self) -> None:
        self.data = ToyData()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, labels = self.data[index]
        return {"inputs": inputs, "labels": labels}


class Slow(TrainerCallback):
    """Sleeps after each step, so that there is time to kill something."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_end(self, *_: Any, **__: Any) -> None:
        time.sleep(self.seconds)


def train(args: argparse.Namespace, state: State | None = None) -> None:
    """Train from the newest checkpoint to the last step."""
    options = TrainingArguments(
        output_dir=str(args.folder),
        max_steps=args.steps,
        save_steps=args.save_every,
        save_total_limit=3,
        per_device_train_batch_size=32,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model=Model(),
        args=options,
        train_dataset=Data(),
        callbacks=[RdzvCallback(state), Slow(args.step_seconds)],
    )
    checkpoint = newest_checkpoint(args.folder)
    if trainer.is_world_process_zero():
        print(f"pid {os.getpid()} goes on from {checkpoint}", flush=True)
    result = trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.is_world_process_zero():
        print(f"training finished: step {result.global_step}", flush=True)


@elastic
def train_kept(state: State, round: Round, args: argparse.Namespace) -> None:
    """Train; called once in each round."""
    train(args, state)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training with Trainer that outlives failures.")
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
