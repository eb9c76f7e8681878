"""The commands of docs/runbook.md."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "runbook.md"


def commands() -> list[str]:
    """Return every command of rdzvctl, with examples in place of names."""
    found = dict.fromkeys(re.findall(r"`(rdzvctl [^`]*)`", PAGE.read_text()))
    assert len(found) > 15
    return [command.replace("MIN:MAX", "1:2").replace("--rank R", "--rank 0") for command in found]


def questions() -> list[str]:
    """Return the commands of the table of questions that only ask the server."""
    table = PAGE.read_text().partition("## The alerts")[0]
    others = ("drain", "undrain", "tokens", "doctor")
    return [c for c in commands() if f"`{c}`" in table and c.split()[1] not in others]
