"""Train in processes that stay when others fail: the script for rdzvrun, torchrun and plain python.

    rdzvrun --standalone --nproc-per-node=2 --max-restarts=3 examples/train_kept.py --epochs 10

It is train_ddp.py with the state in memory in place of a snapshot: when a worker or a node is lost,
the other workers go on in the same processes from the step before. What is new here are `State`,
`@elastic` and `state.commit()`. A snapshot is still needed for what takes all workers at once; see
docs/workers-that-stay.md. With any number of workers it makes the same steps: see docs/any-size.md.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from toy import ToyData, evaluate, loss_function, make_model, make_optimizer, report_step

from rdzv.worker import ElasticBatchSampler, Round, State, elastic


def make_state(data: ToyData, args: argparse.Namespace, device: torch.device) -> State:
    """List everything that training changes, so that it can be resumed."""
    model = make_model(args.seed).to(device)
    return State(
        model=model,
        optimizer=make_optimizer(model),
        sampler=ElasticBatchSampler(
            data, global_batch=args.global_batch, micro_batch=args.micro_batch, seed=args.seed
        ),
        first_loss=evaluate(model, data, device),
        step=0,
    )


@elastic
def train(
    state: State, round: Round, data: ToyData, args: argparse.Namespace, device: torch.device
) -> None:
    """Train from the present state to the last epoch; called once in each round."""
    if round.rank == 0:
        how = "going on" if round.kept else "starting"
        print(f"{how} at step {state.step} | world_size {round.world_size}", flush=True)
    # All ranks have the same state by now, so the wrapper need not send it once more.
    model = DistributedDataParallel(
        state.model, [device.index] if device.type == "cuda" else None, init_sync=False
    )
    while state.sampler.epoch < args.epochs:
        epoch = state.sampler.epoch
        for inputs, targets in DataLoader(data, batch_sampler=state.sampler):
            with state.accumulate(model) as part:
                loss = loss_function(model(inputs.to(device)), targets.to(device))
                (part.weight * loss).backward()
            if part.is_last:
                state.optimizer.step()
                state.optimizer.zero_grad()
                state.step += 1
                state.commit()
                report_step(state.step)
                time.sleep(args.step_seconds)
        if round.rank == 0:
            loss = evaluate(state.model, data, device)
            print(
                f"epoch {epoch + 1} | step {state.step} | loss {loss:.4f} "
                f"| world_size {round.world_size} | round {round.number} | pid {os.getpid()}",
                flush=True,
            )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Data-parallel training that outlives failures.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch", type=int, default=64, help="samples in a step")
    parser.add_argument("--micro-batch", type=int, default=16, help="samples in a forward pass")
    parser.add_argument("--samples", type=int, default=1024, help="in an epoch, of all workers")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="sleep so long each step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--final-weights", type=Path, help="where rank 0 saves the weights at last")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # several workers share the cores
    data = ToyData(args.samples, args.seed)
    state = make_state(data, args, device)
    train(state, data, args, device)
    if os.environ.get("RANK", "0") == "0":
        loss = evaluate(state.model, data, device)
        print(
            f"training finished: step {state.step} | loss first {state.first_loss:.4f} "
            f"-> last {loss:.4f}"
        )
        if args.final_weights:
            torch.save(state.model.state_dict(), args.final_weights)


if __name__ == "__main__":
    main()
