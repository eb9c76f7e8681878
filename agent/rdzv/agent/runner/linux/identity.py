"""Accounts by number: act as one for file access, or become one for good."""

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
    """An account by its numbers, and the limits of its processes."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    umask: int = 0o022
    limits: tuple[tuple[str, int, int], ...] = ()
    """Limits by their names in `resource`, without RLIMIT_: soft and hard, -1 for none."""


SYS_SETGROUPS = {"x86_64": 116, "aarch64": 159, "riscv64": 159, "ppc64le": 81, "s390x": 206}
"""The number of the system call by machine; libc's function acts on the whole process."""


@contextmanager
def acting_as(identity: Identity | None) -> Iterator[None]:
    """Open, create and remove files with only an account's rights; None: with the present ones.

    Applies only to the calling thread, and only to files: no process of that account may signal or
    trace this one meanwhile. Never await inside: other code would run. It nests: leaving the inner
    one restores the account of the outer one.

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
    """Return the user and group with which this thread accesses files."""
    # No account has this number: nothing is set, and the present one is returned.
    nobody = ctypes.c_uint32(0xFFFFFFFF)
    return libc.setfsuid(nobody) & 0xFFFFFFFF, libc.setfsgid(nobody) & 0xFFFFFFFF


def _set_file_ids(uid: int, gid: int) -> None:
    libc.setfsgid(ctypes.c_uint32(gid))
    libc.setfsuid(ctypes.c_uint32(uid))
    # The calls do not report failure.
    if _file_ids() != (uid, gid):
        raise PermissionError(f"only root may act as user {uid} with group {gid}")


def set_thread_groups(groups: Sequence[int]) -> None:
    """Set the groups of this thread; libc's own function sets those of the whole process."""
    call = SYS_SETGROUPS.get(os.uname().machine)
    if call is None:
        raise PermissionError(f"acting as another user is not supported on {os.uname().machine}")
    listed = (ctypes.c_uint32 * len(groups))(*groups)
    if libc.syscall(ctypes.c_long(call), ctypes.c_long(len(groups)), listed) != 0:
        code = ctypes.get_errno()
        raise PermissionError(code, f"only root may act as another user ({os.strerror(code)})")


def become(identity: Identity) -> None:
    """Become another account, for good; `OSError` or `ValueError` if that fails."""
    for name, soft, hard in identity.limits:
        resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (soft, hard))
    os.setgroups(identity.groups)
    os.setresgid(identity.gid, identity.gid, identity.gid)
    os.setresuid(identity.uid, identity.uid, identity.uid)
    os.umask(identity.umask)
