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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .contents import derive_rng, described
from .link import NO_STEP
from .rounds import exchange, warn
from .shards import Place
from .snapshot_files import WholeStep, whole_steps
from .staging import readers

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .rounds import Round
    from .sealing import Sealing
    from .snapshot_slot import Content, Header, Slot
    from .snapshots import HeldSlots

NEWEST_VARIABLE = "RDZV_SNAPSHOT"
"""The newest snapshot that may be used, as LINEAGE:STEP:SERIES. If it is damaged, an older one is
used. If empty, no snapshot may be used. If not set, the ranks decide on their own.
"""
ORIGIN_VARIABLE = "RDZV_SNAPSHOT_ORIGIN"
"""The oldest lineage whose snapshots may be used. The job has continued without any older ones."""
FOLDER_VARIABLE = "RDZV_SNAPSHOT_DIR"
"""The folder of snapshots on disk; not set if there are none."""


class Key(NamedTuple):
    """Identifies a state. It is equal for all of the state's parts, and larger for newer states."""

    lineage: int
    step: int
    series: str
    shards: int


def newest_whole(found: Iterable[tuple[Key, int]]) -> Key | None:
    """Return the newest state for which all parts were found, or None if there is none.

    `found` contains each snapshot's key and part number.

    >>> one, two = Key(0, 20, "a", 2), Key(0, 30, "a", 2)
    >>> newest_whole([(one, 0), (two, 0), (one, 1)])
    Key(lineage=0, step=20, series='a', shards=2)
    >>> newest_whole([(one, 0), (two, 1)])
    """
    parts: dict[Key, set[int]] = {}
    for key, shard in found:
        parts.setdefault(key, set()).add(shard)
    return max((key for key, held in parts.items() if len(held) == key.shards), default=None)


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


class Found(Protocol):
    """A snapshot that this rank may load."""

    header: Header
    key: Key
    where: str
    """Used as in "the snapshot of step 3 in memory"."""
    bytes: int
    is_copy: bool
    """Whether another node saved it. A copy is used only if no rank holds the original."""

    def is_sound(self) -> bool:
        """Return whether the snapshot is undamaged, reading all of it once."""

    def read(self) -> tuple[Content, int, int]:
        """Return the content, and the rank and world size it was saved with."""

    def give_up(self) -> None:
        """Make sure that it is not found again, because it is damaged."""


class InMemory:
    """A snapshot in this node's memory: in one of this rank's slots, or a copy of another node's.

    `clear` is called if the snapshot is given up.
    """

    where = "in memory"

    def __init__(
        self, slot: Slot, header: Header, clear: Callable[[], None], *, is_copy: bool
    ) -> None:
        self._slot = slot
        self.header = header
        self.give_up = clear
        self.is_copy = is_copy
        self.key = Key(header.lineage, header.step, header.series, header.shards)
        self.bytes = header.bytes

    def is_sound(self) -> bool:
        """Return whether the snapshot is undamaged, reading all of it once."""
        return self._slot.is_sound(self.header, readers())

    def read(self) -> tuple[Content, int, int]:
        """Return the content, and the rank and world size it was saved with."""
        return self._slot.read(self.header), self.header.rank, self.header.world_size


class OnDisk:
    """One part of a step on disk."""

    is_copy = False

    def __init__(self, step: WholeStep, shard: int) -> None:
        self.step = step
        self.header = replace(step.header, shard=shard)
        self.where = f"in {step.folder}"
        # Lineages from different runs cannot be compared.
        self.key = Key(step.written_ms, self.header.step, self.header.series, self.header.shards)
        self.bytes = step.bytes_of(shard)

    def is_sound(self) -> bool:
        """Return whether the snapshot is undamaged, reading all of it once."""
        return self.step.is_sound(self.header.shard)

    def read(self) -> tuple[Content, int, int]:
        """Return the content, and the rank and world size it was saved with."""
        return self.step.read(self.header.shard)

    def give_up(self) -> None:
        """Leave the snapshot in place, because it belongs to the user."""


class Resuming:
    """The snapshots that this rank can load. Used only in a round of new processes."""

    def __init__(self, held: HeldSlots | None, sealing: Sealing, round_: Round) -> None:
        """Find snapshots that fit this state. Without a runner, there are none in memory."""
        self._held = held
        self._sealing = sealing
        self._round = round_
        self._in_memory: list[InMemory] = []
        self._loaded: Sequence[Found] = ()
        self._own: Mapping[str, Any] | None = None
        self.key: Key | None = None
        """The state that was loaded, or None if there was none."""
        self.digest = ""
        """Equal on all ranks that have loaded the same tensors; empty if there is no digest."""
        self.not_loaded: list[str] = []
        """The reasons why snapshots that this rank knows of are not loaded."""
        if held is not None:
            copies = held.find()
            found: list[tuple[Slot, Callable[[], None], bool]] = [
                *((slot, partial(held.clear, n), False) for n, slot in enumerate(held.slots)),
                *((slot, slot.clear, True) for slot in copies),
            ]
            for slot, clear, _ in found:
                if slot.is_damaged:
                    self._refuse("a snapshot in memory is damaged in its header, so it is ignored")
                    clear()
            self._in_memory = [
                InMemory(slot, header, clear, is_copy=is_copy)
                for slot, clear, is_copy in found
                if (header := slot.header())
                and may_be_used(header.lineage, header.step, os.environ)
                and self._fits(header, InMemory.where)
            ]

    def load(self, store: Store) -> bool:
        """Load the newest whole step and return whether there was one. All ranks call it together.

        A rank that does not hold the state itself must still be healed. Blocks while ranks are
        missing. Damaged snapshots are given up on all ranks.
        """
        folder = os.environ.get(FOLDER_VARIABLE, "")
        looks = exchange(store, self._round, "looks on disk", bool(folder))
        announced = os.environ.get(NEWEST_VARIABLE)
        mark = tuple(map(int, announced.split(":", 2)[:2])) if announced else NO_STEP
        if self._load(store, "snapshots", self._in_memory):
            assert self._held is not None and self.key is not None
            self._held.base = (self.key.lineage, self.key.step)
            self._compare(mark, self._held.base)
            return True
        is_loaded = any(looks) and self._load(store, "on disk", self._on_disk(folder))
        self._compare(mark, NO_STEP)
        return is_loaded

    def _compare(self, announced: tuple[int, ...], loaded: tuple[int, int]) -> None:
        """Report, on one rank, if the announced snapshots in memory are not the ones loaded."""
        if loaded < announced and self._round.rank == 0:
            if self.key is None:
                instead = "nothing is loaded: the script starts from its own checkpoint or anew"
            else:
                instead = f"training resumes from step {self.key.step}"
            self._refuse(
                f"the snapshot of step {announced[1]} in memory was to be loaded, but is not whole "
                f"and undamaged any more; {instead}"
            )

    def put_back_own(self) -> None:
        """Restore this rank's own values at that step, once the state is loaded."""
        if self.key is None:
            return
        if self._own is not None:
            self._sealing.load_own(self._own)
        else:
            import torch

            derive_rng(torch.initial_seed(), self._round.rank, self.key.step)

    def give_up(self) -> None:
        """Give these snapshots up for good, because they do not fit the script's objects."""
        if self._held is not None:
            for number in range(len(self._held.slots)):
                self._held.clear(number)
        for one in self._loaded:
            if one.is_copy:
                one.give_up()
            elif isinstance(one, OnDisk):
                warn(
                    self._round,
                    f"the snapshot {one.where} does not fit what the script adds to its state: "
                    "move it away, or give another --snapshot-dir",
                )

    def _load(self, store: Store, name: str, found: Sequence[Found]) -> bool:
        begun = time.monotonic()
        attempt, are_sound = 0, False
        while not are_sound:
            mine = [(one.key, one.header.shard, one.is_copy) for one in found if one.header.shards]
            said = exchange(store, self._round, f"{name}/{attempt}", mine)
            held = [[(Key(*key), shard, is_copy) for key, shard, is_copy in one] for one in said]
            newest = newest_whole((key, shard) for key, shard, _ in itertools.chain(*held))
            if newest is None:
                return False
            key = newest
            # A copy is read only if the original is lost.
            lost = set(range(key.shards)) - {
                shard for of, shard, is_copy in itertools.chain(*held) if of == key and not is_copy
            }
            chosen = [
                one
                for one in found
                if _is_of(one, key) and (not one.is_copy or one.header.shard in lost)
            ]
            damaged = [one for one in chosen if not self._is_sound(one)]
            found = [one for one in found if one not in damaged]
            are_sound = all(exchange(store, self._round, f"{name}/sound/{attempt}", not damaged))
            attempt += 1
        for one in chosen:
            self._read(one)
        self.key, self._loaded = key, chosen
        readers = [
            rank
            for rank, one in enumerate(held)
            if any(of == key and (not is_copy or shard in lost) for of, shard, is_copy in one)
        ]
        if self._round.rank == readers[0]:
            self._mark_loaded(chosen[0])
            size = sum(one.bytes for one in chosen)
            parts = f" (copies of parts {', '.join(map(str, sorted(lost)[:8]))})" if lost else ""
            sys.stderr.write(
                f"rdzv: rank {self._round.rank}: resumed from the snapshot of step {key.step} "
                f"{chosen[0].where}{parts}, not from a checkpoint: {size / 1e6:.1f} MB in "
                f"{time.monotonic() - begun:.2f} s\n"
            )
        return True

    def _mark_loaded(self, one: Found) -> None:
        """Let this training remove the steps on disk that it goes on from, if newer ones follow."""
        nonce = self._sealing.nonce
        if isinstance(one, OnDisk):
            one.step.mark_loaded(nonce)
        elif folder := os.environ.get(FOLDER_VARIABLE):
            for step in whole_steps(Path(folder)):
                if one.header.nonce in step.loaded_by():
                    step.mark_loaded(nonce)

    def _on_disk(self, folder: str) -> list[OnDisk]:
        """List the steps on disk that this rank can load.

        A state that is not sharded is loaded by LOCAL_RANK 0 on each node. Each part of a sharded
        state is loaded by its own rank.
        """
        found = []
        # The folder is shared, so one rank on each node says what cannot be read.
        say = self._refuse if self._round.local_rank == 0 else None
        for step in whole_steps(Path(folder), say) if folder else []:
            shards, rank = step.header.shards, self._round.rank
            holds = self._round.local_rank == 0 if shards == 1 else rank < shards
            if holds and self._fits(step.header, f"in {step.folder}"):
                found.append(OnDisk(step, 0 if shards == 1 else rank))
        return found

    def _fits(self, header: Header, where: str) -> bool:
        """Return whether a snapshot fits this state; if it does not, print the reason."""
        reason = ""
        if header.state != described(self._sealing.contents)[1]:
            reason = "its state has other names, sizes or types"
        elif header.part and header.world_size != self._round.world_size:
            before, now = header.world_size, self._round.world_size
            reason = (
                f"its {header.shards} parts were saved by {before} ranks, but this round has "
                f"{now}: start {before}, or load a checkpoint"
            )
        if reason:
            self._refuse(f"cannot resume from the snapshot of step {header.step} {where}: {reason}")
        return not reason

    def _is_sound(self, one: Found) -> bool:
        if one.is_sound():
            return True
        self._refuse(
            f"the snapshot of step {one.header.step} {one.where} is damaged, so it is ignored"
        )
        one.give_up()
        return False

    def _read(self, one: Found) -> None:
        content, rank, world_size = one.read()
        if "state" in content.images:
            self._sealing.load(content.images["state"])
            if list(content.images) == ["state"]:
                self.digest = one.header.tensors_digest
        if "part" in content.images:
            place = Place(one.header.shard, one.header.shards)
            self._sealing.shards.hold(place, content.images["part"])
        if (rank, world_size) == (self._round.rank, self._round.world_size):
            self._own = content.own

    def _refuse(self, reason: str) -> None:
        """Say why a snapshot is not loaded."""
        self.not_loaded.append(reason)
        warn(self._round, reason)


def _is_of(one: Found, key: Key) -> bool:
    """Whether a snapshot belongs to a state. One without state belongs to any state of its step."""
    if one.header.shards:
        return one.key == key
    return (one.header.lineage, one.header.step) == (key.lineage, key.step)
