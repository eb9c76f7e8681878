"""rdzvctl docs shows the pages; docs/rdzvctl.md names all commands, and the flags of no use."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from fake_control import Capture, Ctl

from rdzv.ctl import job_request
from rdzv.ctl.__main__ import rdzvctl, run

TEXT = (Path(__file__).parents[3] / "docs" / "rdzvctl.md").read_text()


@pytest.mark.parametrize("name", ["hangs", "hangs.md", "docs/hangs.md", "one-machine"])
def test_a_page_is_printed_by_the_name_that_messages_give_it(name: str, capsys: Capture) -> None:
    assert run(["docs", name]) == 0
    title = "# Two minutes on one machine\n" if name == "one-machine" else "# Hangs\n"
    assert capsys.readouterr().out.startswith(title)


def test_all_pages_are_listed_with_their_titles(ctl: Ctl) -> None:
    lines = [line.split(maxsplit=1) for line in ctl("docs").out.splitlines()]
    assert ["hangs", "Hangs"] in lines and len(lines) > 30


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("hngs", "did you mean `hangs`?"),
        ("../README", "`rdzvctl docs` lists all"),
        ("zebra", "`rdzvctl docs` lists all"),
    ],
)
def test_another_page_is_refused(name: str, remedy: str, ctl: Ctl) -> None:
    assert ctl("docs", name, code=1).err == f"rdzvctl: no page is called {name!r}; {remedy}\n"


@pytest.mark.parametrize("name", rdzvctl.list_commands(click.Context(rdzvctl)))
def test_every_command_is_there(name: str) -> None:
    assert re.search(rf"^\| \[?`{name}\b", TEXT, re.MULTILINE)


@pytest.mark.parametrize("dest", sorted(job_request.REFUSED))
def test_every_flag_that_is_refused_is_there(dest: str) -> None:
    assert f"`--{dest.replace('_', '-')}`" in TEXT
