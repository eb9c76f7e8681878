"""The share of its time that a training spends productively while something fails repeatedly.

A small DDP model trains over gloo, one worker on each of two nodes of this machine, and saves
itself every 40 steps, about two seconds. Every 15 seconds the worker of the second node gets
SIGKILL. It runs for some minutes under each launcher in turn; `recovery.py` describes them.

Goodput is the share of the time, from the first step on, in which new steps were made: from one
step to the next of the same process, without redone steps. The workers themselves report it, so it
is the same for each launcher. It is compared with rdzvd's own ledger of the same time, and with the
part of the time that the ledger's phases miss.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import measure  # noqa: F401  (its path to `ports`)
from measure import Json, emit, names_of, say_progress
from recovery import prepared
from recovery_job import CONTENDERS, START_S, Contender, Job

from rdzv.client import ControlClient, parse_endpoints
from rdzv.view.ledger import LedgerPhase, ledgers_of, summed
from rdzv.view.reports import clipped

WORKER = Path(__file__).with_name("goodput_worker.py")
NODES = ("n0", "n1")
LAUNCHERS = ("torchrun-unshared", "torchrun-best", "rdzvrun-cold", "rdzvrun")
"""The default launchers. Plain torchrun does not recover from half of its failures."""
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Step:
    """One step, as RANK 0 has written it."""

    at_s: float
    pid: int
    step: int


@dataclass(frozen=True, slots=True)
class Ledgered:
    """The server's ledger of the measured time."""

    goodput: float
    off: float
    """The share of the time by which its phases do not add up."""
    phases_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one launcher."""

    contender: str
    wall_s: float
    failures: int
    steps: int
    redone: int
    goodput: float
    ledger: Ledgered | None
    failed: str = ""


def steps_in(text: str) -> list[Step]:
    """Parse RANK 0's output; an incomplete last line is left out.

    >>> steps_in("1.5 7 1\\n2.5 7 2\\n3.")
    [Step(at_s=1.5, pid=7, step=1), Step(at_s=2.5, pid=7, step=2)]
    """
    found = []
    for line in text.rpartition("\n")[0].splitlines():
        at_s, pid, step = line.split()
        found.append(Step(float(at_s), int(pid), int(step)))
    return found


def trained(steps: Iterable[Step]) -> tuple[float, int, int]:
    """Return the time spent on new steps, and the numbers of new and redone steps.

    >>> trained([Step(1, 7, 1), Step(2, 7, 2), Step(3, 7, 3), Step(9, 8, 2), Step(10, 8, 3),
    ...          Step(11, 8, 4)])
    (3.0, 4, 2)
    """
    spent_s, new, redone, furthest = 0.0, 0, 0, 0
    before: Step | None = None
    for one in steps:
        if one.step > furthest:
            furthest, new = one.step, new + 1
            if before is not None and before.pid == one.pid:
                spent_s += one.at_s - before.at_s
        else:
            redone += 1
        before = one
    return spent_s, new, redone


class FailingJob(Job):
    """A job whose second node loses its worker repeatedly."""

    worker = WORKER
    max_restarts = 100_000

    async def train(self, for_s: float, every_s: float) -> Result:
        """Let it train for a while, and let a worker fail at intervals."""
        self._nnodes = str(len(NODES))
        for name in NODES:
            self._start(name)
        if (failed := await self._trains(NODES, frozenset(), START_S)) is not None:
            return Result(self._contender.name, 0, 0, 0, 0, 0, None, f"did not start: {failed}")
        began_s, failures, failed = time.monotonic(), 0, ""
        end_s, due_s, killed = began_s + for_s, began_s + every_s, set[int]()
        while (now_s := time.monotonic()) < end_s and not failed:
            if now_s >= due_s:
                due_s += every_s
                pid = next(s.pid for s in reversed(self._read()) if s.seat == f"{NODES[-1]}/0")
                # A worker that has not come back yet cannot fail again.
                if pid not in killed:
                    killed.add(pid)
                    failures += 1
                    os.kill(pid, signal.SIGKILL)
            codes = [self._launchers[name].poll() for name in NODES]
            if any(code is not None for code in codes):
                failed = f"its launchers have ended with {codes}"
            await asyncio.sleep(LOOK_S)
        ledger = None if self._contender.torchrun else self._ledger(began_s, end_s)
        steps = steps_in(self._stages.with_name("steps").read_text())
        spent_s, new, redone = trained(s for s in steps if began_s <= s.at_s <= end_s)
        counted = (failures, new, redone)
        return Result(self._contender.name, for_s, *counted, spent_s / for_s, ledger, failed)

    def _ledger(self, began_s: float, end_s: float) -> Ledgered:
        """Return the server's ledger of this time."""
        from_ms, until_ms = (round((s + self._unix_offset_s) * 1000) for s in (began_s, end_s))
        with ControlClient(parse_endpoints(self._endpoint)) as client:
            past = client.events("bench", 10_000)
        found = clipped(ledgers_of(past, until_ms)[-1], from_ms)
        phases = summed(found)
        wall_ms = until_ms - from_ms
        return Ledgered(
            goodput=phases[LedgerPhase.TRAINING] / wall_ms,
            off=abs(sum(phases.values()) - wall_ms) / wall_ms,
            phases_s={phase: ms / 1000 for phase, ms in phases.items() if ms},
        )


def table(results: Sequence[Result]) -> str:
    """Lay out the results for people."""
    head = ["launcher", "failures", "new steps", "redone", "goodput", "by the ledger", "off by"]
    lines = [head]
    for one in results:
        ledger = (
            [f"{one.ledger.goodput:.1%}", f"{one.ledger.off:.2%}"] if one.ledger else ["-", "-"]
        )
        good = f"{one.goodput:.1%}" + (f" ({one.failed})" if one.failed else "")
        lines.append(
            [one.contender, *map(str, (one.failures, one.steps, one.redone)), good, *ledger]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def row(one: Result, every_s: float) -> dict[str, Json]:
    """Return a result as values of a JSON line."""
    ledger = one.ledger
    return {
        "bench": "goodput",
        "contender": one.contender,
        "every_s": every_s,
        "wall_s": one.wall_s,
        "failures": one.failures,
        "steps": one.steps,
        "redone": one.redone,
        "goodput": round(one.goodput, 4),
        "ledger_goodput": round(ledger.goodput, 4) if ledger else None,
        "ledger_off": round(ledger.off, 5) if ledger else None,
        "ledger_phases_s": dict(ledger.phases_s) if ledger else None,
        "failed": one.failed,
    }


async def measure_all(
    contenders: Sequence[Contender], minutes: float, every_s: float, directory: Path, lifeline: Path
) -> list[Result]:
    """Run each launcher in turn."""
    from ports import free_port

    results = []
    for contender in contenders:
        below = directory / contender.name
        below.mkdir()
        endpoint = f"127.0.0.1:{free_port()}"
        async with FailingJob.running(contender, below, endpoint, lifeline) as job:
            assert isinstance(job, FailingJob)
            results.append(await job.train(60 * minutes, every_s))
        say_progress(f"{contender.name}: {results[-1].goodput:.1%}")
    return results


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [contender.name for contender in CONTENDERS]
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="of each launcher (default 10)")
    add("--every", type=float, default=15.0, help="seconds between failures (default 15)")
    add("--launchers", default="", help=f"with commas (default {', '.join(LAUNCHERS)})")
    add("--out", type=Path, help="where the JSON lines are written as well")
    add("--directory", type=Path, help="where data is written, and removed again (default: /tmp)")
    chosen = parser.parse_args()
    launchers = names_of(parser, "--launchers", chosen.launchers, names) or list(LAUNCHERS)
    chosen.contenders = [c for c in CONTENDERS if c.name in launchers]
    if not 2 <= chosen.every <= 60 * chosen.minutes:
        parser.error(f"--every {chosen.every:g}: give 2 seconds or more, within --minutes")
    return chosen


def main() -> None:
    """Measure, and leave nothing behind."""
    chosen = arguments()
    with prepared("goodput", chosen) as (directory, lifeline):
        results = asyncio.run(
            measure_all(chosen.contenders, chosen.minutes, chosen.every, directory, lifeline)
        )
        print(table(results))
        for one in results:
            emit("", **row(one, chosen.every))


if __name__ == "__main__":
    main()
