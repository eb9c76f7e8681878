"""Runs histories, one or many, and reports their failures.

A failure prints its seed and its swarm, then a minimal version of itself: as a scenario file if the
bare core fails in the same way, else as a trace. Exit codes: 1 a crash, 3 a broken guarantee, 4
nothing runs although nothing is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rdzv.structs import struct
from tests.scenarios.interpreter import Stage
from tests.scenarios.language import write_command, write_settings, write_state
from tests.sim.checkers import LivenessError, SafetyError
from tests.sim.ledgers import check_ledgers
from tests.sim.swarm import BUDGET_TROUBLES, NODE_TROUBLES, OPERATOR_TROUBLES, SERVER_TROUBLES
from tests.sim.world import World
from tests.support.builders import SETTINGS

CRASH, SAFETY, LIVENESS = 1, 3, 4
MOST_FAILURES = 20
"""The most failures shown; more would hide them."""
BATCH = 50
"""How many histories one process runs before it reports."""


KNOWN: tuple[str, ...] = ()
"""Parts of the messages of known failures that wait for a fix; they are counted separately.

Remove an entry together with its fix, so that it hides no other failure.
"""


@struct(frozen=True)
class Failure:
    """A history that failed."""

    seed: int
    exit_code: int
    text: str


def judge(
    seed: int,
    *,
    only: Iterable[int] | None = None,
    without: frozenset[str] = frozenset(),
    counts: Counter[str] | None = None,
) -> Failure | None:
    """Run one history; return its failure, if any."""
    gc.collect()
    world = World(seed, only=only, without=without, counts=counts)
    try:
        world.live()
        check_ledgers(world)
    except (SafetyError, LivenessError) as error:
        if counts is not None and any(words in str(error) for words in KNOWN):
            counts["known failure"] += 1
            return None
        exit_code = SAFETY if isinstance(error, SafetyError) else LIVENESS
        return Failure(seed, exit_code, str(error))
    except Exception as error:
        return Failure(seed, CRASH, repr(error))
    return None


# ------------------------------------------------------------------ many


def run_batch(task: tuple[range, frozenset[str], bool]) -> tuple[list[Failure], Counter[str]]:
    """Run some histories; return those that failed, and what was seen."""
    seeds, without, first = task
    counts: Counter[str] = Counter()
    failures: list[Failure] = []
    for seed in seeds:
        counts["histories"] += 1
        if (failure := judge(seed, without=without, counts=counts)) is not None:
            failures.append(failure)
            if first:
                break
    return failures, counts


def run_many(
    seeds: range, processes: int, without: frozenset[str], *, first: bool = False
) -> Iterator[tuple[list[Failure], Counter[str]]]:
    """Run many histories in several processes, batch by batch."""
    batches = [
        (range(at, min(at + BATCH, seeds.stop)), without, first)
        for at in range(seeds.start, seeds.stop, BATCH)
    ]
    if processes == 1:
        yield from map(run_batch, batches)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, initializer=_be_quiet) as pool:
        yield from pool.imap_unordered(run_batch, batches)


def _be_quiet() -> None:
    """Silence servers in trouble, and asyncio about the tasks of killed ones."""
    logging.disable(logging.CRITICAL)
    _forget_tasks()
    # Each history's garbage is collected between two histories, see `judge`.
    gc.collect()
    gc.freeze()
    gc.disable()
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    # Python closes such tasks where they were left, and complains about those that would wait then.
    sys.unraisablehook = lambda unraisable: None


def _forget_tasks() -> None:
    """Keep asyncio from remembering every task; this process never asks for them."""
    if (tasks := getattr(asyncio.tasks, "_all_tasks", None)) is not None:
        tasks.add = lambda task: None


# ------------------------------------------------------------------ one that failed


def shrink(failure: Failure, without: frozenset[str], budget: int = 400) -> list[int]:
    """Leave out every trouble without which the history still fails in the same way."""
    kept = [trouble.number for trouble in World(failure.seed, without=without).plan]
    size = len(kept) // 2
    while size >= 1 and budget > 0:
        first = 0
        while first < len(kept) and budget > 0:
            rest = kept[:first] + kept[first + size :]
            budget -= 1
            again = judge(failure.seed, only=rest, without=without)
            if again is not None and _alike(again, failure):
                kept = rest
            else:
                first += size
        size //= 2
    return kept


def _alike(one: Failure, other: Failure) -> bool:
    return one.exit_code == other.exit_code and one.text.split(":")[0] == other.text.split(":")[0]


def as_scenario(world: World, rdzv_id: str) -> str:
    """Write the commands to a job's rendezvous as a scenario file without its answers."""
    trace = world.judge.trace.get(rdzv_id, [])
    incarnations = sorted({getattr(said.command, "incarnation", 1) for said in trace})
    names = {incarnation: number + 1 for number, incarnation in enumerate(incarnations)}
    settings = world.swarm.jobs[rdzv_id]
    lines = [f"new {rdzv_id} " + " ".join(write_settings(settings, SETTINGS))]
    for said in trace:
        command = said.command
        if isinstance(command, str):
            text = command
        else:
            number = names.get(getattr(command, "incarnation", 1), 1)
            speaker = f"{getattr(command, 'node_id', '')}#{number}"
            text = write_command(command, settings, said.at_ms, speaker)
        lines.append(f"at {said.at_ms}ms  {text}")
    return "\n".join(lines)


def plays_alike(world: World, rdzv_id: str, scenario: str) -> bool:
    """Return whether the bare core, given the scenario, ends like the history."""
    stored = world.judge.stored.get(rdzv_id)
    stage = Stage()
    try:
        stage.run(scenario.splitlines())
    except Exception:
        # It fails there as well, which is the purpose of a failure's scenario.
        return True
    return stored is None or write_state(stage.job.state)[:8] == write_state_of(world, rdzv_id)[:8]


def write_state_of(world: World, rdzv_id: str) -> str:
    """Describe a job's state at the leading server; empty if none leads."""
    leader = world.leader
    state = leader.driver.jobs.peek(rdzv_id) if leader else None
    return write_state(state) if state is not None else ""


def show(seed: int, only: Sequence[int] | None, without: frozenset[str]) -> Failure | None:
    """Run one history and print all of it."""
    world = World(seed, only=only, without=without)
    world.log = []
    print(world.swarm.describe())
    failure = None
    try:
        world.live()
        check_ledgers(world)
    except SafetyError as error:
        failure = Failure(seed, SAFETY, str(error))
    except LivenessError as error:
        failure = Failure(seed, LIVENESS, str(error))
    print("\n".join(world.log))
    for rdzv_id in world.swarm.jobs:
        print(f"# {rdzv_id} as its rendezvous heard it")
        print(as_scenario(world, rdzv_id))
    if failure is not None:
        print(f"seed {seed}: {failure.text}")
    return failure


def explain(failure: Failure, without: frozenset[str]) -> None:
    """Print a failure: its seed, its swarm, and a minimal version of it."""
    kept = shrink(failure, without)
    world = World(failure.seed, only=kept, without=without)
    print(f"\nseed {failure.seed}, made small (--only {','.join(map(str, kept)) or 'none'}):")
    print(world.swarm.describe())
    for trouble in world.plan:
        print(f"  {trouble}")
    try:
        world.live()
    except Exception as error:
        print(f"  {error}"[:1_000])
    for rdzv_id in world.swarm.jobs:
        scenario = as_scenario(world, rdzv_id)
        alike = plays_alike(world, rdzv_id, scenario)
        print(f"# {rdzv_id}: as a scenario" if alike else f"# {rdzv_id}: as its trace")
        print(scenario)


# ------------------------------------------------------------------ by hand


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    options = _parse(arguments)
    _be_quiet()
    without = frozenset(options.without)
    if options.seed is not None:
        only = None
        if options.only is not None:
            only = [int(number) for number in options.only.split(",") if number.isdigit()]
        if options.trace:
            failure = show(options.seed, only, without)
            return failure.exit_code if failure else 0
        failure = judge(options.seed, only=only, without=without)
        if failure is not None:
            print(f"seed {failure.seed}: {failure.text}")
            explain(failure, without)
        return failure.exit_code if failure else 0
    return _run_seeds(options, without)


def _run_seeds(options: argparse.Namespace, without: frozenset[str]) -> int:
    first, _, last = options.seeds.rpartition(":")
    seeds = range(int(first or 0), int(last))
    counts: Counter[str] = Counter()
    failures: list[Failure] = []
    began_s = time.monotonic()
    for found, seen in run_many(seeds, options.processes, without, first=options.first):
        counts += seen
        failures += found
        if len(failures) >= (1 if options.first else MOST_FAILURES):
            break
    took_s = time.monotonic() - began_s
    for failure in failures[:MOST_FAILURES]:
        print(f"seed {failure.seed} ({failure.exit_code}): {failure.text[:300]}")
    if options.coverage:
        for name, count in sorted(counts.items()):
            print(f"{count:>12}  {name}")
    rate = counts["histories"] / max(took_s, 0.001)
    print(
        f"{counts['histories']} histories from {seeds.start}, {len(failures)} failed; "
        f"{took_s:.1f} s, "
        f"{rate:.0f} histories/s with {options.processes} processes; "
        f"{counts['known failure']} ended by a known failure"
    )
    if failures and not options.brief:
        explain(min(failures, key=lambda failure: failure.seed), without)
    return min((failure.exit_code for failure in failures), default=0)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, help="one history")
    parser.add_argument("--trace", action="store_true", help="print all of it")
    parser.add_argument("--only", help="leave out all troubles but these, by number")
    parser.add_argument("--seeds", default="1000", help="FIRST:LAST, or how many")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--first", action="store_true", help="end with the first failure")
    parser.add_argument("--coverage", action="store_true", help="count all that was seen")
    parser.add_argument("--brief", action="store_true", help="do not make a failure small")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        choices=(*(*NODE_TROUBLES, *SERVER_TROUBLES, *OPERATOR_TROUBLES, *BUDGET_TROUBLES),),
        help="a kind of trouble that never happens",
    )
    return parser.parse_args(arguments)
