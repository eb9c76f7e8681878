"""Train in one process: the starting point of the distributed forms.

    python examples/train_single.py --epochs 10

It knows no other process, and any failure ends the training.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from toy import ToyData, evaluate, loss_function, make_model, make_optimizer


class Trainer:
    def __init__(
        self, model: nn.Module, data: ToyData, batch_size: int, device: torch.device
    ) -> None:
        self.model = model.to(device)
        self.optimizer = make_optimizer(self.model)
        self.data = data
        self.loader = DataLoader(data, batch_size=batch_size, shuffle=True)
        self.device = device
        self.step = 0

    def _run_batch(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = loss_function(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        self.step += 1

    def _run_epoch(self) -> None:
        for inputs, targets in self.loader:
            self._run_batch(inputs.to(self.device), targets.to(self.device))

    def train(self, epochs: int) -> None:
        for epoch in range(1, epochs + 1):
            self._run_epoch()
            loss = evaluate(self.model, self.data, self.device)
            print(f"epoch {epoch} | step {self.step} | loss {loss:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Training of a toy model in one process.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--final-weights", type=Path)
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = ToyData(args.samples, args.seed)
    trainer = Trainer(make_model(args.seed), data, args.batch_size, device)
    trainer.train(args.epochs)
    if args.final_weights:
        torch.save(trainer.model.state_dict(), args.final_weights)


if __name__ == "__main__":
    main()
