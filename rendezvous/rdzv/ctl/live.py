"""The screen for `status --watch`: a job's state, what it is waiting for, and its recent history.

A screen is a list of lines that fits a terminal. It is built from the last status that the server
pushed, that status's age, and the job's history; nothing here sends requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar, cast

from msgspec import Struct, structs

from rdzv.core.reason import LAST_CALL
from rdzv.core.words import counted, duration, listed
from rdzv.ctl import as_text
from rdzv.ctl.layout import Cell, Columns, Page, dim
from rdzv.structs import field_names
from rdzv.view.answers import ENDED, Event, JobStatus

T = TypeVar("T")

FOOTER = "Ctrl-C ends this view, not the job"

_LEAST_NODE_LINES = 4
"""The lines reserved for the table of nodes: header, two nodes, and the number omitted."""
_MOST_HISTORY = 8
_MOST_REASON = 4
_LABEL_WIDTH = 13
_BAR = 24

_TURNS = (
    *("RunBegan", "RoundCompleted", "RoundAdopted", "RoundEnded", "RoundSettled", "RunEnded"),
    *("JobScaled", "JobQueued", "NodesPlaced", "NodesWithdrawn", "NodeDeclined", "LastCallBegan"),
    *("NodeDrained", "NodeUndrained"),
)
"""The events shown in the timeline, which is the course of rounds. Node and worker events are shown
elsewhere.
"""

_BEGINS = ("RoundCompleted", "RoundAdopted")
_ENDS = ("RoundEnded", "RunEnded")

_HERE = ("seated", "waiting", "stopping", "succeeded")
"""The states of nodes that take part in this round or count towards the next one."""


# ------------------------------------------------------------------------------------ time


def later(value: T, more_ms: int) -> T:
    """Return an answer as it will be `more_ms` later, if only its ages and deadlines change.

    Ages are the fields whose names end in `age_ms`, and deadlines those that end in `left_ms`.
    """
    if isinstance(value, tuple):
        return cast("T", tuple(later(one, more_ms) for one in value))
    if not isinstance(value, Struct):
        return value
    changed: dict[str, object] = {}
    for name in field_names(type(value)):
        part = getattr(value, name)
        if isinstance(part, int) and name.endswith("age_ms"):
            changed[name] = part + more_ms
        elif isinstance(part, int) and name.endswith("left_ms"):
            changed[name] = max(part - more_ms, 0)
        elif isinstance(part, tuple | Struct):
            changed[name] = later(part, more_ms)
    return cast("T", structs.replace(value, **changed))


def whole_wait_ms(status: JobStatus, before: JobStatus | None, before_ms: int | None) -> int | None:
    """Return the total length of a job's wait, as far as observed, or None if it is not waiting.

    `before_ms` is this function's result for the previous status, `before`.
    """
    left_ms = status.reason.left_ms
    if left_ms is None:
        return None
    same = before is not None and _wait(before) == _wait(status)
    return max(left_ms, before_ms or 0) if same else left_ms


def _wait(status: JobStatus) -> object:
    """Return a value that is equal for all statuses during one wait."""
    return status.run, status.state, status.round, status.reason.then


# ------------------------------------------------------------------------------------ the screen


def screen(
    job: JobStatus,
    history: Sequence[Event],
    whole_ms: int | None,
    page: Page,
    height: int,
    *,
    blocks: bool = True,
) -> list[str]:
    """Format a job on `height` lines: its reason, bars, nodes, and the latest events.

    `whole_ms` is the total length of its current wait. Lines that do not fit are omitted, seated
    nodes first. Without `blocks`, bars are drawn in ASCII.
    """
    width = page.width or 80
    bars = _Bars(page, min(_BAR, max(width - 40, 8)), blocks)
    top = [as_text.headline(job, page)]
    top += as_text.reason(job, page)[:_MOST_REASON]
    whole_ms = _since_its_beginning(job, history, whole_ms, page)
    top += ["", *_bars(job, whole_ms, bars), *_facts(job, page)]
    turns = timeline(history, job, page, bars)
    failure = _failure(job, page)
    room = height - len(top) - len(failure) - 2
    turns = turns[-max(min(_MOST_HISTORY, room - _LEAST_NODE_LINES - 1), 0) :] if turns else []
    below = (["", *turns] if turns else []) + failure
    room = height - len(top) - len(below) - 2
    nodes = _nodes(job, page, room)
    lines = [*top, "", *nodes, *below] if nodes else [*top, *below]
    return [*lines[: height - 1], page.line(dim(FOOTER))]


def _nodes(job: JobStatus, page: Page, room: int) -> list[str]:
    fits = len(job.nodes) + 1 <= room
    if not job.nodes or (not fits and room < 3):
        return []
    most = None if fits else room - 2
    return as_text.node_table(job, page, most=most, one_line=True, hint="")


def _facts(job: JobStatus, page: Page) -> list[str]:
    round_ = "none yet" if job.round is None else str(job.round)
    parts = [f"round {round_}"]
    if job.world_size is not None:
        parts.append(f"WORLD_SIZE {job.world_size}")
    if job.restarts is not None and job.max_restarts:
        parts.append(f"{job.restarts} of {counted(job.max_restarts, 'restart')} spent")
    lines = page.fact("now", ", ".join(parts))
    if job.progress:
        lines += page.fact("progress", as_text.progress(job))
    if coming := as_text.awaited(job):
        lines += page.fact("placed", f"{listed(coming)}; not joined yet")
    if job.submission is not None and job.submission.declined:
        names = listed(node.node_id for node in job.submission.declined)
        last = job.submission.declined[-1]
        lines += page.fact("declined", Cell(f"{names}; {last.node_id}: {last.reason}", "yellow"))
    return lines


def _failure(job: JobStatus, page: Page) -> list[str]:
    if job.last_failure is None:
        return []
    text = as_text.one_line_of(job.last_failure)
    return ["", *page.fact("last failure", Cell(text, "red"))[:2]]


class _Bars:
    """Draws bars of a fixed width."""

    def __init__(self, page: Page, width: int, blocks: bool) -> None:
        self.page = page
        self.width = width
        self.full, self.empty = ("█", "░") if blocks else ("#", ".")

    def of(self, part: float, whole: float) -> str:
        """Return a bar filled in proportion; only 0 looks empty, and only the whole looks full."""
        share = min(max(part / whole, 0.0), 1.0) if whole > 0 else 0.0
        cells = math.ceil(share * self.width) if share < 0.5 else math.floor(share * self.width)
        return self.full * cells + self.empty * (self.width - cells)

    def line(self, label: str, bar: str, text: str) -> list[str]:
        return self.page.fact(label, f"{bar} {text}")


def _bars(job: JobStatus, whole_ms: int | None, bars: _Bars) -> list[str]:
    lines = []
    if job.min_nodes is not None and job.max_nodes is not None and job.state not in ENDED:
        have = sum(1 for node in job.nodes if node.state in _HERE)
        text = f"{have} of {job.min_nodes}:{job.max_nodes}"
        if have < job.min_nodes:
            text += f", {job.min_nodes - have} missing"
        lines += bars.line("nodes", bars.of(have, job.max_nodes), text)
    left_ms = job.reason.left_ms
    if left_ms is not None and whole_ms and job.state not in ENDED:
        lines += bars.line("time left", bars.of(left_ms, whole_ms), duration(left_ms))
    return lines


def _since_its_beginning(
    job: JobStatus, history: Sequence[Event], whole_ms: int | None, page: Page
) -> int | None:
    """Return `whole_ms`; for a last call, include the part before the watch began."""
    left_ms = job.reason.left_ms
    if whole_ms is None or left_ms is None or job.reason.then != LAST_CALL:
        return whole_ms
    began_ms = [
        event.unix_ms
        for event in history
        if event.name == "LastCallBegan" and event.run in (job.run, None)
    ]
    if not began_ms:
        return whole_ms
    return max(whole_ms, left_ms + round(page.now_s * 1000) - began_ms[-1])


# ------------------------------------------------------------------------------------ the timeline


def timeline(
    history: Sequence[Event], job: JobStatus, page: Page, bars: _Bars | None = None
) -> list[str]:
    """Format the current run's turning points, oldest first.

    The end of a round shows how long it ran. With `bars`, a bar above shows when a round was
    running.
    """
    events = [event for event in history if event.run in (job.run, None)]
    turns = [event for event in events if event.name in _TURNS]
    if not turns:
        return []
    rows: list[tuple[Event, str]] = []
    began_ms = None
    for event in turns:
        ran = ""
        if event.name in _BEGINS:
            began_ms = event.unix_ms
        elif event.name in _ENDS and began_ms is not None:
            ran, began_ms = f"after {duration(event.unix_ms - began_ms)}: ", None
        rows.append((event, ran))
    columns: Columns[tuple[Event, str]] = {
        "TIME": lambda row: page.clock(row[0].unix_ms),
        "HISTORY": lambda row: Cell(
            row[1] + row[0].text, as_text.EVENT_STYLES.get(row[0].name, "")
        ),
    }
    lines = page.table(rows, columns, one_line=True)
    share = _share(events, page)
    return lines if bars is None or share is None else [*_ran(share, bars), *lines[1:]]


def _ran(share: Sequence[tuple[float, float]], bars: _Bars) -> list[str]:
    """Draw a bar from the first known event until now, filled where a round was running."""
    cells = [bars.empty] * bars.width
    for first, last in share:
        # Readers look for gaps, so a cell is filled only if a round was running during all of it.
        for cell in range(math.ceil(first * bars.width), math.floor(last * bars.width)):
            cells[cell] = bars.full
    percent = 100 * sum(last - first for first, last in share)
    text = f"a round ran {percent:.3g} % of the time shown"
    return bars.line("history", "".join(cells), text)


def _share(events: Sequence[Event], page: Page) -> list[tuple[float, float]] | None:
    """Return when rounds ran, as fractions of the time since the first event; None if unknown."""
    first_ms, now_ms = events[0].unix_ms, page.now_s * 1000
    whole_ms = now_ms - first_ms
    if whole_ms <= 0:
        return None  # This machine's clock is behind the server's.
    found, began_ms = [], None
    for event in events:
        if event.name in _BEGINS and began_ms is None:
            began_ms = event.unix_ms
        elif event.name in _ENDS and began_ms is not None:
            found.append((began_ms, event.unix_ms))
            began_ms = None
    if began_ms is not None:
        found.append((began_ms, max(round(now_ms), began_ms)))
    return [((a - first_ms) / whole_ms, min((b - first_ms) / whole_ms, 1.0)) for a, b in found]
