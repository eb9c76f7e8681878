"""docs/configuration.md says what the code says, of every knob of both daemons."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdzv.agent.app import agent_settings
from rdzv.server.settings import server_settings
from rdzv.settings.toml_settings import Kind, Knob, Knobs, as_markdown

PATH = Path(__file__).parents[3] / "docs" / "configuration.md"
ALL = [server_settings.KNOBS, agent_settings.KNOBS]


def every_knob(knobs: Knobs) -> list[Knob]:
    inner = [each for knob in knobs.knobs if knob.each for each in every_knob(knob.each)]
    return [*knobs.knobs, *inner]


@pytest.mark.parametrize("knobs", ALL, ids=lambda knobs: knobs.program)
def test_the_document_has_every_knob(knobs: Knobs, request: pytest.FixtureRequest) -> None:
    """`pytest --rewrite` brings it up to date."""
    begin = f"<!-- what `{knobs.program} --print-config` shows -->\n"
    end = f"<!-- end of {knobs.program} -->\n"
    text = PATH.read_text()
    assert text.count(begin) == text.count(end) == 1
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    wanted = f"{before}{begin}\n{as_markdown(knobs, '###')}\n{end}{after}"
    if request.config.getoption("--rewrite"):
        PATH.write_text(wanted)
    assert PATH.read_text() == wanted, "run this test with --rewrite"
    for knob in every_knob(knobs):
        assert knob.reason.replace("|", "\\|") in wanted
        if knob.kind is not Kind.TABLES:
            assert knob.default_text in wanted and knob.counts in wanted


@pytest.mark.parametrize("knobs", ALL, ids=lambda knobs: knobs.program)
def test_reasons_are_short_sentences(knobs: Knobs) -> None:
    for knob in every_knob(knobs):
        assert knob.reason[-1] == ".", knob.key
        assert len(knob.reason) < 250, knob.key


@pytest.mark.parametrize("knobs", ALL, ids=lambda knobs: knobs.program)
def test_what_is_documented_does_not_depend_on_this_machine(knobs: Knobs) -> None:
    for knob in every_knob(knobs):
        if isinstance(knob.default, Path):
            assert knob.default_words, knob.key
