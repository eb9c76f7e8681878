"""The runbook that alerts link to: a page of rdzvd that is current and has all sections."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import click
import pytest
import yaml
from runbook import commands

from rdzv.ctl.__main__ import rdzvctl
from rdzv.server.http.page_files import page_routes

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "rendezvous" / "rdzv" / "web" / "runbook.html"
PROMETHEUS = ROOT / "deploy" / "prometheus"


def alerts() -> list[tuple[str, str]]:
    """Return each alert's name, and the URL of its runbook as Prometheus makes it."""
    labels = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["global"][
        "external_labels"
    ]
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [
        (
            rule["alert"],
            re.sub(
                r"\{\{ \$externalLabels\.(\w+) \}\}",
                lambda found: labels[found[1]],
                rule["annotations"]["runbook_url"],
            ),
        )
        for group in groups
        for rule in group["rules"]
    ]


def test_the_page_is_current(request: pytest.FixtureRequest) -> None:
    made = runpy.run_path(str(PROMETHEUS / "runbook_page.py"))
    text = made["page"](made["SOURCE"].read_text())
    if request.config.getoption("--rewrite"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "run: pytest tests/unit/project/test_runbook.py --rewrite"


@pytest.mark.parametrize(("name", "url"), alerts())
def test_the_runbook_url_of_an_alert_opens_at_its_section(name: str, url: str) -> None:
    where, _, section = url.partition("#")
    paths = {route.path for route in page_routes()}
    assert where.startswith("http://127.0.0.1:29480/")
    assert where.removeprefix("http://127.0.0.1:29480") in paths
    assert f'<h2 id="{section}">{name}</h2>' in PAGE.read_text()


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_runbook_is_one_of_rdzvctl(command: str) -> None:
    """Its options exist, and nothing that it needs is left out."""
    words = shlex.split(command)[1:]
    here: click.Command | None = rdzvctl
    context = click.Context(rdzvctl)
    while isinstance(here, click.Group):
        here = here.get_command(context, words.pop(0))
    assert here is not None, command
    here.make_context("rdzvctl", words, parent=context)
