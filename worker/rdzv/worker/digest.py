"""A digest of tensors: equal for equal bits on any device, and computed in one pass over memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 1 << 20
_MULTIPLIER = 0x2545F4914F6CDD1D
"""An odd number, so that multiplying by it loses no information."""
_COLUMNS = 4096
_ROWS = 7
"""The number of rows that a CPU sums at a time. They stay in its cache for the second sum, and are
too few for torch to divide among threads of its own.
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
    if octets.storage_offset() % 8:
        octets = octets.clone()
    whole = octets.numel() // 8 * 8
    chunks = torch.split(octets[:whole].view(torch.int64), _CHUNK)
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
    """Return the sum of word i times (2i + 1), over all words, times the multiplier.

    Word i is in row r and column c of a grid, so 2i + 1 = 2 r columns + (2c + 1). Summing the rows
    and the columns avoids a product for each word, which would take a CPU longer than the sums.
    """
    import torch

    height = words.numel() // _COLUMNS
    grid = words[: height * _COLUMNS].view(height, _COLUMNS)
    rows = torch.empty(height, dtype=torch.int64, device=words.device)
    columns = torch.zeros(_COLUMNS, dtype=torch.int64, device=words.device)
    at_once = _ROWS if words.device.type == "cpu" else max(height, 1)
    for part, sums in zip(torch.split(grid, at_once), torch.split(rows, at_once)):
        torch.sum(part, 1, out=sums)
        columns += part.sum(0)
    numbers = torch.arange(_COLUMNS, device=words.device) * 2 + 1
    total = (rows * torch.arange(height, device=words.device)).sum() * (2 * _COLUMNS)
    total += (columns * numbers).sum()
    rest = words[height * _COLUMNS :]
    total += (rest * (numbers[: rest.numel()] + 2 * height * _COLUMNS)).sum()
    return total * _MULTIPLIER
