"""Writes docs/runbook.md as the page that alerts link to: rendezvous/rdzv/web/runbook.html.

    python deploy/prometheus/runbook_page.py >rendezvous/rdzv/web/runbook.html

It supports the parts of Markdown that the runbook uses: headings, paragraphs, numbered lists,
tables, code, emphasis, and links. A link to another document becomes its name, since rdzvd serves
only this one.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "docs" / "runbook.md"

HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>rdzv: runbook</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="style.css">
</head>
<body>
<main class="prose">
"""
TAIL = """</main>
</body>
</html>
"""

_ITEM = re.compile(r"\d+\. ")
_INLINE = (
    (re.compile(r"`([^`]+)`"), r"<code>\1</code>"),
    (re.compile(r"\[([^\]]+)\]\(https?://[^)]+\)"), r"\1"),
    (re.compile(r"\[([^\]]+)\]\([^)]+\)"), r"<i>\1</i>"),
    (re.compile(r"\*([^*]+)\*"), r"<em>\1</em>"),
)


def page(markdown: str) -> str:
    """Return the page."""
    return HEAD + "".join(_block(block) for block in markdown.strip().split("\n\n")) + TAIL


def _block(block: str) -> str:
    if block.startswith("## "):
        name = block.removeprefix("## ")
        return f'<h2 id="{name.lower().replace(" ", "-")}">{_inline(name)}</h2>\n'
    if block.startswith("# "):
        return f"<h1>{_inline(block.removeprefix('# '))}</h1>\n"
    if block.startswith("| "):
        rows = [row.strip("|").split(" | ") for row in block.splitlines()]
        told = "".join(
            f"<tr>{''.join(f'<td>{_inline(cell)}</td>' for cell in row)}</tr>\n" for row in rows[2:]
        )
        return f"<table>\n{told}</table>\n"
    if block.startswith("1. "):
        items = re.split(r"\n(?=\d+\. )", block)
        told = "".join(f"<li>{_inline(_ITEM.sub('', item, count=1))}</li>\n" for item in items)
        return f"<ol>\n{told}</ol>\n"
    return f"<p>{_inline(block)}</p>\n"


def _inline(text: str) -> str:
    found = escape(" ".join(text.split()), quote=False)
    for pattern, html in _INLINE:
        found = pattern.sub(html, found)
    return found


if __name__ == "__main__":
    sys.stdout.write(page(SOURCE.read_text(encoding="utf-8")))
