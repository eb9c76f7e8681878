"""The runner's memory, mapped into this process; copies and digests of torch's tensors.

A mapping is not inherited by forked children. Tensors are copied between such memory and the CPU or
a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 32 << 20
_MOST_THREADS = 4
_TINY_BYTES = 4 << 10
_WORTH_HUGE_BYTES = 4 << 20
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
            needed[one.device] = needed.get(one.device, 0) + one.nbytes
    roomy = {device for device, size in needed.items() if _free_bytes(device) > _ROOM * size}
    taken = [one.device in roomy or one.nbytes <= _TINY_BYTES for one in tensors]
    return [one.clone() if take else one for one, take in zip(tensors, taken)], all(taken)


def copy_all(
    tensors: Sequence[Tensor], places: Sequence[Tensor], ready: Sequence[Any], threads: int = 1
) -> None:
    """Copy tensors to places, and return when all are copied.

    From a GPU to the CPU, they go through pinned memory, on separate streams, once the events in
    `ready` have occurred. Other tensors are copied by `threads` threads, because a single thread
    does not use the full memory bandwidth.
    """
    pieces: deque[tuple[Tensor, Tensor]] = deque()
    with torch.no_grad():
        for one, place in zip(tensors, places):
            if one.is_cuda and not place.is_cuda:
                _fetch(one, place, ready)
            else:
                pieces.extend(_pieces(one.detach(), place))
    errors: list[Exception] = []
    # To start a thread takes longer than to copy a small state.
    threads = min(threads, 1 + sum(one.nbytes for one, _ in pieces) // CHUNK_BYTES)
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
    return 1 if torch.get_num_threads() > 1 else readers()


def readers() -> int:
    share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return min(max(share, 1), _MOST_THREADS)


def huge(tensor: Tensor) -> Tensor:
    """Advise huge pages for a new tensor, which make it three times as fast to fill."""
    if tensor.device.type == "cpu" and tensor.nbytes >= _WORTH_HUGE_BYTES:
        address = tensor.data_ptr()
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(begin, end - begin, _MADV_HUGEPAGE)  # It may ignore the advice.
    return tensor


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors on the CPU are equal, bit by bit.

    Torch's version counter does not tell it: a change through `.data` does not count.
    """
    for tensor in (one, other):
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if not is_plain or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return False
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return bool(_libc.memcmp(one.data_ptr(), other.data_ptr(), one.nbytes) == 0)


def _pieces(one: Tensor, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    is_plain = one.is_contiguous() and place.is_contiguous() and not place.is_cuda
    if not is_plain or one.nbytes <= CHUNK_BYTES:
        return iter([(one, place)])
    count = CHUNK_BYTES // one.element_size()
    return zip(torch.split(one.view(-1), count), torch.split(place.view(-1), count))


def _copy(pieces: deque[tuple[Tensor, Tensor]], errors: list[Exception]) -> None:
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
    """Return an event for each GPU, reached once the work queued by this thread is done."""
    found: list[Any] = []
    for device in {one.device for one in tensors if one.is_cuda}:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        found.append(event)
    return found


def _free_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached)


_streams: dict[torch.device, torch.cuda.Stream] = {}
_pinned: list[Tensor] = []


def _fetch(tensor: Tensor, place: Tensor, ready: Sequence[Any]) -> None:
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


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10
_MAP_POPULATE = 0x8000
_HUGE_BYTES = 2 << 20
_PROT_NONE = 0


def mapped(fd: int, size: int) -> memoryview:
    """Map a file with all its pages. The mapping lasts until its last view is gone.

    A file without pages gets huge pages, as far as the kernel has any, so that later processes map
    it quickly. Takes about a second for each gigabyte that has no pages yet, and releases the GIL.
    The descriptor can be closed afterwards. Raises `OSError` if there is no memory for the pages.
    """
    has_pages = os.fstat(fd).st_blocks > 0
    begin, address, length = _reserve(size)
    try:
        if not has_pages:
            _map(fd, size, address)
            _allocate_huge_pages(fd, size, address)
        # Allocate all pages now: if memory runs out, a later write would raise SIGBUS.
        os.posix_fallocate(fd, 0, size)
        _map(fd, size, address, _MAP_POPULATE)
    except OSError:
        _libc.munmap(begin, length)
        raise
    _libc.madvise(address, size, _MADV_DONTFORK)
    held = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(held, _unmap, os.getpid(), begin, length).atexit = False
    return memoryview(held).cast("B")


def _reserve(size: int) -> tuple[int, int, int]:
    """Reserve addresses from which a mapping of `size` bytes begins at a huge page's boundary.

    Returns the first one, that of the mapping, and the reserved length.
    """
    length = size + _HUGE_BYTES
    begin = _libc.mmap(None, length, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    _refuse_failed(begin)
    return begin, -(-begin // _HUGE_BYTES) * _HUGE_BYTES, length


def _map(fd: int, size: int, address: int, flags: int = 0) -> None:
    # mmap.mmap() would hold a descriptor, which forked children would inherit.
    access = mmap.PROT_READ | mmap.PROT_WRITE
    _refuse_failed(_libc.mmap(address, size, access, mmap.MAP_SHARED | _MAP_FIXED | flags, fd, 0))


def _allocate_huge_pages(fd: int, size: int, address: int) -> None:
    for at in range(0, size // _HUGE_BYTES * _HUGE_BYTES, _HUGE_BYTES):
        os.posix_fallocate(fd, at, 1)  # The kernel collapses no range without a page.
    _libc.madvise(address, size // _HUGE_BYTES * _HUGE_BYTES, _MADV_COLLAPSE)


def _refuse_failed(address: int) -> None:
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _unmap(pid: int, address: int, size: int) -> None:
    # A forked child does not have the mapping, and may have something else at that address.
    if os.getpid() == pid:
        _libc.munmap(address, size)


# ------------------------------------------------------------------ digests

_SMALL_BYTES, _TOGETHER = 64 << 10, 512
"""Up to this many tensors of at most this size are summed together."""
_WORDS_AT_ONCE = 1 << 23
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
    described = hashlib.blake2b(digest_size=16)
    sums: dict[torch.device, list[Tensor]] = {}
    small: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for name, tensor in tensors:
            described.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}\n".encode())
            octets = as_octets(tensor.detach())
            if octets.numel() > _SMALL_BYTES:
                sums.setdefault(tensor.device, []).append(_sum(octets, threads))
            elif octets.numel():
                small.setdefault(tensor.device, []).append(octets)
        # A sum takes a dozen operations, so small tensors are put together.
        for device, many in small.items():
            for begin in range(0, len(many), _TOGETHER):
                together = torch.cat(many[begin : begin + _TOGETHER])
                sums.setdefault(device, []).append(_sum(together, threads))
        # Make one transfer per device, not one per tensor.
        for many in sums.values():
            described.update(repr(torch.stack(many).tolist()).encode())
    return described.hexdigest()


def as_octets(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1).contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)


def _sum(octets: Tensor, threads: int) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=octets.device)
    if octets.storage_offset() % 4:
        octets = octets.clone()
    whole = octets.numel() // 4 * 4
    chunks = torch.split(octets[:whole].view(torch.int32), _WORDS_AT_ONCE)
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
    return torch.arange(_COLUMNS, device=device) * 2 + 1


def sums_of_columns(grid: Tensor) -> Tensor:
    sums = torch.zeros(_COLUMNS, dtype=torch.int32, device=grid.device)
    for row in grid:
        torch.add(row, sums, alpha=_WORD_MULTIPLIER, out=sums)
    return sums


def sums_at_once(grid: Tensor) -> Tensor:
    """Return the same, with few operations for a GPU to start, but a copy of the grid."""
    power, powers = 1, []
    for _ in grid:
        powers.append(power if power < 1 << 31 else power - (1 << 32))
        power = power * _WORD_MULTIPLIER % (1 << 32)
    factors = torch.tensor(powers[::-1], dtype=torch.int32, device=grid.device)
    return (grid * factors.view(-1, 1)).sum(0, dtype=torch.int32)
