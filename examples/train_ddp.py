"""Train on one machine or many, and go on after every restart: the script for rdzvrun and torchrun.

    rdzvrun --standalone --nproc-per-node=2 examples/train_ddp.py --epochs 10 --snapshot snapshot.pt

The launcher tells each worker who it is (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, ...) and starts
all of them again when one fails or nodes come and go. The script does the rest: it begins where the
snapshot ends, whatever the number of workers has become.
"""

import argparse
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from snapshot import SnapshotFile
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from toy import ToyData, evaluate, loss_function, make_model, make_optimizer, report_step


def ddp_setup() -> torch.device:
    """Join the process group described by the launcher's environment."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    torch.set_num_threads(1)  # several workers share the cores
    dist.init_process_group("gloo")
    return torch.device("cpu")


class ResumableSampler(DistributedSampler[int]):
    """A DistributedSampler that can begin in the middle of an epoch.

    The order of an epoch depends on seed and epoch alone, and the ranks take turns in it, so the
    samples used so far are a prefix of it, and its length is all there is to remember. That holds
    for another number of workers too; at most `num_replicas - 1` samples are then used twice,
    besides those with which DistributedSampler fills up the last turn.
    """

    samples_done = 0

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), self.samples_done // self.num_replicas, None)


class Trainer:
    """Trains, saves, resumes. Everything that a restart must bring back is in the snapshot."""

    def __init__(
        self, model: nn.Module, data: ToyData, args: argparse.Namespace, device: torch.device
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self.data = data
        self.sampler = ResumableSampler(data, shuffle=True, seed=args.seed)
        self.loader = DataLoader(data, batch_size=args.batch_size, sampler=self.sampler)
        self.save_every: int = args.save_every
        self.step_seconds: float = args.step_seconds
        self.snapshot = SnapshotFile.from_environ(args.snapshot) if args.snapshot else None

        self.model = model.to(device)
        self.optimizer = make_optimizer(self.model)
        # epochs completed, samples used of the next, and optimizer steps since the very beginning
        self.epoch = 0
        self.samples_done = 0  # of the epoch after those
        self.step = 0  # optimizer steps since the very beginning
        self.stop_requested = False
        self.first_loss = self.loss = evaluate(self.model, data, device)
        self._load_snapshot()
        self.ddp_model = DistributedDataParallel(
            self.model, device_ids=[device.index] if device.type == "cuda" else None
        )

    def _load_snapshot(self) -> None:
        """Load the last snapshot, the same one on every rank.

        Rank 0 reads it and sends it to the others. If each read the file itself, two could read
        different snapshots, and wait for each other forever. (With a large model, all ranks should
        rather read it, after agreeing on a name.)
        """
        found = self.snapshot.load() if self.snapshot and self.rank == 0 else None
        message: list[Any] = [found]
        dist.broadcast_object_list(message, src=0, device=self.device)
        if message[0] is None:
            self._say(f"rank 0 of {self.world_size}: starting afresh")
            return
        header, state = message[0]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]
        self.samples_done = state["samples_done"]
        self.first_loss, self.loss = state["first_loss"], state["loss"]
        self.step = header.step
        self._say(
            f"rank 0 of {self.world_size}: resuming from epoch {self.epoch} | step {self.step} "
            f"| loss {self.loss:.4f} | written by round {header.round}"
        )

    def _save_snapshot(self) -> None:
        """Save, on rank 0. Nothing here waits for another rank."""
        if self.snapshot is None or self.rank != 0:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
            "samples_done": self.samples_done,
            "first_loss": self.first_loss,
            "loss": self.loss,
            # A model that draws random numbers (dropout) needs each rank's generator here as well.
        }
        self.snapshot.save(state, self.step)

    def _run_batch(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = loss_function(self.ddp_model(inputs), targets)
        loss.backward()  # DDP averages the gradients of all ranks here
        self.optimizer.step()

    def _run_epoch(self) -> None:
        self.sampler.set_epoch(self.epoch)
        self.sampler.samples_done = self.samples_done
        for inputs, targets in self.loader:
            self._stop_if_requested()
            try:
                self._run_batch(inputs.to(self.device), targets.to(self.device))
            except RuntimeError:
                # Another worker has stopped a little earlier, so the gradients could not be
                # averaged. The optimizer has not run, so the state is still that of a whole step.
                self._stop_if_requested()
                raise
            self.step += 1
            report_step(self.step)
            self.samples_done += len(inputs) * self.world_size
            time.sleep(self.step_seconds)
        self.epoch += 1
        self.samples_done = 0

    def train(self, epochs: int) -> None:
        signal.signal(signal.SIGTERM, self._request_stop)
        while self.epoch < epochs:
            self._run_epoch()
            if self.rank == 0:
                self.loss = evaluate(self.model, self.data, self.device)
            self._say(
                f"epoch {self.epoch} | step {self.step} | loss {self.loss:.4f} "
                f"| world_size {self.world_size} | round {_round()}"
            )
            if self.epoch % self.save_every == 0 or self.epoch == epochs:
                self._save_snapshot()
        self._say(
            f"training finished: epoch {self.epoch} | step {self.step} "
            f"| loss first {self.first_loss:.4f} -> last {self.loss:.4f}"
        )

    def _request_stop(self, signum: int, frame: FrameType | None) -> None:
        """Record SIGTERM: the launcher wants this worker to end, and gives it a while to save.

        Only recorded, because the signal may come in the middle of a step, when half of the weights
        are new. The handler is installed when training begins, because a worker that still waits
        for others in init_process_group has nothing to save and should die at once.
        """
        self.stop_requested = True

    def _stop_if_requested(self) -> None:
        """Between two steps: save and exit, if SIGTERM has come.

        No rank asks the others: after the signal they may be gone, and a rank that waits for them
        waits until SIGKILL. All ranks get the signal at about the same time, so usually all finish
        the same step. If one exits a step earlier, gloo reports an error to the others; NCCL may
        keep rank 0 waiting instead, and then the last regular snapshot has to do.
        """
        if self.stop_requested:
            self._save_snapshot()
            self._say(f"rank 0 of {self.world_size}: stopping on SIGTERM at step {self.step}")
            sys.exit(128 + signal.SIGTERM)

    def _say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)


def _round() -> int:
    return int(os.environ.get("RDZV_ROUND", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Elastic data-parallel training of a toy model.")
    parser.add_argument("--epochs", type=int, default=10, help="in all, over every restart")
    parser.add_argument("--snapshot", type=Path, help="resume from it, and save to it")
    parser.add_argument("--save-every", type=int, default=1, metavar="EPOCHS")
    parser.add_argument("--batch-size", type=int, default=32, help="per worker")
    parser.add_argument("--samples", type=int, default=1024, help="in an epoch, of all workers")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="sleep so long each step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--final-weights", type=Path, help="where rank 0 saves the weights at last")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "no RANK in the environment; start me by a launcher: "
            "rdzvrun --standalone --nproc-per-node=2 examples/train_ddp.py"
        )
    return args


@record  # a traceback reaches the launcher, which shows the first one of the whole job
def main() -> None:
    args = parse_args()
    device = ddp_setup()
    trainer = Trainer(make_model(args.seed), ToyData(args.samples, args.seed), args, device)
    trainer.train(args.epochs)
    if args.final_weights and trainer.rank == 0:
        torch.save(trainer.model.state_dict(), args.final_weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
