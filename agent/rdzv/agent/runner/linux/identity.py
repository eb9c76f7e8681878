"""Numeric accounts: act as one temporarily for file access, or become one permanently."""

from __future__ import annotations

import ctypes
import os
import resource
from contextlib import contextmanager
from dataclasses import dataclass

from .libc import libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Identity:
    """An account's numeric ids, and the resource limits for its processes."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    umask: int = 0o022
    limits: tuple[tuple[str, int, int], ...] = ()
    """Soft and hard limits by their name in `resource`, without RLIMIT_. -1 means unlimited."""


SYS_SETGROUPS = {"x86_64": 116, "aarch64": 159, "riscv64": 159, "ppc64le": 81, "s390x": 206}
"""The system call's number for each machine type; libc's function affects the whole process."""


@contextmanager
def acting_as(identity: Identity | None) -> Iterator[None]:
    """Access files with only an account's rights inside the `with` block, if one is given.

    Affects only the calling thread, and only file access: no process of that account may signal or
    trace this one in the meantime. Never await inside the block, because other code would then run
    with these rights. Blocks can be nested: leaving the inner one restores the outer one's account.

    Raises:
        PermissionError: this process is not root.
    """
    if identity is None:
        yield
        return
    groups, (uid, gid) = os.getgroups(), _file_ids()
    set_thread_groups(identity.groups)
    try:
        _set_file_ids(identity.uid, identity.gid)
        yield
    finally:
        _set_file_ids(uid, gid)
        set_thread_groups(groups)


def _file_ids() -> tuple[int, int]:
    """Return the user and group ids with which this thread accesses files."""
    # No account has this number, so nothing is set and the current one is returned.
    nobody = ctypes.c_uint32(0xFFFFFFFF)
    return libc.setfsuid(nobody) & 0xFFFFFFFF, libc.setfsgid(nobody) & 0xFFFFFFFF


def _set_file_ids(uid: int, gid: int) -> None:
    libc.setfsgid(ctypes.c_uint32(gid))
    libc.setfsuid(ctypes.c_uint32(uid))
    # The calls do not report failure.
    if _file_ids() != (uid, gid):
        raise PermissionError(f"only root may act as user {uid} with group {gid}")


def set_thread_groups(groups: Sequence[int]) -> None:
    """Set this thread's groups; libc's own function would set those of the whole process."""
    call = SYS_SETGROUPS.get(os.uname().machine)
    if call is None:
        raise PermissionError(f"acting as another user is not supported on {os.uname().machine}")
    listed = (ctypes.c_uint32 * len(groups))(*groups)
    if libc.syscall(ctypes.c_long(call), ctypes.c_long(len(groups)), listed) != 0:
        code = ctypes.get_errno()
        raise PermissionError(code, f"only root may act as another user ({os.strerror(code)})")


def become(identity: Identity) -> None:
    """Become another account permanently. Raises `OSError` or `ValueError` if that fails."""
    for name, soft, hard in identity.limits:
        resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (soft, hard))
    os.setgroups(identity.groups)
    os.setresgid(identity.gid, identity.gid, identity.gid)
    os.setresuid(identity.uid, identity.uid, identity.uid)
    os.umask(identity.umask)
