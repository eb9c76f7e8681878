"""Fills each rank's part of a sharded state from those that all ranks hold, however it is divided.

A part of a tensor is a *box* in it. Each rank tells all others which boxes it holds and wants, and
sends each of them the overlaps of its own boxes with theirs. So no rank receives more than its
part, and nothing that it holds already.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .contents import Image, is_tensor
from .rounds import NoSourceError
from .staging import as_octets, digest

if TYPE_CHECKING:
    from .rounds import Round

BATCH = 8 << 20
"""About how many elements each rank receives at a time; more if its part of a tensor is larger."""
DIGEST_BYTES = 16


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The offsets and sizes of a part of a tensor."""
Boxes = dict[str, tuple[Box, Tensor]]


def boxes_of(image: Image, part: str = "") -> Boxes:
    """Map names to an image's tensors and their boxes.

    What is not sharded is named after its `part`, if that is given: others have other values.
    """
    found = {}
    for path, value, chunk in image.placed():
        if is_tensor(value):
            name, sizes = ".".join(path), tuple(value.shape)
            if chunk is None:
                name += part
            offsets = (0,) * len(sizes) if chunk is None else chunk.offsets
            found[name] = ((offsets, sizes), value)
    return found


def unsharded(image: Image) -> Iterator[tuple[str, Tensor]]:
    for path, value, chunk in image.placed():
        if chunk is None and is_tensor(value):
            yield ".".join(path), value


def overlap(one: Box, other: Box) -> Box | None:
    """Return the box that is in both, or None if it is empty.

    >>> overlap(((0, 0), (4, 8)), ((3, 0), (4, 8)))
    ((3, 0), (1, 8))
    >>> overlap(((0,), (4,)), ((4,), (4,)))
    """
    offsets = tuple(map(max, one[0], other[0]))
    ends = [min(a + n, b + m) for a, n, b, m in zip(*one, *other)]
    sizes = tuple(end - begin for begin, end in zip(offsets, ends))
    return (offsets, sizes) if all(size > 0 for size in sizes) else None


class Resharding:
    """What each rank holds and wants, and what is sent for it."""

    def __init__(self, have: Iterable[Boxes], want: Boxes, round_: Round) -> None:
        """Tell all ranks what this one has and wants. All ranks call it together."""
        self._rank, self._ranks, self._want = round_.rank, range(round_.world_size), want
        self._have: dict[str, dict[Box, Tensor]] = {}
        for name, (box, one) in chain.from_iterable(held.items() for held in have):
            self._have.setdefault(name, {})[box] = one
        mine = {name: list(boxes) for name, boxes in self._have.items()}
        said: list[Any] = [None] * round_.world_size
        dist.all_gather_object(said, (mine, {name: box for name, (box, _) in want.items()}))
        self._wanted: list[dict[str, Box]] = [wanted for _, wanted in said]
        self._holders: dict[str, dict[Box, list[int]]] = {}
        for rank, (held, _) in enumerate(said):
            for name, box in ((name, box) for name, boxes in held.items() for box in boxes):
                self._holders.setdefault(name, {}).setdefault(box, []).append(rank)

    def lacking(self) -> str:
        """Return what this rank wants and no rank holds, or an empty text."""
        for name, (box, _) in self._want.items():
            found = self._pieces(name, self._rank, self._holders.get(name, ()))
            if sum(_size(common) for _, common, _ in found) < _size(box):
                where = ", ".join(f"{at}:{at + size}" for at, size in zip(*box))
                return f"no rank holds [{where}] of {name}, which rank {self._rank} needs"
        return ""

    def run(self) -> None:
        """Fill what this rank wants. All ranks call it together."""
        sizes = Counter[str]()
        for wanted in self._wanted:
            sizes.update({name: _size(box) for name, box in wanted.items()})
        batch: list[str] = []
        for name in sorted(sizes):
            if sum(sizes[one] for one in (*batch, name)) > BATCH * len(self._ranks):
                self._run(batch)
                batch = []
            batch.append(name)
        self._run(batch)

    def _pieces(self, name: str, to: int, boxes: Iterable[Box]) -> Iterator[tuple[Box, Box, int]]:
        """Yield those of these boxes that a rank wants, what of each, and who sends it."""
        if (wanted := self._wanted[to].get(name)) is not None:
            for box in sorted(boxes):
                if (common := overlap(box, wanted)) is not None:
                    ranks = self._holders[name][box]
                    yield box, common, to if to in ranks else ranks[to % len(ranks)]

    def _run(self, names: Iterable[str]) -> None:
        sent: list[list[Tensor]] = [[] for _ in self._ranks]
        places: list[list[Tensor]] = [[] for _ in self._ranks]
        for name in names:
            have = self._have.get(name, {})
            for to in self._ranks:
                for box, common, source in self._pieces(name, to, have):
                    if source == self._rank:
                        sent[to].append(_cut(have[box], box, common))
            for _, common, source in self._pieces(name, self._rank, self._holders.get(name, ())):
                wanted, tensor = self._want[name]
                places[source].append(_cut(tensor, wanted, common))
        with torch.no_grad():
            for one, place in zip(sent[self._rank], places[self._rank]):
                place.copy_(one)
            sent[self._rank], places[self._rank] = [], []
            exchange_tensors(sent, places)


def exchange_tensors(sent: list[list[Tensor]], places: list[list[Tensor]]) -> None:
    """Send tensors to each rank, and receive those from each into `places`.

    Raises `NoSourceError` if what comes is not what was sent.
    """
    known = [device.type for device in dist.group.WORLD._device_types]  # type: ignore[union-attr]
    ours = next((one.device for one in chain(*sent, *places)), torch.device("cpu"))
    device = ours if ours.type in known else torch.device(known[0])

    def packed_for(tensors: list[Tensor]) -> list[Tensor]:
        octets = [as_octets(one).to(device) for one in tensors]
        return [*octets, *([_digest_of(octets)] if octets else [])]

    outgoing = [packed_for(one) for one in sent]
    incoming = [[one.nbytes for one in of] + [DIGEST_BYTES] * bool(of) for of in places]
    flat = [one for of in outgoing for one in of]
    wire = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
    came = torch.empty(sum(map(sum, incoming)), dtype=torch.uint8, device=device)
    counts = [sum(one.numel() for one in of) for of in outgoing]
    dist.all_to_all_single(came, wire, [sum(one) for one in incoming], counts)
    parts = iter(torch.split(came, list(chain(*incoming))))
    for rank, of in enumerate(places):
        pieces = [next(parts) for _ in of]
        if pieces and not torch.equal(_digest_of(pieces), next(parts)):
            raise NoSourceError(f"what came from rank {rank} is not what it has sent")
        for place, piece in zip(of, pieces):
            # A view of another type needs an aligned tensor.
            place.copy_(piece.clone().view(place.dtype).view(place.shape))


def _digest_of(pieces: list[Tensor]) -> Tensor:
    found = bytes.fromhex(digest(("", one) for one in pieces))
    return torch.tensor(list(found), dtype=torch.uint8, device=pieces[0].device)


def _size(box: Box) -> int:
    return math.prod(box[1])


def _cut(tensor: Tensor, box: Box, common: Box) -> Tensor:
    """Return the part of a box's tensor that another box has in common with it."""
    begin = [at - first for at, first in zip(common[0], box[0])]
    return tensor.detach()[tuple(slice(at, at + size) for at, size in zip(begin, common[1]))]
