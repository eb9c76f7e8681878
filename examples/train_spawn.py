"""Train on one machine with processes that the script starts by itself.

    python examples/train_spawn.py --nproc 2 --epochs 10

What a launcher would do is marked BY HAND below. What is missing is longer: a second machine, a
restart when a process dies, a snapshot to go on from, the output and traceback of each worker.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from toy import ToyData, evaluate, loss_function, make_model, make_optimizer


def ddp_setup(rank: int, world_size: int, port: int) -> torch.device:
    # BY HAND: where the processes meet. The port must be free, and nothing searches for one.
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rank=rank, world_size=world_size, device_id=device)
        return device
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return torch.device("cpu")


class Trainer:
    def __init__(
        self, model: nn.Module, data: ToyData, args: argparse.Namespace, device: torch.device
    ) -> None:
        self.rank = dist.get_rank()
        self.model = model.to(device)
        self.ddp_model = DistributedDataParallel(
            self.model, device_ids=[device.index] if device.type == "cuda" else None
        )
        self.optimizer = make_optimizer(self.model)
        self.data = data
        self.sampler: DistributedSampler[int] = DistributedSampler(
            data, shuffle=True, seed=args.seed
        )
        self.loader = DataLoader(data, batch_size=args.batch_size, sampler=self.sampler)
        self.device = device
        self.step = 0

    def _run_batch(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = loss_function(self.ddp_model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        self.step += 1

    def _run_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)
        for inputs, targets in self.loader:
            self._run_batch(inputs.to(self.device), targets.to(self.device))

    def train(self, epochs: int) -> None:
        for epoch in range(epochs):
            self._run_epoch(epoch)
            if self.rank == 0:
                loss = evaluate(self.model, self.data, self.device)
                print(
                    f"epoch {epoch + 1} | step {self.step} | loss {loss:.4f} "
                    f"| world_size {dist.get_world_size()}",
                    flush=True,
                )


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> None:
    device = ddp_setup(rank, world_size, args.port)
    trainer = Trainer(make_model(args.seed), ToyData(args.samples, args.seed), args, device)
    trainer.train(args.epochs)
    if args.final_weights and rank == 0:
        torch.save(trainer.model.state_dict(), args.final_weights)
    dist.barrier()  # no process closes what another still uses
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Training of a toy model with mp.spawn.")
    parser.add_argument("--nproc", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--port", type=int, default=12355)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per worker")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--final-weights", type=Path)
    args = parser.parse_args()
    # BY HAND: how many processes there are, and their ranks; mp.spawn passes each its rank.
    mp.spawn(run_worker, args=(args.nproc, args), nprocs=args.nproc)


if __name__ == "__main__":
    main()
