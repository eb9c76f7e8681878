"""Copies tensors between CPU memory that torch does not own and the CPU or a GPU."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .mapped_memory import equal_memory, use_huge_pages

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CHUNK_BYTES = 32 << 20
_MOST_THREADS = 4
_TINY_BYTES = 4 << 10
_HUGE_BYTES = 4 << 20
_ROOM = 1.25
"""A copy is made on a GPU only if this many times the copy's size is free there."""


def set_aside(tensors: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
    """Copy GPU tensors on their own GPU if it has room, and tiny tensors on any device.

    A copy within a GPU takes a thousandth of the time of one to the CPU, so training need not wait
    for the latter. Returns the tensors, replaced by their copies where one was made, and whether
    all of them were copied.
    """
    needed: dict[torch.device, int] = {}
    for one in tensors:
        if one.is_cuda:
            needed[one.device] = needed.get(one.device, 0) + _bytes_of(one)
    roomy = {device for device, size in needed.items() if _free_bytes(device) > _ROOM * size}
    taken = [one.device in roomy or _bytes_of(one) <= _TINY_BYTES for one in tensors]
    return [one.clone() if take else one for one, take in zip(tensors, taken)], all(taken)


def copy_all(
    tensors: Sequence[Tensor], places: Sequence[Tensor], ready: Sequence[Any], threads: int = 1
) -> None:
    """Copy tensors to places, at least one of each pair on the CPU, and return when all are copied.

    GPU tensors go through pinned memory, on separate streams, once the events in `ready` have
    occurred. Other tensors are copied by `threads` threads, because a single thread does not use
    the full memory bandwidth.
    """
    import torch

    pieces: deque[tuple[Tensor, Tensor]] = deque()
    with torch.no_grad():
        for one, place in zip(tensors, places):
            if one.is_cuda:
                _fetch(one, place, ready)
            else:
                pieces.extend(_pieces(one.detach(), place))
    errors: list[Exception] = []
    others = [threading.Thread(target=_copy, args=(pieces, errors)) for _ in range(threads - 1)]
    for thread in others:
        thread.start()
    _copy(pieces, errors)
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]


def copiers() -> int:
    """Return how many threads should copy on the CPU: this worker's share of CPUs, at most 4.

    It is 1 if torch itself uses several threads to copy large tensors.
    """
    import torch

    return 1 if torch.get_num_threads() > 1 else readers()


def readers() -> int:
    """Return this worker's share of the CPUs, at most 4."""
    share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return min(max(share, 1), _MOST_THREADS)


def huge(tensor: Tensor) -> Tensor:
    """Advise huge pages for a new tensor, which make it three times as fast to fill."""
    if tensor.device.type == "cpu" and _bytes_of(tensor) >= _HUGE_BYTES:
        use_huge_pages(tensor.data_ptr(), _bytes_of(tensor))
    return tensor


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are known to be equal, bit by bit. False for tensors not on the CPU.

    Torch's version counter does not tell it: a change through `.data` does not count.
    """
    import torch

    for tensor in (one, other):
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if not is_plain or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return False
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return equal_memory(one.data_ptr(), other.data_ptr(), _bytes_of(one))


def _pieces(one: Tensor, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Divide a large contiguous CPU tensor into chunks; leave any other tensor whole."""
    is_plain = one.is_contiguous() and place.is_contiguous() and not place.is_cuda
    if not is_plain or _bytes_of(one) <= CHUNK_BYTES:
        return iter([(one, place)])
    import torch

    count = CHUNK_BYTES // one.element_size()
    return zip(torch.split(one.view(-1), count), torch.split(place.view(-1), count))


def _copy(pieces: deque[tuple[Tensor, Tensor]], errors: list[Exception]) -> None:
    """Copy pieces until there are no more. Torch releases the GIL while it copies."""
    import torch

    try:
        with torch.no_grad():
            while not errors:
                one, place = pieces.popleft()
                place.copy_(one)
    except IndexError:
        pass
    except Exception as error:
        errors.append(error)


def events(tensors: Sequence[Tensor]) -> list[Any]:
    """Return an event for each GPU, which completes once the work queued by this thread is done."""
    import torch

    found: list[Any] = []
    for device in {one.device for one in tensors if one.is_cuda}:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        found.append(event)
    return found


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _free_bytes(device: torch.device) -> int:
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached)


_streams: dict[torch.device, torch.cuda.Stream] = {}
_pinned: list[Tensor] = []


def _fetch(tensor: Tensor, place: Tensor, ready: Sequence[Any]) -> None:
    import torch

    if tensor.device not in _streams:
        _streams[tensor.device] = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
    if not _pinned:
        _pinned.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True))
    stream, (buffer,) = _streams[tensor.device], _pinned
    for event in ready:
        stream.wait_event(event)
    to = place.view(-1).view(torch.uint8)
    with torch.cuda.stream(stream):
        octets = tensor.contiguous().view(-1).view(torch.uint8)
        for begin in range(0, octets.numel(), CHUNK_BYTES):
            part = octets[begin : begin + CHUNK_BYTES]
            buffer[: part.numel()].copy_(part, non_blocking=True)
            stream.synchronize()
            to[begin : begin + part.numel()].copy_(buffer[: part.numel()])
