"""Runs one round after another in one process: initialize, heal, train, park, wait."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from . import cutting
from .groups import (
    Options,
    RoundGroups,
    can_reconfigure,
    free_groups,
    refuse_groups_from_outside,
)
from .healing import heal, prepare
from .link import Go, Link, Release, process_link
from .resuming import Resuming
from .rounds import (
    STANDBY,
    STANDBY_ROUND,
    ReplicasDifferError,
    Round,
    RoundOver,
    UnsupportedError,
    WorkerError,
    chain,
    follows_from_cut,
    is_suspect,
    round_of,
    warn,
)
from .shards import Parts, add_parts
from .snapshots import Snapshots
from .state import State
from .verifying import Verifying

if TYPE_CHECKING:
    from .sealing import Sealing

_MEET_SLICE = timedelta(seconds=1)
"""The longest uninterrupted wait at the end. Python's signal handlers run only between such waits.
"""

_CAUSE_WAIT_S = 0.25
"""How long a suspect waits for its round to end before it is reported.

Usually a peer's death is known within milliseconds, and then there is nothing to report.
"""
_EXIT_WAIT_S = 10.0
"""The same if a peer is known to be about to raise an exception, and exit."""


@dataclass
class Over:
    """A round in which this rank no longer takes part."""

    round: Round
    groups: RoundGroups
    error: BaseException
    """The exception that ended the script's function."""
    text: str = ""
    """The exception's traceback, once this rank has parked."""


class _RaisedInRoundError(Exception):
    """Shows the traceback of an exception that is re-raised after its round."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Session:
    """One call of a function under @elastic, lasting as many rounds as it takes to return."""

    has_returned = False
    """Whether any call has returned in this process."""
    _refuses_old_groups = True
    """Whether nothing may refer to a round's groups, and what is made of them, once it is over."""

    def __init__(self, state: State, options: Options, link: Link | None) -> None:
        self._state = state
        self._sealing: Sealing = state._sealing
        self._options = options
        self._link = link
        self.snapshots = Snapshots(state._sealing, link, state._snapshot_every)
        self.verifying = Verifying(
            state._sealing,
            state._verify_every,
            self.snapshots.clear_redone,
            functools.partial(self._leave_round, within_s=_EXIT_WAIT_S),
        )
        self._resuming: Resuming | None = None
        self.groups: RoundGroups | None = None
        """The groups of the latest round."""
        self._round: Round | None = None
        self._ended_between_steps = False
        self._awaited: BaseException | None = None
        """The error with which this rank leaves a round whose end it may have to report."""

    def run(self, call: Callable[[Round], Any]) -> Any:
        """Call the script's function in each round until it returns, and return its result.

        The script's own exceptions are raised at once. Exceptions caused by the end of the round
        lead to the next round, if a runner keeps this process.
        """
        refuse_groups_from_outside()
        self._refuse_second_call()
        go = self._stand_by()
        while True:
            value, over = self._one_round(call, go)
            if over is None:
                Session.has_returned = True
                return value
            go = self._next(over)
            del over  # It holds references to the groups of the round that is over.

    def reconfigure(self, error: BaseException | None, step: int) -> Round:
        """Leave the present round, if any, for this error; return in the next one."""
        go = self._stand_by()
        while True:
            if error is not None:
                over = self._over(error)
                self._sealing.step = step or None
                go = self._next(over)
                del over
            try:
                return self._begin(go)
            except (RoundOver, Exception) as failure:
                error, step = failure, self._sealing.step or step

    def _next(self, over: Over) -> Go:
        """Park, and wait for the next round; raise if there is none."""
        order = self.park(over)
        if isinstance(order, Go):
            _enter(order)
            return order
        over.groups.close()
        if order is None:
            raise SystemExit("the runner of this worker is gone, so there is no next round")
        raise over.error from _RaisedInRoundError(over.text)

    def _stand_by(self) -> Go | None:
        """Park before the first round, if this process was started before its node has a seat."""
        if os.environ.get("RDZV_ROUND") != STANDBY:
            return None
        order: Go | Release | None = None
        if self._link is not None:
            used = _gpu_bytes()
            self._link.parked(STANDBY_ROUND, [], gpu_bytes=used, **self._sealing.holds())
            order = self._link.wait_for_order()
        if not isinstance(order, Go):
            raise SystemExit("the runner of this standby worker is gone, so it gets no round")
        _enter(order)
        return order

    def check(self, *, between_steps: bool) -> None:
        if self._link is not None and self._link.is_over():
            self._ended_between_steps = between_steps
            assert self._round is not None
            raise RoundOver(leaving=self._round.leaving)
        if self.groups is not None:
            self.groups.hold_connections()  # The connections of groups that the script created.

    def refuse_failed_step(self) -> None:
        """Raise `RoundOver` if a collective may have failed, though the script shows no exception.

        It may have caught the exception. Waits for the end of the round; if it does not come,
        reports the failure.
        """
        groups, round_ = self.groups, self._round
        assert groups is not None and round_ is not None
        if not groups.has_failed(is_in_step=self._sealing.is_in_step):
            return
        step = (self._sealing.step or 0) + 1
        self._leave_round(
            f"step {step} is not committed: a connection has ended, so one of its collectives may "
            "have failed"
            if groups.shows_failure
            else ""
        )

    def _leave_round(self, reason: str, within_s: float = _CAUSE_WAIT_S) -> NoReturn:
        """Wait for the round's end; if it does not come, report the reason."""
        round_ = self._round
        assert round_ is not None
        if self._link is None:
            raise ReplicasDifferError(reason)
        over = RoundOver(leaving=round_.leaving)
        if reason:
            over.args = (reason,)
            warn(round_, reason)
        self._await_end(over, within_s)
        raise over

    def _before_step(self) -> None:
        assert self.groups is not None
        self.groups.before_step()
        self.refuse_failed_step()
        if self.groups.gloo is not None:
            self.groups.gloo.note_success()

    def add(self, entries: Mapping[str, Any], *, hold_last: bool) -> None:
        round_, groups = self._round, self.groups
        assert round_ is not None and groups is not None and groups.store is not None
        self.verifying.refuse_shards()
        parts = Parts(entries, round_.rank, round_.world_size)
        try:
            add_parts(
                self._sealing,
                parts,
                round_,
                groups.store,
                # Without a runner there is no other round.
                holds_last=hold_last and self._link is not None,
            )
        except WorkerError:
            if self._resuming is not None:
                # Otherwise the next processes would fail in the same way.
                self._resuming.give_up()
            raise

    def _refuse_second_call(self) -> None:
        alone = self._link is None and round_of(os.environ).world_size == 1
        if Session.has_returned and not alone:
            raise WorkerError(
                "a function under @elastic was called a second time in this process. A new worker "
                "would begin with the first call while others are in the second: write one "
                "function that does both parts, and let the state decide which one is next"
            )

    def _one_round(self, call: Callable[[Round], Any], go: Go | None) -> tuple[Any, Over | None]:
        object.__setattr__(self._state, "_session", self)
        try:
            value = call(self._begin(go))
            self._meet()
        except (RoundOver, Exception) as error:
            return None, self._over(error)
        finally:
            object.__setattr__(self._state, "_session", None)
            self._sealing.end_round()
        self.close()
        return value, None

    def close(self) -> None:
        """Destroy the groups of the last round."""
        if self.groups is not None:
            atexit.register(free_groups, self.groups.watch())
            self.groups.close()

    def _over(self, error: BaseException) -> Over:
        """Return the end of the present round that has caused an error; raise any other error."""
        assert self._round is not None and self.groups is not None
        if isinstance(error, RoundOver):
            ends = self._link is not None and (self._link.is_over() or self._awaited is error)
        else:
            ends = isinstance(error, Exception) and self._ends_the_round(error)
        if not ends:
            raise error
        return Over(self._round, self.groups, error)

    def _begin(self, go: Go | None) -> Round:
        # A standby's first round begins with an order, too.
        round_ = self._round = round_of(os.environ, kept=self.groups is not None)
        groups = self.groups = RoundGroups(round_, self._options, self._link, self.groups)
        hashed = prepare(self._sealing)
        begun = time.monotonic()
        groups.open()
        ready = time.monotonic()
        assert groups.store is not None
        self._sealing.is_redo = round_.kept and not self._ended_between_steps
        self._ended_between_steps = False
        step = go.step if go else None
        self._resuming = None
        healed = heal(
            self._sealing, hashed, round_, groups.store, step, self._resume, self.verifying
        )
        self.snapshots.begin_round(round_)
        self._sealing.begin_round(round_.rank, round_.world_size, self._before_step)
        self.verifying.begin_round()
        if self._link is not None:
            self._link.resumed(
                round=round_.number,
                step=healed.step,
                source=healed.source,
                healed=healed.received,
                init_ms=_ms(ready - begun),
                heal_ms=_ms(time.monotonic() - ready),
                is_unwatched=groups.is_unwatched,
                not_loaded="; ".join(self._resuming.not_loaded)[:500] if self._resuming else "",
            )
        self._round = replace(round_, step=healed.step or 0, source=healed.source)
        return self._round

    def _resume(self) -> Resuming:
        assert self._round is not None
        self._resuming = Resuming(self.snapshots.held, self._sealing, self._round)
        return self._resuming

    def _meet(self) -> None:
        """Wait until all ranks have returned, because a rank that has left cannot repeat a step."""
        groups = self.groups
        if self._link is None or groups is None or groups.store is None:
            return
        world_size = groups.round.world_size
        if groups.store.add("returned", 1) == world_size:
            groups.store.set("all returned", "")
        while not groups.round.leaving:
            self.check(between_steps=True)
            try:
                groups.store.wait(["all returned"], _MEET_SLICE)
                return
            except Exception as error:
                if "imeout" not in str(error) and "timed out" not in str(error).lower():
                    raise

    def _ends_the_round(self, error: Exception) -> bool:
        link = self._link
        if link is None or link.is_closed:
            return False
        if link.is_over():
            return follows_from_cut(error)
        if not is_suspect(error):
            return False
        self._await_end(error)
        return True

    def _await_end(self, error: BaseException, within_s: float = _CAUSE_WAIT_S) -> None:
        assert self._link is not None and self._round is not None
        self._awaited = error
        if not self._link.wait_until_over(within_s):
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            self._link.suspect(self._round.number, f"{type(error).__name__}: {error}", text)

    def park(self, over: Over) -> Go | Release | None:
        link = self._link
        assert link is not None
        over.groups.cut.cut()
        over.text = _detach_traceback(over.error)
        self._sealing.wait_for_copies()
        self._sealing.shards.take_out(self._sealing.step)
        watched = over.groups.watch()
        over.groups.close(keep=True)
        if self._refuses_old_groups:
            over.groups.refuse_old(watched)
        wait_for_devices()
        for callback in self._state._on_park:
            callback(over.round)
        link.parked(over.round.number, over.groups.connections, **self._sealing.holds())
        if not self._refuses_old_groups:
            over.groups.refuse_wrappers()
        return link.wait_for_order()


def drop_in_child(session: weakref.ref[Session]) -> None:
    found = session()
    if found is not None and found.groups is not None and found.groups.gloo is not None:
        cutting.drop_in_child(found.groups.gloo.addresses)


def _enter(go: Go) -> None:
    os.environ.update(go.env)
    for fd, stream, path in ((1, sys.stdout, go.stdout), (2, sys.stderr, go.stderr)):
        if path is not None:
            stream.flush()
            log = _open_log(path.encode("utf-8", "surrogateescape"))
            os.dup2(log, fd)
            os.close(log)


def _open_log(path: bytes) -> int:
    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    # O_NONBLOCK, because opening a FIFO without a reader would block.
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY | os.O_NONBLOCK, 0o666)
    os.set_blocking(log, True)
    return log


def _detach_traceback(error: BaseException) -> str:
    """Return a traceback as text, and drop its frames, which refer to wrappers and groups."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    for one in chain(error):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
    return text


def wait_for_devices() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(index):
                torch.cuda.synchronize(index)


def _gpu_bytes() -> int:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def elastic(
    function: Callable[..., Any] | None = None,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> Callable[..., Any]:
    """Decorate `train(state, round, ...)` so that it is called in every round.

    The script calls it as `train(state, ...)`. In each round, the default process group is created
    with torch's `backend` ("gloo" on CPUs, "cpu:gloo,cuda:nccl" with GPUs) and `timeout`, and the
    furthest rank's state is loaded. Then the function is called with the state and a `Round`. It
    must create its wrappers, groups and loaders anew, continue from where the state is, and call
    `state.commit()` after each step. The round ends when another worker or node is lost or joins;
    then `RoundOver` or a collective's exception is raised in the function. If rdzvrun started the
    process, the function is called again in the next round, in the same process. Otherwise there is
    a single round, and exceptions are raised as in any script.

    The function's result is returned once it has returned on all ranks. Its own exceptions are
    raised at once.

    With three or more ranks, DDP reorders its buckets after the first step of each wrapper, so sums
    differ in the last bits after each new round. With `find_unused_parameters=True` it does not.
    """
    if function is None:
        return functools.partial(elastic, backend=backend, timeout=timeout)

    @functools.wraps(function)
    def run(state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise TypeError(
                f"{function.__name__} was called with {type(state).__name__} in place of a State"
            )
        session = _started(state, Options(backend, timeout))
        return session.run(lambda round_: function(state, round_, *args, **kwargs))

    return run


def _started(state: State, options: Options) -> Session:
    session = Session(state, options, process_link())
    held = weakref.ref(session)
    os.register_at_fork(after_in_child=lambda: drop_in_child(held))
    return session


_reconfiguring: list[Session] = []


def reconfigure(
    error: BaseException | None = None, *, step: int = 0, timeout: timedelta | None = None
) -> Round:
    """Bring torch's default process group into the next round, and return that round.

    This is the rendezvous that `torch.distributed._reconfigure` leaves to its caller, for a script
    that uses nothing else of this library. The first call creates the group, with gloo and torch's
    `timeout`. Each later one is given the exception with which the script has left the round, and
    the number of steps that it has completed. It blocks until the next round: the group is the same
    object then, with the ranks of `round`. Other groups that the script created are destroyed.

    Neither parameters nor optimizers are touched. `round.source` is the rank to receive them from,
    at `round.step`. Wrappers (DistributedDataParallel, fully_shard) are made anew in each round; an
    old one raises `StaleGroupError` when it is used. A rank is not kept if its step is more than
    one away from the others', and no rank is kept if rounds end one after the other without a step.
    Call `dist.barrier()` before work that one rank does alone.

    Raises the given exception again if a lost peer has not caused it, and without rdzvrun; and
    `UnsupportedError` if torch is older than 2.14. Source: torch/distributed/distributed_c10d.py.
    """
    if not can_reconfigure("gloo"):
        raise UnsupportedError(
            f"torch {torch.__version__} cannot reconfigure process groups: use torch 2.14 or "
            "newer, without RDZV_RECONFIGURE=0, or @elastic"
        )
    if not _reconfiguring:
        refuse_groups_from_outside()
        if error is not None:
            raise error
        session = _started(State(), Options("gloo", timeout))
        session._refuses_old_groups = False
        _reconfiguring.append(session)
        atexit.register(session.close)
    elif error is None:
        raise WorkerError(
            "reconfigure() was called again without an exception: give it the one with which this "
            "rank has left the round"
        )
    return _reconfiguring[0].reconfigure(error, step)
