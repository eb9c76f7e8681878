"""Batches of a data set for a group of workers whose size may change in the middle of an epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

from .rounds import NoRoundError, WorkerError, warn


@dataclass(frozen=True)
class MicroBatch:
    """A part of a step, as `state.accumulate` returns it."""

    weight: float
    """The factor for its mean loss: its share of the step's samples, times the number of ranks,
    because gradients are averaged over these. It is 0 if another rank computes it, too.
    """
    is_last: bool
    """Whether it is this rank's last one in the step. All ranks have equally many."""
    of: tuple[int, int, int] | None
    """What its random numbers are derived from (seed, epoch, place), or None: they are the rank's.
    """


class ElasticBatchSampler:
    """Yields every sample once per epoch, regardless of failures and resizes.

    It is passed to `State(sampler=...)` and `DataLoader(..., batch_sampler=state.sampler)`. An
    epoch is an ordering of all samples that depends only on `seed` and the epoch number. Only
    `state.commit()` advances the position in that ordering, so samples that were prefetched, or
    were part of an unfinished step, are yielded again.

    With `batch_size`, each step takes the next `batch_size * world_size` samples, and each rank a
    consecutive part of them. With `global_batch`, it takes that many samples, cut into parts of at
    most `micro_batch`, whatever the number of ranks, which compute them in turn. Each sample is
    then loaded, and each part computed, with random numbers of its own, derived from `seed`.

    All ranks yield equally many batches in a step, so two of them may yield the same one. The step
    at the end of an epoch has fewer samples; with `drop_tail`, it is omitted.

    Iteration ends with the epoch. Loop over epochs like this, which also works if a round begins in
    the middle of one:

        while state.sampler.epoch < epochs:
            for batch in loader:
                ...
                state.commit()

    With `micro_batch`, each batch is computed in `state.accumulate`, which says when a step ends.
    """

    def __init__(
        self,
        data: Sized | int,
        batch_size: int | None = None,
        *,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_tail: bool = False,
    ) -> None:
        """Accept a data set, or its number of samples, and a number of samples per step.

        That is given per rank (`batch_size`; with `micro_batch`, ranks accumulate gradients) or in
        total (`global_batch` with `micro_batch`). `ValueError` if a number is not positive, or if
        they contradict each other.
        """
        self.size = data if isinstance(data, int) else len(data)
        for name, value in (
            ("the number of samples", self.size),
            ("batch_size", batch_size),
            ("global_batch", global_batch),
            ("micro_batch", micro_batch),
        ):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
        step = batch_size or global_batch
        if step is None or (batch_size and global_batch):
            raise ValueError(
                f"batch_size is {batch_size} and global_batch is {global_batch}: give one of them, "
                "the number of samples in a step per rank, or of all ranks together"
            )
        if (global_batch and micro_batch is None) or (micro_batch or 0) > step:
            raise ValueError(
                f"micro_batch is {micro_batch}, but {step} samples need one of 1 to {step}: the "
                "number in one forward pass, which does not depend on the number of workers"
            )
        self.given = f"{self.size} samples, {batch_size=}, {global_batch=}, {micro_batch=}, {seed=}"
        """What must be the same on all ranks."""
        self.batch_size = batch_size
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.shuffle = shuffle
        self.seed = seed
        self.drop_tail = drop_tail
        self.epoch = 0
        """The number of completed epochs."""
        self.position = 0
        """The number of samples that all ranks together have completed in the current epoch."""
        self.on_first_batch: Callable[[], None] | None = None
        """Called before the first batch of a round that begins in the middle of an epoch."""
        self._rank: int | None = None
        self._world_size = 1
        self._round = 0
        self._yielded: deque[MicroBatch] = deque()
        self._current: MicroBatch | None = None
        """The micro-batch being computed, or the last one that was."""

    def begin_round(self, rank: int, world_size: int) -> None:
        """Divide the samples among a new round's ranks. Older iterators raise from now on.

        Raises `WorkerError` if training would begin with fewer samples in a step than ranks, or if
        `drop_tail` would leave no samples in an epoch.
        """
        self._rank = rank
        self._world_size = world_size
        self._round += 1
        self._current = None
        self._yielded.clear()
        step = self._per_step
        if self.drop_tail and self.size < step:
            raise WorkerError(
                f"drop_tail leaves nothing of {self.size} samples in a world of {world_size} with "
                f"steps of {step}: choose a smaller batch, or keep the tail"
            )
        if (count := self._count(step)) < world_size:
            idle = (
                f"global_batch is {step}, or {count} micro-batches, for {world_size} workers, so "
                f"{world_size - count} are without work: choose more samples, smaller "
                "micro-batches, or fewer workers"
            )
            # Later, the job goes on, because workers may also leave again.
            if step < world_size and not self.epoch and not self.position:
                raise WorkerError(idle)
            if rank == 0:
                warn(None, idle)
        self._end_epoch()

    def begin_micro_batch(self) -> MicroBatch:
        """Return the oldest batch that was yielded and not begun. Called by `State.accumulate`."""
        if self._current is not None and self._current.is_last:
            raise WorkerError(
                "a micro-batch was begun after the last one of a step: call the optimizer's step "
                "and state.commit() before, `if part.is_last`"
            )
        if not self._yielded:
            raise WorkerError(
                "state.accumulate() was called without a batch: call it once for each batch of a "
                "loader with batch_sampler=state.sampler"
            )
        self._current = self._yielded.popleft()
        return self._current

    def refuse_unfinished_step(self) -> None:
        """Raise `WorkerError` if this rank has more micro-batches in the step."""
        if self._current is None:
            is_unfinished = self.micro_batch is not None and bool(self._yielded)
        else:
            is_unfinished = not self._current.is_last
        if is_unfinished:
            raise WorkerError(
                "the step has more micro-batches: compute each in `with state.accumulate(model) as "
                "part`, and call the optimizer's step and state.commit() `if part.is_last`"
            )

    def commit(self) -> None:
        """Count the oldest yielded step as done. Called by `State.commit`."""
        if self._current is None and self._yielded:
            self._current = self._yielded.popleft()
        if self._current is not None:
            self.position += min(self._per_step, self.size - self.position)
        self._current = None
        self._end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, and the values that determine its order."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "size": self.size,
            "seed": self.seed,
            "global_batch": self.global_batch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position. Raises `WorkerError` if it belongs to other steps."""
        for name, here in (("size", self.size), ("global_batch", self.global_batch)):
            if state.get(name) != here:
                raise WorkerError(
                    f"the sampler's state is for {name}={state.get(name)}, but here it is {here}: "
                    "give every rank and every start of the job the same, or begin a new training"
                )
        self.epoch = state["epoch"]
        self.position = state["position"]
        self.seed = state["seed"]
        self._current = None
        self._yielded.clear()

    @property
    def ends_epoch(self) -> bool:
        """Whether the step that is not committed yet is the last one of its epoch."""
        return self._left(self.position + self._per_step) <= 0

    def __len__(self) -> int:
        """Return the number of batches in this epoch that this rank has not committed."""
        steps, tail = divmod(self.size - self.position, self._per_step)
        return steps * self._turns(self._per_step) + (0 if self.drop_tail else self._turns(tail))

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
        if self.on_first_batch is not None and self.position:
            self.on_first_batch()
        self.on_first_batch = None
        order = self._order()
        position, world_size = self.position, self._world_size
        self._yielded.clear()
        while left := self._left(position):
            samples = min(self._per_step, left)
            count = self._count(samples)
            turns = range(rank, self._turns(samples) * world_size, world_size)
            for turn in turns:
                begin, end = (position + (turn % count + i) * samples // count for i in (0, 1))
                weight = (end - begin) * world_size / samples if turn < count else 0.0
                of = (self.seed, self.epoch, begin) if self.global_batch else None
                self._yielded.append(MicroBatch(weight, turn == turns[-1], of))
                yield _Samples(order[begin:end], of[:2]) if of else order[begin:end]
                self._refuse_if_stale(round_)
            position += samples

    def _refuse_if_stale(self, round_: int) -> None:
        if round_ != self._round:
            raise WorkerError(
                "an iterator of an earlier round was asked for a batch, but it divides the samples "
                "among other ranks: make loaders and iterators inside the function under @elastic"
            )

    def _end_epoch(self) -> None:
        if self._left(self.position) == 0:
            self.epoch += 1
            self.position = 0
            self._yielded.clear()

    @property
    def _per_step(self) -> int:
        return self.global_batch or (self.batch_size or 0) * self._world_size

    def _left(self, position: int) -> int:
        left = self.size - position
        return 0 if self.drop_tail and left < self._per_step else left

    def _count(self, samples: int) -> int:
        """Return the number of micro-batches of a step with this many samples."""
        count = -(-samples // (self.micro_batch or self.batch_size or 1))
        # A script that knows nothing of weights has a part of the epoch's tail on each rank.
        return count if self.global_batch else max(count, min(samples, self._world_size))

    def _turns(self, samples: int) -> int:
        """Return how many of them each rank computes; some are computed twice."""
        return -(-self._count(samples) // self._world_size)

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.size))
        import torch

        generator = torch.Generator().manual_seed((self.seed << 20) + self.epoch)
        order: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return order


class _Samples(list[int]):
    """A micro-batch's indices. Iterating seeds the generators of the process that loads them."""

    def __init__(self, indices: list[int], of: tuple[int, int]) -> None:
        super().__init__(indices)
        self._of = of
        """The seed and the epoch."""

    def __iter__(self) -> Iterator[int]:
        from .contents import derive_rng

        for index in super().__iter__():
            derive_rng("sample", *self._of, index, is_frequent=True)
            yield index

    def __reduce__(self) -> Any:
        return _Samples, (self[:], self._of)  # By default, pickling iterates, in another thread.
