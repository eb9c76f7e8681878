"""Maps the runner's memory into this process, but not into its forked children."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

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
    """Reserve addresses for a mapping of `size` bytes that begins at a huge page's boundary.

    Returns the first reserved address, the address for the mapping, and the reserved length. A
    mapping that begins elsewhere gets no huge pages.
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
    """Allocate huge pages for a file without pages, as far as the kernel has them."""
    for at in range(0, size // _HUGE_BYTES * _HUGE_BYTES, _HUGE_BYTES):
        os.posix_fallocate(fd, at, 1)  # The kernel collapses no range without a page.
    _libc.madvise(address, size // _HUGE_BYTES * _HUGE_BYTES, _MADV_COLLAPSE)


def _refuse_failed(address: int) -> None:
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def use_huge_pages(address: int, size: int) -> None:
    """Advise the kernel to use huge pages for this process's memory. It may ignore the advice."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(begin, end - begin, _MADV_HUGEPAGE)


def equal_memory(one: int, other: int, size: int) -> bool:
    """Whether the bytes at two addresses are equal."""
    return bool(_libc.memcmp(one, other, size) == 0)


def _unmap(pid: int, address: int, size: int) -> None:
    # A forked child does not have the mapping, and may have something else at that address.
    if os.getpid() == pid:
        _libc.munmap(address, size)
