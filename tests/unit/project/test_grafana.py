"""The dashboards: current, complete, and readable without their author.

That every query returns data is shown with a real Prometheus, in the integration tests.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from grafana import FOLDER, dashboards, documented_metrics, panel_queries

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
NOT_SHOWN = {
    "rdzv_c10d_job_round",
    "rdzv_certificate_expiry_timestamp_seconds",
    "rdzv_agent_certificate_expiry_timestamp_seconds",
}
"""Metrics without a panel: they mean something only together with the log of the job's nodes, or
they matter once a year and have an alert.
"""


@pytest.fixture(name="make", scope="module")
def _make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_dashboards", FOLDER / "make.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def test_the_dashboards_are_current(make: ModuleType) -> None:
    """`python deploy/grafana/make.py` updates them."""
    assert make.main(["--check"]) == 0
    assert set(dashboards()) == {board.uid for board in make.BOARDS}


@pytest.mark.quick
@pytest.mark.parametrize("uid", sorted(dashboards()))
def test_panels_have_a_place_and_a_name_of_their_own(uid: str) -> None:
    panels: list[dict[str, Any]] = dashboards()[uid]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    titles = [panel["title"] for panel in panels if panel["type"] != "row"]
    assert len(set(titles)) == len(titles)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
        assert one["x"] + one["w"] <= 24


@pytest.mark.quick
@pytest.mark.parametrize("uid", sorted(dashboards()))
def test_what_a_query_asks_for_is_chosen_on_the_dashboard(uid: str) -> None:
    board = dashboards()[uid]
    names = {variable["name"] for variable in board["templating"]["list"]}
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "$datasource"
            assert target["legendFormat"]
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used <= names | {"__rate_interval", "__range"}
            # Others, of servers with another store, must not appear here.
            assert "job" in used or "ALERTS" in target["expr"], target["expr"]


def test_every_metric_is_on_a_dashboard() -> None:
    metrics = documented_metrics()
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())
    recorded = {r["record"]: r["expr"] for group in rules["groups"] for r in group["rules"]}
    asked = " ".join(query.expr for query in panel_queries())
    asked += " ".join(expr for name, expr in recorded.items() if name in asked)
    shown = {
        metric
        for metric in metrics
        if re.search(rf"\b{metric}(_sum|_count|_bucket)?\b", asked) is not None
    }
    assert metrics - shown == NOT_SHOWN


def test_what_grafana_reads_names_what_is_there() -> None:
    folder = FOLDER / "provisioning"
    (provider,) = yaml.safe_load((folder / "dashboards" / "rdzv.yml").read_text())["providers"]
    assert provider["options"]["path"].endswith("/dashboards/rdzv")
    (source,) = yaml.safe_load((folder / "datasources" / "rdzv.yml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    prometheus = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]


@pytest.mark.parametrize("uid", ["rdzv-fleet", "rdzv-job"])
def test_membership_and_what_ended_rounds_stand_on_the_first_screen(uid: str) -> None:
    places = {panel["title"]: panel["gridPos"] for panel in dashboards()[uid]["panels"]}
    # At 1080 lines a browser shows about 23 of Grafana's rows.
    for title in ("Membership changes", "Rounds that ended, by cause"):
        assert places[title]["y"] + places[title]["h"] <= 23
