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

_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_POPULATE = 0x8000


def mapped(fd: int, size: int) -> memoryview:
    """Map a file with all its pages. The mapping lasts until its last view is gone.

    Takes about a second for each gigabyte that has no pages yet, and releases the GIL. The
    descriptor can be closed afterwards. Raises `OSError` if there is no memory for the pages.
    """
    # Allocate all pages now: if memory runs out, a later write would raise SIGBUS.
    os.posix_fallocate(fd, 0, size)
    # mmap.mmap() would hold a descriptor, which forked children would inherit.
    address = _libc.mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_POPULATE, fd, 0
    )
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _libc.madvise(address, size, _MADV_DONTFORK)
    held = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(held, _unmap, os.getpid(), address, size).atexit = False
    return memoryview(held).cast("B")


def use_huge_pages(address: int, size: int) -> None:
    """Advise the kernel to use huge pages for this process's memory. It may ignore the advice."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(begin, end - begin, _MADV_HUGEPAGE)


def _unmap(pid: int, address: int, size: int) -> None:
    # A forked child does not have the mapping, and may have something else at that address.
    if os.getpid() == pid:
        _libc.munmap(address, size)
