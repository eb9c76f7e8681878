"""Train a sharded model (FSDP2) in processes that stay when a round ends.

    rdzvrun --nnodes=2 --nproc-per-node=2 --max-restarts=3 examples/train_kept_fsdp.py --replicas 2

Each rank holds one part of the model. As long as every part has a holder (all ranks stayed, or a
replica has it: HSDP), training goes on from memory. Else all processes are new, and go on from the
checkpoint. The model is built in each round and given to `state.add`; see
docs/workers-that-stay.md.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from toy import ToyData, loss_function, make_model, make_optimizer, report_step

from rdzv.worker import ElasticBatchSampler, Round, State, elastic


@elastic
def train(state: State, round: Round, data: ToyData, args: argparse.Namespace) -> None:
    """Train from the present state to the last epoch; called once in each round."""
    model = make_model(args.seed).to(round.device)
    mesh = make_mesh(round, args.replicas)
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model)
    state.add(model=model, optimizer=optimizer)
    if not state.committed:  # Nothing is in memory yet.
        load_newest(state, args.checkpoints)
    if round.rank == 0:
        how = "going on" if round.kept else "starting"
        print(f"{how} at step {state.step} | world_size {round.world_size}", flush=True)
    while state.sampler.epoch < args.epochs:
        for inputs, targets in DataLoader(data, batch_sampler=state.sampler):
            optimizer.zero_grad()
            loss = loss_function(model(inputs.to(round.device)), targets.to(round.device))
            loss.backward()
            optimizer.step()
            state.step += 1
            state.commit()
            report_step(state.step)
        save(state, args.checkpoints / f"{state.step:08}-{round.token}")
        if round.rank == 0:
            print(
                f"epoch {state.sampler.epoch} | step {state.step} | loss {loss.item():.4f} "
                f"| round {round.number} | pid {os.getpid()}",
                flush=True,
            )


def make_mesh(round: Round, replicas: int) -> DeviceMesh:
    """Divide the ranks into replicas of the model, each sharded over as many ranks."""
    if round.world_size % replicas:
        raise ValueError(f"{round.world_size} workers are no multiple of {replicas} replicas")
    shape = (replicas, round.world_size // replicas)
    names = ("replicate", "shard")
    return init_device_mesh(round.device.type, shape, mesh_dim_names=names)


def save(state: State, folder: Path) -> None:
    """Write a checkpoint, each rank its own part; all ranks call it together."""
    model, optimizer = get_state_dict(state.model, state.optimizer)
    at = {"sampler": state.sampler.state_dict(), "step": state.step}
    dcp.save({"model": model, "optimizer": optimizer, "at": at}, checkpoint_id=folder)


def load_newest(state: State, folder: Path) -> None:
    """Load the newest complete checkpoint, if there is one."""
    whole = sorted(path.parent for path in folder.glob("*/.metadata"))  # It is written last.
    if not whole:
        return
    model, optimizer = get_state_dict(state.model, state.optimizer)
    held = {"model": model, "optimizer": optimizer, "at": {"sampler": {}, "step": 0}}
    held["at"]["sampler"] = state.sampler.state_dict()
    dcp.load(held, checkpoint_id=whole[-1])
    set_state_dict(state.model, state.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    state.sampler.load_state_dict(held["at"]["sampler"])
    state.step = held["at"]["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Sharded training that outlives failures.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per worker")
    parser.add_argument("--samples", type=int, default=1024, help="in an epoch, of all workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=1, help="copies of each part")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(1)  # several workers share the cores
    data = ToyData(args.samples, args.seed)
    sampler = ElasticBatchSampler(data, args.batch_size, seed=args.seed)
    train(State(sampler=sampler, step=0), data, args)
    if os.environ.get("RANK", "0") == "0":
        print("training finished")


if __name__ == "__main__":
    main()
