"""This rank's part of a sharded state (FSDP2): in a round, between rounds, and from a replica.

A sharded model is bound to its round's process groups, so the script builds it anew in each round.
In between, its parameters are held here as plain tensors, and are then loaded into the next model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .contents import Contents, Image, Layout, is_sharded, local
from .healing import compare_manifests, transfer
from .rounds import MismatchError, NoSourceError, UnsupportedError, WorkerError, exchange
from .snapshot_files import whole_step

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .rounds import Round
    from .sealing import Sealing
    from .snapshot_files import WholeStep


@dataclass(frozen=True)
class Place:
    """The number of a rank's part, and the total number of parts."""

    shard: int = 0
    shards: int = 1


class Parts(Contents):
    """The modules, optimizers and objects that a script has added to a round."""

    def __init__(self, entries: Mapping[str, Any], rank: int, world_size: int) -> None:
        super().__init__(entries)
        if self.values:
            raise WorkerError(
                f"state.add() was given {min(self.values)!r}, which is a plain value: "
                "give it to State(...), which keeps it from round to round"
            )
        # They are listed now, because a forward pass temporarily replaces them with gathered
        # parameters.
        self._tensors, self._buffers = super().tensors(), super().buffers()
        self._layout = super().layout()
        self.place = place_of(self._tensors, rank, world_size)

    def tensors(self) -> list[tuple[str, Tensor]]:
        return self._tensors

    def buffers(self) -> list[tuple[str, Tensor]]:
        return self._buffers

    def layout(self) -> Layout:
        return self._layout

    def small(self) -> dict[str, Any]:
        return self.small_with({name: local(one).clone() for name, one in self._buffers})


class Shards:
    """A rank's part of a sharded state. Does nothing if the state is not sharded."""

    def __init__(self) -> None:
        self.parts: Parts | None = None
        """The objects that the script has added in this round."""
        self.place = Place()
        self.is_missing = False
        """Whether other ranks have a sharded state but this rank does not have its part yet."""
        self._held: dict[int, Image] = {}
        """This rank's part between rounds, by step: at most the last two sealed steps."""
        self._copies: dict[int, Image] = {}
        """Other parts whose snapshots were found here, held until the script adds its objects."""
        self.on_disk: WholeStep | None = None
        """The step from which all ranks load their parts when the script adds its objects."""
        self._last: Image | None = None
        """The part as it was before the latest optimizer step."""
        self.small: dict[str, Any] = {}
        """The part's small values at the sealed step."""
        self.is_touched = False
        """Whether an optimizer has changed the part since the last seal."""
        self._holds_last = False

    def held(self, step: int | None) -> Image | None:
        return self._held.get(step or 0)

    def all_held(self, step: int | None) -> dict[int, Image]:
        found = {n: one for n, one in self._copies.items() if one.step == (step or 0)}
        if (own := self.held(step)) is not None:
            found[self.place.shard] = own
        return found

    def hold(self, place: Place, image: Image) -> None:
        """Hold a loaded part until the script adds its objects; further ones for other ranks."""
        if self._held:
            self._copies[place.shard] = image
        else:
            self.place, self._held = place, {image.step: image}

    def oldest_step(self, step: int | None) -> int | None:
        return max(step - 1, 0) if step and step - 1 in self._held else step

    def begin(self, parts: Parts, *, holds_last: bool) -> None:
        self.parts, self.place = parts, parts.place
        self._holds_last = holds_last
        self._held, self._copies, self._last, self.is_touched = {}, {}, None, False
        self.on_disk = None
        self.small = parts.small()
        self.is_missing = False

    def before_step(self, step: int) -> None:
        if self.parts is not None and not self.is_touched:
            self._last = None  # Its memory can be reused for the next image.
            if self._holds_last:
                image = self.parts.image(step, self.small)
                self._last = image.mapped(lambda _, one: one.clone())
            self.is_touched = True

    def commit(self) -> None:
        if self._held or self.on_disk or self.is_missing:
            raise WorkerError(
                "state.commit() was called before state.add() in this round: a sharded model is "
                "built anew in each round, and added before its first step"
            )
        if self.parts is not None:
            self.small = self.parts.small()
            self.is_touched = False

    def take_out(self, step: int | None) -> None:
        """Keep the part as plain tensors, and release modules, optimizers and meshes."""
        if self.parts is None:
            return
        images = [] if self._last is None else [self._last]
        if not self.is_touched:
            images.append(self.parts.image(step or 0, self.small))
        self._held = {image.step: image for image in images} if step else {}
        self.is_missing = bool(step) and step not in self._held
        self.parts, self._last, self.small = None, None, {}


def place_of(tensors: list[tuple[str, Tensor]], rank: int, world_size: int) -> Place:
    """Return which part of the state a rank has. Ranks with the same part can heal each other.

    If all parameters are on one mesh that spans all ranks, the part is determined by the rank's
    coordinates in the mesh dimensions that shard a parameter. Otherwise each rank has its own part.
    """
    sharded: list[Any] = [one for _, one in tensors if is_sharded(one)]
    if not sharded:
        raise UnsupportedError(
            "state.add() was given no sharded parameters (of fully_shard). Give a model that is "
            "the same on all ranks to State(...); FullyShardedDataParallel cannot be kept"
        )
    mesh = sharded[0].device_mesh
    if any(one.device_mesh != mesh for one in sharded) or mesh.size() != world_size:
        return Place(rank, world_size)
    shard, shards = 0, 1
    for dimension, coordinate in enumerate(mesh.get_coordinate()):
        if not all(one.placements[dimension].is_replicate() for one in sharded):
            size = mesh.size(dimension)
            shard, shards = shard * size + coordinate, shards * size
    return Place(shard, shards)


@dataclass(frozen=True)
class Claim:
    """A rank's part of the state in this round, and the parts that it still holds."""

    shard: int
    shards: int
    held: list[int]
    held_shards: int
    manifest: str
    on_disk: str = ""
    """The folder of the step that all ranks were to load from disk, if it was not loaded yet."""


def add_parts(
    sealing: Sealing, parts: Parts, round_: Round, store: Store, *, holds_last: bool
) -> None:
    """Load the state into the objects that the script has added. All ranks call it together.

    A rank that holds its part receives nothing. Any other rank receives its part from a rank that
    has the same part (HSDP) or has found a copy of it. From a step on disk, each rank reads its
    part, however the state is divided now. Blocks while ranks are missing. Raises, on all ranks,
    `MismatchError` if ranks have added different objects, and `NoSourceError` if no rank holds a
    part.
    """
    shards, step = sealing.shards, sealing.step
    held = shards.all_held(step)
    manifest, hashed = parts.described()
    given = dict(sealing.contents.manifest())
    if both := [name for name, _ in manifest if name in given]:
        raise WorkerError(
            f"{both[0]} was given to State(...) and to state.add(): name one otherwise"
        )
    mine = Claim(
        shard=parts.place.shard,
        shards=parts.place.shards,
        held=sorted(held),
        held_shards=shards.place.shards,
        manifest=hashed,
        on_disk=str(shards.on_disk.folder) if shards.on_disk else "",
    )
    if round_.rank == 0:
        store.set("manifest of parts", json.dumps(manifest))
    claims = [Claim(**one) for one in exchange(store, round_, "part", asdict(mine))]
    hashes = [one.manifest for one in claims]
    compare_manifests(hashes, manifest, round_, store, "manifest of parts")
    if folder := next((one.on_disk for one in claims if one.on_disk), ""):
        _read_parts(parts, whole_step(Path(folder)), round_, hashed)
    elif step:
        image = held.get(parts.place.shard)
        for shard, source in sources(claims).items():
            to = [n for n, one in enumerate(claims) if one.shard == shard and shard not in one.held]
            if to:
                # Every rank takes part, including those that neither have the part nor need it.
                sent = held.get(shard) if round_.rank == source else None
                came = transfer(f"part/{shard}", source, to, round_, store, sent)
                image = image if came is None else came["image"]
        assert image is not None
        parts.put_back(image)
    sealing.add(parts, holds_last=holds_last)


def _read_parts(parts: Parts, step: WholeStep, round_: Round, manifest: str) -> None:
    if step.header.part != manifest:
        raise MismatchError(
            f"what state.add() was given has other names, sizes or types than the snapshot in "
            f"{step.folder}"
        )
    if reason := step.why_not(round_.world_size):
        raise NoSourceError(f"cannot load the snapshot in {step.folder}: {reason}")
    parts.put_back(step.read(round_, part=parts).images["part"])


def sources(claims: list[Claim]) -> dict[int, int]:
    """Map each part of the state to the lowest rank that holds it.

    Raises `NoSourceError` if no rank holds a part, or if the state is now divided differently.

    >>> sources([Claim(0, 2, [], 1, ""), Claim(1, 2, [1], 2, ""), Claim(0, 2, [0, 1], 2, "")])
    {1: 1, 0: 2}
    """
    found: dict[int, int] = {}
    for rank, claim in enumerate(claims):
        if not claim.held:
            continue
        if claim.held_shards != claim.shards:
            raise NoSourceError(
                f"the state was sharded into {claim.held_shards} parts, and is now sharded into "
                f"{claim.shards}: the job must resume from its checkpoint, in new processes"
            )
        for shard in claim.held:
            found.setdefault(shard, rank)
    for rank, claim in enumerate(claims):
        if claim.shard not in found:
            raise NoSourceError(
                f"no rank holds part {claim.shard} of {claim.shards} of the sharded state, which "
                f"rank {rank} needs: the job must resume from its checkpoint, in new processes"
            )
    return found
