"""Train on several machines that share no disk: every node keeps its own snapshot.

    rdzvrun --nnodes=2 --nproc-per-node=2 --rdzv-endpoint=HOST:29400 --rdzv-id=job \\
        examples/train_multinode.py 10 2 --snapshot /local/snapshot.pt

Two ranks matter here. LOCAL_RANK counts the workers of one machine: it selects the GPU, and the
worker that writes the machine's snapshot. RANK counts all workers: it selects the one that prints.
A machine that is new, or comes back with an old snapshot, is given the newest one of all.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from toy import ToyData, evaluate, loss_function, make_model, make_optimizer


def ddp_setup() -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch.device("cpu")


class Trainer:
    def __init__(
        self, data: ToyData, batch_size: int, save_every: int, snapshot: Path, device: torch.device
    ) -> None:
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.rank = dist.get_rank()
        self.device = device
        self.data = data
        self.sampler: DistributedSampler[int] = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=batch_size, sampler=self.sampler)
        self.save_every = save_every
        self.snapshot = snapshot
        self.epochs_run = 0
        self.model = make_model().to(device)
        self.optimizer = make_optimizer(self.model)
        self._load_newest_snapshot()
        # From here on the gradients of all workers are averaged in every step.
        self.ddp_model = DistributedDataParallel(
            self.model, device_ids=[device.index] if device.type == "cuda" else None
        )

    def _load_newest_snapshot(self) -> None:
        """Agree on the newest snapshot of all nodes, and load it everywhere."""
        own: dict[str, Any] | None = None
        if self.local_rank == 0 and self.snapshot.exists():
            own = torch.load(self.snapshot, map_location="cpu", weights_only=True)
        epochs = torch.tensor([own["epochs_run"] if own else 0], device=self.device)
        everyones = [torch.zeros_like(epochs) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, epochs)
        of_all = [int(number) for number in everyones]
        newest = max(of_all)
        if newest == 0:
            return
        source = of_all.index(newest)
        message = [own if self.rank == source else None]
        dist.broadcast_object_list(message, src=source, device=self.device)
        found: Any = message[0]
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.epochs_run = found["epochs_run"]
        if self.rank == 0:
            print(f"resuming at epoch {self.epochs_run}, as known to rank {source}", flush=True)

    def _save_snapshot(self) -> None:
        """Save on every node; a crash at any moment leaves the previous snapshot or this one."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epochs_run": self.epochs_run,
        }
        temporary = self.snapshot.with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.snapshot)

    def _run_batch(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = loss_function(self.ddp_model(inputs), targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self) -> None:
        self.sampler.set_epoch(self.epochs_run)
        for inputs, targets in self.loader:
            self._run_batch(inputs.to(self.device), targets.to(self.device))
        self.epochs_run += 1

    def train(self, total_epochs: int) -> None:
        while self.epochs_run < total_epochs:
            self._run_epoch()
            if self.local_rank == 0 and self.epochs_run % self.save_every == 0:
                self._save_snapshot()
            if self.rank == 0:
                loss = evaluate(self.model, self.data, self.device)
                workers = dist.get_world_size()
                print(f"epoch {self.epochs_run} | loss {loss:.4f} | {workers} workers", flush=True)


@record
def main() -> None:
    parser = argparse.ArgumentParser(description="Training on machines that share no disk.")
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker (default 32)")
    parser.add_argument("--snapshot", type=Path, default=Path("snapshot.pt"))
    args = parser.parse_args()
    device = ddp_setup()
    trainer = Trainer(ToyData(), args.batch_size, args.save_every, args.snapshot, device)
    trainer.train(args.total_epochs)
    dist.barrier()  # no process closes what another still uses
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
