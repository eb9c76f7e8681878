"""docs/rdzvctl.md names every command, and every flag that submit refuses."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from rdzv.ctl import job_request
from rdzv.ctl.__main__ import rdzvctl

TEXT = (Path(__file__).parents[3] / "docs" / "rdzvctl.md").read_text()


@pytest.mark.parametrize("name", rdzvctl.list_commands(click.Context(rdzvctl)))
def test_every_command_is_there(name: str) -> None:
    assert re.search(rf"^\| \[?`{name}\b", TEXT, re.MULTILINE)


@pytest.mark.parametrize("dest", sorted(job_request.REFUSED))
def test_every_flag_that_is_refused_is_there(dest: str) -> None:
    assert f"`--{dest.replace('_', '-')}`" in TEXT
