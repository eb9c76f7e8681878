"""Renders a configuration for users, as commented TOML."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from rdzv.settings.setting_types import Setting, Table, settings_of
from rdzv.settings.toml_files import Loaded


def render(loaded: Loaded[Any]) -> str:
    """Return a configuration as TOML, with a description of each setting.

    The result is a valid file that represents the same configuration.
    """
    title = f"The configuration of {loaded.settings.program}, as it is in effect."
    lines = [*_comment(title), "", *_rendered(loaded.settings, loaded.sources)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _rendered(
    settings: Table, sources: Mapping[str, str], place: str = "", where: str = ""
) -> Iterator[str]:
    for section, of_section in _by_section(type(settings)).items():
        plain = [each for each in of_section if each.each is None]
        if section and plain:
            yield from (f"[{place}{section}]", "")
        for each in plain:
            name, value = each.name, each.of(settings)
            yield from _comment(_about(each, sources.get(f"{where}{each.key}", "")))
            yield f"#{name} = (not set)" if value is None else f"{name} = {each.spelled(value)}"
            yield ""
    # Lists of tables come last, because a key that follows a table would belong to it.
    for each in settings_of(type(settings)).values():
        if each.each is None:
            continue
        yield from (*_comment(_about(each, sources.get(f"{where}{each.key}", ""))), "")
        for number, item in enumerate(each.of(settings), start=1):
            yield f"[[{place}{each.key}]]"
            yield from _rendered(
                item, sources, f"{place}{each.key}.", f"{where}{each.key}[{number}]."
            )


def _by_section(table: type[Table]) -> dict[str, list[Setting]]:
    found: dict[str, list[Setting]] = {"": []}
    for each in settings_of(table).values():
        found.setdefault(each.key.rpartition(".")[0], []).append(each)
    return found


def _about(setting: Setting, source: str) -> str:
    parts = [setting.reason]
    if setting.unit:
        parts.append(f"Unit: {setting.unit}.")
    if setting.bounds:
        parts.append(f"Allowed: {setting.bounds}.")
    parts.append(f"Default: {setting.default_text}.")
    if source:
        parts.append(f"Set by {source}.")
    parts.append("A reload applies it." if setting.reload else "A change needs a restart.")
    return " ".join(parts)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        width=96,
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )
