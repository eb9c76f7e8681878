"""Replicas of a small training in one process: their steps, bits changed in them, their verdicts.

Each has a model and AdamW of its own, and gradients that depend on its own parameters, of which all
apply the average. What would go over the network is computed here for all of them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from rdzv.worker import verifying
from rdzv.worker.healing import StateOffer, digest_of
from rdzv.worker.rounds import Round, WorkerError
from rdzv.worker.sealing import Sealing
from rdzv.worker.verifying import Verifying

Raised = list[Exception | None]


class LeftError(Exception):
    """A replica leaves the round, and is to be kept."""


class Replicas:
    """Replicas that verify themselves every `every` steps."""

    def __init__(self, count: int, every: int) -> None:
        self.every = every
        self.cleared: list[int | None] = []
        """The steps at which replicas have cleared snapshots of later ones."""
        self.hosts = [f"n{rank}" for rank in range(count)]
        made = [self._new() for _ in range(count)]
        self.sealings, self.verifyings = map(list, zip(*made, strict=True))
        self.begin_round()

    def _new(self) -> tuple[Sealing, Verifying]:
        torch.manual_seed(11)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sealing = Sealing({"model": model, "optimizer": optimizer})

        def clear() -> None:
            self.cleared.append(sealing.step)

        return sealing, Verifying(sealing, self.every, clear, self._leave)

    def renew(self, rank: int) -> None:
        """Put a process that has not begun in the place of a replica."""
        self.sealings[rank], self.verifyings[rank] = self._new()

    def _leave(self, reason: str) -> NoReturn:
        raise LeftError(reason)

    @property
    def at(self) -> int:
        return self.sealings[0].step or 0

    def offers(self) -> list[StateOffer]:
        return [
            StateOffer(one.has_begun, one.step, one.torn, digest, "", **v.offered())
            for one, v, digest in zip(self.sealings, self.verifyings, self.digests(), strict=True)
        ]

    def begin_round(self) -> Raised:
        """Begin a round, and return what each replica has raised while offers were compared."""
        offers, size = self.offers(), len(self.sealings)
        raised = self._in_contact(
            lambda rank, one: one.compare(
                offers, Round(0, rank, size, 0, 0, ""), verifying.exchange
            )
        )
        if not any(raised):
            for rank, (sealing, one) in enumerate(zip(self.sealings, self.verifyings, strict=True)):
                sealing.begin_round(rank, size, lambda: None)
                one.begin_round()
        return raised

    def step(self) -> None:
        """Make one step on all replicas."""
        noise = torch.Generator().manual_seed(self.at)
        models = [one.contents.modules["model"] for one in self.sealings]
        for same in zip(*(model.parameters() for model in models), strict=True):
            grads = [one.detach() * 0.3 + torch.randn(one.shape, generator=noise) for one in same]
            average = torch.stack(grads).mean(0)
            for one in same:
                one.grad = average.clone()
        for sealing in self.sealings:
            sealing.contents.optimizers["optimizer"].step()

    def commit(self) -> Raised:
        """Commit on all replicas; return what each has raised."""
        for sealing in self.sealings:
            sealing.commit()
        return self._in_contact(lambda _, one: one.committed())

    def _in_contact(self, do: Any) -> Raised:
        digests = self.digests()
        entries = [[host, {}] for host in self.hosts]
        if len(set(digests)) > 1:
            for (_, held), one in zip(entries, self.sealings, strict=True):
                tensors = one.image({}).tensors()
                held.update((name, verifying.digest([(name, one)])) for name, one in tensors)
        before = verifying.gather, verifying.exchange
        verifying.gather = lambda mine, size: digests
        verifying.exchange = lambda *_: entries
        raised: Raised = []
        try:
            for rank, one in enumerate(self.verifyings):
                try:
                    raised.append(do(rank, one))
                except (LeftError, WorkerError) as error:
                    raised.append(error)
        finally:
            verifying.gather, verifying.exchange = before
        return raised

    def digests(self) -> list[str]:
        return [digest_of(one.image({})) for one in self.sealings]

    def parameters(self, rank: int) -> list[tuple[str, torch.Tensor]]:
        return list(self.sealings[rank].image({}).parameters.items())

    def replace(self, rank: int, by: int) -> None:
        """Give a replica the state of another, as to a new process on another node."""
        mine, source = self.sealings[rank].contents, self.sealings[by].contents
        mine.modules["model"].load_state_dict(source.modules["model"].state_dict())
        held = copy.deepcopy(source.optimizers["optimizer"].state_dict())
        mine.optimizers["optimizer"].load_state_dict(held)
        self.sealings[rank].step = self.sealings[by].step
        self.hosts[rank] += "+"
        assert not any(self.begin_round())


def plant(replicas: Replicas, chosen: random.Random, every: int) -> tuple[int, Raised]:
    """Flip a bit in a replica, and train until a verification; return the rank, and what followed.

    The replicas then redo what they have gone back from, one of them as a new process.
    """
    for _ in range(chosen.randrange(every)):
        replicas.step()
        assert not any(replicas.commit())
    rank, raised = chosen.randrange(len(replicas.sealings)), Raised()
    flip(replicas.parameters(rank), chosen)
    end = replicas.at + every
    while not any(raised) and replicas.at < end:
        replicas.step()
        raised = replicas.commit()
    if any(raised):
        replicas.replace(rank, by=(rank + 1) % len(replicas.sealings))
    while replicas.at < end:
        replicas.step()
        assert not any(replicas.commit())
    return rank, raised


def flip(tensors: Sequence[tuple[str, torch.Tensor]], chosen: random.Random) -> None:
    """Change one bit of a number, which stays below a thousand: none becomes a NaN by it."""
    while True:
        _, tensor = chosen.choice(tensors)
        place, bit = chosen.randrange(tensor.numel()), chosen.randrange(32)
        words = tensor.view(torch.int32).view(-1)
        changed = int(words[place]) ^ (1 << bit if bit < 31 else -(1 << 31))
        number = torch.tensor([changed], dtype=torch.int32).view(torch.float32).item()
        if abs(number) < 1000:
            words[place] = changed
            return
