"""A digest of tensors: equal for equal bits on any device, and computed in one pass over memory."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_CHUNK = 1 << 23
"""The number of words in each part of a tensor that one thread sums."""
_MULTIPLIER = 0x2545F4914F6CDD1D
_WORD_MULTIPLIER = 0x2545F491
"""Odd numbers, so that multiplying by them loses no information."""
_COLUMNS = 28672
"""The number of 4-byte words that are added at a time. On a CPU, their sums stay in its cache, and
they are too few for torch to divide among threads of its own.
"""


def digest(tensors: Iterable[tuple[str, Tensor]], threads: int = 1) -> str:
    """Return a digest of names, types, shapes and bits, computed by `threads` threads.

    It detects accidental differences between tensors, but does not protect against an adversary.
    """
    import torch

    described = hashlib.blake2b(digest_size=16)
    sums: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for name, tensor in tensors:
            described.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}\n".encode())
            sums.setdefault(tensor.device, []).append(_sum(tensor.detach(), threads))
        # Make one transfer per device, not one per tensor.
        for many in sums.values():
            described.update(repr(torch.stack(many).tolist()).encode())
    return described.hexdigest()


def _sum(tensor: Tensor, threads: int = 1) -> Tensor:
    """Return an order-dependent sum of a tensor's bits, as a single int64 tensor."""
    import torch

    flat = tensor.reshape(-1).contiguous()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if flat.numel() == 0:
        return total
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    octets = flat.view(torch.uint8)
    if octets.storage_offset() % 4:
        octets = octets.clone()
    whole = octets.numel() // 4 * 4
    chunks = torch.split(octets[:whole].view(torch.int32), _CHUNK)
    if threads > 1 and len(chunks) > 1:
        with ThreadPoolExecutor(threads) as pool:
            sums = list(pool.map(_sum_of_chunk, chunks))
    else:
        sums = [_sum_of_chunk(chunk) for chunk in chunks]
    for one in sums:
        total = total * _MULTIPLIER + one
    for octet in octets[whole:].to(torch.int64):
        total = total * _MULTIPLIER + octet
    return total


def _sum_of_chunk(words: Tensor) -> Tensor:
    """Return an order-dependent sum of 4-byte words, as a single int64 tensor.

    The words form rows of a grid. Each column is a polynomial of its words, and column c counts
    2c + 1 times. A changed word changes the sum, because all factors are odd.
    """
    odd_numbers = _odd_numbers(words.device)
    height, left = divmod(words.numel(), _COLUMNS)
    total = (words[height * _COLUMNS :] * odd_numbers[:left]).sum()
    if height:
        grid = words[: height * _COLUMNS].view(height, _COLUMNS)
        sums = sums_of_columns(grid) if words.device.type == "cpu" else sums_at_once(grid)
        total += (sums * odd_numbers).sum() * _MULTIPLIER
    return total


@functools.cache
def _odd_numbers(device: torch.device) -> Tensor:
    import torch

    return torch.arange(_COLUMNS, device=device) * 2 + 1


def sums_of_columns(grid: Tensor) -> Tensor:
    """Return the polynomial of each column, in one pass over memory."""
    import torch

    sums = torch.zeros(_COLUMNS, dtype=torch.int32, device=grid.device)
    for row in grid:
        torch.add(row, sums, alpha=_WORD_MULTIPLIER, out=sums)
    return sums


def sums_at_once(grid: Tensor) -> Tensor:
    """Return the same, with few operations for a GPU to start, but a copy of the grid."""
    import torch

    power, powers = 1, []
    for _ in grid:
        powers.append(power if power < 1 << 31 else power - (1 << 32))
        power = power * _WORD_MULTIPLIER % (1 << 32)
    factors = torch.tensor(powers[::-1], dtype=torch.int32, device=grid.device)
    return (grid * factors.view(-1, 1)).sum(0, dtype=torch.int32)
