"""A digest of tensors: equal for equal bits, on any device, in one pass over the memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 1 << 20
_MULTIPLIER = 0x2545F4914F6CDD1D
"""Odd, so that multiplying by it loses nothing."""


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of names, types, shapes and bits.

    It distinguishes tensors that differ by accident, but does not protect against an adversary.
    """
    import torch

    described = hashlib.blake2b(digest_size=16)
    sums: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for name, tensor in tensors:
            described.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}\n".encode())
            sums.setdefault(tensor.device, []).append(_sum(tensor.detach()))
        # One transfer for each device, not one for each tensor.
        for many in sums.values():
            described.update(repr(torch.stack(many).tolist()).encode())
    return described.hexdigest()


def _sum(tensor: Tensor) -> Tensor:
    """Return a sum of a tensor's bits that depends on their order, as one int64 tensor."""
    import torch

    flat = tensor.reshape(-1).contiguous()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if flat.numel() == 0:
        return total
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    octets = flat.view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    whole = octets.numel() // 8 * 8
    words = octets[:whole].view(torch.int64)
    weights = torch.arange(min(_CHUNK, words.numel()), device=tensor.device)
    weights.mul_(2 * _MULTIPLIER).add_(_MULTIPLIER)
    for chunk in torch.split(words, _CHUNK):
        total = total * _MULTIPLIER + (chunk * weights[: chunk.numel()]).sum()
    for octet in octets[whole:].to(torch.int64):
        total = total * _MULTIPLIER + octet
    return total
