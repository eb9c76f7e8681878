"""Train with Hugging Face's Accelerate, in processes that stay when others fail.

    rdzvrun --standalone --nproc-per-node=2 --max-restarts=3 \\
        examples/train_accelerate.py --folder out

Under `accelerate launch`, or when all processes are new, it goes on from the checkpoint in the
folder. docs/frameworks.md.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from toy import ToyData, evaluate, loss_function, make_model, make_optimizer

from rdzv.worker import (
    ElasticBatchSampler,
    Round,
    State,
    elastic,
    exit_if_leaving,
    should_stop,
)
from rdzv.worker.integrations import report_step
from rdzv.worker.integrations.accelerate import round_accelerator


@elastic
def train(state: State, round: Round, data: ToyData, args: argparse.Namespace) -> None:
    """Train from the present state to the last step; called once in each round."""
    accelerator = round_accelerator(cpu=not torch.cuda.is_available())
    checkpoint = args.folder / "checkpoint.pt"
    if not state.committed and checkpoint.exists():
        load(state, checkpoint)
    accelerator.print(
        f"{'kept' if round.kept else 'new'} at step {state.step} | world_size {round.world_size}",
        flush=True,
    )
    model = accelerator.prepare_model(state.model)
    while state.step < args.steps:
        for inputs, targets in DataLoader(data, batch_sampler=state.sampler):
            state.optimizer.zero_grad()
            accelerator.backward(
                loss_function(model(inputs.to(round.device)), targets.to(round.device))
            )
            state.optimizer.step()
            state.step += 1
            state.commit()
            report_step(state.step)
            leaves = should_stop()
            if leaves or state.step % args.save_every == 0:
                save(state, args, accelerator.is_main_process)
            if leaves:
                exit_if_leaving()
            time.sleep(args.step_seconds)
            if state.step == args.steps:
                break


def save(state: State, args: argparse.Namespace, is_main_process: bool) -> None:
    """Write the checkpoint beside its name and rename it, so that it is always complete."""
    if is_main_process:
        entries = ("model", "optimizer", "sampler")
        content = {name: getattr(state, name).state_dict() for name in entries}
        args.folder.mkdir(parents=True, exist_ok=True)
        torch.save({**content, "step": state.step}, args.folder / ".checkpoint.pt")
        (args.folder / ".checkpoint.pt").replace(args.folder / "checkpoint.pt")


def load(state: State, checkpoint: Path) -> None:
    content = torch.load(checkpoint, weights_only=True)
    state.step = content.pop("step")
    for name, entry in content.items():
        getattr(state, name).load_state_dict(entry)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training with Accelerate that outlives failures.")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints; shared")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=5, help="steps")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="sleep so long each step")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    data = ToyData()
    model = make_model()
    sampler = ElasticBatchSampler(data, 32)
    state = State(model=model, optimizer=make_optimizer(model), sampler=sampler, step=0)
    train(state, data, args)
    if os.environ.get("RANK", "0") == "0":
        loss = evaluate(state.model, data, torch.device("cpu"))
        print(f"training finished: step {state.step} | loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
