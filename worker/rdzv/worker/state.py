"""The state of a training that stays in memory: what a script gives in, and steps it commits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import NoRoundError, WorkerError
from .sealing import Sealing

if TYPE_CHECKING:
    from .rounds import Round
    from .session import Session


class State:
    """All that a training changes as it goes on: `State(model=..., optimizer=..., step=0)`.

    An entry is a module, an optimizer, an object with `state_dict` and `load_state_dict` (a
    sampler, a scheduler, a gradient scaler), or a plain value that can be copied and pickled. Each
    is an attribute; plain values can be assigned to:

    >>> state = State(step=0, note="begun")
    >>> state.step += 1
    >>> state.step, state.note
    (1, 'begun')

    Parameters must be changed by the optimizers of the state alone, from the first commit on. What
    is computed from random numbers before the first batch of a round is not put back.
    """

    def __init__(self, *, snapshot_every: int | None = None, **entries: Any) -> None:
        """Take the entries. `WorkerError` for one that a new round would break.

        Each `snapshot_every` steps the state is saved in this node's memory, as by `save`; None:
        only when `save` is called.
        """
        if snapshot_every is not None and (type(snapshot_every) is not int or snapshot_every < 1):
            raise ValueError(f"snapshot_every is a number of steps from 1, not {snapshot_every!r}")
        taken = sorted(set(entries) & {name for name in dir(State) if not name.startswith("__")})
        if taken:
            raise ValueError(f"State has {taken[0]!r} for itself: choose another name")
        object.__setattr__(self, "_sealing", Sealing(entries))
        object.__setattr__(self, "_snapshot_every", snapshot_every)
        object.__setattr__(self, "_session", None)
        object.__setattr__(self, "_on_park", [])

    def __getattr__(self, name: str) -> Any:
        parts = self._sealing.shards.parts
        for held in (self._sealing.contents, *([parts.contents] if parts is not None else [])):
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
        """How many steps were committed since the training was begun or loaded."""
        return self._sealing.step or 0

    @property
    def is_redo(self) -> bool:
        """Whether the step under way was begun before, in a round that ended in its middle."""
        redo: bool = self._sealing.is_redo
        return redo

    def add(self, *, hold_last: bool = True, **entries: Any) -> None:
        """Load the state into a sharded model, its optimizer and its scheduler.

        They are bound to the round's process groups, so the function under @elastic builds them
        anew in each round, shards the model (`fully_shard`) and adds all of them here, once, before
        the first step. All ranks call it together. Each rank puts its own part of the state back;
        a new rank gets its part from a replica (HSDP). Until the first commit nothing is changed.

        Before each optimizer step the part is copied in its memory, so that all ranks can go on
        from the same step. `hold_last=False` saves that memory: if ranks have stopped at different
        steps then, the job goes on from its checkpoint.

        Raises `UnsupportedError` for a model that is not sharded, `MismatchError` if ranks have
        added different things, `NoSourceError` if a part is lost.
        """
        self._running("add").add(entries, hold_last=hold_last)

    def commit(self) -> None:
        """Say that this step is done, on every rank; call it once after each optimizer step.

        From here on the state can be gone on from: if the round ends, a step that was begun since
        is done again from here. It copies the small things (buffers, the sampler's place, random
        number generators, plain values), and no parameters.

        Raises `RoundOver` if the round has ended, `NoRoundError` outside of the function under
        @elastic, `CannotBroadcastError` for a value that cannot be copied.
        """
        session = self._running("commit")
        self._sealing.commit()
        session.snapshots.committed()
        session.check(between_steps=True)

    def save(self) -> bool:
        """Save the step that was just committed in this node's memory; call it on every rank.

        If all workers are lost later, new ones go on from there before `train` is called, in place
        of the script's own checkpoint; `committed` is not 0 then. The state is copied while the
        script goes on: the next optimizer step waits for the copy, and the next `save` for all of
        the one before. On each node the memory of two copies is used, of the state or of the
        parts of its ranks, from the first save on.

        Returns False if there is none: without rdzvrun, before the first commit, or since its
        limit was reached, which is said on stderr. Raises `NoRoundError` outside of the function
        under @elastic, `WorkerError` in the middle of a step.
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
        """Register a function to call with each round that is over, before waiting for the next.

        It makes writers in the background finish or give up, and returns soon: a worker that has
        not parked within the job's --keep-timeout is ended. Can be used as a decorator.
        """
        self._on_park.append(callback)
        return callback

    def _running(self, what: str) -> Session:
        session: Session | None = self._session
        if session is None:
            raise NoRoundError(
                f"state.{what}() was called while no round is under way: call it inside of the "
                "function under @elastic"
            )
        return session
