"""Train a small GPT on characters, on as many machines as the launcher finds.

    rdzvrun --standalone --nproc-per-node=2 --max-restarts=3 \\
        examples/train_chargpt.py --epochs 4 --snapshot gpt.pt

The shape of a real training: a model and a data set that know nothing of processes, their settings
as dataclasses, and a Trainer that alone knows of ranks, snapshots and the process group.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from snapshot import SnapshotFile
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

# ---------------------------------------------------------------------- data


@dataclass(frozen=True)
class DataConfig:
    """The text to learn from."""

    path: Path | None = None
    """None: this very script."""
    block_size: int = 32
    samples: int = 512


class CharDataset(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text, each with the same piece shifted by one character as its target."""

    def __init__(self, config: DataConfig) -> None:
        text = (config.path or Path(__file__)).read_text()
        self.characters = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.characters)}
        self.data = torch.tensor([numbers[character] for character in text])
        self.block_size = config.block_size
        places = len(self.data) - self.block_size - 1
        if places < 1:
            raise ValueError(f"the text has {len(self.data)} characters; give a longer one")
        self.starts = torch.linspace(0, places, min(config.samples, places)).long().tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = self.starts[index]
        piece = self.data[start : start + self.block_size + 1]
        return piece[:-1], piece[1:]


# ---------------------------------------------------------------------- model


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model."""

    vocabulary: int
    block_size: int
    layers: int = 2
    heads: int = 2
    width: int = 32


class Block(nn.Module):
    """Attention to earlier positions, then a small network for each position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.before_attention = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.attended = nn.Linear(config.width, config.width)
        self.network = nn.Sequential(
            nn.LayerNorm(config.width),
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        parts = self.query_key_value(self.before_attention(x)).split(width, dim=2)
        query, key, value = (part.view(split).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.network(x)


class GPT(nn.Module):
    """Predicts, for each position of a text, the next character."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.characters = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Parameter(torch.zeros(1, config.block_size, config.width))
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.head = nn.Sequential(
            nn.LayerNorm(config.width), nn.Linear(config.width, config.vocabulary)
        )

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.characters(numbers) + self.places[:, : numbers.shape[1]]
        logits: Tensor = self.head(self.blocks(x))
        return logits


# ---------------------------------------------------------------------- training


@dataclass(frozen=True)
class TrainerConfig:
    """How to train."""

    epochs: int = 4
    batch_size: int = 16
    learning_rate: float = 3e-3
    clip_gradients_at: float = 1.0
    save_every: int = 1
    snapshot: Path | None = None


class Trainer:
    """Trains one model with all workers; a restart continues from the snapshot."""

    def __init__(
        self, config: TrainerConfig, model: GPT, data: CharDataset, device: torch.device
    ) -> None:
        self.config = config
        self.device = device
        self.rank = dist.get_rank()
        self.sampler: DistributedSampler[int] = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=config.batch_size, sampler=self.sampler)
        self.model = model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate)
        self.snapshot = SnapshotFile.from_environ(config.snapshot) if config.snapshot else None
        self.epochs_run = 0
        self.step = 0
        self._load_snapshot()
        self.ddp_model = DistributedDataParallel(
            self.model, device_ids=[device.index] if device.type == "cuda" else None
        )

    def _load_snapshot(self) -> None:
        """Read the snapshot on rank 0 and tell the others, so that all begin alike."""
        found = self.snapshot.load() if self.snapshot and self.rank == 0 else None
        message: list[Any] = [found]
        dist.broadcast_object_list(message, src=0, device=self.device)
        if message[0] is None:
            return
        header, state = message[0]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epochs_run, self.step = state["epochs_run"], header.step
        self._say(f"resuming at epoch {self.epochs_run}, step {self.step}")

    def _save_snapshot(self) -> None:
        if self.snapshot is not None and self.rank == 0:
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "epochs_run": self.epochs_run,
            }
            self.snapshot.save(state, self.step)

    def _run_batch(self, numbers: Tensor, targets: Tensor) -> float:
        logits = self.ddp_model(numbers)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_gradients_at)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def _run_epoch(self) -> None:
        self.sampler.set_epoch(self.epochs_run)
        losses = [
            self._run_batch(numbers.to(self.device), targets.to(self.device))
            for numbers, targets in self.loader
        ]
        self.epochs_run += 1
        mean = torch.tensor(sum(losses) / len(losses), device=self.device)
        dist.all_reduce(mean)
        loss = float(mean) / dist.get_world_size()
        self._say(f"epoch {self.epochs_run} | step {self.step} | loss {loss:.3f}")

    def train(self) -> None:
        while self.epochs_run < self.config.epochs:
            self._run_epoch()
            last = self.epochs_run == self.config.epochs
            if last or self.epochs_run % self.config.save_every == 0:
                self._save_snapshot()

    def _say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)


def ddp_setup() -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch.device("cpu")


@record
def main() -> None:
    parser = argparse.ArgumentParser(description="Training of a small GPT on characters.")
    parser.add_argument("--text", type=Path, help="what to learn from (default: this script)")
    parser.add_argument("--epochs", type=int, default=TrainerConfig.epochs)
    parser.add_argument("--samples", type=int, default=DataConfig.samples)
    parser.add_argument("--snapshot", type=Path, help="resume from it, and save to it")
    args = parser.parse_args()
    device = ddp_setup()
    data = CharDataset(DataConfig(args.text, samples=args.samples))
    torch.manual_seed(0)
    model = GPT(GPTConfig(len(data.characters), data.block_size))
    config = TrainerConfig(epochs=args.epochs, snapshot=args.snapshot)
    trainer = Trainer(config, model, data, device)
    trainer.train()
    dist.barrier()  # no process closes what another still uses
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
