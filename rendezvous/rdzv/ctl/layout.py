"""Lays out lines for a terminal or a pipe: widths, colors, and sanitized text.

All text is treated as hostile: a traceback may contain codes that retitle a terminal, clear it or
type into it. A `Page`'s output has no control characters except for its own colors.
"""

from __future__ import annotations

import os
import shutil
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, tzinfo
from typing import TextIO, TypeVar

import click

from rdzv.runtime.log_format import harmless
from rdzv.structs import struct

T = TypeVar("T")

_GAP = "  "
_LABEL_WIDTH = 15
_NARROWEST = 28
"""If a row leaves less width than this, its free text goes on the lines below."""
_SHORTEST = 40
"""By default, expendable columns are dropped until free text has at least this much width."""


@struct(frozen=True)
class Cell:
    """A piece of text and its style: the name of a color, `bold`, `dim`, or empty."""

    text: str
    style: str = ""


def bold(text: str) -> Cell:
    return Cell(text, "bold")


def dim(text: str) -> Cell:
    return Cell(text, "dim")


Text = str | Cell
Columns = Mapping[str, Callable[[T], Text]]
"""The columns of a table: the text for a row, by title."""


@struct(frozen=True)
class Page:
    """The destination for laid-out lines. A pipe or a file has no `width`."""

    width: int | None
    colour: bool
    now_s: float
    zone: tzinfo | None = None
    """The time zone for all times; None means this machine's."""

    def line(self, *texts: Text) -> str:
        """Join all texts that are not empty into one line."""
        return _GAP.join(self._paint(cell) for cell in map(_cell, texts) if cell.text)

    def sentence(self, text: str, indent: int = 0) -> list[str]:
        return self._wrapped(Cell(text), " " * indent, indent)

    def fact(self, label: str, value: Text, width: int = 0) -> list[str]:
        """Format a value after its label; `width` is the width of the widest label."""
        indent = max(_LABEL_WIDTH, 2 + width + len(_GAP))
        name = self._paint(dim(f"  {label}".ljust(indent)))
        return self._wrapped(_cell(value), name, indent)

    def facts(self, found: Mapping[str, Text]) -> list[str]:
        """Format values by label, without those that are empty."""
        shown = ((label, value) for label, value in found.items() if _cell(value).text)
        return [line for label, value in shown for line in self.fact(label, value)]

    def block(self, text: str, indent: int, last: int | None = None) -> list[str]:
        """Indent text without wrapping it, optionally keeping only its last `last` lines."""
        lines = text.splitlines()
        left_out = max(len(lines) - last, 0) if last is not None else 0
        note = f"... {left_out} lines before these are left out; --all shows them"
        shown = [self.line(dim(note))] if left_out else []
        shown += [harmless(line.expandtabs()) for line in lines[left_out:]]
        return [" " * indent + line if line else "" for line in shown]

    def table(
        self,
        found: Iterable[T],
        columns: Columns[T],
        *,
        expendable: Sequence[str] = (),
        one_line: bool = False,
        least: int = _SHORTEST,
    ) -> list[str]:
        """Format a row for each value found; the last column is free text.

        Free text takes the remaining width. Columns without text are omitted, and then `expendable`
        ones, in that order, until the rest fits. Free text is wrapped; with `one_line`, it is cut,
        and `least` is kept free for it.
        """
        rows = list(found)
        filled = {}
        for title, text_of in columns.items():
            cells = [_cell(text_of(row)) for row in rows]
            if any(cell.text for cell in cells):
                filled[title] = [bold(title), *cells]
        texts = filled.pop(list(columns)[-1], None)
        widths = {
            title: max(_width(cell.text) for cell in cells) + len(_GAP)
            for title, cells in filled.items()
        }
        reserved = least if one_line and texts else 0
        for title in expendable:
            if self.width is None or sum(widths.values()) + reserved <= self.width:
                break
            widths.pop(title, None)
        taken, lines = sum(widths.values()), []
        for number in range(len(rows) + 1):
            left = ""
            for title, width in widths.items():
                cell = filled[title][number]
                left += self._paint(cell) + " " * (width - _width(cell.text))
            lines += self._with_text(left, texts[number] if texts else Cell(""), taken, one_line)
        return lines

    def at(self, unix_ms: int) -> str:
        moment = self._moment(unix_ms / 1000)
        return f"{moment:%Y-%m-%d %H:%M:%S}.{unix_ms % 1000:03d}" if moment else "?"

    def clock(self, unix_ms: int) -> str:
        """Format a time as `ago` does, for a column in which most times fall on the current day."""
        return self.ago(round(self.now_s * 1000) - unix_ms)

    def ago(self, age_ms: int) -> str:
        """Format the time `age_ms` ago: to the second if today, otherwise with the date."""
        moment, now = self._moment(self.now_s - age_ms / 1000), self._moment(self.now_s)
        if moment is None or now is None:
            return "?"
        return f"{moment:%H:%M:%S}" if moment.date() == now.date() else f"{moment:%Y-%m-%d %H:%M}"

    def _moment(self, unix_s: float) -> datetime | None:
        try:
            return datetime.fromtimestamp(unix_s, self.zone)
        except (OverflowError, ValueError, OSError):
            return None

    def _paint(self, cell: Cell) -> str:
        text = harmless(cell.text)
        if not self.colour or not cell.style:
            return text
        if cell.style in ("bold", "dim"):
            return click.style(text, **{cell.style: True})
        return click.style(text, fg=cell.style)

    def _wrapped(self, cell: Cell, first: str, indent: int) -> list[str]:
        """Wrap text that follows the prefix `first` on its line; `indent` is the prefix's width."""
        lines = [harmless(cell.text)]
        if self.width is not None:
            room = max(self.width - indent, 8)
            # Do not split host names at hyphens, because half a name is of no use when copied.
            lines = textwrap.wrap(
                lines[0], room, break_long_words=False, break_on_hyphens=False
            ) or [""]
        painted = [self._paint(Cell(line, cell.style)) for line in lines]
        return [first + painted[0], *(" " * indent + line for line in painted[1:])]

    def _with_text(self, row: str, text: Cell, taken: int, one_line: bool) -> list[str]:
        if not text.text:
            return [row.rstrip()]
        if self.width is None:
            return [row + self._paint(text)]
        room = self.width - taken
        if one_line:
            return [row + self._paint(Cell(_cut(harmless(text.text), room), text.style))]
        if room >= min(_NARROWEST, _width(text.text)):
            return self._wrapped(text, row, taken)
        return [row.rstrip(), *self._wrapped(text, " " * 4, 4)]


def page_for(stream: TextIO) -> Page:
    terminal = stream.isatty()
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return Page(
        width=shutil.get_terminal_size().columns if terminal else None,
        colour=terminal and not plain,
        now_s=time.time(),
    )


def _cell(text: Text) -> Cell:
    return Cell(text) if isinstance(text, str) else text


def _width(text: str) -> int:
    """Return how many columns text occupies. A wide character, such as a Chinese one, takes two."""
    shown = harmless(text)
    if shown.isascii():
        return len(shown)
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in shown)


def _cut(text: str, room: int) -> str:
    room = max(room, 2)
    return text if len(text) <= room else text[: room - 1] + "…"
