"""docs/rdzvctl.md names every command, and every flag that submit adds or refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rdzv.ctl import job_request
from rdzv.ctl.__main__ import rdzvctl

TEXT = (Path(__file__).parents[3] / "docs" / "rdzvctl.md").read_text()


@pytest.mark.parametrize("name", sorted(rdzvctl.commands))
def test_every_command_is_there(name: str) -> None:
    assert re.search(rf"^\| \[?`{name}\b", TEXT, re.MULTILINE)


@pytest.mark.parametrize(
    "option", [*job_request._of_job(), *job_request._of_command()], ids=lambda o: o[0][-1]
)
def test_every_flag_of_submit_is_there(option: job_request.Option) -> None:
    assert option[0][-1] in TEXT or option[0][-1] == "--help"


@pytest.mark.parametrize("dest", sorted(job_request.REFUSED))
def test_every_flag_that_is_refused_is_there(dest: str) -> None:
    assert f"`--{dest.replace('_', '-')}`" in TEXT
