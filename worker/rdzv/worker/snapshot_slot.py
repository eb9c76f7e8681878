"""Snapshots in memory: how they are written, verified and read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .contents import Image, Shape, packed, unpacked
from .slot_format import TENSORS_AT, Header, SealedMemory, SnapshotError
from .staging import digest, readers

_ALIGNMENT = 64


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
        shapes = {name: image.shapes() for name, image in self.images.items()}
        return packed(own=dict(self.own), **shapes)


class Slot(SealedMemory):
    """Memory for one snapshot, with its tensors."""

    def begin(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Clear the slot and return where to copy the tensors."""
        self.clear()
        if (needed := bytes_needed(tensors, b"")) > self.size:
            raise SnapshotError(f"a snapshot of {needed} bytes does not fit into {self.size}")
        return self._places(tensors)

    def seal(self, header: Header, tensors: Sequence[Tensor], head: bytes) -> Header:
        """Complete the snapshot once the tensors are copied."""
        if (end := bytes_needed(tensors, head)) > self.size:
            raise SnapshotError(f"a snapshot of {end} bytes does not fit into {self.size}")
        begin = end - len(head)
        self.memory[begin:end] = head
        sizes = replace(header, tensors_bytes=begin - TENSORS_AT, head_bytes=len(head))
        tensors_digest = self._tensors_digest(sizes)
        written = replace(
            sizes, tensors_digest=tensors_digest, digest=self._digest(sizes, tensors_digest)
        )
        self._complete(written)
        return written

    def is_sound(self, header: Header, threads: int | None = None) -> bool:
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
        shapes = unpacked(self.head_bytes(header))
        own = shapes.pop("own")
        places = iter(
            self._places([one for image in shapes.values() for _, one in image.tensors()])
        )
        images = {name: image.filled(places) for name, image in shapes.items()}
        if not in_place:
            for name, image in images.items():
                images[name] = image.with_optimizers_on(shapes[name])
        return Content(own, images)

    def head_bytes(self, header: Header) -> bytes:
        """Return everything but the tensors, whose shapes are in their places, pickled."""
        begin = TENSORS_AT + header.tensors_bytes
        return bytes(self.memory[begin : begin + header.head_bytes])

    def _places(self, shapes: Sequence[Tensor | Shape]) -> list[Tensor]:
        """Return consecutive views of the memory, each with its own storage."""
        places, at = [], TENSORS_AT
        for one in shapes:
            size = one.nbytes
            if size:
                octets = torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=at)
                places.append(octets.view(one.dtype).view(one.shape))
            else:
                places.append(torch.empty(one.shape, dtype=one.dtype))
            at += _aligned(size)
        return places

    def _tensors_digest(self, header: Header, threads: int = 1) -> str:
        memory = torch.frombuffer(self.memory, dtype=torch.uint8)
        return digest(
            [("tensors", memory[TENSORS_AT : TENSORS_AT + header.tensors_bytes])], threads
        )

    def _digest(self, header: Header, tensors_digest: str) -> str:
        head = hashlib.blake2b(self.head_bytes(header), digest_size=16)
        head.update(tensors_digest.encode())
        return head.hexdigest()


def bytes_needed(tensors: Sequence[Tensor], head: bytes) -> int:
    return TENSORS_AT + sum(_aligned(one.nbytes) for one in tensors) + len(head)


def _aligned(octets: int) -> int:
    return -(-octets // _ALIGNMENT) * _ALIGNMENT
