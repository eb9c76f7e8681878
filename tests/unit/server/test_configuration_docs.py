"""docs/configuration.md has every setting of both daemons as the code declares it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdzv.agent.app.agent_settings import AgentSettings
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.settings.rendering import as_markdown
from rdzv.settings.setting_types import Setting, Table, settings_of

PATH = Path(__file__).parents[3] / "docs" / "configuration.md"
ALL = [RdzvdSettings, AgentSettings]


def every_setting(table: type[Table]) -> list[Setting]:
    settings = [*settings_of(table).values()]
    return settings + [inner for one in settings if one.each for inner in every_setting(one.each)]


@pytest.mark.parametrize("table", ALL, ids=lambda table: table.program)
def test_the_document_has_every_setting(table: type[Table], request: pytest.FixtureRequest) -> None:
    """`pytest --rewrite` updates it."""
    begin = f"<!-- what `{table.program} --print-config` shows -->\n"
    end = f"<!-- end of {table.program} -->\n"
    text = PATH.read_text()
    assert text.count(begin) == text.count(end) == 1
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    wanted = f"{before}{begin}\n{as_markdown(table, '###')}\n{end}{after}"
    if request.config.getoption("--rewrite"):
        PATH.write_text(wanted)
    assert PATH.read_text() == wanted, "run this test with --rewrite"
    for setting in every_setting(table):
        assert setting.reason.replace("|", "\\|") in wanted
        if setting.each is None:
            assert setting.default_text in wanted and setting.unit in wanted


@pytest.mark.parametrize("table", ALL, ids=lambda table: table.program)
def test_reasons_are_short_sentences(table: type[Table]) -> None:
    for setting in every_setting(table):
        assert setting.reason[-1] == ".", setting.key
        assert len(setting.reason) < 250, setting.key


@pytest.mark.parametrize("table", ALL, ids=lambda table: table.program)
def test_what_is_documented_does_not_depend_on_this_machine(table: type[Table]) -> None:
    for setting in every_setting(table):
        if isinstance(setting.default, Path):
            assert setting.default_words, setting.key
