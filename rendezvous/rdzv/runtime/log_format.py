"""Log formats used by both daemons: for a terminal, a file, and systemd's journal.

The journal records each line's time and priority. It takes the priority from a prefix such as `<4>`
(sd-daemon(3)) and removes the prefix from the line.

A record may quote a job, and whoever reads the log may be root at a terminal. So every formatter
escapes what a terminal would obey, and those of the daemons indent a record's further lines: no
line that a job makes looks like a record.
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
"""The syslog(3) priority from each level upward; lower levels have priority 7."""


_REPEATS = 5
"""How often a warning is logged before it is only counted."""
_REPEATS_END_S = 60.0
_REPEATS_KEPT = 256


class RepeatedWarnings(logging.Filter):
    """Counts an identical warning instead of repeating it: logs 5, the 10th, the 100th and so on.

    A minute without it ends the count. Whoever can cause a warning, such as a job, can cause many.
    Events are always logged.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[int, float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or record.name == "rdzv.events":
            return True
        text = record.getMessage()
        count, last_s = self._seen.pop(text[:1000], (0, 0.0))
        count = count + 1 if abs(record.created - last_s) < _REPEATS_END_S else 1
        self._seen[text[:1000]] = (count, record.created)
        if len(self._seen) > _REPEATS_KEPT:
            del self._seen[next(iter(self._seen))]
        if count <= _REPEATS:
            return True
        record.msg, record.args = f"{text} (for the {count:,}th time)", ()
        return str(count).strip("0") == "1"


class HumanFormatter(logging.Formatter):
    """Formats lines for people, such as `2026-11-21T12:00:01.250Z INFO job-7: n1 joined ...`."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{_time(record)} {record.levelname:<7} {_text(self, record)}"


class JsonFormatter(logging.Formatter):
    """Formats each record as one line of JSON, for machines."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key in ("rdzv_id", "run", "event"):
            if hasattr(record, key):
                line[key] = getattr(record, key)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        text = json.dumps(line, ensure_ascii=False)
        return text if text.isprintable() else json.dumps(line)


class PlainFormatter(logging.Formatter):
    """Formats lines of a program that users start themselves: `TIME rdzvrun[n1]: warning: ...`.

    Its workers write to the same terminal, so an indentation would prove nothing.
    """

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        warning = "warning: " if record.levelno == logging.WARNING else ""
        text = _text(self, record, indent="")
        return f"{_time(record)} {self._program}: {warning}{text}"


class JournalFormatter(logging.Formatter):
    """Formats lines such as `<6>job-7: n1 joined ...`, without the fields that the journal adds."""

    def __init__(self, lines: logging.Formatter | None = None) -> None:
        """Wrap the formatter `lines`, or format records as plain text if it is None."""
        super().__init__()
        self._lines = lines

    def format(self, record: logging.LogRecord) -> str:
        text = _text(self, record) if self._lines is None else self._lines.format(record)
        return _prioritized(text, record.levelno)


def log_to_stderr(level: str, log_format: str) -> None:
    """Log to stderr, where services and users expect it; stdout is used for the ready line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter_for(log_format))
    handler.addFilter(RepeatedWarnings())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def formatter_for(log_format: str) -> logging.Formatter:
    lines = JsonFormatter() if log_format == "json" else None
    if stderr_is_journal():
        return JournalFormatter(lines)
    return lines or HumanFormatter()


def stderr_is_journal() -> bool:
    """Return whether stderr is still the journal stream to which systemd connected it."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))


def complain(text: str) -> None:
    """Print to stderr why a program is ending; the journal records the line as an error."""
    text = escaped_lines(text)
    print(_prioritized(text, logging.ERROR) if stderr_is_journal() else text, file=sys.stderr)  # noqa: T201


def harmless(text: str) -> str:
    r"""Escape characters that control a terminal, or that hide or reverse text.

    >>> print(harmless("\x1b[2J gone\n"))
    \x1b[2J gone\n
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escaped_lines(text: str, indent: str = "  ") -> str:
    r"""Escape each line of a record, and indent all lines but the first.

    >>> print(escaped_lines("it says\n2026-11-21T12:00:00.000Z INFO forged\r"))
    it says
      2026-11-21T12:00:00.000Z INFO forged\r
    """
    if text.isprintable():
        return text
    return f"\n{indent}".join(harmless(line.expandtabs()) for line in text.split("\n"))


def _time(record: logging.LogRecord) -> str:
    """Format a record's time in UTC, as in all programs, so that logs of several hosts compare."""
    at = datetime.fromtimestamp(record.created, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03d}Z"


def _text(formatter: logging.Formatter, record: logging.LogRecord, indent: str = "  ") -> str:
    text = record.getMessage()
    if record.exc_info:
        text = f"{text}\n{formatter.formatException(record.exc_info)}"
    return escaped_lines(text, indent)


def _prioritized(text: str, level: int) -> str:
    priority = next((number for least, number in _PRIORITIES if level >= least), 7)
    return "\n".join(f"<{priority}>{line}" for line in text.split("\n"))
