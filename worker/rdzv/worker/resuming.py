"""How new processes go on from snapshots that their predecessors have left in memory.

Only a round without any kept worker does: all ranks say which snapshots their runners hold, and go
on from the newest step that is whole. Nothing is loaded before all ranks have verified theirs.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from . import rng
from .contents import described
from .shards import Place

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .rounds import Round
    from .sealing import Sealing
    from .snapshot_slot import Header, Slot
    from .snapshots import HeldSlots

NEWEST_VARIABLE = "RDZV_SNAPSHOT"
"""What the round goes on from, as LINEAGE:STEP:SERIES, or from what is older, if that is damaged;
empty: from no snapshot. Not set: the ranks decide alone."""
ORIGIN_VARIABLE = "RDZV_SNAPSHOT_ORIGIN"
"""The lineage from which on snapshots may be used: the job has gone on without those before."""


class Key(NamedTuple):
    """What parts of one state have in common. The larger one is the newer one."""

    lineage: int
    step: int
    series: str
    shards: int


def newest_whole(found: Iterable[tuple[Key, int]]) -> Key | None:
    """Return the newest state of which every part was found; None if there is none.

    `found` has a key and a part of it for each snapshot.

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
    """Whether the round leaves it to its workers to go on from a snapshot.

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


class Resuming:
    """The snapshots of this rank's runner, in a round of new processes alone."""

    def __init__(self, held: HeldSlots | None, sealing: Sealing, round_: Round) -> None:
        """Look for snapshots of this state; without a runner there are none."""
        self._held = held
        self._sealing = sealing
        self._round = round_
        self._found: list[tuple[Slot, Header]] = []
        self._own: Mapping[str, Any] | None = None
        self.key: Key | None = None
        """What is gone on from."""
        if held is not None and held.ask(0):
            headers = [(slot, slot.header()) for slot in held.slots]
            self._found = [(slot, one) for slot, one in headers if one and self._fits(one)]

    def load(self, store: Store) -> bool:
        """Bring this rank to the newest step that is whole, if there is one; all ranks call it.

        Returns whether there is. A rank that does not hold the state itself is still to be healed.
        Blocks as long as ranks are missing. Snapshots that are damaged are given up, on all ranks.
        """
        begun = time.monotonic()
        attempt, are_sound = 0, False
        while not are_sound:
            mine = [(_key(one), one.shard) for _, one in self._found if one.shards]
            said = self._exchange(store, f"snapshots/{attempt}", mine)
            held = [[(Key(*key), shard) for key, shard in one] for one in said]
            newest = newest_whole(itertools.chain(*held))
            if newest is None:
                return False
            key = newest
            chosen = [(slot, one) for slot, one in self._found if _is_of(one, key)]
            sound = [(slot, one) for slot, one in chosen if self._is_sound(slot, one)]
            are_sound = all(self._exchange(store, f"sound/{attempt}", len(sound) == len(chosen)))
            attempt += 1
        for slot, header in sound:
            self._read(slot, header)
        self.key = key
        if self._held is not None:
            self._held.base = (key.lineage, key.step)
        holders = [rank for rank, one in enumerate(held) if key in (other for other, _ in one)]
        if self._round.rank == holders[0]:
            size = sum(header.bytes for _, header in sound)
            self._say(
                f"goes on from the snapshot of step {key.step} in memory, not from a checkpoint: "
                f"{size / 1e6:.1f} MB in {time.monotonic() - begun:.2f} s"
            )
        return True

    def put_back_own(self) -> None:
        """Bring what is this rank's alone to that step, once the state is there."""
        if self.key is None:
            return
        if self._own is not None:
            self._sealing.load_own(self._own)
        else:
            import torch

            rng.derive(torch.initial_seed(), self._round.rank, self.key.step)

    def give_up(self) -> None:
        """Have nothing of it gone on from again: the script's objects do not fit to it."""
        if self._held is not None:
            for number in range(len(self._held.slots)):
                self._held.clear(number)

    def _exchange(self, store: Store, name: str, mine: Any) -> list[Any]:
        """Publish this rank's, and wait for all."""
        store.set(f"{name}/{self._round.rank}", json.dumps(mine))
        ranks = range(self._round.world_size)
        return [json.loads(one) for one in store.multi_get([f"{name}/{rank}" for rank in ranks])]

    def _fits(self, header: Header) -> bool:
        """Whether a snapshot may be used, and is of this state; else say why not."""
        if not may_be_used(header.lineage, header.step, os.environ):
            return False
        reason = ""
        if header.state != described(self._sealing.contents)[1]:
            reason = "it is of a state with other names, sizes or types"
        elif header.part and header.world_size != self._round.world_size:
            reason = f"its parts are of {header.world_size} ranks, and now there are "
            reason += f"{self._round.world_size}"
        if reason:
            self._say(f"cannot go on from the snapshot of step {header.step}: {reason}")
        return not reason

    def _is_sound(self, slot: Slot, header: Header) -> bool:
        if slot.is_sound(header):
            return True
        assert self._held is not None
        self._say(f"the snapshot of step {header.step} is damaged, and is not used")
        self._held.clear(self._held.slots.index(slot))
        self._found = [(one, other) for one, other in self._found if one is not slot]
        return False

    def _read(self, slot: Slot, header: Header) -> None:
        content = slot.read(header)
        if "state" in content.images:
            self._sealing.load(content.images["state"])
        if "part" in content.images:
            place = Place(header.shard, header.shards)
            self._sealing.shards.hold(place, content.images["part"])
        if (header.rank, header.world_size) == (self._round.rank, self._round.world_size):
            self._own = content.own

    def _say(self, text: str) -> None:
        sys.stderr.write(f"rdzv: rank {self._round.rank}: {text}\n")


def _key(header: Header) -> Key:
    return Key(header.lineage, header.step, header.series, header.shards)


def _is_of(header: Header, key: Key) -> bool:
    """Whether a snapshot belongs to a state; one without state belongs to that of its step."""
    if header.shards:
        return _key(header) == key
    return (header.lineage, header.step) == (key.lineage, key.step)
