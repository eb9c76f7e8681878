"""Locks an rdzvd's data directory, and refuses network file systems."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from rdzv.errors import InvalidRequestError

MOUNTINFO = Path("/proc/self/mountinfo")

_NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "coda", "lustre", "gpfs"}
    | {"beegfs", "ocfs2", "gfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.cephfs", "fuse.s3fs"}
)
"""File systems whose files may be in use by another machine at the same time. flock, the
write-ahead log's shared memory and fsync do not work there as on a local disk. 9p is one of them,
because it keeps locks within its guest. virtiofs is not, because it is the local disk of many
containers."""


def claim_directory(directory: Path, mountinfo: Path = MOUNTINFO) -> int:
    """Create the data directory, lock it, and return the descriptor that holds the lock.

    Raises:
        InvalidRequestError: it cannot be used, is in use, or is on a network file system.

    """
    # Check this before anything is created there.
    _refuse_network_filesystem(directory, mountinfo)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        # Check this again, because an automounter mounts at the first access and the file may be a
        # link.
        _refuse_network_filesystem(directory, mountinfo)
        _refuse_network_filesystem(directory / "rdzv.db", mountinfo)
        _lock(lock, directory)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _unusable(directory: Path, error: OSError) -> InvalidRequestError:
    return InvalidRequestError(
        f"data directory {directory} cannot be used: {error.strerror or error}; give a "
        "directory that this user may write to with --data-dir, or use --store memory"
    )


def _lock(lock: int, directory: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InvalidRequestError(
            f"data directory {directory} is in use by {_holder(lock)}; stop that one first, or "
            "give this one another directory with --data-dir"
        ) from error
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        raise _unusable(directory, error) from error


def share_directory(directory: Path) -> tuple[int | None, str]:
    """Prevent servers from using a directory; return the open lock file and any lock holder."""
    try:
        lock = os.open(directory / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, ""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return lock, _holder(lock)
    return lock, ""


def _holder(lock: int) -> str:
    """Return the lock's holder. Servers write their pid into the file and leave it there."""
    pid = os.pread(lock, 32, 0).decode(errors="replace").strip()
    if pid.isdigit() and Path("/proc", pid).exists():
        return f"rdzvd pid {pid}"
    return "another process (perhaps rdzvd --check, or an rdzvd in another container)"


def _refuse_network_filesystem(path: Path, mountinfo: Path) -> None:
    kind = filesystem_of(path.resolve(), mountinfo)
    if kind in _NETWORK_FILESYSTEMS:
        raise InvalidRequestError(
            f"data directory {path} is on {kind}, a network file system, where SQLite may lose "
            "commits; give a directory on a local disk with --data-dir"
        )


def filesystem_of(path: Path, mountinfo: Path = MOUNTINFO) -> str:
    """Return the type of file system that an absolute path is on, or empty if unknown."""
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        return ""
    depth, kind = -1, ""
    for line in lines:
        # "36 35 98:0 /root /mount/point options [tags...] - type source options"
        before, _, after = line.partition(" - ")
        mount = Path(_unescape(before.split(" ")[4]))
        # Of two mounts on the same path, the later one hides the earlier one.
        if path.is_relative_to(mount) and len(mount.parts) >= depth:
            depth, kind = len(mount.parts), after.split(" ")[0]
    return kind


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)
