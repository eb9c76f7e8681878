"""Brings all of a round's ranks to one state: that of the previous round's furthest rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .contents import (
    Image,
    Shape,
    derive_rng,
    packed,
    parameters_of,
    unpacked,
)
from .rounds import MismatchError, NoSourceError, exchange
from .staging import digest, readers

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .resuming import Resuming
    from .rounds import Round
    from .sealing import Sealing
    from .verifying import Verifying


BUCKET_BYTES = 32 << 20


@dataclass(frozen=True)
class StateOffer:
    """The state that a rank offers in a round."""

    kept: bool
    step: int | None
    torn: bool
    digest: str
    manifest: str
    shard: int = 0
    shards: int = 1
    oldest_step: int | None = None
    """The oldest step to which the rank can go back, if its part of the state is sharded."""
    lineage: int = 0
    """The last round in which all workers of its training were new."""
    nonce: str = ""
    """Distinguishes this lineage from another with the same number."""
    verify_every: int = 0
    is_proven: bool = False
    last_odd: list[Any] = field(default_factory=list)
    """These three are explained in `Verifying`."""

    @property
    def sealed(self) -> int:
        return self.step or 0


@dataclass(frozen=True)
class Healed:
    """Where this round's state came from, and whether this rank received it."""

    source: int
    step: int | None
    received: bool


def elect(offers: list[StateOffer]) -> int:
    """Return the rank whose state the round continues from.

    This is the lowest rank with the newest sealed step; for a sharded state, the newest step that
    all parts have sealed. Ranks that took part in the previous round take precedence over new ones.
    A torn rank is never chosen. Raises `NoSourceError` if all are torn.

    >>> def offer(kept: bool, step: int, torn: bool = False) -> StateOffer:
    ...     return StateOffer(kept, step, torn, "", "")
    >>> elect([offer(False, 0), offer(True, 6), offer(True, 7, torn=True), offer(True, 6)])
    1
    """
    anyone_kept = any(offer.kept for offer in offers)
    whole = [
        rank
        for rank, offer in enumerate(offers)
        if not offer.torn and (offer.kept or not anyone_kept)
    ]
    if not whole:
        raise NoSourceError(
            "every rank that was kept is torn: an optimizer had begun to change its parameters. "
            "The job must resume from its checkpoint, in new processes"
        )
    shards = max(offers[rank].shards for rank in whole)
    furthest: dict[int, int] = {}
    for offer in (offers[rank] for rank in whole if offers[rank].shards == shards):
        furthest[offer.shard] = max(offer.sealed, furthest.get(offer.shard, 0))
    step = min(furthest.values())
    # The check that some rank holds each part at exactly this step is made when the script adds it.
    return min(
        rank for rank in whole if (offers[rank].shards, offers[rank].sealed) == (shards, step)
    )


def receivers(offers: list[StateOffer], source: int) -> list[int]:
    """Return the ranks whose state differs from the source's."""
    one = offers[source]
    return [
        rank
        for rank, offer in enumerate(offers)
        if rank != source
        and (
            offer.torn
            or (offer.kept, offer.sealed, offer.digest) != (one.kept, one.sealed, one.digest)
        )
    ]


def prepare(sealing: Sealing) -> str:
    """Return the digest of this rank's state, or "" if it has none that others may receive.

    It may take as long as a new process takes to start, so it is called before all ranks meet.
    Raises `CannotBroadcastError` for an entry that cannot be sent.
    """
    sealing.contents.refuse_shards()
    if not sealing.has_begun:
        # Fail now, rather than in the round that needs to send the state.
        packed(image=sealing.image(sealing.contents.small_with({})).shapes())
    return digest_of(sealing.image({})) if sealing.has_begun and not sealing.torn else ""


def heal(
    sealing: Sealing,
    hashed: str,
    round_: Round,
    store: Store,
    expected_step: int | None,
    resuming: Callable[[], Resuming],
    verifying: Verifying,
) -> Healed:
    """Bring this rank to the state of the round's source. All ranks must call it together.

    `hashed` is what `prepare` has returned. If no rank was kept, the ranks first load the newest
    whole snapshot, if there is one.

    Ranks whose state equals the source's receive nothing. A rank that receives into its own tensors
    is torn until the last tensor has arrived and the digests match. Blocks while ranks are missing.
    Before anything is sent, raises `MismatchError` on all ranks if entries, sizes or types differ.
    """
    verified = verifying.offered()
    offers, manifest = _exchange_offers(sealing, round_, store, "offer", hashed, verified)
    verifying.compare(offers, round_, store)
    resumed = None
    if not any(offer.kept for offer in offers):
        # New ranks are compared now, with what they have loaded.
        sealing.lineage, sealing.nonce = round_.number, offers[0].nonce
        resumed = resuming()
        is_behind = resumed.load(store) and not sealing.step
        hashed = "" if is_behind else resumed.digest or digest_of(sealing.image({}))
        offers, manifest = _exchange_offers(sealing, round_, store, "resumed", hashed, verified)
    source = elect(offers)
    compare_manifests([one.manifest for one in offers], manifest, round_, store, "manifest")
    step = offers[source].step
    if expected_step is not None and (step or 0) < expected_step:
        raise NoSourceError(
            f"the round should continue from step {expected_step}, but its furthest rank has "
            f"sealed only {step or 0}"
        )
    to = receivers(offers, source)
    settle(sealing, offers, source, round_)
    if to:
        # A digest of what was loaded says nothing about what is sent, which is in another order.
        sent = "" if resumed and resumed.digest else hashed
        _pass_on(sealing, offers, [source, *to], round_, sent)
    sealing.step = step
    sealing.lineage, sealing.nonce = offers[source].lineage, offers[source].nonce
    if resumed is not None:
        resumed.put_back_own()
    sealing.shards.is_missing = (
        bool(step) and offers[source].shards > 1 and sealing.shards.held(step) is None
    )
    return Healed(source, step, round_.rank in to)


def digest_of(image: Image) -> str:
    return digest(image.tensors(), readers())


def _exchange_offers(
    sealing: Sealing,
    round_: Round,
    store: Store,
    name: str,
    hashed: str,
    verified: dict[str, Any],
) -> tuple[list[StateOffer], list[list[str]]]:
    samplers = [[f"state.{name}", one.given] for name, one in sealing.samplers.items()]
    manifest, manifest_digest = sealing.contents.described(*samplers)
    mine = StateOffer(
        # Like a new process, a rank that has never begun to train has nothing to offer.
        kept=sealing.has_begun,
        digest=hashed,
        manifest=manifest_digest,
        lineage=sealing.lineage,
        nonce=sealing.nonce,
        **sealing.holds(),
        **verified,
    )
    if round_.rank == 0:
        store.set("manifest", json.dumps(manifest))
    return [StateOffer(**one) for one in exchange(store, round_, name, asdict(mine))], manifest


def compare_manifests(
    hashes: Sequence[str], manifest: list[list[str]], round_: Round, store: Store, key: str
) -> None:
    """Raise on every rank if any describes its state differently from RANK 0."""
    others = [rank for rank, one in enumerate(hashes) if one != hashes[0]]
    if not others:
        return
    if round_.rank not in others:
        raise MismatchError(
            f"the state of rank {others[0]} differs from that of rank 0 in names, sizes or types; "
            f"its own error says where"
        )
    first = dict(json.loads(store.get(key)))
    here = dict(manifest)
    for name in (*first, *here):
        if first.get(name) != here.get(name):
            raise MismatchError(
                f"{name} is {here.get(name, 'missing')} on rank {round_.rank}, and "
                f"{first.get(name, 'missing')} on rank 0: build the same state on every rank"
            )
    raise MismatchError(
        f"the state of rank {round_.rank} has the entries of rank 0 in another order: build it the "
        "same way on every rank"
    )


def settle(sealing: Sealing, offers: list[StateOffer], source: int, round_: Round) -> None:
    mine, step = offers[round_.rank], offers[source].sealed
    if sealing.has_gone_back and mine.sealed < step:
        # Unlike others that are one step behind, it is not as it was after that step's passes.
        mine = offers[round_.rank] = replace(mine, kept=False)
    if not mine.kept:
        return
    if mine.sealed < step - 1:
        raise NoSourceError(
            f"rank {round_.rank} has sealed {mine.sealed} steps, and rank {source} {step}: ranks "
            "that are more than one step apart did not train in lock-step, so nothing says that "
            "their states belong together. Call state.commit() on every rank after each step"
        )
    if mine.sealed > step:
        # Some parts of the state have not sealed the last step, so it is repeated.
        sealing.undo_local()
        sealing.is_redo = True
    elif mine.sealed < step:
        # The source is one step ahead. This rank has also run that step's forward and backward
        # passes, because otherwise its collectives could not have ended. So its buffers and
        # generators are right.
        sealing.is_redo = False
    elif mine.torn:
        sealing.roll_back_local()
    else:
        sealing.roll_back()


def _pass_on(
    sealing: Sealing, offers: list[StateOffer], chain: list[int], round_: Round, hashed: str
) -> None:
    """Have the first rank of the chain send its state to the next, which hands it on, and so on."""
    if round_.rank not in chain:
        return
    place, source = chain.index(round_.rank), chain[0]
    before = chain[place - 1] if place else None
    after = chain[place + 1] if place + 1 < len(chain) else None
    contents, mine = sealing.contents, offers[round_.rank]
    if before is None:
        buffers = {name: one.detach().clone() for name, one in contents.buffers()}
        image, seed = sealing.image(contents.small_with(buffers)), torch.initial_seed()
        head = packed(image=image.shapes(), digest=hashed or digest_of(image), seed=seed)
        octets = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        length = torch.tensor(len(head), device="cpu")
        for tensors in ([length], [octets], [tensor for _, tensor in image.tensors()]):
            relay(tensors, before, after)
        return
    own = sealing.image({})
    # A rank that is whole, though behind, stays whole until everything has arrived: if the source
    # dies now, this may be the only whole rank left.
    staged = mine.kept and not mine.torn
    reused: dict[str, Tensor] = {} if staged else dict(own.tensors())
    devices = {name: one.device for name, one in own.parameters.items()}
    for name, optimizer in contents.optimizers.items():
        for number, parameter in enumerate(parameters_of(optimizer)):
            devices[f"{name}/{number}"] = parameter.device

    def make(name: str, shape: Shape) -> Tensor:
        if name in reused and shape.fits(reused[name]):
            return reused[name]
        if name not in devices and shape.device != "cpu":
            name = name.rpartition("/")[0]
        return shape.empty(devices.get(name))

    if not staged:
        sealing.torn = True
    received = _received(make, before, after)
    if digest_of(received["image"]) != received["digest"]:
        raise NoSourceError(
            f"what rank {round_.rank} received is not the state that rank {source} offered"
        )
    sealing.torn = True
    # A kept rank ran the source's last step, too, so it has its own buffers.
    sealing.load(received["image"], with_buffers=not mine.kept)
    if not mine.kept and offers[source].kept:
        derive_rng(received["seed"], round_.rank, offers[source].sealed)
    sealing.torn = False


def _received(
    make: Callable[[str, Shape], Tensor], before: int, after: int | None
) -> dict[str, Any]:
    length = torch.tensor(0, device="cpu")
    relay([length], before, after)
    octets = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    relay([octets], before, after)
    received = unpacked(octets.numpy().tobytes())
    received["image"] = received["image"].mapped(make)
    relay([tensor for _, tensor in received["image"].tensors()], before, after)
    return received


def relay(tensors: list[Tensor], before: int | None, after: int | None) -> None:
    """Receive tensors in place from one rank and send them to the next, batching small ones.

    The default group does that at once; a group of its own takes 20 ms to make and to destroy.
    """
    known = [device.type for device in dist.group.WORLD._device_types]  # type: ignore[union-attr]
    # The group's timeout may be shorter than the source takes for its digest.
    timeout = dist.distributed_c10d.default_pg_timeout
    for bucket in buckets_of(tensors):
        flat = torch.cat([one.reshape(-1) for one in bucket])
        wire = flat if flat.device.type in known else flat.to(known[0])
        if before is not None:
            dist.irecv(wire, before).wait(timeout)  # type: ignore[union-attr]
            with torch.no_grad():
                for one, came in zip(bucket, torch.split(wire, [one.numel() for one in bucket])):
                    one.copy_(came.view(one.shape))
        if after is not None:
            dist.isend(wire, after).wait(timeout)  # type: ignore[union-attr]


def buckets_of(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Divide tensors, in order, into batches of one type and device."""
    bucket: list[Tensor] = []
    octets = 0
    for tensor in tensors:
        size = tensor.nbytes
        alike = not bucket or (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not alike or octets + size > BUCKET_BYTES):
            yield bucket
            bucket, octets = [], 0
        bucket.append(tensor)
        octets += size
    if bucket:
        yield bucket
