"""How the log lines of both daemons look: on a terminal, in a file, and in systemd's journal.

The journal keeps the time and the priority of each line itself. It takes the priority from a prefix
such as `<4>` (sd-daemon(3)), which is no part of the line then.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

_PRIORITIES = (
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
)
"""The priorities of syslog(3), by the least level that has each; below them it is 7."""


class HumanFormatter(logging.Formatter):
    """`12:00:01.250 INFO  job-7: n1 joined ...`: for eyes."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record as a line, with its traceback below if there is one."""
        at = datetime.fromtimestamp(record.created).astimezone()
        time = f"{at:%H:%M:%S}.{int(record.msecs):03d}"
        return f"{time} {record.levelname:<7} {_text(self, record)}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line, for machines."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record as a JSON object."""
        at = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key in ("rdzv_id", "run", "event"):
            if hasattr(record, key):
                line[key] = getattr(record, key)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class JournalFormatter(logging.Formatter):
    """`<6>job-7: n1 joined ...`: what the journal adds is left to it."""

    def __init__(self, lines: logging.Formatter | None = None) -> None:
        """Write lines of another format; without one, plain text."""
        super().__init__()
        self._lines = lines

    def format(self, record: logging.LogRecord) -> str:
        """Write one record, with its priority before each of its lines."""
        text = _text(self, record) if self._lines is None else self._lines.format(record)
        return _prioritized(text, record.levelno)


def formatter_for(log_format: str) -> logging.Formatter:
    """Return what writes records to stderr in a format, "human" or "json"."""
    lines = JsonFormatter() if log_format == "json" else None
    if stderr_is_journal():
        return JournalFormatter(lines)
    return lines or HumanFormatter()


def stderr_is_journal() -> bool:
    """Whether stderr is the journal's stream, as systemd connected it, and is not redirected."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))


def complain(text: str) -> None:
    """Write to stderr why a program ends; in the journal it is an error."""
    print(_prioritized(text, logging.ERROR) if stderr_is_journal() else text, file=sys.stderr)  # noqa: T201


def _text(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    text = record.getMessage()
    return f"{text}\n{formatter.formatException(record.exc_info)}" if record.exc_info else text


def _prioritized(text: str, level: int) -> str:
    priority = next((number for least, number in _PRIORITIES if level >= least), 7)
    return "\n".join(f"<{priority}>{line}" for line in text.split("\n"))
