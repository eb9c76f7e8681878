"""Creates, cuts and destroys a round's process groups.

Where torch can, the default group of a process that stays is *reconfigured* instead: the same
object gets the next round's ranks (`torch.distributed._reconfigure`, from torch 2.14 on). Torch
asks its caller for three things. The ranks' *handles* pass through the round's store, which all of
them reach already. The *uuid*, never used before, is made of the round's number. And since a
group's store cannot be replaced, it is one that goes on with each round's own.

Between rounds the group is reconfigured to this rank alone, which closes all of its connections.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from .cutting import GlooCut, NcclCut, RoundCut, recording_store, resolve
from .rounds import StaleGroupError, UnsupportedError, exchange, warn

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .link import Link
    from .rounds import Round


c10d: Any = getattr(dist, "distributed_c10d", None)

_LRU_CACHE = type(functools.lru_cache(int))


@dataclass(frozen=True)
class Options:
    """The process groups' backend and timeout, as in torch; None means the default."""

    backend: str | None = None
    timeout: timedelta | None = None


class RoundGroups:
    """A round's default group, and all groups that the script creates."""

    def __init__(
        self, round_: Round, options: Options, link: Link | None, former: RoundGroups | None = None
    ) -> None:
        self.round = round_
        self.cut = RoundCut()
        self.store: Any = None
        """The round's own store, or None before `open`."""
        self._former = former
        self._can_be_kept = False
        """Whether the default group may go on in the next round."""
        self._references = 0
        """How many references there are to it that hold nothing else of the round."""
        self._options = options
        self._link = link
        self.gloo: GlooCut | None = None
        """Interrupts gloo's collectives. None if no runner keeps this process."""
        self.nccl = NcclCut()
        """Interrupts NCCL's collectives."""
        self._excepthook = sys.excepthook
        self.is_unwatched = False
        """Whether the round uses NCCL, and nothing in the process ends a hanging collective."""

    def open(self) -> None:
        """Create or reconfigure the default group. Blocks until all ranks do, or the round ends."""
        _check_torch()
        if self._link is not None:
            _keep_nccl_quiet()
            self._link.begin(self.round.number, self.cut)
        self._open_store()
        backend = self._options.backend or default_backend()
        quiet = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0"
        self.is_unwatched = "nccl" in backend and quiet
        if self._options.timeout is not None and self._link is not None:
            # The timeout is for collectives, not for the time this round's new processes take to
            # start.
            exchange(self.store, self.round, "started", True)
        reconfigures = self.gloo is not None and can_reconfigure(backend)
        if not dist.is_initialized():
            more: dict[str, Any] = {"enable_reconfigure": True} if reconfigures else {}
            dist.init_process_group(
                backend,
                store=self.store,
                rank=self.round.rank,
                world_size=self.round.world_size,
                timeout=self._options.timeout,
                **more,
            )
        if reconfigures:
            self._reconfigure("cpu" if backend == "gloo" else self.round.device)
        self.cut.add(self.nccl)
        self.hold_connections()
        if self.gloo is not None:
            self.gloo.begin()
        self.cut.refuse()

    def _open_store(self) -> None:
        from torch._C._distributed_c10d import PrefixStore

        # Group names start at 0 in every round, so two rounds must not share keys.
        self.store = PrefixStore(f"rdzv/{self.round.number}", self.make_store())
        if self.gloo is not None:
            former, self._former = self._former, None
            if former is not None and former._can_be_kept:
                self._references = former._references
                former.store.enter(self.store, self.gloo, self.cut.refuse)
                self.store = former.store
            else:
                self.store = recording_store(self.store, self.gloo, self.cut.refuse)

    def _reconfigure(self, device: str | torch.device) -> None:
        """Give the default group this round's ranks. Blocks until all ranks have done so."""
        handles = exchange(self.store, self.round, "handle", c10d._get_reconfigure_handle())
        _reconfigure(self.round.number << 32, handles)
        # A first collective: torch's record of them begins again from 1, and shows it only then.
        dist.all_reduce(torch.zeros(1, device=device))
        self._can_be_kept = True
        self._references = self._references or _references()

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

    def close(self, *, keep: bool = False) -> None:
        """Destroy all groups; with `keep`, all but a default group that can be reconfigured.

        Afterwards, none of the round's connections to peers is open.
        """
        # NCCL's abort, in the other thread, has destroyed all of them.
        self._can_be_kept &= keep and dist.is_initialized()
        if self._can_be_kept:
            try:
                self._be_alone()
            except Exception as error:
                warn(self.round, f"the process group is made anew: {error}")
                self._can_be_kept = False
        if not self._can_be_kept:
            self._destroy()
        over = False
        if self._link is not None:
            over = self._link.is_over()
            self._link.end()
        self.cut.release(over=over)
        # Each init_process_group call wraps the hook once more.
        sys.excepthook = self._excepthook

    def _be_alone(self) -> None:
        from torch._C._distributed_c10d import HashStore

        for group in [one for one in c10d._world.pg_map if one is not c10d.GroupMember.WORLD]:
            dist.destroy_process_group(group)
        # Not this round's cut, which would knock at an address that nobody else connects to.
        self.store.enter(HashStore(), GlooCut(set()), lambda: None)
        uuid = (self.round.number << 32) + 1 + self.round.rank  # Makes all ranks' handles differ.
        _reconfigure(uuid, [c10d._get_reconfigure_handle()])

    def _destroy(self) -> None:
        if dist.is_initialized():
            # NCCL's abort, in the other thread, may have been faster.
            with contextlib.suppress(ValueError, AssertionError):
                dist.destroy_process_group()
        # An interrupted init has already counted its group. Group names are numbers, and must match
        # on all ranks.
        c10d._world.group_count = 0
        self.store = None

    def watch(self) -> list[weakref.ref[Any]]:
        """Return the groups of the round."""
        return [
            *self.nccl.aborted,
            *(weakref.ref(group) for group in c10d._world.pg_map),
        ]

    def refuse_old(self, groups: list[weakref.ref[Any]]) -> None:
        """Raise `StaleGroupError` if anything still refers to one of the closed round's groups.

        It would go on using the old connections for as long as both ends are alive. A default group
        that was kept may be referred to, but not by what torch has made of it for those ranks.
        """
        if _references() <= self._references:
            groups = [group for group in groups if group() is not c10d.GroupMember.WORLD]
        free_groups(groups)
        used, names = False, set()
        for group in (alive for one in groups if (alive := one()) is not None):
            holders = _holders(group)
            if group is c10d.GroupMember.WORLD:
                holders = [one for one in holders if _is_bound(one)] + _meshes()
            used |= bool(holders) or group is not c10d.GroupMember.WORLD
            names |= {getattr(one, "__name__", type(one).__name__) for one in holders}
            del group, holders
        if not used:
            self._references = _references()  # What is left need not be looked at again.
            return
        names_text = f" by {', '.join(sorted(names))}" if names else ""
        raise StaleGroupError(
            f"a process group of round {self.round.number}, which is over, is still in use"
            f"{names_text}: make groups and wrappers (DistributedDataParallel) inside the function "
            "under @elastic, and keep them in its local variables only"
        )

    def refuse_wrappers(self) -> None:
        """Have what torch has made of the default group raise `StaleGroupError` when it is used.

        It would wait for ever beside the wrapper of a new rank, or beside one that has not divided
        its gradients anew yet. Sharded parameters of other ranks would be taken for those of the
        same number.
        """
        refusal = _Refusal(self.round.number)
        for holder in gc.get_referrers(c10d.GroupMember.WORLD):
            if isinstance(holder, dict) and "reducer" in holder:
                # The attributes of a DistributedDataParallel. An interrupted backward pass of it
                # would go on in that of the next wrapper.
                holder["reducer"]._remove_autograd_hooks()
                holder.setdefault("forward", refusal)
            elif type(holder).__module__.startswith("torch.distributed.fsdp."):
                for name, value in list(vars(holder).items()):
                    if value is c10d.GroupMember.WORLD:
                        setattr(holder, name, refusal)

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
        return TCPStore(
            host,
            int(port),
            self.round.world_size,
            is_master=not served and self.round.rank == 0,
            timeout=default_pg_timeout,
            **({} if served else {"multi_tenant": True}),
        )


def can_reconfigure(backend: str) -> bool:
    """Return whether torch reconfigures groups of this backend; it does so for no two in one group.

    RDZV_RECONFIGURE=0, on all ranks, has each round's groups made anew, as with older torch.
    """
    known = hasattr(c10d, "_reconfigure") and backend in ("gloo", "nccl2")
    return known and os.environ.get("RDZV_RECONFIGURE") != "0"


def _reconfigure(uuid: int, handles: list[str]) -> None:
    c10d._reconfigure(uuid=uuid, handles=handles).wait()
    ranks = {rank: rank for rank in range(len(handles))}
    c10d._world.pg_group_ranks[c10d.GroupMember.WORLD] = ranks
    # Group names are numbers, and must match on all ranks: the default group's is 0.
    c10d._world.group_count = 1


class _Refusal:
    """Stands where a wrapper looks for its group or for its forward pass."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise StaleGroupError(
            f"a wrapper of round {self._number} (DistributedDataParallel, fully_shard) is used in "
            "a later round, whose ranks it does not fit: make wrappers anew in each round"
        )

    def __getattr__(self, name: str) -> NoReturn:
        self()


def _references() -> int:
    return sys.getrefcount(c10d.GroupMember.WORLD)


def refuse_groups_from_outside() -> None:
    if dist.is_available() and dist.is_initialized():
        raise StaleGroupError(
            "a process group was created before the function under @elastic was called. The "
            "library creates one for each round: remove init_process_group from the script"
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


def _holders(group: object) -> list[object]:
    """Return the objects that refer to a group; in place of a dictionary, its owner."""
    found: list[object] = []
    for holder in gc.get_referrers(group):
        if isinstance(holder, dict):
            owners = gc.get_referrers(holder)
            found += [one for one in owners if getattr(one, "__dict__", None) is holder]
        elif not isinstance(holder, (list, tuple, set)) and type(holder).__name__ != "frame":
            found.append(holder)
    return found


def _meshes() -> list[object]:
    """Return all device meshes; they find their groups by name, so they refer to none."""
    mesh = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)
    return [one for one in gc.get_objects() if type(one) is mesh]


def _is_bound(holder: object) -> bool:
    """Return whether an object was made of a group for its ranks, and by torch."""
    module = type(holder).__module__
    return isinstance(holder, torch.nn.parallel.DistributedDataParallel) or (
        module.startswith("torch.distributed.") and module != c10d.__name__
    )


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
