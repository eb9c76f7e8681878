"""Tables of RESULTS.md and their plots, from the output of recovery.py, scale.py and launch.py.

`sections.py FILE...` reads JSON lines, and rewrites the section of each benchmark found in them:
the text between its two marks, and its plot if it has one. The rest of RESULTS.md is left alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import draw
from measure import figure
from recovery_job import PHASES

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"

Row = dict[str, Any]

HEADINGS = {
    "died": "worker gone",
    "noticed": "noticed",
    "parked": "parked",
    "stopped": "all stopped",
    "round": "round",
    "spawned": "spawned",
    "started": "started",
    "imported": "torch imported",
    "grouped": "process group",
    "reduced": "all-reduce",
    "stepped": "DDP step",
}
BEFELL = {
    "worker": "SIGKILL of a worker",
    "tree": "SIGKILL of an agent and all below it",
    "late": "a node joins",
    "term": "SIGTERM of an agent",
}
ACTS = {"gather": "gather", "form": "form", "lose": "lose one", "return": "server back"}


def conditions(row: Row) -> str:
    """Return the sentence about the conditions of a measurement."""
    busy = row["load"] > row["cpus"] / 2
    return (
        f"**{row['date']}**, `{row['command']}`: {row['cpus']} CPUs, load {row['load']:g} at the "
        f"start, Python {row['python']}, torch {row['torch']}, grpc {row['grpc']}, Linux "
        f"{row['kernel']}, {row['filesystem']}; everything on one machine and loopback."
        + (" **The machine was busy with other work**: take ratios, not seconds." if busy else "")
    )


# ------------------------------------------------------------------------------------ recovery


def recovery_section(rows: Sequence[Row]) -> str:
    """Return the section of bench/recovery.py."""
    told = [row for row in rows if row["case"] != "conditions"]
    head = ["what", "nodes", "launcher", "recovered", *(HEADINGS[phase] for phase in PHASES)]
    head += ["min / p90 / max", "to torchrun", "to its best"]
    lines = [*_head(head), *(_recovery_row(row) for row in told)]
    return "\n".join(
        [
            *(conditions(row) for row in rows if row["case"] == "conditions"),
            "",
            "Medians, in seconds since what befell the job; min / p90 / max are of the all-reduce.",
            "Ratios below 1: faster than torchrun as it comes, and than torchrun at its best.",
            "",
            *lines,
            "",
            "![Recovery by phase](recovery.svg)",
        ]
    )


def _recovery_row(row: Row) -> str:
    spreads = row["phases_s"]
    reduced = spreads["reduced"]
    span = f"none within {row['deadline_s']:g} s"
    if reduced:
        span = " / ".join(figure(reduced[key]) for key in ("low", "p90", "high"))
    medians = [figure(spreads[p]["median"]) if spreads[p] else "-" for p in PHASES]
    ratios = [f"x{figure(r)}" if (r := row[k]) else "-" for k in ("to_torchrun", "to_best")]
    cells = [BEFELL[row["case"]], f"{row['nodes']} x {row['nproc']}", row["contender"]]
    cells += [f"{row['recovered']} of {row['runs']}", *medians, span, *ratios]
    return _cells(cells)


def recovery_plot(rows: Sequence[Row]) -> str:
    """Draw how long each phase takes."""
    drawn = []
    for row in rows:
        if row["case"] == "conditions":
            continue
        spreads = row["phases_s"]
        medians = [spreads[phase]["median"] for phase in PHASES if spreads[phase]]
        lost = row["runs"] - row["recovered"]
        missed = f"{lost} of {row['runs']} not within {row['deadline_s']:g} s"
        note = f"{figure(spreads['stepped']['median'])} s" if spreads["stepped"] else ""
        if lost:
            note = f"{note}; {missed}" if note else missed
        # A phase without a time has no length.
        ends, before = [], 0.0
        for phase in PHASES:
            before = max(before, spreads[phase]["median"]) if spreads[phase] else before
            ends.append(before)
        name = f"{row['case']}, {row['nodes']} x {row['nproc']}: {row['contender']}"
        failed_after = 0.0 if medians else row["deadline_s"]
        drawn.append(draw.Bar(name, tuple(ends) if medians else (), note, failed_after))
    title = "Recovery by phase, until the last node's first DDP step (medians)"
    return draw.bars(title, "seconds", tuple(HEADINGS.values()), drawn)


# --------------------------------------------------------------------------------------- scale


def scale_section(rows: Sequence[Row]) -> str:
    """Return the section of bench/scale.py."""
    ours = [row for row in rows if row["case"] == "rdzvd"]
    theirs = [row for row in rows if row["case"] == "c10d"]
    lines = [
        *(conditions(row) for row in rows if row["case"] == "conditions"),
        "",
        "Seconds: median (lowest..highest). Traffic: what one node says and hears until it was "
        "told its first round, heartbeats included.",
        "",
        *_head(
            ["nodes", *ACTS.values(), "steady CPU", "memory a node", "messages a node", "bytes"]
        ),
        *(_scale_row(row) for row in ours),
        "",
    ]
    lines += [
        f"{row['nodes']:,} joins through the core alone take {figure(row['alone_s'])} s of CPU, "
        f"and {figure(row['checked_s'])} s with the invariants."
        for row in rows
        if row["case"] == "core"
    ]
    lines += ["", "torch's c10d rendezvous, in the same run:", ""]
    lines += _head(["nodes", "gather", "form", "not complete", "form, ours to theirs"])
    lines += [_peer_row(row, ours) for row in theirs]
    return "\n".join([*lines, "", "![Formation time against the number of nodes](scale.svg)"])


def _scale_row(row: Row) -> str:
    memory, steady = row["bytes_per_node"], row["steady_cpu"]
    cells = [f"{row['nodes']:,}", *(_span(row["seconds"].get(act)) for act in ACTS)]
    cells.append("-" if steady is None else f"{100 * steady:.1f} %")
    cells.append("-" if memory is None else f"{memory / 1e3:.0f} kB")
    until_told = [row["traffic"][act] for act in ("gather", "form") if act in row["traffic"]]
    for units in (("up", "down"), ("up_bytes", "down_bytes")):
        both = [sum(traffic[unit] for traffic in until_told) for unit in units]
        cells.append(f"{both[0]:.1f} up, {both[1]:.1f} down" if until_told else "-")
    if row["failed"]:
        cells[1] = f"{cells[1]}; failed: {row['failed'][0]}"
    if row["disturbed"]:
        cells[0] += f" ({row['disturbed']} disturbed)"
    return _cells(cells)


def _peer_row(row: Row, ours: Iterable[Row]) -> str:
    form = row["seconds"].get("form")
    same = [own["seconds"].get("form") for own in ours if own["nodes"] == row["nodes"]]
    ratio = f"x{figure(same[0]['median'] / form['median'])}" if form and same and same[0] else "-"
    cells = [f"{row['nodes']:,}", _span(row["seconds"].get("gather")), _span(form)]
    return _cells([*cells, str(len(row["failed"])), ratio])


def _span(spread: Row | None) -> str:
    if not spread:
        return "-"
    if spread["count"] == 1:
        return figure(spread["median"])
    return f"{figure(spread['median'])} ({figure(spread['low'])}..{figure(spread['high'])})"


def scale_plot(rows: Sequence[Row]) -> str:
    """Draw formation against the number of nodes."""

    def line(name: str, case: str, act: str) -> draw.Line:
        of_case = sorted((r for r in rows if r["case"] == case), key=lambda r: int(r["nodes"]))
        points = [
            (float(r["nodes"]), float(r["seconds"][act]["median"]))
            for r in of_case
            if act in r["seconds"]
        ]
        failed = [float(r["nodes"]) for r in of_case if act not in r["seconds"]]
        return draw.Line(name, tuple(points), tuple(failed))

    series = [
        line("rdzvd: form", "rdzvd", "form"),
        line("c10d: form", "c10d", "form"),
        line("rdzvd: lose one", "rdzvd", "lose"),
        line("rdzvd: server back", "rdzvd", "return"),
    ]
    title = "From the last join, or the loss, until every node was told (medians; × not complete)"
    return draw.lines(title, "nodes", "seconds", [one for one in series if one.points])


# -------------------------------------------------------------------------------------- launch


def launch_section(rows: Sequence[Row]) -> str:
    """Return the section of bench/launch.py."""
    starts = [row for row in rows if row["case"] == "start"]
    idle = [row for row in rows if row["case"] == "idle"]
    lines = [*(conditions(row) for row in rows if row["case"] == "conditions")]
    if starts:
        lines += ["", "Seconds from the command to the first line of the last worker's script:", ""]
        lines += _head(["launcher", "workers", "starts", "median", "min", "p90", "torchrun / this"])
        lines += [_start_row(row) for row in starts]
    if idle:
        lines += ["", f"While the workers do nothing, over {idle[0]['seconds']:g} s:", ""]
        lines += _head(["launcher", "what", "PSS", "RSS", "CPU of one core", "wake-ups a second"])
        lines += [_idle_row(row) for row in idle]
    return "\n".join(lines)


def _start_row(row: Row) -> str:
    spread, faster = row["seconds"], row["times_as_fast"]
    cells = [row["contender"], str(row["workers"]), str(spread["count"])]
    cells += [figure(spread[key]) for key in ("median", "low", "p90")]
    return _cells([*cells, "-" if faster is None else f"{figure(faster)}"])


def _idle_row(row: Row) -> str:
    several = f" ({row['processes']})" if row["processes"] > 1 else ""
    cells = [row["contender"], f"{row['role']}{several}"]
    cells += [f"{row[size] / 1e6:.1f} MB" for size in ("pss_bytes", "rss_bytes")]
    return _cells([*cells, f"{row['cpu_percent']:.3f} %", f"{row['wakeups_per_s']:.1f}"])


# ---------------------------------------------------------------------------------- all of it


def _head(cells: Sequence[str]) -> list[str]:
    return [_cells(cells), "|" + "---|" * len(cells)]


def _cells(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def renewed(text: str, bench: str, section: str) -> str:
    """Return a document with a section in place of what is between its marks.

    Raises:
        ValueError: the document lacks one of the marks.

    >>> print(renewed("<!-- a begins -->old<!-- a ends -->", "a", "new"))
    <!-- a begins -->
    new
    <!-- a ends -->
    """
    begins, ends = f"<!-- {bench} begins -->", f"<!-- {bench} ends -->"
    before, begun, rest = text.partition(begins)
    _, ended, after = rest.partition(ends)
    if not begun or not ended:
        raise ValueError(f"the document needs the marks {begins} and {ends}, in this order")
    return f"{before}{begins}\n{section}\n{ends}{after}"


SECTIONS: dict[
    str, tuple[Callable[[Sequence[Row]], str], Callable[[Sequence[Row]], str] | None]
] = {
    "recovery": (recovery_section, recovery_plot),
    "scale": (scale_section, scale_plot),
    "launch": (launch_section, None),
}


def main() -> None:
    """Rewrite the measured sections."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="with JSON lines")
    parser.add_argument("--print", action="store_true", help="print the sections, renew nothing")
    rows: list[Row] = []
    chosen = parser.parse_args()
    for file in chosen.files:
        rows += [json.loads(line) for line in file.read_text().splitlines()]
    text = RESULTS.read_text()
    for bench, (section, plot) in SECTIONS.items():
        if of_bench := [row for row in rows if row["bench"] == bench]:
            if chosen.print:
                print(section(of_bench))
                continue
            text = renewed(text, bench, section(of_bench))
            if plot is not None:
                (HERE / f"{bench}.svg").write_text(plot(of_bench))
            print(f"renewed: {bench} in {RESULTS.name}{f', {bench}.svg' if plot else ''}")
    RESULTS.write_text(text)


if __name__ == "__main__":
    main()
