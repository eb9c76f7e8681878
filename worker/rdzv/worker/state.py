"""A training's state: the entries that a script provides, and the steps that it commits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from .contents import derive_rng
from .rounds import NoRoundError, WorkerError
from .sealing import Sealing

if TYPE_CHECKING:
    from .rounds import Round
    from .sampler import MicroBatch
    from .session import Session


class State:
    """Everything that changes during training: `State(model=..., optimizer=..., step=0)`.

    An entry is a module, an optimizer, an object with `state_dict` and `load_state_dict` (such as a
    sampler, a scheduler or a gradient scaler), or a plain value that can be copied and pickled.
    Each entry is an attribute; plain values can be assigned to:

    >>> state = State(step=0, note="begun")
    >>> state.step += 1
    >>> state.step, state.note
    (1, 'begun')

    From the first commit on, only the state's optimizers may change its parameters. Values computed
    from random numbers before the first batch of a round are not restored.
    """

    def __init__(
        self,
        *,
        snapshot_every: int | None = None,
        verify_every: int | None = None,
        **entries: Any,
    ) -> None:
        """Store the entries. Raises `WorkerError` for an entry that a new round would break.

        The state is saved in this node's memory every `snapshot_every` steps, as by `save`. If
        None, it is saved only when `save` is called.

        All ranks compare their parameters and optimizer state every `verify_every` steps, and after
        the first of each round. A rank that differs from most others raises `OddReplicaError`, and
        its node leaves the job; if no majority agrees, `ReplicasDifferError` is raised.
        """
        for name, every in (("snapshot_every", snapshot_every), ("verify_every", verify_every)):
            if every is not None and (type(every) is not int or every < 1):
                raise ValueError(f"{name} is {every!r}; give 1 step or more, or None")
        taken = sorted(set(entries) & {name for name in dir(State) if not name.startswith("__")})
        if taken:
            raise ValueError(f"State uses the name {taken[0]!r} itself: choose another name")
        object.__setattr__(self, "_sealing", Sealing(entries))
        object.__setattr__(self, "_snapshot_every", snapshot_every)
        object.__setattr__(self, "_verify_every", verify_every)
        object.__setattr__(self, "_session", None)
        object.__setattr__(self, "_on_park", [])

    def __getattr__(self, name: str) -> Any:
        parts = self._sealing.shards.parts
        for held in (self._sealing.contents, *([parts] if parts is not None else [])):
            for entries in (held.values, held.modules, held.optimizers, held.objects):
                if name in entries:
                    return entries[name]
        raise AttributeError(f"the state has no entry {name!r}: give it to State(...)")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._sealing.contents.values:
            raise AttributeError(
                f"the state has no plain value {name!r}: give it to State(...), on every rank"
            )
        self._sealing.contents.values[name] = value

    @property
    def committed(self) -> int:
        """The number of steps committed since training began or was loaded."""
        return self._sealing.step or 0

    @property
    def is_redo(self) -> bool:
        """Whether the current step was already begun in a round that ended in the middle of it."""
        redo: bool = self._sealing.is_redo
        return redo

    def add(self, *, hold_last: bool = True, **entries: Any) -> None:
        """Load the state into a sharded model, its optimizer and its scheduler.

        They are bound to the round's process groups, so the function under @elastic builds them
        anew in each round, shards the model (`fully_shard`) and adds all of them here, once, before
        the first step. All ranks must call it together. Each rank restores its own part of the
        state, or receives it from the ranks that hold it, however it was divided among them. Before
        the first commit, nothing is changed.

        The part is copied in memory before each optimizer step, so that all ranks can go back to
        the same step. `hold_last=False` saves that memory; if ranks then stop at different steps,
        the job resumes from its checkpoint.

        Raises `UnsupportedError` for a model that is not sharded, `MismatchError` if ranks have
        added different objects, and `NoSourceError` if a part is lost.
        """
        self._running("add").add(entries, hold_last=hold_last)

    @contextmanager
    def accumulate(self, model: Any) -> Iterator[MicroBatch]:
        """Compute one batch of the state's `ElasticBatchSampler` as a part of a step.

        Give it the DistributedDataParallel wrapper, or a model sharded by `fully_shard`; gradients
        are exchanged in the last part alone. The loss is a mean over the batch:

            with state.accumulate(model) as part:
                (part.weight * loss_function(model(inputs), targets)).backward()
            if part.is_last:
                state.optimizer.step()
                state.optimizer.zero_grad()
                state.commit()

        Raises `RoundOver` if the round has ended, and `WorkerError` if it is called out of order.
        """
        self._running("accumulate").check(between_steps=False)
        set_sync = getattr(model, "set_requires_gradient_sync", None)  # FSDP2's.
        if set_sync is None and not hasattr(model, "no_sync"):
            raise WorkerError(
                f"state.accumulate() was called with {type(model).__name__}, which exchanges no "
                "gradients: give it the DistributedDataParallel wrapper"
            )
        samplers = list(self._sealing.samplers.values())
        if len(samplers) != 1:
            raise WorkerError(
                "state.accumulate() needs one ElasticBatchSampler in the state, which has "
                f"{len(samplers)}: give it to State(sampler=...)"
            )
        part = samplers[0].begin_micro_batch()
        if part.of is not None:
            derive_rng("micro-batch", *part.of, is_frequent=True)
        if set_sync is not None:
            set_sync(part.is_last)
        # DDP with static_graph=True cannot leave out an exchange. A further one changes nothing.
        exchanges = part.is_last or set_sync is not None or getattr(model, "static_graph", False)
        with nullcontext() if exchanges else model.no_sync():
            yield part

    def commit(self) -> None:
        """Mark this step as done. Call it on every rank, once after each optimizer step.

        Training can then continue from this state: if the round ends, a step begun after the commit
        is repeated from here. The small values (buffers, the sampler's position, random number
        generators, plain values) are copied, but parameters are not.

        Raises `RoundOver` if the round has ended, `NoRoundError` outside the function under
        @elastic, and `CannotBroadcastError` for a value that cannot be copied. A step is not marked
        if one of its collectives has failed, even if the script has caught the exception.
        """
        session = self._running("commit")
        session.refuse_failed_step()
        self._sealing.commit()
        session.verifying.committed()
        session.snapshots.committed()
        session.check(between_steps=True)

    def save(self) -> bool:
        """Save the step just committed in this node's memory. Call it on every rank.

        If all workers are lost later, new ones load this state before `train` is called, instead of
        the script's own checkpoint; `committed` is then not 0. The state is copied in the
        background: the next optimizer step waits for its tensors to be copied, and the next `save`
        waits for this one to finish. From the first save on, each node uses memory for two copies
        of the state, or of its ranks' parts.

        Returns False if nothing can be saved: without rdzvrun, before the first commit, or once the
        memory limit is reached, which is reported on stderr. Raises `NoRoundError` outside the
        function under @elastic, and `WorkerError` in the middle of a step.
        """
        session = self._running("save")
        if self._sealing.is_in_step:
            raise WorkerError(
                "state.save() was called in the middle of a step, after the optimizer's: call it "
                "right after state.commit()"
            )
        return session.snapshots.save()

    def check(self) -> None:
        """Raise `RoundOver` if the round has ended; for long work between two commits."""
        self._running("check").check(between_steps=False)

    def on_park(self, callback: Callable[[Round], object]) -> Callable[[Round], object]:
        """Register a function to call with each finished round, before waiting for the next.

        It should make background writers finish or give up, and return soon: a worker that does not
        park within the job's --keep-timeout is killed. Can be used as a decorator.
        """
        self._on_park.append(callback)
        return callback

    def _running(self, what: str) -> Session:
        session: Session | None = self._session
        if session is None:
            raise NoRoundError(
                f"state.{what}() was called outside of a round: call it inside the function under "
                "@elastic, on the State with which that function was called"
            )
        return session
