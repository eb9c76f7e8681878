"""Linux calls: time since boot with an alarm, accounts, and how much memory is free."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


# ---------------------------------------------------------------------- time

_TFD_TIMER_ABSTIME = 1


def boottime_ms() -> int:
    """Return the time since this machine booted, including time when it was suspended.

    Fences use this clock, because other machines' clocks keep running during a suspension.
    """
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class Alarm:
    """A descriptor that becomes readable at a given time of `boottime_ms`.

    `select` timeouts do not advance while the machine is suspended; this descriptor is readable as
    soon as the machine wakes up.
    """

    def __init__(self) -> None:
        self._fd: int = libc.timerfd_create(time.CLOCK_BOOTTIME, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")

    def fileno(self) -> int:
        return self._fd

    def set(self, at_ms: int | None) -> None:
        seconds, ms = divmod(at_ms or 0, 1000)
        # The kernel's `struct itimerspec`: interval and time. All zero: never.
        spec = struct.pack("4l", 0, 0, seconds, ms * 1_000_000)
        if libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, spec, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        os.close(self._fd)


# ---------------------------------------------------------------------- accounts


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
    Raises `PermissionError` if this process is not root.
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


# ---------------------------------------------------------------------- free memory

_NO_LIMIT_BYTES = 1 << 60


def free_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes available without swapping or reaching a limit, or None if unknown."""
    return min([*_of_machine(proc), *_of_cgroups(proc, cgroup)], default=None)


def _of_machine(proc: Path) -> Iterator[int]:
    for line in _read(proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _of_cgroups(proc: Path, cgroup: Path) -> Iterator[int]:
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = cgroup if (cgroup / "cgroup.controllers").exists() else cgroup / "unified"
            limit, usage, prefix = "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top = cgroup / "memory"
            limit, usage, prefix = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        # What the kernel can reclaim when memory is needed.
        cached = (f"{prefix}inactive_file", f"{prefix}active_file")
        below = Path(path.lstrip("/"))
        # Inside a container, the path may be the host's, and only the top of the hierarchy is
        # visible.
        for place in (below, *below.parents):
            limited, used = _read(top / place / limit).strip(), _read(top / place / usage).strip()
            if limited.isdigit() and int(limited) < _NO_LIMIT_BYTES and used.isdigit():
                stat = map(str.split, _read(top / place / "memory.stat").splitlines())
                yield int(limited) - int(used) + sum(int(v) for name, v in stat if name in cached)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
