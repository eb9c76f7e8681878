"""Formats ledgers as a self-contained HTML page with plots.

All text is escaped, because names and reasons come from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from itertools import chain
from typing import Any

from rdzv.core.words import duration
from rdzv.ctl.as_text_report import (
    advice_tables,
    all_tables,
    hours,
    notes,
    run_tables,
    share,
)
from rdzv.view.ledger import Cost, Interval, Ledger, LedgerPhase
from rdzv.view.reports import Report

COLOURS: Mapping[str, str] = {
    LedgerPhase.QUEUED: "#b8bfcc",
    LedgerPhase.WAITING: "#8792a5",
    LedgerPhase.FORMING: "#7aa7e0",
    LedgerPhase.STARTING: "#4f7fd6",
    LedgerPhase.LOADING: "#6f5fd0",
    LedgerPhase.TRAINING: "#2f9e5b",
    LedgerPhase.REDOING: "#e0b03a",
    LedgerPhase.DETECTING: "#d1495b",
    LedgerPhase.STOPPING: "#e08a4a",
}
"""The color of each phase, as on rdzvd's page."""

_WIDTH, _BAND = 1_000, 46
_LEAST_WIDTH = 0.2
"""Intervals narrower than this are merged and drawn in the color of the longest one."""
_TICKS = 5
_WORDS = ("cause", "node", "job", "workers", "change", "now", "verdict")
"""The titles of columns that hold text; all others hold numbers."""

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif;
  font-variant-numeric: tabular-nums; }
body { max-width: 1040px; margin: 24px auto; padding: 0 20px; }
h1 { font-size: 22px; } h2 { font-size: 16px; margin: 28px 0 8px; }
svg { width: 100%; display: block; } svg[viewBox] { height: auto; }
svg[viewBox] text { fill: currentColor; font-size: 13px; }
table { border-collapse: collapse; } th, td { text-align: left; padding: 3px 18px 3px 0; }
th { font-weight: 600; border-bottom: 1px solid #8886; } td.n, th.n { text-align: right; }
ul.key { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; }
ul.key i { display: inline-block; width: 12px; height: 12px; margin-right: 6px; }
p.big { font-size: 30px; font-weight: 650; margin: 0; } .dim { opacity: 0.7; }
"""


def ledger(rdzv_id: str, found: Ledger, others: Sequence[Ledger], restarts: str) -> str:
    """Format a run; `restarts` is the picture of its last ones, an SVG."""
    number = f"run {found.run_number}" if found.run_number is not None else "run"
    good = share(found.goodput, steps_reported=found.steps_reported)
    trained = duration(found.phases[LedgerPhase.TRAINING])
    body = [
        f"<h1>{escape(rdzv_id)}, {escape(number)}: {escape(found.result or 'open')}</h1>",
        f'<p class="big">Goodput {escape(good)}</p>',
        f"<p>{trained} of {duration(found.wall_ms)} were training; ",
        f"{hours(found.node_ms)} node-hours were held.</p>",
        *(f'<p class="dim">{escape(note)}</p>' for note in notes(found)),
        "<h2>Over time</h2>",
        _band(found.intervals),
        _key(found.phases),
        "<h2>The last restarts</h2>",
        restarts,
        "<h2>Where the time went</h2>",
        _bars((phase, ms, COLOURS[phase]) for phase, ms in found.phases.items() if ms),
    ]
    for title, columns, rows in run_tables(found):
        body += [f"<h2>{title}</h2>", _table(columns, rows)]
    if others:
        body += ["<h2>Other runs</h2>", *(_other(run) for run in others)]
    return _page(f"{rdzv_id}: {number}", body)


def report(found: Report) -> str:
    bound = all(job.steps_reported for job in found.jobs)
    since = duration(found.until_unix_ms - found.from_unix_ms)
    good = share(found.goodput, steps_reported=bound)
    body = [
        f"<h1>All jobs in the last {since}</h1>",
        f'<p class="big">Goodput {escape(good)}</p>',
        f"<p>of {hours(found.node_ms)} node-hours were training.</p>",
        "<h2>Where the time went</h2>",
        _bars((phase, ms, COLOURS[phase]) for phase, ms in found.phases.items() if ms),
    ]
    for title, columns, rows in chain(all_tables(found), advice_tables(found)):
        body += [
            f"<h2>{title}</h2>",
            *_losses(rows),
            _table(columns, rows) if rows else "<p>None.</p>",
        ]
    return _page(f"All jobs in the last {since}", body)


def _page(title: str, body: Iterable[str]) -> str:
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head += f'</title><meta http-equiv="Content-Security-Policy" content="{policy}">'
    return "\n".join([f"{head}<style>{_STYLE}</style></head><body>", *body, "</body></html>\n"])


# ------------------------------------------------------------------ plots


def _band(intervals: Sequence[Interval]) -> str:
    if not intervals:
        return "<p>No time has passed yet.</p>"
    from_ms, until_ms = intervals[0].from_unix_ms, intervals[-1].until_unix_ms
    scale = _WIDTH / (until_ms - from_ms)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_BAND + 22}" role="img" aria-label="phases over time">']
    for run in _together(intervals, _LEAST_WIDTH / scale):
        most = max(run, key=lambda one: one.ms)
        x = (run[0].from_unix_ms - from_ms) * scale
        width = (run[-1].until_unix_ms - run[0].from_unix_ms) * scale
        parts.append(
            f'<rect x="{x:.2f}" y="0" width="{max(width, _LEAST_WIDTH):.2f}" height="{_BAND}" '
            f'fill="{COLOURS[most.phase]}"><title>{escape(_about(most))}</title></rect>'
        )
    for tick in range(_TICKS):
        share_ = tick / (_TICKS - 1)
        anchor = {0: "start", _TICKS - 1: "end"}.get(tick, "middle")
        # The labels at both ends include the date and the time zone.
        form = "%H:%M:%S" if anchor == "middle" else "%Y-%m-%d %H:%M:%S %Z"
        text = _time(round(from_ms + share_ * (until_ms - from_ms)), form)
        place = f'x="{share_ * _WIDTH:.0f}" y="{_BAND + 17}" text-anchor="{anchor}"'
        parts.append(f"<text {place}>{text}</text>")
    return "".join([*parts, "</svg>"])


def _together(intervals: Sequence[Interval], least_ms: float) -> Iterator[list[Interval]]:
    """Yield groups of adjacent intervals, each long enough to be visible."""
    group: list[Interval] = []
    for one in intervals:
        if group and group[-1].until_unix_ms - group[0].from_unix_ms >= least_ms:
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _about(one: Interval) -> str:
    text = f"{one.phase}, {duration(one.ms)}, from {_time(one.from_unix_ms)}"
    if one.round is not None:
        text += f", round {one.round}"
    if one.cause:
        text += f": {one.cause}" + (f" on {one.node_id}" if one.node_id else "")
    return text


def _time(unix_ms: int, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    try:
        return escape(datetime.fromtimestamp(unix_ms / 1000).astimezone().strftime(form))
    except (OverflowError, ValueError, OSError):
        return "?"


def _key(phases: Mapping[str, int]) -> str:
    items = "".join(
        f'<li><i style="background:{COLOURS[phase]}"></i>{escape(phase)}</li>'
        for phase, ms in phases.items()
        if ms
    )
    return f'<ul class="key">{items}</ul>'


def _bars(rows: Iterable[tuple[str, int, str]], text_of: Callable[[int], str] = duration) -> str:
    found = list(rows)
    whole_ms = max(sum(ms for _, ms, _ in found), 1)
    most_ms = max((ms for _, ms, _ in found), default=0) or 1
    parts = [f'<svg viewBox="0 0 {_WIDTH} {len(found) * 26}" role="img" aria-label="bars">']
    for number, (name, ms, colour) in enumerate(found):
        y = number * 26
        width = ms / most_ms * 560
        text = f"{text_of(ms)}, {ms / whole_ms:.1%}"
        parts += [
            f'<text x="0" y="{y + 17}">{escape(name[:40])}</text>',
            f'<rect x="190" y="{y + 3}" width="{width:.1f}" height="20" fill="{colour}"></rect>',
            f'<text x="{190 + width + 8:.1f}" y="{y + 17}">{text}</text>',
        ]
    return "".join([*parts, "</svg>"])


def _losses(rows: Sequence[Any]) -> list[str]:
    """Draw the largest costs, unless the rows are something else."""
    costs = [row for row in rows[:20] if isinstance(row, Cost)]
    most = [(one.node_id or one.cause or "the start", one.node_ms, "#d1495b") for one in costs]
    return [_bars(most, lambda node_ms: f"{hours(node_ms)} node-hours")] if most else []


def _other(run: Ledger) -> str:
    number = "?" if run.run_number is None else run.run_number
    good = share(run.goodput, steps_reported=run.steps_reported)
    text = f"Run {number}: {run.result or 'open'} after {duration(run.wall_ms)}, goodput {good}."
    return f"<p>{escape(text)}</p>{_band(run.intervals)}"


def _table(columns: Mapping[str, Callable[[Any], str]], found: Sequence[Any]) -> str:
    """Format a table without its empty columns; `_WORDS` names the columns that hold text."""
    cells = {title: [text_of(one) for one in found] for title, text_of in columns.items()}
    filled = {title: texts for title, texts in cells.items() if any(texts)}
    kinds = ["" if title in _WORDS else ' class="n"' for title in filled]

    def row(tag: str, texts: Iterable[str]) -> str:
        cells = zip(kinds, texts, strict=True)
        return f"<tr>{''.join(f'<{tag}{kind}>{escape(text)}</{tag}>' for kind, text in cells)}</tr>"

    lines = [row("td", texts) for texts in zip(*filled.values(), strict=True)]
    return f"<table>{row('th', filled)}{''.join(lines)}</table>"
