"""Temporary folders that a later process of the same account removes if this one is killed.

A folder is locked for as long as the process that made it lives: the kernel releases the lock, and
no process id can be mistaken for another. Other machines may share the folder for temporary files
without seeing its locks, so each name includes the machine, and only its own folders are removed.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from hashlib import sha256
from itertools import islice
from pathlib import Path

from rdzv.agent.system.folder_trees import remove_tree
from rdzv.transport.addresses import machine_id

PROGRESS = "rdzv_progress_"
"""The prefix of folders for the workers' progress and notice files."""
LOGS = "rdzv_"
"""The prefix of folders for logs, which are kept if they contain a file."""

MAX_LISTED = 10_000
"""How many names in the folder for temporary files are read to find those that were left."""
MAX_SWEPT = 100
"""How many folders are examined in one sweep."""
MAX_FILES = 10_000
"""How many files of one folder are removed; the next sweep removes more."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make(prefix: str, below: Path | None = None) -> tuple[Path, int]:
    """Create a folder; return it with a descriptor that keeps it locked until closed.

    Raises `OSError` if it cannot be created.
    """
    while True:
        path = Path(tempfile.mkdtemp(prefix=_of_this_machine(prefix), dir=below))
        if (lock := _lock_new(path)) is not None:
            return path, lock


def _lock_new(path: Path) -> int | None:
    """Lock a new folder; return None if a sweep has found it before it was locked."""
    try:
        lock = os.open(path, _FOLDER)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        swept = True
    except OSError:
        swept = False  # The file system has no locks, so no sweep can get this one.
    else:
        swept = not path.exists()
    if not swept:
        return lock
    os.close(lock)
    return None


def has_files(path: Path) -> bool:
    return any(files for _, _, files in os.walk(path))


def sweep() -> None:
    """Remove the folders of processes that have ended, except logs."""
    progress, logs = _of_this_machine(PROGRESS), _of_this_machine(LOGS)
    with suppress(OSError):
        folder = Path(tempfile.gettempdir())
        with os.scandir(folder) as listed:
            names = [entry.name for entry in islice(listed, MAX_LISTED)]
        # Logs may be kept, and must not hide the others for ever.
        found = [name for prefix in (progress, logs) for name in names if name.startswith(prefix)]
        for name in found[:MAX_SWEPT]:
            with suppress(OSError):
                _remove_if_left(folder / name)


def _remove_if_left(path: Path) -> None:
    lock = os.open(path, _FOLDER)
    try:
        if os.fstat(lock).st_uid != os.geteuid():
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.name.startswith(PROGRESS) or not has_files(path):
            remove_tree(path, None, MAX_FILES)
    finally:
        os.close(lock)


def _of_this_machine(prefix: str) -> str:
    return f"{prefix}{sha256(machine_id().encode()).hexdigest()[:12]}_"
