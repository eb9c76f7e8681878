"""The guarantees of workers that stay, checked repeatedly with real servers, nodes and processes.

Three nodes of two workers train a small model with dropout and batch norm over gloo, on this
machine. Each case has its own job:

* worker: a worker gets SIGKILL. The five others stay, with as many descriptors and threads as
before, and no more memory; in the end all losses are compared with those of an undisturbed run: bit
  for bit, with the new ranks' random numbers seeded as they were;
* blocked: a rank holds the GIL, is in a call of C, or waits for its loader, by turns, and another
  gets SIGKILL: these two are replaced, once --keep-timeout is over, and the others stay;
* stopped: a rank gets SIGSTOP; it alone is replaced, once --hang-timeout is over;
* stuck: a rank waits in the kernel, in D state, for a file server that does not answer, and
  survives SIGKILL: its node is given up, and the others stay;
* lost: a node and everything on it is killed, and comes back; spare: another one takes its place,
  with hot standbys; cold: likewise, without. The workers of the other nodes stay, and no restart is
  spent;
* scale: an operator adds a third node, and removes it again: all others stay;
* source: a worker is replaced, and the rank that heals it dies meanwhile: no round begins with
  ranks of several states.

Times are from the fault to the first step of the last rank, and of the last that stayed, and to the
moments before it at which all staying workers have parked, and the next round is decided.

With --groups=reconfigure,init each case runs twice, with torch 2.14: with process groups that are
reconfigured, and that are made anew.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from kept_job import START_S, BrokenPromiseError, KeptJob, of_nodes, resources, victim
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
from recovery import lifeline_in

from rdzv.worker.groups import can_reconfigure

from cluster import cluster  # isort: skip  (its path comes from measure)

NAMES = ("n1", "n2", "n3")
WAITS = ("waiting", "spare")
KEEP_S = 0.5
HANG_S = 2.0
GROWN_BYTES = 24 << 20
"""Growth beyond this since early in the case does not count as flat memory."""
WARM_UP = 50
"""After this many rounds the memory is measured for the first time."""


@dataclass
class Found:
    """The result of one case."""

    case: str
    wanted: int
    held: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    broken: str = ""

    def took(self, phase: str, seconds: float) -> None:
        """Record a time."""
        self.seconds.setdefault(phase, []).append(seconds)


@dataclass(frozen=True)
class Place:
    """The place where jobs are created."""

    directory: Path
    lifeline: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    """What the workers have in their environment besides."""

    @contextmanager
    def job(
        self, *options: str, nnodes: str = "3", names: tuple[str, ...] = NAMES
    ) -> Iterator[KeptJob]:
        """Start a job, and wait until it trains, and restarts are warm."""
        with cluster(Path(tempfile.mkdtemp(dir=self.directory))) as made:
            job = KeptJob(made, self.lifeline, *options, environ=self.environ)
            nodes = job.start(names, nnodes)
            job.trains(2 * len(names), within_s=START_S)
            job.warmed(nodes)
            yield job


def settle(job: KeptJob, seconds: float) -> None:
    """Let it train a while: at least a few steps, and until spare forks exist again."""
    time.sleep(seconds)
    first = next(iter(job.workers.values())).step
    ranks = range(len(job.workers))
    job.until(
        "a few steps are done",
        lambda: all((first + 3, rank) in job.diary.read().losses for rank in ranks),
    )


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> float:
    """Send a signal; return when."""
    at_s = time.monotonic()
    os.kill(pid, number)
    return at_s


def note_recovery(
    found: Found, job: KeptJob, since_s: float, stepped_s: float, last: int, what: str = ""
) -> None:
    """Record the times of a recovery from a round whose number was `last`."""
    parked = job.diary.parked_s.get(last)
    if parked:
        found.took(f"{what}parked", max(parked.values()) - since_s)
    if (decided_s := job.decided_s()) is not None:
        found.took(f"{what}decided", decided_s - since_s)
    seats, times = job.diary.begun[job.round], job.diary.stepped_s[job.round]
    if kept := [times[rank] for rank, seat in seats.items() if seat.kept]:
        found.took(f"{what}those that stayed", max(kept) - since_s)
    found.took(f"{what}stepped", stepped_s - since_s)


# ------------------------------------------------------------------ the cases


def worker(found: Found, place: Place) -> None:
    """SIGKILL of a worker."""
    with place.job() as job:
        early: dict[int, tuple[int, int, int]] = {}
        too_many: list[str] = []
        for number in range(found.wanted):
            settle(job, 1.1)
            if number == min(WARM_UP, found.wanted // 2):
                early = {s.pid: resources(s.pid) for s in job.workers.values()}
            before, last, killed = dict(job.workers), job.round, victim(job, "n3")
            since_s = kill(killed.pid)
            stepped_s = job.trains(6)
            note_recovery(found, job, since_s, stepped_s, last)
            if job.replaced(before) == {killed.pid}:
                found.held += 1
            else:
                too_many.append(job.why_new())
        settle(job, 0)
        _check_flat(found, job, early)
        seeds = [
            (seat.rank, seat.step, seat.seed)
            for number, seats in job.diary.begun.items()
            for seat in seats.values()
            if number and not seat.kept
        ]
        _check_losses(found, job, place, seeds)
        if too_many:
            raise BrokenPromiseError(f"others were replaced as well: {too_many[0]}")


def _check_flat(found: Found, job: KeptJob, early: dict[int, tuple[int, int, int]]) -> None:
    grown = 0
    for pid in early.keys() & {seat.pid for seat in job.workers.values()}:
        fds, threads, memory = early[pid]
        # A file may be open for a moment, while a step is saved or loaded.
        try:
            job.until("are flat", lambda: resources(pid)[:2] == (fds, threads))  # noqa: B023
        except BrokenPromiseError as error:
            raise BrokenPromiseError(
                f"worker {pid} had {fds} descriptors and {threads} threads, and has "
                f"{resources(pid)[:2]}"
            ) from error
        grown = max(grown, resources(pid)[2] - memory)
    if grown > GROWN_BYTES:
        raise BrokenPromiseError(f"a worker's memory has grown by {grown >> 10} kB")
    found.notes.append(f"descriptors and threads flat, memory + {grown / 1e6:.1f} MB")


def _check_losses(
    found: Found, job: KeptJob, place: Place, seeds: list[tuple[int, int, int]]
) -> None:
    """Compare all losses of the job with those of a run that nothing disturbs."""
    last = max(step for step, _ in job.diary.losses) - 1
    expected = {key: loss for key, loss in job.diary.losses.items() if key[0] <= last}
    job.end()
    environ = {"KEPT_STEPS": str(last), "KEPT_SEEDS": json.dumps(seeds)}
    with cluster(Path(tempfile.mkdtemp(dir=place.directory))) as made:
        calm = KeptJob(made, place.lifeline, environ=environ, nproc=6, pause_s=0)
        (node,) = calm.start(["n1"], "1")
        if code := node.wait(START_S + last):
            raise BrokenPromiseError(f"the run that nothing disturbs ended with {code}")
        undisturbed = calm.diary.read().losses
    differing = sorted(key for key in expected if undisturbed.get(key) != expected[key])
    if differing:
        raise BrokenPromiseError(
            f"{len(differing)} of {len(expected)} losses differ, the first at step, rank "
            f"{differing[0]}; new ranks: {seeds[:4]}"
        )
    found.notes.append(f"{len(expected)} losses of {last} steps bitwise equal")


def blocked(found: Found, place: Place) -> None:
    """A rank blocks, in three ways by turns, and another gets SIGKILL."""
    with place.job(f"--keep-timeout={KEEP_S}", nnodes="2", names=NAMES[:2]) as job:
        for number in range(found.wanted):
            settle(job, 0.2)
            before, blocks, killed = dict(job.workers), job.workers[number % 3], job.workers[3]
            job.order(blocks.pid, ("gil", "call", "loader")[number // 3 % 3])
            since_s = kill(killed.pid)
            stepped_s = job.trains(4)
            job.check_kept(before, [killed.pid, blocks.pid])
            found.took("stepped", stepped_s - since_s)
            found.held += 1


def stopped(found: Found, place: Place) -> None:
    """SIGSTOP of a rank."""
    with place.job(f"--hang-timeout={HANG_S}") as job:
        for number in range(found.wanted):
            settle(job, 1.1)
            before, last, rank = dict(job.workers), job.round, job.workers[number % 6]
            since_s = kill(rank.pid, signal.SIGSTOP)
            stepped_s = job.trains(6)
            job.check_kept(before, [rank.pid])
            note_recovery(found, job, since_s + HANG_S, stepped_s, last)
            found.held += 1
        found.notes.append(f"beyond the limit of {HANG_S:g} s")


def stuck(found: Found, place: Place) -> None:
    """A rank in D state."""
    from file_server import NEVER, serving

    for _ in range(found.wanted):
        with (
            place.job(f"--keep-timeout={KEEP_S}", nnodes="2:3") as job,
            serving(job.made.folder / "remote") as server,
        ):
            settle(job, 0.5)
            before, rank = dict(job.workers), victim(job, "n3")
            job.order(rank.pid, str(server.path / NEVER))
            other = next(s for s in before.values() if s.node == "n3" and s.pid != rank.pid)
            since_s = kill(other.pid)
            job.may_end.add("n3")
            stepped_s = job.trains(4)
            job.check_kept(of_nodes(before, NAMES[:2]))
            if not Path(f"/proc/{rank.pid}").exists():
                raise BrokenPromiseError("the rank has not survived SIGKILL: it was not stuck")
            found.took("stepped", stepped_s - since_s)
            found.held += 1


def lost(found: Found, place: Place) -> None:
    """A node is lost, and comes back."""
    with place.job(nnodes="2:3") as job:
        for _ in range(found.wanted):
            settle(job, 1.1)
            before, last = of_nodes(job.workers, NAMES[:2]), job.round
            since_s = time.monotonic()
            next(n for n in reversed(job.made.nodes) if n.name == "n3").kill_tree()
            stepped_s = job.trains(4)
            job.check_kept(before)
            note_recovery(found, job, since_s, stepped_s, last)
            settle(job, 0)
            back = job.start(["n3"], "2:3")
            job.trains(6, within_s=START_S)
            job.check_kept(before)
            job.warmed(back)
            found.held += 1
        _check_no_restart(found, job)


def spare(found: Found, place: Place) -> None:
    """A node is lost, and another one takes its place, whose workers wait for that."""
    _replaced(found, place, "hot")


def cold(found: Found, place: Place) -> None:
    """A node is lost, and another one takes its place, which has a zygote and no workers."""
    _replaced(found, place, "cold")


def _replaced(found: Found, place: Place, standby: str) -> None:
    with place.job(f"--standby={standby}") as job:
        goes = "n3"
        for number in range(found.wanted):
            comes = f"n{4 + number}"
            job.warmed(job.start([comes], "3"))
            job.until(f"{comes} waits", lambda: job.node_state(comes) in WAITS)  # noqa: B023
            if standby == "hot":
                job.until("its workers wait", lambda: job.has_standby(comes), START_S)  # noqa: B023
            settle(job, 1.1)
            before, last = of_nodes(job.workers, NAMES[:2]), job.round
            since_s = time.monotonic()
            next(n for n in job.made.nodes if n.name == goes).kill_tree()
            stepped_s = job.trains(6, within_s=START_S)
            job.check_kept(before)
            note_recovery(found, job, since_s, stepped_s, last)
            goes = comes
            found.held += 1
        _check_no_restart(found, job)


def _check_no_restart(found: Found, job: KeptJob) -> None:
    if spent := job.made.status().restarts:
        raise BrokenPromiseError(f"{spent} restarts are spent")
    found.notes.append("no restart spent")


def scale(found: Found, place: Place) -> None:
    """Two nodes, three, and two again."""
    with place.job(nnodes="2", names=NAMES[:2]) as job:
        job.warmed(job.start(["n3"], "2"))
        job.until("n3 waits", lambda: job.node_state("n3") in WAITS)
        for _ in range(found.wanted):
            job.until("its workers wait", lambda: job.has_standby("n3"), START_S)
            settle(job, 1.1)
            before, last = dict(job.workers), job.round
            since_s = job.scale(3)
            stepped_s = job.trains(6, within_s=START_S)
            job.check_kept(before)
            note_recovery(found, job, since_s, stepped_s, last, "to three: ")
            settle(job, 0.5)
            since_s = job.scale(2)
            stepped_s = job.trains(4)
            job.check_kept(before)
            found.took("to two", stepped_s - since_s)
            found.held += 1
        _check_no_restart(found, job)


def source(found: Found, place: Place) -> None:
    """The source dies while it heals."""
    with place.job() as job:
        for number in range(found.wanted):
            settle(job, 0.3)
            died = len(job.diary.died)
            (job.orders / "heal").write_text(str(number % 5))
            since_s = kill(victim(job, "n3").pid)
            job.until("the source dies", lambda: len(job.diary.read().died) > died)  # noqa: B023
            found.took("stepped", job.trains(6, within_s=START_S) - since_s)
            for seats in job.diary.begun.values():
                if len({(seat.step, seat.weights) for seat in seats.values()}) != 1:
                    raise BrokenPromiseError(f"a round began with a mixture: {seats}")
            found.held += 1
        began = [next(iter(seats.values())).step for seats in job.diary.begun.values()]
        found.notes.append(f"{sum(step == 0 for step in began) - 1} times from step 0")


CASES: dict[str, tuple[Callable[[Found, Place], None], int]] = {
    "worker": (worker, 200),
    "blocked": (blocked, 200),
    "stopped": (stopped, 6),
    "stuck": (stuck, 2),
    "lost": (lost, 6),
    "spare": (spare, 4),
    "cold": (cold, 4),
    "scale": (scale, 4),
    "source": (source, 100),
}
"""Each case with its default number of repetitions."""
GROUPS: dict[str, dict[str, str]] = {"reconfigure": {}, "init": {"RDZV_RECONFIGURE": "0"}}
"""How the default process group gets to the next round, with the workers' variables for it."""


def run(case: str, times: int, place: Place) -> Found:
    """Run a case; broken promises are part of the result."""
    found = Found(case, times)
    try:
        CASES[case][0](found, place)
    except BrokenPromiseError as error:
        found.broken = str(error)
    return found


# ------------------------------------------------------------------ results


def row(found: Found) -> str:
    """Return a line of a table in Markdown."""
    spreads = {phase: Spread.of(seconds) for phase, seconds in found.seconds.items()}
    times = "; ".join(
        f"{phase} {figure(one.median)} / {figure(one.p99)} / {figure(one.high)}"
        for phase, one in spreads.items()
    )
    notes = "; ".join([*found.notes, *([f"**broken**: {found.broken}"] if found.broken else [])])
    return f"| {found.case} | {found.held} of {found.wanted} | {times or '-'} | {notes} |"


def as_json(found: Found) -> dict[str, Json]:
    """Return the values of a JSON line."""
    return {
        "bench": "kept",
        "case": found.case,
        "wanted": found.wanted,
        "held": found.held,
        "seconds": {p: Spread.of(seconds).as_json() for p, seconds in found.seconds.items()},
        "notes": list(found.notes),
        "broken": found.broken,
        "load": load(),
    }


def main() -> None:
    """Run the cases, and print their table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", default="", help=f"with commas, of {', '.join(CASES)}")
    add(
        "--times",
        type=int,
        help="of each case (default: "
        + ", ".join(f"{case} {times}" for case, (_, times) in CASES.items())
        + ")",
    )
    add("--groups", default="", help=f"with commas, of {', '.join(GROUPS)}")
    add("--out", type=Path, help="where the JSON lines are written as well")
    add("--directory", type=Path, help="where data is written, and removed again (default: /tmp)")
    chosen = parser.parse_args()
    cases = names_of(parser, "--cases", chosen.cases, list(CASES)) or list(CASES)
    ways = names_of(parser, "--groups", chosen.groups, list(GROUPS)) or [""]
    if "reconfigure" in ways and not can_reconfigure("gloo"):
        parser.error("this torch reconfigures no groups: use build/torch-2.14.1/bin/python")
    end_on_sigterm()
    broken = False
    with (
        tempfile.TemporaryDirectory(prefix="rdzv-bench-", dir=chosen.directory) as temporary,
        emitting_to(chosen.out),
        lifeline_in(Path(temporary)) as lifeline,
    ):
        say_conditions("kept", Path(temporary))
        lines = ["| case | held | seconds: median / p99 / most | |", "|---|---|---|---|"]
        for case, way in product(cases, ways):
            began_s = time.monotonic()
            place = Place(Path(temporary), lifeline, GROUPS.get(way, {}))
            found = run(case, chosen.times or CASES[case][1], place)
            found.case += f", {way}" if way else ""
            broken = broken or bool(found.broken)
            lines.append(row(found))
            emit("", **as_json(found))
            say_progress(f"{lines[-1]} ({time.monotonic() - began_s:.0f} s)")
        print("\n".join(lines))
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
