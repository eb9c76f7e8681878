"""Plots as SVG, as far as needed here: lines over logarithms, bars of parts, and panels.

Panels are parts of a dashboard: several plots over one time axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

INK, FAINT, PAPER = "#1f2328", "#d0d7de", "#ffffff"
COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#9a6700", "#cf222e", "#57606a", "#3192aa")
"""Dark enough to read on white, and distinguishable for the colour-blind, too."""
FONT = "font-family='system-ui, sans-serif' font-size='12'"
CHAR = 6.6
"""About the width of a character, in the unit of the drawing."""


@dataclass(frozen=True, slots=True)
class Line:
    """A series of points, and the x values for which no result came in time."""

    name: str
    points: tuple[tuple[float, float], ...]
    failed: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: where each of its parts ends, in order; empty if it did not finish."""

    name: str
    ends: tuple[float, ...]
    note: str = ""
    failed_after: float = 0.0
    """Drawn up to here as an outline, if there are no parts."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Values that hold until the next moment; a bound is drawn as a dashed line."""

    name: str
    points: tuple[tuple[float, float], ...]
    bound: bool = False


@dataclass(frozen=True, slots=True)
class Pile:
    """Values stacked at one moment, by name."""

    at: float
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: steps or piles."""

    title: str
    steps: tuple[Steps, ...] = ()
    piles: tuple[Pile, ...] = ()


def decades(values: Iterable[float]) -> tuple[int, int]:
    """Return the powers of ten between which all values lie.

    >>> decades([0.02, 3])
    (-2, 1)
    """
    logs = [math.log10(value) for value in values]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    return low, max(high, low + 1)


def lines(title: str, x_name: str, y_name: str, series: Sequence[Line]) -> str:
    """Draw series over two logarithmic axes.

    Raises:
        ValueError: there are no points to draw.
    """
    xs = [x for line in series for x in (*(x for x, _ in line.points), *line.failed)]
    ys = [y for line in series for _, y in line.points]
    if not ys:
        raise ValueError(f"{title}: there is nothing to draw")
    (x_low, x_high), (y_low, y_high) = decades(xs), decades(ys)
    left, top, width, height = 70.0, 40.0, 560.0, 320.0

    def at_x(value: float) -> float:
        return left + width * (math.log10(value) - x_low) / (x_high - x_low)

    def at_y(value: float) -> float:
        return top + height * (1 - (math.log10(value) - y_low) / (y_high - y_low))

    parts = [_text(left, 22, title, weight="bold")]
    for power in range(x_low, x_high + 1):
        x = at_x(10.0**power)
        parts.append(_rule(x, top, x, top + height))
        parts.append(_text(x, top + height + 18, f"{10**power:,}", anchor="middle"))
    for power in range(y_low, y_high + 1):
        y = at_y(10.0**power)
        parts.append(_rule(left, y, left + width, y))
        parts.append(_text(left - 8, y + 4, f"{10.0**power:g}", anchor="end"))
    parts.append(_text(left + width / 2, top + height + 38, x_name, anchor="middle"))
    parts.append(_text(left, top - 4, y_name))
    for line, colour in zip(series, COLOURS, strict=False):
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in line.points)
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>")
        parts += [
            f"<circle cx='{at_x(x):.1f}' cy='{at_y(y):.1f}' r='3.5' fill='{colour}'/>"
            for x, y in line.points
        ]
        parts += [_text(at_x(x), top + 14, "×", colour, anchor="middle") for x in line.failed]
        if line.points:
            x, y = line.points[-1]
            parts.append(_text(at_x(x) + 9, at_y(y) + 4, line.name, colour))
    return _page(left + width + 150, top + height + 50, parts)


def bars(title: str, x_name: str, part_names: Sequence[str], drawn: Sequence[Bar]) -> str:
    """Draw bars below each other, each of consecutive parts, over a linear axis.

    Raises:
        ValueError: there are no bars.
    """
    if not drawn:
        raise ValueError(f"{title}: there is nothing to draw")
    longest = max(max((*bar.ends, bar.failed_after)) for bar in drawn) or 1.0
    step = _step(longest)
    left, top, width, row = 16 + CHAR * max(len(bar.name) for bar in drawn), 74.0, 560.0, 20.0
    height = row * len(drawn)

    def at_x(value: float) -> float:
        return left + width * value / longest

    parts = [_text(8, 22, title, weight="bold")]
    x = left
    for name, colour in zip(part_names, COLOURS, strict=False):
        parts.append(f"<rect x='{x:.1f}' y='38' width='10' height='10' fill='{colour}'/>")
        parts.append(_text(x + 14, 47, name))
        x += 26 + CHAR * len(name)
    for number in range(int(longest / step) + 1):
        at = at_x(number * step)
        parts.append(_rule(at, top - 4, at, top + height))
        parts.append(_text(at, top - 8, f"{number * step:g}", anchor="middle"))
    parts.append(_text(left + width, top + height + 18, x_name, anchor="end"))
    for number, bar in enumerate(drawn):
        y = top + row * number
        parts.append(_text(left - 8, y + 14, bar.name, anchor="end"))
        before = 0.0
        for end, colour in zip(bar.ends, COLOURS, strict=False):
            wide = at_x(max(end, before)) - at_x(before)
            parts.append(
                f"<rect x='{at_x(before):.1f}' y='{y + 3:.1f}' width='{wide:.1f}' "
                f"height='{row - 6:.1f}' fill='{colour}'/>"
            )
            before = max(end, before)
        if not bar.ends:
            parts.append(
                f"<rect x='{left:.1f}' y='{y + 3:.1f}' width='{at_x(bar.failed_after) - left:.1f}' "
                f"height='{row - 6:.1f}' fill='none' stroke='{INK}' stroke-dasharray='3'/>"
            )
        parts.append(_text(at_x(max(before, bar.failed_after)) + 6, y + 14, bar.note))
    wide = left + width + 20 + CHAR * max(len(bar.note) for bar in drawn)
    return _page(wide, top + height + 30, parts)


def panels(
    title: str,
    x_name: str,
    until: float,
    drawn: Sequence[Panel],
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Draw panels below each other, over one axis from 0 to `until`; marks go through all of them.

    Raises:
        ValueError: a panel has nothing to draw.

    """
    left, top, width, height, gap = 52.0, 78.0, 640.0, 104.0, 46.0
    bottom = top + len(drawn) * (height + gap) - gap

    def at_x(value: float) -> float:
        return left + width * value / until

    parts = [_text(8, 22, title, weight="bold")]
    names = []
    for number, (at, name) in enumerate(marks):
        x, y = at_x(at), 40 + 13 * (number % 2)
        parts.append(
            f"<line x1='{x:.1f}' y1='{y + 2}' x2='{x:.1f}' y2='{bottom:.1f}' stroke='{INK}' "
            "stroke-dasharray='2 3'/>"
        )
        names.append(_text(x + 3, y + 2, name))
    parts += names
    for number, panel in enumerate(drawn):
        y = top + number * (height + gap)
        parts += _panel(panel, at_x, (left, y, width, height))
    step = _step(until)
    for number in range(int(until / step) + 1):
        x = at_x(number * step)
        parts.append(_text(x, bottom + 18, f"{number * step:g}", anchor="middle"))
    parts.append(_text(left + width, bottom + 36, x_name, anchor="end"))
    return _page(left + width + 150, bottom + 46, parts)


def _panel(
    panel: Panel, at_x: Callable[[float], float], box: tuple[float, float, float, float]
) -> list[str]:
    left, top, width, height = box
    highest = max(
        (
            *(value for steps in panel.steps for _, value in steps.points),
            *(sum(value for _, value in pile.parts) for pile in panel.piles),
        ),
        default=0.0,
    )
    if not highest:
        raise ValueError(f"{panel.title}: there is nothing to draw")
    # Counts have no halves; times are seldom whole.
    whole = all(value == int(value) for steps in panel.steps for _, value in steps.points) and all(
        value == int(value) for pile in panel.piles for _, value in pile.parts
    )
    step = max(_step(highest), 1.0) if whole else _step(highest)
    highest = step * math.ceil(highest / step)

    def at_y(value: float) -> float:
        return top + height * (1 - value / highest)

    parts = [_text(left, top - 8, panel.title, weight="bold")]
    for number in range(0, round(highest / step) + 1, 2 if highest / step > 6 else 1):
        y = at_y(number * step)
        parts.append(_rule(left, y, left + width, y))
        parts.append(_text(left - 8, y + 4, f"{number * step:g}", anchor="end"))
    names = [steps.name for steps in panel.steps]
    names += dict.fromkeys(name for pile in panel.piles for name, _ in pile.parts)
    colours = dict(zip(names, itertools.cycle(COLOURS), strict=False))
    for steps in panel.steps:
        parts.append(_stairs(steps, colours[steps.name], at_x, at_y))
    for pile in panel.piles:
        low = 0.0
        for name, value in pile.parts:
            x, y = at_x(pile.at) - 5, at_y(low + value)
            parts.append(
                f"<rect x='{x:.1f}' y='{y:.1f}' width='10' height='{at_y(low) - y:.1f}' "
                f"fill='{colours[name]}'/>"
            )
            low += value
    for number, (name, colour) in enumerate(colours.items()):
        y = top + 12 + 16 * number
        x = left + width + 12
        parts.append(f"<rect x='{x}' y='{y - 9:.1f}' width='10' height='10' fill='{colour}'/>")
        parts.append(_text(x + 16, y, name))
    return parts


def _stairs(
    steps: Steps, colour: str, at_x: Callable[[float], float], at_y: Callable[[float], float]
) -> str:
    found: list[str] = []
    before = 0.0
    for number, (x, value) in enumerate(steps.points):
        found += [f"{at_x(x):.1f},{at_y(before):.1f}"] if number else []
        found.append(f"{at_x(x):.1f},{at_y(value):.1f}")
        before = value
    stroke = f"stroke='{colour}' stroke-width='2'"
    stroke += " stroke-dasharray='6 4'" if steps.bound else ""
    return f"<polyline points='{' '.join(found)}' fill='none' {stroke}/>"


def _step(longest: float) -> float:
    """Return a round step that divides a length into five to ten."""
    power = 10.0 ** math.floor(math.log10(longest / 5))
    return next(power * each for each in (1, 2, 5, 10) if longest / (power * each) <= 10)


def _text(
    x: float, y: float, text: str, colour: str = INK, *, anchor: str = "start", weight: str = ""
) -> str:
    bold = f" font-weight='{weight}'" if weight else ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' fill='{colour}' text-anchor='{anchor}'{bold}>"
        f"{escape(text)}</text>"
    )


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{FAINT}'/>"


def _page(width: float, height: float, parts: Iterable[str]) -> str:
    size = f"width='{width:.0f}' height='{height:.0f}' viewBox='0 0 {width:.0f} {height:.0f}'"
    inside = "\n".join(parts)
    # Lines that cross a text end at its edge.
    halo = f"text {{ paint-order: stroke; stroke: {PAPER}; stroke-width: 4px }}"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} {FONT}>\n"
        f"<style>{halo}</style>\n"
        f"<rect width='100%' height='100%' fill='{PAPER}'/>\n{inside}\n</svg>\n"
    )
