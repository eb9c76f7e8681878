"""A slot's format: how a snapshot in memory is written, verified and read.

    seal     48 bytes: magic, format, length and digest of the header; zero during a write
    header   JSON, up to 64 KiB from the start: step, lineage, layout, sizes, digest of the rest
    tensors  each aligned to 64 bytes
    head     pickled: everything else, and the names, shapes and types of the tensors

The seal is written last: a process that is killed while writing leaves no seal, so a slot with a
seal is complete. The digest detects any other damage. It is verified before anything in the
snapshot is used, and before its head is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from .contents import Image, Shape, packed, unpacked
from .link import Mark
from .staging import copy_all, digest, readers

if TYPE_CHECKING:
    from torch import Tensor

TENSORS_AT = 64 << 10

_ALIGNMENT = 64
_MAGIC, _FORMAT = b"rdzvsnap", 1
_SEAL = struct.Struct(">8sII32s")
SEAL_BYTES = _SEAL.size


@dataclass(frozen=True)
class Header:
    """Describes the snapshot in a slot."""

    step: int
    """The number of sealed steps in the saved state."""
    lineage: int
    """The last round in which all workers of this training were new."""
    shard: int
    shards: int
    """The number of parts, or 0 if the snapshot holds no state but only this rank's own values
    (random number generators).
    """
    rank: int
    world_size: int
    state: str
    """A digest of the names, shapes and types of the values given to State(...)."""
    part: str = ""
    """The same digest for the values added by state.add()."""
    nonce: str = ""
    """A random identifier that all ranks share from the start of their lineage.

    It is needed because a server restored from a backup may reuse a lineage's number.
    """
    round: int = 0
    """The round in which it was saved.

    Kept workers of a later round may repeat the step with other results. A node that was left out
    of that round still holds the first ones.
    """
    tensors_bytes: int = 0
    head_bytes: int = 0
    tensors_digest: str = ""
    """Equal on all ranks that have saved the same tensors."""
    digest: str = ""

    @property
    def series(self) -> str:
        """An identifier shared by snapshots from different ranks that form a consistent set."""
        ranks = self.world_size if self.part else 0
        text = f"{self.state}/{self.part}/{self.shards}/{ranks}/{self.nonce}/{self.round}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def mark(self) -> Mark:
        return Mark(self.lineage, self.step, self.series, self.shards, self.world_size)

    @property
    def bytes(self) -> int:
        return TENSORS_AT + self.tensors_bytes + self.head_bytes


@dataclass(frozen=True)
class Content:
    """One rank's saved values."""

    own: Mapping[str, Any]
    """The values that belong to this rank alone: its random number generators and buffers, and its
    place in the round that saved them.
    """
    images: Mapping[str, Image]
    """Under `state`, the values given to State(...); under `part`, those added by state.add()."""

    def tensors(self) -> list[Tensor]:
        return [one for image in self.images.values() for _, one in image.tensors()]

    def head(self) -> bytes:
        """Pickle everything else. Raises `CannotBroadcastError` if that is not possible."""
        shapes = {name: image.shapes() for name, image in self.images.items()}
        return packed(own=dict(self.own), **shapes)


class SlotError(ValueError):
    """A snapshot does not fit into its slot."""


class Slot:
    """Memory for one snapshot that outlives this process."""

    def __init__(self, memory: memoryview | bytearray) -> None:
        """Wrap more than 64 KiB of writable memory."""
        self._bytes = memoryview(memory)

    @property
    def size(self) -> int:
        return len(self._bytes)

    def header(self) -> Header | None:
        """Return the snapshot's header, or None if the slot holds no complete snapshot."""
        magic, version, length, sealed = _SEAL.unpack_from(self._bytes)
        if (magic, version) != (_MAGIC, _FORMAT) or length > TENSORS_AT - SEAL_BYTES:
            return None
        said = bytes(self._bytes[SEAL_BYTES : SEAL_BYTES + length])
        if hashlib.blake2b(said, digest_size=32).digest() != sealed:
            return None
        header = Header(**json.loads(said))
        return header if header.bytes <= self.size else None

    @property
    def seal_digest(self) -> str:
        return digest_of_seal(self._bytes[:SEAL_BYTES])

    @property
    def is_damaged(self) -> bool:
        """Whether the slot is neither empty nor holds a snapshot whose header can be read."""
        return any(self._bytes[:SEAL_BYTES]) and self.header() is None

    # ------------------------------------------------------------------ writing

    def copied(self, header: Header) -> Slot:
        """Return a copy of the snapshot in this process's own memory, without importing torch.

        Raises `OSError` if there is no memory for it.
        """
        memory = mmap.mmap(-1, header.bytes)
        memory[:] = self._bytes[: header.bytes]
        return Slot(memoryview(memory))

    def clear(self) -> None:
        self._bytes[:SEAL_BYTES] = bytes(SEAL_BYTES)

    def begin(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Clear the slot and return where to copy the tensors.

        Raises `SlotError` if the slot is too small.
        """
        self.clear()
        if (needed := bytes_needed(tensors, b"")) > self.size:
            raise SlotError(f"a snapshot of {needed} bytes does not fit into {self.size}")
        return self._places(tensors)

    def seal(self, header: Header, tensors: Sequence[Tensor], head: bytes) -> Header:
        """Complete the snapshot once the tensors are copied; return the header as written."""
        if (end := bytes_needed(tensors, head)) > self.size:
            raise SlotError(f"a snapshot of {end} bytes does not fit into {self.size}")
        begin = end - len(head)
        self._bytes[begin:end] = head
        sizes = replace(header, tensors_bytes=begin - TENSORS_AT, head_bytes=len(head))
        tensors_digest = self._tensors_digest(sizes)
        written = replace(
            sizes, tensors_digest=tensors_digest, digest=self._digest(sizes, tensors_digest)
        )
        said = json.dumps(asdict(written)).encode()
        self._bytes[SEAL_BYTES : SEAL_BYTES + len(said)] = said
        sealed = hashlib.blake2b(said, digest_size=32).digest()
        self._bytes[:SEAL_BYTES] = _SEAL.pack(_MAGIC, _FORMAT, len(said), sealed)
        return written

    # ------------------------------------------------------------------ reading

    def is_sound(self, header: Header, threads: int | None = None) -> bool:
        """Return whether the snapshot is undamaged, reading all of it once."""
        if self.header() != header:
            return False
        return (
            self._digest(header, self._tensors_digest(header, threads or readers()))
            == header.digest
        )

    def read(self, header: Header, *, in_place: bool = False) -> Content:
        """Return the snapshot, with parameters sharing the slot's memory.

        Optimizer tensors are copied to their original device. With `in_place`, they share the
        memory, too, and are not moved.

        Call this only for an undamaged snapshot.
        """
        own, shapes = self._head(header)
        places = iter(
            self._places([one for image in shapes.values() for _, one in image.tensors()])
        )
        images = {name: image.filled(places) for name, image in shapes.items()}
        if not in_place:
            for name, image in images.items():
                copies = [shape.empty() for shape in shapes[name].optimizer_tensors()]
                copy_all(image.optimizer_tensors(), copies, [], readers())
                images[name] = image.filled(iter([*image.parameters.values(), *copies]))
        return Content(own, images)

    def shapes(self, header: Header) -> dict[str, Image]:
        """Return the snapshot's images with shapes in place of tensors."""
        return self._head(header)[1]

    def _head(self, header: Header) -> tuple[dict[str, Any], dict[str, Image]]:
        begin = TENSORS_AT + header.tensors_bytes
        parts = unpacked(self._bytes[begin : begin + header.head_bytes])
        return parts.pop("own"), parts

    def _places(self, shapes: Sequence[Tensor | Shape]) -> list[Tensor]:
        """Return consecutive views of the memory, each with its own storage."""
        import torch

        places, at = [], TENSORS_AT
        for one in shapes:
            size = one.nbytes
            if size:
                octets = torch.frombuffer(self._bytes, dtype=torch.uint8, count=size, offset=at)
                places.append(octets.view(one.dtype).view(one.shape))
            else:
                places.append(torch.empty(one.shape, dtype=one.dtype))
            at += _aligned(size)
        return places

    def _tensors_digest(self, header: Header, threads: int = 1) -> str:
        import torch

        memory = torch.frombuffer(self._bytes, dtype=torch.uint8)
        return digest(
            [("tensors", memory[TENSORS_AT : TENSORS_AT + header.tensors_bytes])], threads
        )

    def _digest(self, header: Header, tensors_digest: str) -> str:
        begin = TENSORS_AT + header.tensors_bytes
        head = hashlib.blake2b(self._bytes[begin : begin + header.head_bytes], digest_size=16)
        head.update(tensors_digest.encode())
        return head.hexdigest()


def digest_of_seal(seal: bytes | memoryview) -> str:
    """Return what workers report of each saved snapshot, to tell it from any other."""
    return hashlib.blake2b(seal, digest_size=32).hexdigest()


def bytes_needed(tensors: Sequence[Tensor], head: bytes) -> int:
    return TENSORS_AT + sum(_aligned(one.nbytes) for one in tensors) + len(head)


def _aligned(octets: int) -> int:
    return -(-octets // _ALIGNMENT) * _ALIGNMENT
