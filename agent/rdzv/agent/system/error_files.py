"""Error files: a failed worker's own report of its failure.

The format is torchelastic's (`torch/distributed/elastic/multiprocessing/errors`), so `@record`
works unchanged: `{"message": {"message": "Type: text", "extraInfo": {"py_callstack": "...",
"timestamp": "<seconds>"}}}`, or `{"message": "text", "timestamp": seconds}`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from stat import S_ISREG

from rdzv.agent.system.accounts import Identity, acting_as
from rdzv.core.model import Failure
from rdzv.structs import struct

MAX_MESSAGE_CHARS = 2_000
MAX_TRACEBACK_CHARS = 16_000
MAX_FILE_BYTES = 1 << 20

NO_ERROR_FILE = "no error file, so no uncaught exception is known; its output may say why"


@struct(frozen=True)
class ErrorFile:
    """The content of an error file about a worker's failure."""

    message: str
    traceback: str
    age_ms: int
    """The time since the failure, based on the error file's timestamp; 0 if there is no timestamp,
    or no clock to compare it with.
    """


def read_error(
    path: Path, signum: int | None, pid: int, identity: Identity | None = None
) -> ErrorFile:
    """Explain an exit by the worker's error file or, if there is none, by its exit status.

    The file is read with its worker's rights, because it may be a link. Never raises: if the file
    cannot be read, the message says so. May hang if a file server does.
    """
    if path == Path(os.devnull):
        return ErrorFile(_without_error_file(signum, pid), "", 0)
    try:
        # Reading a FIFO would block until some process writes to it.
        with acting_as(identity):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                stat = os.fstat(file.fileno())
                text = file.read(MAX_FILE_BYTES) if S_ISREG(stat.st_mode) else b"no regular file"
            now_ns, is_full = _touch(path.parent), _is_full(path.parent)
    except FileNotFoundError:
        return ErrorFile(_without_error_file(signum, pid), "", 0)
    except OSError as error:
        return unread(error)
    age_ms = 0 if now_ns is None else max((now_ns - stat.st_mtime_ns) // 1_000_000, 0)
    message, traceback = _parse(text.decode(errors="replace"))
    if not message:
        message = _without_error_file(signum, pid)
    if not traceback and is_full:
        message += (
            f"; the disk of {path} is full, so its log may be cut off as well: make room, or give "
            "another folder (--log-dir, or TMPDIR)"
        )
    return ErrorFile(
        message.strip()[:MAX_MESSAGE_CHARS], traceback.rstrip()[-MAX_TRACEBACK_CHARS:], age_ms
    )


def unread(error: Exception) -> ErrorFile:
    return ErrorFile(f"cannot read the error file: {error}", "", 0)


def _touch(folder: Path) -> int | None:
    """Return the time on the clock of a folder's file system, or None if unknown.

    That clock may be a file server's instead of this machine's. An error file's folder belongs to
    its worker, so it may be touched.
    """
    try:
        os.utime(folder)
        return folder.stat().st_mtime_ns
    except OSError:
        return None


def _is_full(folder: Path) -> bool:
    """Return whether a folder's disk has no room; not every file system says so."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    return disk.f_blocks > 0 and disk.f_bavail == 0


def write_error(path: Path, failure: Failure) -> None:
    """Write the job's root cause for the process that started this agent, as torchrun does.

    Raises `OSError` if the file cannot be written.
    """
    exit_code = failure.exit_code if failure.signal is None else -failure.signal
    message = {
        "message": failure.message,
        "extraInfo": {"py_callstack": failure.traceback, "timestamp": str(int(time.time()))},
        "errorCode": exit_code,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"message": message}))


def _parse(text: str) -> tuple[str, str]:
    if not text:
        return "the error file is empty", ""
    try:
        document = json.loads(text)
        body = document["message"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return f"the error file is not torchelastic's JSON: {text[:200]!r}", ""
    if isinstance(body, dict):
        extra = body.get("extraInfo")
        callstack = extra.get("py_callstack") if isinstance(extra, dict) else ""
        return str(body.get("message") or ""), str(callstack or "")
    return str(body or ""), ""


def _without_error_file(signum: int | None, pid: int) -> str:
    return NO_ERROR_FILE if signum is None else f"received {signal_name(signum)} (pid {pid})"


def describe_exit(exit_code: int | None, signum: int | None) -> str:
    """Describe how a process ended.

    >>> describe_exit(1, None), describe_exit(None, 9)
    ('exit code 1', 'signal 9 (SIGKILL)')
    """
    if signum is not None:
        return f"signal {signum} ({signal_name(signum)})"
    return "no exit was seen" if exit_code is None else f"exit code {exit_code}"


def signal_name(signum: int) -> str:
    """Return a signal's name.

    >>> signal_name(9)
    'SIGKILL'
    """
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
