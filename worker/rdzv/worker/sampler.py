"""Batches of a data set for a group of workers whose size may change in the middle of an epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import Any

from .rounds import NoRoundError, WorkerError


class ElasticBatchSampler:
    """Yields every sample once per epoch, regardless of failures and resizes.

    It is passed to `State(sampler=...)` and `DataLoader(..., batch_sampler=state.sampler)`. An
    epoch is an ordering of all samples that depends only on `seed` and the epoch number. Each step
    takes the next `batch_size * world_size` samples, a consecutive `batch_size` for each rank. Only
    `state.commit()` advances the position in that ordering, so samples that were prefetched, or
    were part of an unfinished step, are yielded again.

    At the end of an epoch, fewer samples may remain. They are divided among the ranks as evenly as
    possible. If there are fewer samples than ranks, the epoch's first samples are added until each
    rank has one; only these are seen twice. With `drop_tail`, the last incomplete step is omitted
    instead, so that all batches have the same size.

    Iteration ends with the epoch. Loop over epochs like this, which also works if a round begins in
    the middle of one:

        while state.sampler.epoch < epochs:
            for batch in loader:
                ...
                state.commit()
    """

    def __init__(
        self,
        data: Sized | int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_tail: bool = False,
        batches_per_commit: int = 1,
    ) -> None:
        """Accept a data set, or its number of samples, and a batch size per rank.

        `batches_per_commit` is the number of batches between two commits, for scripts that
        accumulate gradients. `ValueError` if a number is not positive.
        """
        self.size = data if isinstance(data, int) else len(data)
        for name, value in (
            ("the number of samples", self.size),
            ("batch_size", batch_size),
            ("batches_per_commit", batches_per_commit),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_tail = drop_tail
        self.batches_per_commit = batches_per_commit
        self.epoch = 0
        """The number of completed epochs."""
        self.position = 0
        """The number of samples that all ranks together have completed in the current epoch."""
        self.on_first_batch: Callable[[], None] | None = None
        """Called before the first batch of a round that begins in the middle of an epoch."""
        self._rank: int | None = None
        self._world_size = 1
        self._round = 0
        self._ends: deque[int] = deque()
        self._fruitless = 0
        """The number of consecutive iterators that have yielded the same incomplete last step."""

    def begin_round(self, rank: int, world_size: int) -> None:
        """Divide the samples among a new round's ranks. Older iterators raise from now on.

        Raises `WorkerError` if `drop_tail` would leave no samples in an epoch.
        """
        if self.drop_tail and self.size < self.batch_size * world_size:
            raise WorkerError(
                f"drop_tail leaves nothing of {self.size} samples in a world of {world_size} with "
                f"batches of {self.batch_size}: choose a smaller batch, or keep the tail"
            )
        self._rank = rank
        self._world_size = world_size
        self._round += 1
        self._fruitless = 0
        self._ends.clear()
        self._end_epoch()

    def commit(self) -> None:
        """Count the oldest yielded batches as done. Called by `State.commit`."""
        self._fruitless = 0
        for _ in range(min(self.batches_per_commit, len(self._ends))):
            self.position = self._ends.popleft()
        self._end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, and the values that determine its order."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "size": self.size,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position. Raises `WorkerError` if the data set's size differs."""
        if state["size"] != self.size:
            raise WorkerError(
                f"the sampler's state is for {state['size']} samples, but the data set here has "
                f"{self.size}: give every rank and every start of the job the same data set"
            )
        self.epoch = state["epoch"]
        self.position = state["position"]
        self.seed = state["seed"]
        self._ends.clear()

    def __len__(self) -> int:
        """Return the number of batches in this epoch that this rank has not committed."""
        per_step = self.batch_size * self._world_size
        left = self.size - self.position
        return left // per_step if self.drop_tail else -(-left // per_step)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield lists of indices until the end of the epoch."""
        if self._rank is None:
            raise NoRoundError(
                "the sampler was asked for batches before a round began: give it to State(...), "
                "and make loaders and iterators inside the function under @elastic"
            )
        return self._batches(self._rank, self._round)

    def _batches(self, rank: int, round_: int) -> Iterator[list[int]]:
        self._refuse_if_stale(round_)
        self._refuse_endless_epoch()
        if self.on_first_batch is not None and self.position:
            self.on_first_batch()
        self.on_first_batch = None
        order = self._order()
        position = self.position
        self._ends.clear()
        while self._left(position):
            batch, position = self._step(order, position, rank)
            self._ends.append(position)
            yield batch
            self._refuse_if_stale(round_)
        self._fruitless += len(self._ends) < self.batches_per_commit

    def _refuse_if_stale(self, round_: int) -> None:
        if round_ != self._round:
            raise WorkerError(
                "an iterator of an earlier round was asked for a batch, but it divides the samples "
                "among other ranks: make loaders and iterators inside the function under @elastic"
            )

    def _refuse_endless_epoch(self) -> None:
        # No sooner, because the script may have left the loop early, or looked at a single batch.
        if self._fruitless > 2:
            raise WorkerError(
                f"the last {len(self._ends)} batches of the epoch are never committed, because "
                f"batches_per_commit is {self.batches_per_commit}: also commit the last step, "
                f"which has fewer: if batches == min({self.batches_per_commit}, len(sampler))"
            )

    def _end_epoch(self) -> None:
        if self._left(self.position) == 0:
            self.epoch += 1
            self.position = 0
            self._ends.clear()

    def _left(self, position: int) -> int:
        left = self.size - position
        if self.drop_tail and left < self.batch_size * self._world_size:
            return 0
        return left

    def _step(self, order: list[int], position: int, rank: int) -> tuple[list[int], int]:
        world_size = self._world_size
        count = min(self.batch_size * world_size, self.size - position)
        taken = order[position : position + count]
        if count < world_size:
            taken = [*taken, *(order[i % self.size] for i in range(world_size - count))]
        share, more = divmod(len(taken), world_size)
        begin = rank * share + min(rank, more)
        return taken[begin : begin + share + (rank < more)], position + count

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.size))
        import torch

        generator = torch.Generator().manual_seed((self.seed << 20) + self.epoch)
        order: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return order
