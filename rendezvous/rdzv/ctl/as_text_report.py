"""Formats ledgers as text: how one run or all jobs spent their time, and what failures cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rdzv.core.words import counted, duration
from rdzv.ctl.layout import Cell, Columns, Page, bold
from rdzv.view.advice import FAILURES
from rdzv.view.ledger import Ledger, LedgerPhase
from rdzv.view.reports import Report

NO_STEPS = (
    "No progress is reported: training counts from the first collective or, where none is "
    "recorded, from the start of the workers, so the share of training is an upper bound."
)
"""Shown if the time for starting, loading and redone steps cannot be told apart from training."""
FORGOTTEN = "The beginning of this run is no longer in the history, so it is not counted."
LISTED = 10

_BAR = 24
_HOUR_MS = 3_600_000
_STYLES = {LedgerPhase.TRAINING.value: "green", LedgerPhase.REDOING.value: "yellow"}


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

    >>> hours(15_000), hours(90 * 60_000), hours(-360_000_000), hours(None)
    ('0.00417', '1.50', '-100', '')
    """
    if ms is None:
        return ""
    found = ms / _HOUR_MS
    return f"{found:.3g}" if abs(found) < 1 else f"{found:,.{0 if abs(found) >= 100 else 2}f}"


Tables = Iterable[tuple[str, Mapping[str, Callable[[Any], str]], Sequence[Any]]]
"""The tables of a report, as text and as a page: the title, columns and rows of each."""


Rows = Mapping[str, Callable[[Any], str]]
_COSTS: Rows = {
    "times": lambda cost: str(cost.times) if cost.cause or cost.node_id else "",
    "time": lambda cost: duration(cost.ms),
    "node-hours": lambda cost: hours(cost.node_ms),
    "GPU-hours": lambda cost: hours(cost.gpu_ms),
}
_CAUSE: Rows = {"cause": lambda cost: cost.cause or "the start"}
_NODE: Rows = {"node": lambda cost: cost.node_id}


def run_tables(found: Ledger) -> Tables:
    """Yield what a run lost, and how its rounds began."""
    if found.costs:
        yield "What it cost", {**_CAUSE, **_NODE, **_COSTS}, found.costs
    if found.comebacks:
        columns: Rows = {
            "workers": lambda one: one.way,
            "times": lambda one: str(one.times),
            "each": lambda one: duration(one.ms // one.times),
            "time": lambda one: duration(one.ms),
            "node-hours": lambda one: hours(one.node_ms),
        }
        yield "How long until it trained again", columns, found.comebacks


def all_tables(found: Report) -> Tables:
    """Yield what all jobs lost, by cause, by node and by job."""
    yield "Which causes cost most", {**_CAUSE, **_COSTS}, found.causes
    if found.nodes:
        yield "Which nodes cost most", {**_NODE, **_COSTS}, found.nodes
    columns: Rows = {
        "job": lambda job: job.rdzv_id,
        "runs": lambda job: str(job.runs),
        "time": lambda job: duration(job.wall_ms),
        "goodput": lambda job: share(job.goodput, steps_reported=job.steps_reported),
        "lost node-hours": lambda job: hours(job.lost_node_ms),
        "lost GPU-hours": lambda job: hours(job.lost_gpu_ms),
    }
    yield "Jobs", columns, found.jobs


def advice_tables(found: Report) -> Tables:
    """Yield what changes would have saved and cost, best first."""
    if found.advice:
        columns: Rows = {
            "change": lambda one: one.change,
            "job": lambda one: one.rdzv_id,
            "now": lambda one: one.now,
            "saves": lambda one: hours(one.saves_ms),
            "costs": lambda one: hours(one.costs_ms),
            "net": lambda one: (
                hours(one.net_ms) + ((one.spread_ms and f" ± {hours(one.spread_ms)}") or "")
            ),
            "verdict": lambda one: one.verdict,
        }
        yield "What changes would have saved, in node-hours", columns, found.advice


def ledger(rdzv_id: str, found: Ledger, others: Sequence[Ledger], page: Page) -> str:
    number = f"run {found.run_number}" if found.run_number is not None else "run"
    state = found.result or "open"
    lines = [page.line(bold(rdzv_id), f"{number}, {state}"), ""]
    good = share(found.goodput, steps_reported=found.steps_reported)
    spent = f"{duration(found.phases[LedgerPhase.TRAINING])} of {duration(found.wall_ms)}"
    held, gpus = f"{hours(found.node_ms)} node-hours", found.gpus_per_node
    if gpus is not None:
        held += f", {hours(found.node_ms * gpus)} GPU-hours"
    lines += page.facts(
        {
            "goodput": f"{good} ({spent} were training)",
            "held": held,
            "steps redone": str(found.steps_redone or ""),
        }
    )
    lines += [line for note in notes(found) for line in page.sentence(note)]
    lines += _section("Where the time went", _phases(found.phases, page), page)
    lines += _listed(run_tables(found), page)
    if others:
        columns: Columns[Ledger] = {
            "RUN": lambda run: "?" if run.run_number is None else str(run.run_number),
            "BEGAN": lambda run: page.clock(run.from_unix_ms),
            "RESULT": lambda run: run.result or "open",
            "LASTED": lambda run: duration(run.wall_ms),
            "GOODPUT": lambda run: share(run.goodput, steps_reported=run.steps_reported),
        }
        lines += _section("Other runs", page.table(others[-LISTED:], columns), page)
    return "\n".join(lines)


def notes(found: Ledger) -> list[str]:
    lines = []
    if not found.steps_reported and found.phases[LedgerPhase.TRAINING]:
        lines.append(NO_STEPS)
    if found.run_number is None:
        lines.append(FORGOTTEN)
    return lines


def _section(title: str, lines: Iterable[str], page: Page) -> list[str]:
    return ["", page.line(bold(title)), *(f"  {line}" for line in lines)]


def _phases(phases: Mapping[str, int], page: Page) -> list[str]:
    whole_ms = sum(phases.values())
    columns: Columns[tuple[str, int]] = {
        "PHASE": lambda one: Cell(one[0], _STYLES.get(one[0], "")),
        "TIME": lambda one: duration(one[1]),
        "SHARE": lambda one: f"{one[1] / whole_ms:.1%}",
        "": lambda one: Cell(
            "#" * max(round(one[1] / whole_ms * _BAR), 1), _STYLES.get(one[0], "")
        ),
    }
    rows = [(phase, ms) for phase, ms in phases.items() if ms]
    return page.table(rows, columns) if rows else ["no time yet"]


def _listed(tables: Tables, page: Page) -> list[str]:
    """Format the first rows of each table, and count the others."""
    lines = []
    for title, columns, found in tables:
        capital = {name.upper(): text_of for name, text_of in columns.items()}
        rows, left = page.table(found[:LISTED], capital), len(found) - LISTED
        if left > 0:
            rows.append(
                f"and {counted(left, f'more {next(iter(columns))}')}; -o json has all of them"
            )
        lines += _section(title, rows if found else ["none"], page)
    return lines


# ------------------------------------------------------------------ all jobs


def report(found: Report, page: Page) -> str:
    lines = _all_jobs("All jobs in", found, page)
    if not found.jobs:
        return "\n".join(lines)
    bound = all(job.steps_reported for job in found.jobs)
    good = share(found.goodput, steps_reported=bound)
    lines += page.fact("goodput", f"{good} of {hours(found.node_ms)} node-hours")
    if not bound:
        lines += page.sentence(NO_STEPS)
    lines += _section("Where the time went", _phases(found.phases, page), page)
    return "\n".join([*lines, *_listed(all_tables(found), page)])


def advice(found: Report, page: Page) -> str:
    lines = _all_jobs("Advice for", found, page)
    if not found.jobs:
        return "\n".join(lines)
    failures = sum(cost.times for cost in found.causes if cost.cause in FAILURES)
    seen = f"{counted(failures, 'failure')}, {counted(len(found.jobs), 'job')}"
    lines += page.fact("seen", f"{seen}, {hours(found.node_ms)} node-hours held")
    lines += _listed(advice_tables(found), page)
    note = "The same failures with the change applied; ± is the effect of chance."
    return "\n".join([*lines, "", *page.sentence(note)])


def _all_jobs(title: str, found: Report, page: Page) -> list[str]:
    since = duration(found.until_unix_ms - found.from_unix_ms)
    none = [] if found.jobs else page.sentence("No job had a run in this time.")
    return [page.line(bold(f"{title} the last {since}")), "", *none]
