"""The lines of a file that a program is still writing, without one that has only begun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def whole_lines(text: str) -> list[str]:
    r"""Return the lines that have an end: a reader may see a part of what one write adds.

    >>> whole_lines("one\ntwo\nthr")
    ['one', 'two']
    """
    return text[: text.rfind("\n") + 1].splitlines()


def lines_of(path: Path) -> list[str]:
    """Return the whole lines of a file; none, if there is no such file yet."""
    try:
        return whole_lines(path.read_text())
    except FileNotFoundError:
        return []


def json_rows(text: str, what: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the JSON objects that workers have printed with this `what` and these fields.

    Each is the last on its line; a launcher may have written the worker's name before it.
    """
    found = [
        json.loads(line[line.index('{"what"') :]) for line in whole_lines(text) if '{"what"' in line
    ]
    return [row for row in found if row["what"] == what and fields.items() <= row.items()]
