"""The manual pages of the package: text unchanged, and one section for each command."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import types
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from rdzv.ctl.__main__ import rdzvctl

SCRIPT = Path(__file__).parents[3] / "deploy/debian/manpages"


@pytest.fixture(scope="module")
def manpages() -> types.ModuleType:
    loader = importlib.machinery.SourceFileLoader("manpages", str(SCRIPT))
    spec = importlib.util.spec_from_loader("manpages", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (".dot", "\\&.dot"),
        ("'quote\nplain", "\\&'quote\nplain"),
        ("a -b C:\\d", "a \\-b C:\\ed"),
    ],
)
def test_no_text_is_taken_for_a_request(
    manpages: types.ModuleType, text: str, expected: str
) -> None:
    assert manpages.quoted(text) == expected


def test_every_command_has_a_section(manpages: types.ModuleType) -> None:
    said = CliRunner().invoke(rdzvctl, ["--help"], prog_name="rdzvctl", terminal_width=80).output
    assert sorted(manpages.commands_in(said)) == rdzvctl.list_commands(click.Context(rdzvctl))


def test_every_program_is_named(manpages: types.ModuleType) -> None:
    assert set(manpages.SECTIONS) == set(manpages.NAMES)
