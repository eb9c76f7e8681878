"""The queries of the delivered dashboards, with their variables filled in."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
ALWAYS = {"__rate_interval": ["1m"], "__range": ["1h"]}
"""The variables that Grafana itself fills in."""


@dataclass(frozen=True)
class PanelQuery:
    """One query of one panel."""

    board: str
    panel: str
    expr: str

    def with_values(self, values: Mapping[str, Sequence[str]]) -> Iterator[str]:
        """Yield the query for every choice of its variables."""
        given = {**values, **ALWAYS}
        names = sorted(set(re.findall(r"\$(\w+)", self.expr)))
        for chosen in itertools.product(*(given[name] for name in names)):
            text = self.expr
            for name, value in zip(names, chosen, strict=True):
                text = re.sub(rf"\${name}\b", value, text)
            yield text

    def __str__(self) -> str:
        return f"{self.board}: {self.panel}: {self.expr}"


def dashboards() -> dict[str, Any]:
    """Return every dashboard by its uid."""
    found = [json.loads(path.read_text()) for path in sorted((FOLDER / "dashboards").glob("*"))]
    return {board["uid"]: board for board in found}


def documented_metrics() -> set[str]:
    """Return every metric that has a row in docs/metrics.md."""
    manual = (FOLDER.parents[1] / "docs" / "metrics.md").read_text()
    named = re.findall(r"^\| (`rdzv_[^|]*)\|", manual, flags=re.MULTILINE)
    return {name for cell in named for name in re.findall(r"rdzv_\w+", cell)}


def panel_queries() -> list[PanelQuery]:
    """Return every query of every panel, and of the annotations on them."""
    found = []
    for uid, board in dashboards().items():
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                found.append(PanelQuery(uid, panel["title"], target["expr"]))
        for mark in board["annotations"]["list"]:
            found.append(PanelQuery(uid, f"mark: {mark['name']}", mark["expr"]))
    return found


def variable_queries() -> list[tuple[str, str, str]]:
    """Return dashboard, series and label of every variable whose values come from a query."""
    found = []
    for uid, board in dashboards().items():
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"])
                assert asked is not None, variable
                found.append((uid, asked[1], asked[2]))
    return found
