"""Lets new processes resume from snapshots that their predecessors left in memory or on disk.

This happens only in a round without kept workers. All ranks publish which snapshots their runners
hold, and resume from the newest whole step. If there is none, they do the same with snapshots on
disk. Nothing is loaded until all ranks have verified their snapshots.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .contents import derive_rng
from .rounds import exchange, warn
from .shards import Place
from .slot_format import NO_MARK, Mark
from .snapshot_files import WholeStep, whole_steps

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .rounds import Round
    from .sealing import Sealing
    from .slot_format import Header
    from .snapshot_slot import Slot
    from .snapshots import HeldSlots

NEWEST_VARIABLE = "RDZV_SNAPSHOT"
"""The newest snapshot that may be used, as LINEAGE:STEP:SERIES. If it is damaged, an older one is
used. If empty, no snapshot may be used. If not set, the ranks decide on their own.
"""
ORIGIN_VARIABLE = "RDZV_SNAPSHOT_ORIGIN"
"""The oldest lineage whose snapshots may be used. The job has continued without any older ones."""
FOLDER_VARIABLE = "RDZV_SNAPSHOT_DIR"
"""The folder of snapshots on disk; not set if there are none."""


def newest_whole(found: Iterable[tuple[Mark, int]]) -> Mark | None:
    """Return the newest state of which all parts were found.

    >>> one, two = Mark(0, 20, "a", 2), Mark(0, 30, "a", 2)
    >>> newest_whole([(one, 0), (two, 0), (one, 1)]).step
    20
    >>> newest_whole([(one, 0), (two, 1)])
    """
    parts: dict[Mark, set[int]] = {}
    for mark, shard in found:
        parts.setdefault(mark, set()).add(shard)
    return max((mark for mark, held in parts.items() if len(held) == mark.shards), default=None)


def may_be_used(lineage: int, step: int, environ: Mapping[str, str]) -> bool:
    """Whether the round may resume from a snapshot of this lineage and step.

    >>> names = {NEWEST_VARIABLE: "3:20:a", ORIGIN_VARIABLE: "2"}
    >>> [may_be_used(*mark, names) for mark in ((3, 20), (2, 90), (3, 30), (4, 0), (1, 10))]
    [True, True, False, False, False]
    >>> may_be_used(3, 20, {NEWEST_VARIABLE: ""}), may_be_used(3, 20, {})
    (False, True)
    """
    newest = environ.get(NEWEST_VARIABLE)
    if newest is None:
        return True
    if not newest:
        return False
    last = tuple(map(int, newest.split(":", 2)[:2]))
    return lineage >= int(environ.get(ORIGIN_VARIABLE) or 0) and (lineage, step) <= last


@dataclass(frozen=True)
class Found:
    """A snapshot that this rank may load."""

    held: Slot | WholeStep
    """A slot in memory, or the step on disk to which it belongs."""
    header: Header
    clear: Callable[[], object] = lambda: None
    """Makes sure that it is not found again. Those on disk belong to the user, and stay."""
    is_copy: bool = False
    """Whether another node saved it. A copy is used only if no rank holds the original."""

    @property
    def where(self) -> str:
        return f"in {self.held.folder}" if isinstance(self.held, WholeStep) else "in memory"

    @property
    def bytes(self) -> int:
        if isinstance(self.held, WholeStep):
            return self.held.bytes
        return self.header.bytes

    def belongs_to(self, mark: Mark) -> bool:
        mine = self.header.mark
        return mine == mark if self.header.shards else mine.time == mark.time


class Resuming:
    """The snapshots that this rank can load. Used only in a round of new processes."""

    def __init__(self, held: HeldSlots | None, sealing: Sealing, round_: Round) -> None:
        self._held = held
        self._sealing = sealing
        self._round = round_
        self._in_memory: list[Found] = []
        self._loaded: Sequence[Found] = ()
        self._own: Mapping[str, Any] | None = None
        self.mark: Mark | None = None
        """The state that was loaded, or None if there was none."""
        self.digest = ""
        """Equal on all ranks that have loaded the same tensors; empty if there is no digest."""
        self.not_loaded: list[str] = []
        """The reasons why snapshots that this rank knows of are not loaded."""
        if held is not None:
            copies = held.find()
            for number, slot in enumerate(held.slots):
                self._look(slot, partial(held.clear, number), is_copy=False)
            for slot in copies:
                self._look(slot, slot.clear, is_copy=True)

    def _look(self, slot: Slot, clear: Callable[[], object], *, is_copy: bool) -> None:
        if slot.is_damaged:
            self._refuse("a snapshot in memory is damaged in its header, so it is ignored")
            clear()
        if (header := slot.header()) and may_be_used(header.lineage, header.step, os.environ):
            found = Found(slot, header, clear, is_copy)
            if self._fits(found):
                self._in_memory.append(found)

    def load(self, store: Store) -> bool:
        """Load the newest whole step and return whether there was one. All ranks call it together.

        A rank that does not hold the state itself must still be healed. Blocks while ranks are
        missing. Damaged snapshots are given up on all ranks.
        """
        folder = os.environ.get(FOLDER_VARIABLE, "")
        looks = exchange(store, self._round, "looks on disk", bool(folder))
        announced = os.environ.get(NEWEST_VARIABLE)
        time = tuple(map(int, announced.split(":", 2)[:2])) if announced else NO_MARK.time
        if self._load(store, "snapshots", self._in_memory):
            assert self._held is not None and self.mark is not None
            self._held.base = self.mark.time
            self._compare(time, self._held.base)
            return True
        is_loaded = any(looks) and self._load(store, "on disk", self._on_disk(folder))
        self._compare(time, NO_MARK.time)
        return is_loaded

    def _compare(self, announced: tuple[int, ...], loaded: tuple[int, int]) -> None:
        if loaded < announced and self._round.rank == 0:
            if self.mark is None:
                instead = "nothing is loaded: the script starts from its own checkpoint or anew"
            else:
                instead = f"training resumes from step {self.mark.step}"
            self._refuse(
                f"the snapshot of step {announced[1]} in memory was to be loaded, but is not whole "
                f"and undamaged any more; {instead}"
            )

    def put_back_own(self) -> None:
        if self.mark is None:
            return
        if self._own is not None:
            self._sealing.load_own(self._own)
        else:
            derive_rng(torch.initial_seed(), self._round.rank, self.mark.step)

    def give_up(self) -> None:
        if self._held is not None:
            for number in range(len(self._held.slots)):
                self._held.clear(number)
        for one in self._loaded:
            if one.is_copy:
                one.clear()
            elif isinstance(one.held, WholeStep):
                warn(
                    self._round,
                    f"the snapshot {one.where} does not fit what the script adds to its state: "
                    "move it away, or give another --snapshot-dir",
                )

    def _load(self, store: Store, name: str, found: Sequence[Found]) -> bool:
        begun = time.monotonic()
        for attempt in itertools.count():
            mine = [
                (one.header.mark, one.header.shard, one.is_copy)
                for one in found
                if one.header.shards
            ]
            said = exchange(store, self._round, f"{name}/{attempt}", mine)
            held = [[(Mark(*mark), shard, is_copy) for mark, shard, is_copy in one] for one in said]
            newest = newest_whole((of, shard) for of, shard, _ in itertools.chain(*held))
            if newest is None:
                return False
            mark = newest
            # A copy is read only if the original is lost.
            lost = set(range(mark.shards)) - {
                shard for of, shard, is_copy in itertools.chain(*held) if of == mark and not is_copy
            }
            chosen = [
                one
                for one in found
                if one.belongs_to(mark) and (not one.is_copy or one.header.shard in lost)
            ]
            damaged = [one for one in chosen if not self._is_sound(one)]
            found = [one for one in found if one not in damaged]
            if all(exchange(store, self._round, f"{name}/sound/{attempt}", not damaged)):
                break
        for one in chosen:
            self._read(one)
        self.mark, self._loaded = mark, chosen
        readers = [
            rank
            for rank, one in enumerate(held)
            if any(of == mark and (not is_copy or shard in lost) for of, shard, is_copy in one)
        ]
        if self._round.rank == readers[0]:
            self._mark_loaded(chosen[0])
            size = sum(one.bytes for one in chosen)
            parts = f" (copies of parts {', '.join(map(str, sorted(lost)[:8]))})" if lost else ""
            sys.stderr.write(
                f"rdzv: rank {self._round.rank}: resumed from the snapshot of step {mark.step} "
                f"{chosen[0].where}{parts}, not from a checkpoint: {size / 1e6:.1f} MB in "
                f"{time.monotonic() - begun:.2f} s\n"
            )
        return True

    def _mark_loaded(self, one: Found) -> None:
        """Let this training remove the steps on disk that it goes on from, if newer ones follow."""
        nonce = self._sealing.nonce
        if isinstance(one.held, WholeStep):
            one.held.mark_loaded(nonce)
        elif folder := os.environ.get(FOLDER_VARIABLE):
            for step in whole_steps(Path(folder)):
                if one.header.nonce in step.loaded_by():
                    step.mark_loaded(nonce)

    def _on_disk(self, folder: str) -> list[Found]:
        """List the steps on disk that this rank can load.

        A state that is the same on all ranks is read by one rank of each node. All ranks read a
        sharded one, of which each first verifies a share of the files.
        """
        found = []
        # The folder is shared, so one rank on each node says what cannot be read.
        say = self._refuse if self._round.local_rank == 0 else None
        for step in whole_steps(Path(folder), say) if folder else []:
            header = replace(step.header, shards=1)
            if header.part:
                header = replace(header, shard=self._round.rank, shards=self._round.world_size)
            part = Found(step, header)
            if (header.part or self._round.local_rank == 0) and self._fits(part):
                found.append(part)
        return found

    def _fits(self, found: Found) -> bool:
        header = found.header
        reason = ""
        if header.state != self._sealing.contents.described()[1]:
            reason = "its state has other names, sizes or types"
        elif isinstance(found.held, WholeStep):
            reason = found.held.why_not(self._round.world_size)
        if reason:
            self._refuse(
                f"cannot resume from the snapshot of step {header.step} {found.where}: {reason}"
            )
        return not reason

    def _is_sound(self, one: Found) -> bool:
        if one.held.is_sound(one.header):
            return True
        self._refuse(
            f"the snapshot of step {one.header.step} {one.where} is damaged, so it is ignored"
        )
        one.clear()
        return False

    def _read(self, one: Found) -> None:
        if isinstance(one.held, WholeStep):
            content = one.held.read(self._round, state=self._sealing.contents)
            if one.header.part:
                place = Place(self._round.rank, self._round.world_size)
                self._sealing.shards.place, self._sealing.shards.on_disk = place, one.held
        else:
            content = one.held.read(one.header)
        if "state" in content.images:
            self._sealing.load(content.images["state"])
            if list(content.images) == ["state"]:
                self.digest = one.header.tensors_digest
        if "part" in content.images:
            place = Place(one.header.shard, one.header.shards)
            self._sealing.shards.hold(place, content.images["part"])
        if tuple(content.own["place"]) == (self._round.rank, self._round.world_size):
            self._own = content.own

    def _refuse(self, reason: str) -> None:
        self.not_loaded.append(reason)
        warn(self._round, reason)
