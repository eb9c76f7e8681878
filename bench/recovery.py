"""How long until a real training goes on after something has befallen it, phase by phase.

A small DDP model trains over gloo, with one worker (--nproc) on each of two or three nodes of this
machine, under each launcher in turn:

* torchrun: as it comes; -unshared: each attempt has a store of its own
  (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), without which half of its restarts do not come back;
  -tuned: last_call_timeout=1 and keep_alive_interval=1; -best: both;
* rdzvrun: as it comes, so its restarts are warm; -warm: with --warm; -cold: with --no-warm; -kept:
  a script whose processes stay (rdzv.worker). Where there is to be a zygote, nothing befalls the
  job before each node has one;
* torchft, nvidia: what stays in its processes elsewhere (recovery_peers.py), for `worker` alone.
  torchft starts killed workers anew, cold; the in-process wrapper has a spare rank for it.

What befalls it, always on the last node, since the first hosts torchrun's store, whose loss ends
the job:

* worker: its worker gets SIGKILL (a job of exactly so many nodes; all others are of N-1:N);
* tree: its agent and everything below it get SIGKILL;
* late: it is started only now, and joins the running job;
* term: its agent gets SIGTERM.

Between `died` (the kernel has freed the memory of the killed worker) and `spawned` (the new ones
are executed or forked) nothing waits but for the kernel to free that of the others, and for a
node that is away (`tree`: reconnect_grace, 0.25 s). The phases are told in recovery_job.py.

Each run is a job of its own. A run that does not train again within its deadline is counted as not
recovered, and its time is in no median. torchrun with its default timeouts is measured less often
where a node comes or goes, and several such jobs side by side, for nearly all of their time they
wait for a timeout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import (
    Json,
    Spread,
    emit,
    emitting_to,
    end_on_sigterm,
    figure,
    load,
    names_of,
    say_conditions,
    say_progress,
)
from processes import BIN
from recovery_job import CASES, CONTENDERS, PHASES, Contender, Job, Outcome
from recovery_peers import are_installed

DEADLINE_S = 30.0
PATIENT_DEADLINE_S = 75.0
"""torchrun needs 45 s: three heartbeats of 5 s, and a last call of 30 s; and then a start."""
BESIDE = 3
"""The number of jobs waiting for timeouts that run side by side."""
PLAN = {2: ("worker",), 3: CASES}
"""The cases of each number of nodes, if none are asked for."""
QUICK = (
    *("torchrun", "torchrun-best"),
    *("rdzvrun-cold", "rdzvrun", "rdzvrun-warm", "rdzvrun-kept"),
)
"""The default launchers of a single run."""


@dataclass(frozen=True, slots=True)
class Point:
    """One repeated measurement."""

    case: str
    nodes: int
    contender: Contender
    nproc: int = 1

    @property
    def patient(self) -> bool:
        """Whether torchrun's timeouts take most of the time."""
        return self.contender.patient and self.case != "worker"

    @property
    def deadline_s(self) -> float:
        """How long the job has to recover."""
        return PATIENT_DEADLINE_S if self.patient else DEADLINE_S

    def __str__(self) -> str:
        return f"{self.case} nodes={self.nodes}x{self.nproc} {self.contender.name}"


Outcomes = dict[Point, list[Outcome]]


def points(
    nodes: Sequence[int], cases: Sequence[str], contenders: Sequence[Contender], nproc: int = 1
) -> Iterator[Point]:
    """Yield the measurements; contenders of one case follow each other."""
    for count in nodes:
        for case in cases or PLAN.get(count, CASES):
            for contender in contenders:
                if case == "worker" or not contender.alone:
                    yield Point(case, count, contender, nproc)


async def measure(
    chosen: Sequence[Point], runs: int, end_s: float, directory: Path, lifeline: Path
) -> Outcomes:
    """Run everything this often, in passes, so that an interrupted pass lacks no contender."""
    from ports import free_port

    outcomes: Outcomes = defaultdict(list)
    number = 0

    async def run(point: Point) -> None:
        nonlocal number
        if time.monotonic() > end_s:
            return
        number += 1
        below = directory / str(number)
        below.mkdir()
        port = free_port()
        try:
            async with Job.running(point.contender, below, f"127.0.0.1:{port}", lifeline) as job:
                outcome = await job.measure(point.case, point.nodes, point.nproc, point.deadline_s)
        except (OSError, RuntimeError) as error:
            outcome = Outcome({}, f"{type(error).__name__}: {error}")
        outcomes[point].append(outcome)
        came = figure(outcome.phases.get("stepped")) if outcome.phases else outcome.failed
        say_progress(f"{point}: {came}")

    beside = asyncio.Semaphore(BESIDE)

    async def run_beside(point: Point) -> None:
        async with beside:
            await run(point)

    # Slow ones a third less often, but at least once.
    for number_of_pass in range(runs):
        for point in chosen:
            if not point.patient:
                await run(point)
        if number_of_pass < max(1, runs * 2 // 3):
            async with asyncio.TaskGroup() as tasks:
                for point in chosen:
                    if point.patient:
                        tasks.create_task(run_beside(point))
    return outcomes


# ------------------------------------------------------------------ what came of it


def rows(outcomes: Outcomes) -> list[dict[str, Json]]:
    """Return one row for each point, with the ratios of its median to those of torchrun."""
    medians = {
        (point.case, point.nodes, point.contender.name): Spread.of(reduced).median
        for point, found in outcomes.items()
        if (reduced := _reduced(found))
    }
    return [_row(point, found, medians) for point, found in outcomes.items()]


def _reduced(found: Sequence[Outcome]) -> list[float]:
    return [outcome.phases["reduced"] for outcome in found if outcome.phases]


def _row(
    point: Point, found: Sequence[Outcome], medians: dict[tuple[str, int, str], float]
) -> dict[str, Json]:
    def ratio(peer: str) -> Json:
        ours = medians.get((point.case, point.nodes, point.contender.name))
        theirs = medians.get((point.case, point.nodes, peer))
        return float(f"{ours / theirs:.3g}") if ours and theirs else None

    of_phase = {
        phase: [outcome.phases[phase] for outcome in found if phase in outcome.phases]
        for phase in PHASES
    }
    failed: list[Json] = [outcome.failed for outcome in found if outcome.failed]
    return {
        "bench": "recovery",
        "case": point.case,
        "nodes": point.nodes,
        "nproc": point.nproc,
        "contender": point.contender.name,
        "runs": len(found),
        "recovered": len(found) - len(failed),
        "deadline_s": point.deadline_s,
        "phases_s": {p: Spread.of(s).as_json() if s else None for p, s in of_phase.items()},
        "to_torchrun": ratio("torchrun"),
        "to_best": ratio("torchrun-best"),
        "failed": failed,
        "load": load(),
    }


HEADINGS = {
    "died": "died",
    "noticed": "noticed",
    "parked": "parked",
    "stopped": "stopped",
    "round": "round",
    "spawned": "spawned",
    "started": "started",
    "imported": "imported",
    "grouped": "group",
    "reduced": "all-reduce",
    "stepped": "DDP step",
}


def table(found: Sequence[dict[str, Json]]) -> str:
    """Lay out the rows for people: medians in seconds since what befell the job.

    `x` is the ratio of the median to torchrun's as it comes, and to its best: below 1 is faster.
    """
    head = ["case", "nodes", "launcher", "back", *HEADINGS.values(), "min..p90..max", "x", "x best"]
    lines = [head]
    for row in found:
        phases = row["phases_s"]
        assert isinstance(phases, dict)
        cells = [
            str(row["case"]),
            f"{row['nodes']} x {row['nproc']}",
            str(row["contender"]),
            f"{row['recovered']} of {row['runs']}",
        ]
        for phase in HEADINGS:
            spread = phases[phase]
            cells.append(figure(spread["median"]) if isinstance(spread, dict) else "-")
        spread = phases["reduced"]
        cells.append(
            "..".join(figure(spread[key]) for key in ("low", "p90", "high"))
            if isinstance(spread, dict)
            else f"> {row['deadline_s']:g} s"
        )
        cells += [figure(row["to_torchrun"]), figure(row["to_best"])]
        lines.append(cells)
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


# ------------------------------------------------------------------ all of it


def has_warm() -> bool:
    """Whether this rdzvrun supports --warm."""
    told = subprocess.run(
        [BIN / "rdzvrun", "--help"], capture_output=True, text=True, timeout=30, check=True
    )
    return "--warm" in told.stdout


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [contender.name for contender in CONTENDERS]
    add = parser.add_argument
    add("--runs", type=int, default=3, help="of each case, nodes and launcher (default 3)")
    add("--minutes", type=float, default=20.0, help="no run begins after that (default 20)")
    add("--cases", default="", help=f"with commas, of {', '.join(CASES)}")
    add("--nodes", default="", help="numbers of nodes, with commas (default 2,3; one run: 3)")
    add("--nproc", type=int, default=1, help="workers of each node (default 1)")
    add(
        "--launchers",
        default="",
        help=f"with commas (default all; one run: {', '.join(QUICK)}), of {', '.join(names)}",
    )
    add("--out", type=Path, help="where the JSON lines are written as well")
    add("--directory", type=Path, help="where data is written, and removed again (default: /tmp)")
    chosen = parser.parse_args()
    if chosen.runs < 1:
        parser.error(f"--runs {chosen.runs}: give at least 1")
    chosen.cases = names_of(parser, "--cases", chosen.cases, CASES)
    launchers = names_of(parser, "--launchers", chosen.launchers, names)
    launchers = launchers or (list(QUICK) if chosen.runs == 1 else names)
    chosen.contenders = [c for c in CONTENDERS if c.name in launchers]
    try:
        chosen.nodes = [int(part) for part in chosen.nodes.split(",") if part]
    except ValueError:
        parser.error(f"--nodes {chosen.nodes} are no numbers; give, for example, 2,3")
    if any(not 2 <= count <= 16 for count in chosen.nodes):
        parser.error(f"--nodes {chosen.nodes}: a job here has 2 to 16 nodes")
    chosen.nodes = chosen.nodes or ([3] if chosen.runs == 1 else [2, 3])
    return chosen


@contextlib.contextmanager
def lifeline_in(directory: Path) -> Iterator[Path]:
    """Hold the lock in a directory; when it is released, every worker ends."""
    path = directory / "lifeline"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield path


@contextlib.contextmanager
def prepared(bench: str, chosen: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """Make a folder and a lifeline for a measurement, without unavailable contenders."""
    end_on_sigterm()
    if not has_warm():
        # Printed, so that nobody takes their absence for a result.
        print("# this rdzvrun has no --warm: rdzvrun-warm is left out")
        chosen.contenders = [c for c in chosen.contenders if "--warm" not in c.options]
    if not are_installed():
        print("# there is no build/peers (`make build/peers/.ready`): torchft, nvidia are left out")
        chosen.contenders = [c for c in chosen.contenders if not c.alone]
    with (
        tempfile.TemporaryDirectory(prefix="rdzv-bench-", dir=chosen.directory) as temporary,
        emitting_to(chosen.out),
        lifeline_in(Path(temporary)) as lifeline,
    ):
        directory = Path(temporary)
        say_conditions(bench, directory)
        yield directory, lifeline


def main() -> None:
    """Measure, and leave nothing behind."""
    chosen = arguments()
    with prepared("recovery", chosen) as (directory, lifeline):
        began_s = time.monotonic()
        end_s = began_s + 60 * chosen.minutes
        wanted = list(points(chosen.nodes, chosen.cases, chosen.contenders, chosen.nproc))
        outcomes = asyncio.run(measure(wanted, chosen.runs, end_s, directory, lifeline))
        in_order = {point: outcomes[point] for point in wanted if point in outcomes}
        found = rows(in_order)
        print(table(found))
        for row in found:
            emit("", **row)
        if time.monotonic() > end_s:
            print(
                f"# cut short after {chosen.minutes:g} minutes; the column `back` says of how many"
            )
        print(f"# took {(time.monotonic() - began_s) / 60:.1f} minutes", file=sys.stderr)


if __name__ == "__main__":
    main()
