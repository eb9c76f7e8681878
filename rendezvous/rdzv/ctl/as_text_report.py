"""Formats ledgers as text: how one run or all jobs spent their time, and what failures cost."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rdzv.core.words import counted, duration
from rdzv.ctl.layout import Cell, Page
from rdzv.errors import InvalidRequestError
from rdzv.view.ledger import Cost, Ledger, LedgerPhase
from rdzv.view.reports import JobLine, Loss, Report

NO_STEPS = (
    "No progress is reported: training counts from the first collective or, where none is "
    "recorded, from the start of the workers, so the share of training is an upper bound."
)
"""Shown if the time for starting, loading and redone steps cannot be told apart from training."""
FORGOTTEN = "The beginning of this run is no longer in the history, so it is not counted."
LISTED = 10
"""The maximum number of jobs, causes and nodes that a text lists."""

COMEBACKS = ("workers", "times", "each", "time", "node-hours")
"""The column titles for the table that shows how rounds began."""

_BAR = 24
_HOUR_MS = 3_600_000
_UNITS_MS = {"m": 60_000, "min": 60_000, "h": _HOUR_MS, "d": 24 * _HOUR_MS, "w": 168 * _HOUR_MS}
_STYLES = {LedgerPhase.TRAINING.value: "green", LedgerPhase.REDOING.value: "yellow"}


def read_since(text: str) -> int:
    """Parse how far back to look, such as `7d` or `12h`, and return milliseconds.

    Raises:
        InvalidRequestError: the text is not such a time.
    """
    found = re.fullmatch(r"(\d{1,6})\s*(m|min|h|d|w)", text.strip())
    if found is None or not int(found[1]):
        raise InvalidRequestError(
            f"{text[:40]!r} is not a time to look back; give one such as 90m, 12h, 7d or 2w"
        )
    return int(found[1]) * _UNITS_MS[found[2]]


def share(goodput: float | None, *, steps_reported: bool) -> str:
    """Format a share of time. It is an upper bound if no steps are reported.

    >>> share(0.8731, steps_reported=True), share(1.0, steps_reported=False)
    ('87.3%', 'at most 100.0%')
    """
    if goodput is None:
        return "?"
    return ("" if steps_reported or not goodput else "at most ") + f"{goodput:.1%}"


def hours(ms: int | None) -> str:
    """Format node or GPU time in hours; empty if it is unknown.

    >>> hours(15_000), hours(90 * 60_000), hours(360_000_000), hours(None)
    ('0.00417', '1.50', '100', '')
    """
    if ms is None:
        return ""
    found = ms / _HOUR_MS
    return f"{found:.3g}" if found < 1 else f"{found:.2f}" if found < 100 else f"{found:,.0f}"


def cause_name(cause: str) -> str:
    """Return a name for the cause of lost time. An empty cause is the start of the run."""
    return cause or "the start"


def ledger(rdzv_id: str, found: Ledger, others: Sequence[Ledger], page: Page) -> str:
    """Format one run's ledger; `others` are the job's other runs."""
    number = f"run {found.run_number}" if found.run_number is not None else "run"
    state = found.result or "open"
    lines = [page.line(Cell(rdzv_id, "bold"), Cell(f"{number}, {state}")), ""]
    good = share(found.goodput, steps_reported=found.steps_reported)
    spent = f"{duration(found.phases[LedgerPhase.TRAINING])} of {duration(found.wall_ms)}"
    lines += page.fact("goodput", Cell(f"{good} ({spent} were training)"))
    lines += page.fact("held", Cell(_held(found.node_ms, found.gpus_per_node)))
    if found.steps_redone:
        lines += page.fact("steps redone", Cell(str(found.steps_redone)))
    for note in notes(found):
        lines += page.sentence(note)
    lines += ["", page.line(Cell("Where the time went", "bold"))]
    lines += _indented(_phases(found.phases, page))
    if found.costs:
        lines += ["", page.line(Cell("What it cost", "bold"))]
        lines += _indented(_costs(found.costs, found.gpus_per_node, page))
    if found.comebacks:
        lines += ["", page.line(Cell("How long until it trained again", "bold"))]
        header = tuple(name.upper() for name in COMEBACKS)
        lines += _indented(page.table(header, [[*map(Cell, row)] for row in came_back(found)]))
    if others:
        lines += ["", page.line(Cell("Other runs", "bold"))]
        lines += _indented(_runs(others, page))
    return "\n".join(lines)


def notes(found: Ledger) -> list[str]:
    """Return notes on what a ledger cannot determine."""
    told = []
    if not found.steps_reported and found.phases[LedgerPhase.TRAINING]:
        told.append(NO_STEPS)
    if found.run_number is None:
        told.append(FORGOTTEN)
    return told


def came_back(found: Ledger) -> list[tuple[str, ...]]:
    """Return a row for each way in which rounds began, with the columns of `COMEBACKS`."""
    return [
        (
            *(one.way, str(one.times), duration(one.ms // one.times)),
            *(duration(one.ms), hours(one.node_ms)),
        )
        for one in found.comebacks
    ]


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _held(node_ms: int, gpus_per_node: int | None) -> str:
    text = f"{hours(node_ms)} node-hours"
    if gpus_per_node is not None:
        text += f", {hours(node_ms * gpus_per_node)} GPU-hours"
    return text


def _phases(phases: Mapping[str, int], page: Page) -> list[str]:
    whole_ms = sum(phases.values())
    rows = []
    for phase, ms in phases.items():
        if not ms:
            continue
        style = _STYLES.get(phase, "")
        bar = Cell("#" * max(round(ms / whole_ms * _BAR), 1), style)
        rows.append((Cell(phase, style), Cell(duration(ms)), Cell(f"{ms / whole_ms:.1%}"), bar))
    return page.table(("PHASE", "TIME", "SHARE", ""), rows) if rows else ["no time yet"]


def _costs(costs: Sequence[Cost], gpus_per_node: int | None, page: Page) -> list[str]:
    header = ("CAUSE", "NODE", "TIMES", "TIME", "NODE-HOURS", "GPU-HOURS")
    rows = []
    for cost in costs[:LISTED]:
        gpu_ms = None if gpus_per_node is None else cost.node_ms * gpus_per_node
        times = str(cost.times) if cost.cause else ""
        rows.append(
            (
                *(Cell(cause_name(cost.cause)), Cell(cost.node_id), Cell(times)),
                *(Cell(duration(cost.ms)), Cell(hours(cost.node_ms)), Cell(hours(gpu_ms))),
            )
        )
    return page.table(header, rows) + _more(len(costs), "cause")


def _more(number: int, noun: str) -> list[str]:
    left = number - LISTED
    return [f"and {counted(left, f'more {noun}')}; -o json has all of them"] if left > 0 else []


def _runs(runs: Sequence[Ledger], page: Page) -> list[str]:
    rows = []
    for run in runs[-LISTED:]:
        number = "?" if run.run_number is None else str(run.run_number)
        good = share(run.goodput, steps_reported=run.steps_reported)
        began, lasted = page.clock(run.from_unix_ms), duration(run.wall_ms)
        rows.append([Cell(text) for text in (number, began, run.result or "open", lasted, good)])
    return page.table(("RUN", "BEGAN", "RESULT", "LASTED", "GOODPUT"), rows)


# ------------------------------------------------------------------ all jobs


def report(found: Report, page: Page) -> str:
    """Format how all jobs spent their time, and which causes and nodes cost most."""
    since = duration(found.until_unix_ms - found.from_unix_ms)
    lines = [page.line(Cell(f"All jobs in the last {since}", "bold")), ""]
    if not found.jobs:
        return "\n".join([*lines, *page.sentence("No job had a run in this time.")])
    bound = all(job.steps_reported for job in found.jobs)
    good = share(found.goodput, steps_reported=bound)
    lines += page.fact("goodput", Cell(f"{good} of {hours(found.node_ms)} node-hours"))
    if not bound:
        lines += page.sentence(NO_STEPS)
    lines += ["", page.line(Cell("Where the time went", "bold"))]
    lines += _indented(_phases(found.phases, page))
    lines += ["", page.line(Cell("Which causes cost most", "bold"))]
    lines += _indented(_losses("CAUSE", found.causes, page))
    if found.nodes:
        lines += ["", page.line(Cell("Which nodes cost most", "bold"))]
        lines += _indented(_losses("NODE", found.nodes, page))
    lines += ["", page.line(Cell("Jobs", "bold")), *_indented(_jobs(found.jobs, page))]
    return "\n".join(lines)


def _losses(name: str, losses: Sequence[Loss], page: Page) -> list[str]:
    rows = [
        (
            *(Cell(cause_name(loss.name)), Cell(str(loss.times)), Cell(duration(loss.ms))),
            *(Cell(hours(loss.node_ms)), Cell(hours(loss.gpu_ms))),
        )
        for loss in losses[:LISTED]
    ]
    if not rows:
        return ["none"]
    header = (name, "TIMES", "TIME", "NODE-HOURS", "GPU-HOURS")
    return page.table(header, rows) + _more(len(losses), name.lower())


def _jobs(jobs: Sequence[JobLine], page: Page) -> list[str]:
    rows = [
        (
            *(Cell(job.rdzv_id), Cell(str(job.runs)), Cell(duration(job.wall_ms))),
            Cell(share(job.goodput, steps_reported=job.steps_reported)),
            *(Cell(hours(job.lost_node_ms)), Cell(hours(job.lost_gpu_ms))),
        )
        for job in jobs[:LISTED]
    ]
    header = ("JOB", "RUNS", "TIME", "GOODPUT", "LOST NODE-HOURS", "LOST GPU-HOURS")
    return page.table(header, rows) + _more(len(jobs), "job")
