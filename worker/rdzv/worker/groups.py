"""Creates, cuts and destroys a round's process groups."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .cutting import GlooCut, NcclCut, RoundCut, recording_store, resolve
from .rounds import StaleGroupError, UnsupportedError, exchange

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .link import Link
    from .rounds import Round


_LRU_CACHE = type(functools.lru_cache(int))


@dataclass(frozen=True)
class Options:
    """The process groups' backend and timeout, as in torch; None means the default."""

    backend: str | None = None
    timeout: timedelta | None = None


class RoundGroups:
    """A round's default group, and all groups that the script creates."""

    def __init__(self, round_: Round, options: Options, link: Link | None) -> None:
        self.round = round_
        self.cut = RoundCut()
        self.store: Store | None = None
        """The round's own store, or None before `open`."""
        self._options = options
        self._link = link
        self.gloo: GlooCut | None = None
        """Interrupts gloo's collectives. None if no runner keeps this process."""
        self.nccl = NcclCut()
        """Interrupts NCCL's collectives."""
        self._base_store: Any = None
        self._excepthook = sys.excepthook
        self.is_unwatched = False
        """Whether the round uses NCCL, and nothing in the process ends a hanging collective."""

    def open(self) -> None:
        """Create the default group, blocking until all ranks do so, or the round ends."""
        from torch._C._distributed_c10d import PrefixStore

        _check_torch()
        if self._link is not None:
            _keep_nccl_quiet()
            self._link.begin(self.round.number, self.cut)
        self._base_store = self.make_store()
        # Group names start at 0 in every round, so two rounds must not share keys.
        self.store = PrefixStore(f"rdzv/{self.round.number}", self._base_store)
        backend = self._options.backend or default_backend()
        quiet = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0"
        self.is_unwatched = "nccl" in backend and quiet
        if self._options.timeout is not None and self._link is not None:
            # The timeout is for collectives, not for the time this round's new processes take to
            # start.
            exchange(self.store, self.round, "started", True)
        dist.init_process_group(
            backend,
            store=self.store,
            rank=self.round.rank,
            world_size=self.round.world_size,
            timeout=self._options.timeout,
        )
        self.cut.add(self.nccl)
        self.hold_connections()
        if self.gloo is not None:
            self.gloo.is_broken()  # From here on, it sees which connections end.
        self.cut.refuse()

    def before_step(self) -> None:
        """Wait until a step's collectives have ended; raise `RoundOver` if they were cut.

        On a GPU, the backward pass returns when they have only been enqueued.
        """
        if self._link is None:
            return
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
        self.cut.refuse()

    def has_failed(self, *, is_in_step: bool) -> bool:
        """Return whether a collective may have failed, even if the script caught its exception.

        Before an optimizer's step an ended connection suffices, as the step can be repeated;
        afterwards a collective must have begun since the last that is known to have succeeded.
        """
        if self._link is None or self._link.is_closed:
            return False
        is_cut, gloo = self.cut.is_done(), self.gloo
        if not (gloo is not None and gloo.is_broken()) and not is_cut:
            return False
        return not is_in_step or self.shows_failure

    @property
    def shows_failure(self) -> bool:
        return self.gloo is not None and self.gloo.has_begun_another()

    def hold_connections(self) -> None:
        if self.gloo is not None and self._link is not None and self._link.holds_connections:
            self.gloo.hand_over(self._link.hold_open)

    @property
    def connections(self) -> list[list[Any]]:
        published = self.gloo.published if self.gloo is not None else ()
        return [[host, port] for host, port in sorted(published)]

    def close(self) -> None:
        """Destroy all groups. Afterwards, none of the round's connections to peers is open."""
        if dist.is_initialized():
            # NCCL's abort, in the other thread, may have been faster.
            with contextlib.suppress(ValueError, AssertionError):
                dist.destroy_process_group()
        # An interrupted init has already counted its group. Group names are numbers, and must match
        # on all ranks.
        dist.distributed_c10d._world.group_count = 0
        over = False
        if self._link is not None:
            over = self._link.is_over()
            self._link.end()
        self.cut.release(over=over)
        self.store = self._base_store = None
        # Each init_process_group call wraps the hook once more.
        sys.excepthook = self._excepthook

    def watch(self) -> list[weakref.ref[Any]]:
        return [
            *self.nccl.aborted,
            *(weakref.ref(group) for group in dist.distributed_c10d._world.pg_map),
        ]

    def make_store(self) -> Store:
        """Connect to the store at MASTER_ADDR; a single process without one has its own."""
        from torch._C._distributed_c10d import HashStore, TCPStore
        from torch.distributed.distributed_c10d import default_pg_timeout

        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if host is None or port is None:
            if self.round.world_size != 1:
                raise UnsupportedError(
                    f"WORLD_SIZE is {self.round.world_size}, and MASTER_ADDR or MASTER_PORT is not "
                    "set: start the script by rdzvrun or torchrun, or without WORLD_SIZE"
                )
            return HashStore()
        if self._link is not None:
            self.gloo = GlooCut(resolve(host, int(port)))
            self.cut.add(self.gloo)
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = TCPStore(
            host,
            int(port),
            self.round.world_size,
            is_master=not served and self.round.rank == 0,
            timeout=default_pg_timeout,
            **({} if served else {"multi_tenant": True}),
        )
        if self.gloo is None:
            return store
        return recording_store(store, self.gloo, self.cut.refuse)


def refuse_groups_from_outside() -> None:
    if dist.is_available() and dist.is_initialized():
        raise StaleGroupError(
            "a process group was created before the function under @elastic was called. The "
            "library creates one for each round: remove init_process_group from the script"
        )


def refuse_old_groups(groups: list[weakref.ref[Any]], number: int) -> None:
    """Raise `StaleGroupError` if anything still refers to a group from a finished round.

    It would go on using the old connections for as long as both ends are alive.
    """
    free_groups(groups)
    holders = {
        holder for group in groups if (alive := group()) is not None for holder in _holders(alive)
    }
    if not any(group() is not None for group in groups):
        return
    raise StaleGroupError(
        f"a process group of round {number}, which is over, is still in use"
        + (f" by {', '.join(sorted(holders))}" if holders else "")
        + ": make groups and wrappers (DistributedDataParallel) inside the function under "
        "@elastic, and keep them in its local variables only"
    )


def free_groups(groups: list[weakref.ref[Any]]) -> None:
    """Free groups referenced only by caches and cycles; gloo's threads end with their group.

    This is also needed before a process exits: a gloo thread that frees a tensor while the
    interpreter is shutting down aborts the process ("terminate called without an active
    exception").
    """
    if any(group() is not None for group in groups):
        _forget_meshes()
        gc.collect()  # This takes a few tenths of a second, and is seldom needed.


def _forget_meshes() -> None:
    """Clear DTensor's caches, which hold references to device meshes and thus to groups."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    gc.unfreeze()  # A zygote has frozen what it imported, and get_objects() leaves that out.
    for one in gc.get_objects():
        # Some caches exist once per thread, and cannot be reached in any other way.
        if type(one) is _LRU_CACHE and str(one.__module__).startswith("torch.distributed."):
            one.cache_clear()
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    for clear in (
        getattr(redistribute, "clear_redistribute_planner_cache", None),
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None),
    ):
        if clear is not None:
            clear()


def _holders(group: object) -> set[str]:
    """Return the names of the types that refer to a group; for a dictionary, its owner's."""
    names = set()
    for holder in gc.get_referrers(group):
        if isinstance(holder, dict):
            owners = [
                one for one in gc.get_referrers(holder) if getattr(one, "__dict__", None) is holder
            ]
            names |= {getattr(one, "__name__", type(one).__name__) for one in owners}
        elif not isinstance(holder, (list, tuple, set)) and type(holder).__name__ != "frame":
            names.add(type(holder).__name__)
    return names


def _check_torch() -> None:
    if not dist.is_available() or not dist.is_gloo_available():
        raise UnsupportedError(
            "this build of torch has no gloo, which the library needs beside any other backend: "
            "install a build with USE_GLOO=1"
        )


def default_backend() -> str:
    if torch.cuda.is_available() and dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def _keep_nccl_quiet() -> None:
    """Keep NCCL's watchdog and monitor from ending a process that should be kept.

    The value "1", which every launcher sets, makes the watchdog end the process at the first failed
    collective.
    """
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1") == "1":
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
