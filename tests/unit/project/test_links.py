"""Every relative link of a document leads to a file of the tree, and to a heading that it has."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(
        path
        for folder in ("docs", "deploy", "examples", "bench")
        for path in (ROOT / folder).rglob("*.md")
    ),
]
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!\w+:)([^)\s]+)\)")


def links(path: Path) -> list[str]:
    return _LINK.findall(_FENCED.sub("", path.read_text()))


@functools.cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors that GitHub and the site make of a document's headings."""
    headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", path.read_text()), re.MULTILINE)
    shown = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return frozenset(
        re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-") for text in shown
    )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    dead = []
    for link in links(path):
        place, _, anchor = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        known = not anchor or (
            target.suffix == ".md" and target.exists() and anchor in anchors(target)
        )
        if not target.exists() or not known:
            dead.append(link)
    assert dead == [], f"dead links in {path.relative_to(ROOT)}"
