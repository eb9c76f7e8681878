"""This rank's part of a sharded state (FSDP2): in a round, between rounds, and from a replica.

A sharded model is bound to its round's process groups, so the script builds it anew in each round.
In between, its parameters are held here as plain tensors, and are then loaded into the next model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from .contents import Contents, Image, Layout, is_sharded, local, packed, unpacked
from .healing import compare_manifests
from .resharding import Resharding, boxes_of, unsharded
from .rounds import MismatchError, NoSourceError, UnsupportedError, WorkerError, exchange
from .snapshot_files import whole_step
from .staging import digest

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .rounds import Round
    from .sealing import Sealing
    from .snapshot_files import WholeStep


@dataclass(frozen=True, order=True)
class Place:
    """The number of a rank's part, and the total number of parts."""

    shard: int = 0
    shards: int = 1

    def __str__(self) -> str:
        return f"part {self.shard} of {self.shards}"


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
        buffers = {name: local(one).clone() for name, one in self._buffers}
        return {**self.small_with(buffers), "layout": self._layout}

    def are_divided_as(self, image: Image) -> bool:
        shapes = [(name, local(one).shape) for name, one in self._tensors]
        there = [(name, one.shape) for name, one in image.parameters.items()]
        return self._layout.chunks == image.small["layout"].chunks and shapes == there


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
        self._copies: dict[Place, Image] = {}
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

    def all_held(self, step: int | None) -> dict[Place, Image]:
        own = self.held(step)
        found = {} if own is None else {self.place: own}
        return found | {at: one for at, one in self._copies.items() if one.step == (step or 0)}

    def hold(self, place: Place, image: Image) -> None:
        """Hold a loaded part until the script adds its objects; further ones for other ranks."""
        if self._held:
            self._copies[place] = image
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
    """What a rank has added in this round, and what it holds of the state."""

    manifest: str
    has_own: bool
    """Whether it holds just the part that it has now."""
    holds: int
    """The number of parts that it holds."""
    on_disk: str = ""
    """The folder of the step that all ranks were to load from disk, if it was not loaded yet."""


def add_parts(
    sealing: Sealing, parts: Parts, round_: Round, store: Store, *, holds_last: bool
) -> None:
    """Load the state into the objects that the script has added. All ranks call it together.

    A rank that holds its part receives nothing. Any other rank receives its part from those that
    hold some of it, however the state was divided, or reads it from a step on disk. Blocks while
    ranks are missing. Raises, on all ranks, `MismatchError` if ranks have added different objects,
    and `NoSourceError` if no rank holds some of the state.
    """
    shards, step = sealing.shards, sealing.step
    manifest, hashed = parts.described()
    given = dict(sealing.contents.manifest())
    if both := [name for name, _ in manifest if name in given]:
        raise WorkerError(
            f"{both[0]} was given to State(...) and to state.add(): name one otherwise"
        )
    held = shards.all_held(step)
    image = held.get(parts.place)
    if image is not None and not parts.are_divided_as(image):
        image = None
    on_disk = str(shards.on_disk.folder) if shards.on_disk else ""
    mine = Claim(hashed, image is not None, len(held), on_disk)
    if round_.rank == 0:
        store.set("manifest of parts", json.dumps(manifest))
    claims = [Claim(**one) for one in exchange(store, round_, "part", asdict(mine))]
    hashes = [one.manifest for one in claims]
    compare_manifests(hashes, manifest, round_, store, "manifest of parts")
    if folder := next((one.on_disk for one in claims if one.on_disk), ""):
        _read_parts(parts, whole_step(Path(folder)), round_, hashed)
    elif step:
        if not all(one.has_own for one in claims):
            holders = [rank for rank, one in enumerate(claims) if one.holds]
            received = _receive(parts, held, holders, round_, store, needs=image is None)
            image = image or received
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


def _receive(
    parts: Parts,
    held: Mapping[Place, Image],
    holders: list[int],
    round_: Round,
    store: Store,
    *,
    needs: bool,
) -> Image | None:
    """Return this rank's part of what all ranks hold, if it needs one. All ranks call it."""
    plain = {digest(unsharded(image)) for image in held.values()}
    said = chain(*exchange(store, round_, "unsharded", sorted(plain)))
    # If ranks have tensors of their own (local experts), each needs those of the same part.
    differ = len(set(said)) > 1
    shapes = next((image.shapes() for image in held.values()), None)
    if holders and len(holders) < round_.world_size:
        sent = [packed(image=shapes) if round_.rank == holders[0] else b""]
        dist.broadcast_object_list(sent, holders[0])
        shapes = shapes or unpacked(sent[0])["image"]
    image = parts.like(shapes)[0] if needs and shapes is not None else None
    moving = Resharding(
        [boxes_of(one, f" of {place}" if differ else "") for place, one in held.items()],
        boxes_of(image, f" of {parts.place}" if differ else "") if image is not None else {},
        round_,
    )
    lacking = moving.lacking() if shapes is not None else "no rank holds any part of the state"
    if reason := next(filter(None, exchange(store, round_, "lacking", lacking)), ""):
        if differ:
            reason += (
                ": it is not sharded, and differs between parts, so start as many as before, or"
            )
        else:
            reason += ": the job must"
        raise NoSourceError(f"{reason} resume from its checkpoint, in new processes")
    moving.run()
    return image
