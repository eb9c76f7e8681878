"""docs/configuration.md has every setting of both daemons as the code declares it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from rdzv.agent.app.agent_settings import AgentSettings
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.settings.setting_types import Setting, Table, settings_of

PATH = Path(__file__).parents[3] / "docs" / "configuration.md"
ALL = [RdzvdSettings, AgentSettings]


def every_setting(table: type[Table]) -> list[Setting]:
    settings = [*settings_of(table).values()]
    return settings + [inner for one in settings if one.each for inner in every_setting(one.each)]


def as_markdown(table: type[Table], heading: str = "###") -> str:
    lines: list[str] = []
    sections: dict[str, list[Setting]] = {"": []}
    for each in settings_of(table).values():
        sections.setdefault(each.key.rpartition(".")[0], []).append(each)
    for section, of_section in sections.items():
        if plain := [each for each in of_section if each.each is None]:
            title = f"`[{section}]`" if section else "Before any table"
            lines += [f"{heading} {title}", "", *_markdown_table(plain), ""]
    for each in settings_of(table).values():
        if each.each is not None:
            lines += [f"{heading} `[[{each.key}]]`", "", each.reason, ""]
            lines += [*_markdown_table(settings_of(each.each).values()), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _markdown_table(settings: Iterable[Setting]) -> Iterator[str]:
    yield "| key | unit | default | allowed | reload | what it is |"
    yield "|---|---|---|---|---|---|"
    for each in settings:
        literal = each.has_default and not each.default_words
        cells = (
            f"`{each.name}`",
            each.unit or each.kind_words,
            f"`{each.default_text}`" if literal else each.default_text,
            each.bounds,
            "yes" if each.reload else "no",
            each.reason,
        )
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


@pytest.mark.parametrize("table", ALL, ids=lambda table: table.program)
def test_the_document_has_every_setting(table: type[Table], request: pytest.FixtureRequest) -> None:
    """`pytest --rewrite` updates it."""
    begin = f"<!-- what `{table.program} --print-config` shows -->\n"
    end = f"<!-- end of {table.program} -->\n"
    text = PATH.read_text()
    assert text.count(begin) == text.count(end) == 1
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    wanted = f"{before}{begin}\n{as_markdown(table)}\n{end}{after}"
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
