"""Explains a failed worker's exit in one message."""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from contextlib import suppress
from pathlib import Path

from rdzv.agent.exit_causes.last_words import (
    ENLARGE_SHM,
    explain_last_words,
    explain_peer_address,
)
from rdzv.agent.exit_causes.memory_kills import MemoryKills, explain_memory_kill
from rdzv.agent.inventory.resources import read_text
from rdzv.agent.system.accounts import Identity, acting_as, open_untrusted
from rdzv.agent.system.error_files import MAX_MESSAGE_CHARS, ErrorFile, read_error
from rdzv.core.words import size_text
from rdzv.structs import replace, struct
from rdzv.transport.addresses import interfaces

TAIL_BYTES = 64 << 10
"""How many bytes at the end of a worker's log are searched for known messages."""

SHM = Path("/dev/shm")
SHM_IS_FULL_BYTES = 1 << 20
"""The free space below which /dev/shm is too full for torch and NCCL."""

DUMPING = (
    *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGQUIT, signal.SIGSEGV),
    *(signal.SIGSYS, signal.SIGTRAP, signal.SIGXCPU, signal.SIGXFSZ),
)
"""Signals whose default action is to dump core, as core(5) of the Linux manual pages has them."""

DUMPED_S = 60.0
"""The age above which a file may be another process's dump."""

KERNEL = Path("/proc/sys/kernel")


@struct(frozen=True)
class ExitedWorker:
    """A failed worker, and where to look for the cause of its failure."""

    pid: int
    signal: int | None
    error_file: Path
    stderr: Path | None
    """The worker's log, or None if it shares the agent's stderr."""
    folder: Path | None
    identity: Identity | None
    kills_before: MemoryKills
    """The kernel's counts from before the worker started."""
    has_other_nodes: bool = False
    """Whether other nodes took part in its round."""


def explain_exit(worker: ExitedWorker) -> ErrorFile:
    """Read the job's files with its rights. Raises nothing, but may hang if a file server does."""
    error = read_error(worker.error_file, worker.signal, worker.pid, worker.identity)
    uid = worker.identity.uid if worker.identity is not None else os.getuid()
    killed = worker.signal == signal.SIGKILL
    found = [
        explain_memory_kill(worker.pid, worker.kills_before, killed=killed, uid=uid),
        explain_signal(worker),
    ]
    # What a worker wrote before an exception that is known need not have to do with it.
    words = f"{error.message}\n{error.traceback or _tail(worker.stderr, worker.identity)}"
    found.append(explain_last_words(words))
    if worker.has_other_nodes:
        with suppress(OSError):
            found.append(explain_peer_address(words, interfaces))
    reasons = "; ".join(reason for reason in found if reason)
    explained = f"{error.message}: {reasons}" if reasons else error.message
    return replace(error, message=explained[:MAX_MESSAGE_CHARS])


def explain_signal(worker: ExitedWorker, shm: Path = SHM) -> str:
    if worker.signal is None:
        return ""
    dump = find_core_dump(worker.pid, worker.signal, worker.folder, worker.identity)
    shared_memory = _describe_shm(shm) if worker.signal == signal.SIGBUS else ""
    return "; ".join(reason for reason in (shared_memory, dump) if reason)


def _describe_shm(shm: Path) -> str:
    """Report that /dev/shm is full, or may have been before a dead process's files were removed."""
    try:
        about = os.statvfs(shm)
    except OSError:
        return ""
    size, free = about.f_blocks * about.f_frsize, about.f_bavail * about.f_frsize
    if not size:
        return ""
    if free < SHM_IS_FULL_BYTES:
        return f"/dev/shm is full (its size is {size_text(size)}): {ENLARGE_SHM}"
    return (
        f"/dev/shm may have been full (its size is {size_text(size)}; now that the process has "
        f"ended, {size_text(free)} are free): {ENLARGE_SHM}. Or a file that it had mapped was "
        "made shorter"
    )


def find_core_dump(
    pid: int,
    signum: int,
    folder: Path | None,
    identity: Identity | None = None,
    kernel: Path = KERNEL,
) -> str:
    """Return "" if none is found. The worker's account must see the file.

    `folder` is the worker's working folder, or None for the agent's own.
    """
    if signum not in DUMPING:
        return ""
    pattern = read_text(kernel / "core_pattern").strip()
    if pattern.startswith("|"):
        program = pattern[1:].split(" ")[0]
        if program.endswith("/systemd-coredump"):
            return f"its core dump: coredumpctl info {pid}"
        return f"its core dump was piped to {program}" if program else ""
    if "%p" not in pattern and read_text(kernel / "core_uses_pid").strip() != "0":
        pattern += ".%p"
    names = {"%p": str(pid), "%P": str(pid), "%s": str(signum), "%h": os.uname().nodename}
    names["%%"] = "%"
    name = re.sub("%.", lambda found: names.get(found[0], "*"), pattern)
    with acting_as(identity):
        found = _recent((folder or Path()) / name)
    return f"its core dump: {found}" if found is not None else ""


def _recent(pattern: Path) -> Path | None:
    try:
        place = pattern.absolute()
        found = [(path.lstat(), path) for path in place.parent.glob(place.name)]
    except (OSError, ValueError):
        return None
    files = [(about.st_mtime, path) for about, path in found if stat.S_ISREG(about.st_mode)]
    written, path = max(files, default=(0.0, None))
    return path if time.time() - written <= DUMPED_S else None


def _tail(path: Path | None, identity: Identity | None) -> str:
    if path is None:
        return ""
    try:
        with acting_as(identity):
            fd = open_untrusted(path, os.O_RDONLY)
        with os.fdopen(fd, "rb") as file:
            file.seek(max(os.fstat(fd).st_size - TAIL_BYTES, 0))
            return file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
