"""Restores each rank's part of a sharded state, from the rank itself or from a replica."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .contents import Image, described, packed
from .digest import digest
from .healing import broadcast, compare_manifests, receive_head, send_head
from .rounds import NoSourceError, exchange
from .shards import Parts

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .rounds import Round
    from .sealing import Sealing


@dataclass(frozen=True)
class Claim:
    """A rank's part of the state in this round, and the parts that it still holds."""

    shard: int
    shards: int
    held: list[int]
    held_shards: int
    manifest: str


def add_parts(
    sealing: Sealing, parts: Parts, round_: Round, store: Store, *, holds_last: bool
) -> None:
    """Load the state into the objects that the script has added. All ranks call it together.

    A rank that holds its part receives nothing. Any other rank receives its part from a rank that
    has the same part (HSDP) or has found a copy of it. Blocks while ranks are missing. Raises, on
    all ranks, `MismatchError` if ranks have added different objects, and `NoSourceError` if no rank
    holds a part.
    """
    shards, step = sealing.shards, sealing.step
    held = shards.all_held(step)
    manifest, hashed = described(parts.contents)
    mine = Claim(
        shard=parts.place.shard,
        shards=parts.place.shards,
        held=sorted(held),
        held_shards=shards.place.shards,
        manifest=hashed,
    )
    if round_.rank == 0:
        store.set("manifest of parts", json.dumps(manifest))
    claims = [Claim(**one) for one in exchange(store, round_, "part", asdict(mine))]
    compare_manifests(
        [one.manifest for one in claims], manifest, round_, lambda: store.get("manifest of parts")
    )
    if step:
        image = _transfer(held, claims, sources(claims), round_, store)
        parts.put_back(image)
    sealing.add(parts, holds_last=holds_last)


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


def _transfer(
    held: Mapping[int, Image],
    claims: list[Claim],
    holders: Mapping[int, int],
    round_: Round,
    store: Store,
) -> Image:
    """Return this rank's part, and send parts that other ranks lack, each over a separate group."""
    import torch.distributed as dist

    image = held.get(claims[round_.rank].shard)
    for shard, source in holders.items():
        to = [
            rank
            for rank, claim in enumerate(claims)
            if claim.shard == shard and shard not in claim.held
        ]
        if not to:
            continue
        # Every rank must call this, including those that are not in the group.
        group: Any = dist.new_group(sorted([source, *to]))
        if round_.rank == source:
            _send(held[shard], shard, source, group, store)
        elif round_.rank in to:
            image = _receive(shard, source, round_, group, store)
        if round_.rank in (source, *to):
            dist.destroy_process_group(group)
    assert image is not None
    return image


def _send(held: Image, shard: int, source: int, group: Any, store: Store) -> None:
    import torch

    tensors = [tensor for _, tensor in held.tensors()]
    layout = held.mapped(lambda one: torch.empty_like(one, device="meta"))
    devices = [tensor.device.type for tensor in tensors]
    head = packed({"part": (layout, devices, digest(held.tensors()))})
    send_head(head, f"part/{shard}/head_bytes", source, group, store)
    broadcast(tensors, source, group)


def _receive(shard: int, source: int, round_: Round, group: Any, store: Store) -> Image:
    import torch

    head = receive_head(f"part/{shard}/head_bytes", source, group, store)
    layout, devices, announced = head["part"]
    on = iter(devices)
    image: Image = layout.mapped(lambda one: torch.empty_like(one, device=next(on)))
    broadcast([tensor for _, tensor in image.tensors()], source, group)
    if digest(image.tensors()) != announced:
        raise NoSourceError(
            f"the part that rank {round_.rank} received is not the one that rank {source} offered"
        )
    return image
