"""`python -m tests.faults`: real processes, real faults, and a verdict.

    python -m tests.faults                               every fault five times
    python -m tests.faults --faults kill-server,cut-host --times 20
    python -m tests.faults --quick                       a few minutes: all but the longest once
    python -m tests.faults --workers kept                only with workers that stay
    python -m tests.faults --check FILE                  judge a history that was kept

Needs root and iproute2, because its hosts are network namespaces. Exit codes: 0 every promise was
kept, 1 some were broken, 2 usage, 77 this machine lacks something.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rdzv.errors import RendezvousError
from tests.faults import checker, etcd, history
from tests.faults.catalogue import CATALOGUE, Fault
from tests.faults.errors import StuckError
from tests.faults.lane import Lane

LIVENESS_S = 90.0
"""How long all hosts may take to train again once a fault has healed. This includes TCP's backoff
after an outage, the last seconds of a takeover's grace, and `import torch` on a busy machine.
"""
FINISH_S = 60.0
LEASE_S = 5.0
QUICK_BELOW_S = 35.0
TORCH_S = 20.0
STORES = ("sqlite", "etcd")
WORKERS = ("gloo", "kept", "light", "light")
"""The workers of the lanes, in turn: with torch, with torch and staying, without torch."""
WITH_TORCH = ("gloo", "kept")
EXIT_LACKS = 77
BROKEN, WHOLE = 1, 0


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.check:
        return verdict({options.check: history.read(options.check)})
    if lacking := what_is_lacking():
        print(f"SKIPPED: {lacking}")
        return EXIT_LACKS
    names = options.faults or [n for n, f in CATALOGUE.items() if is_quick(f) or not options.quick]
    plan = [CATALOGUE[name] for name in names for _ in range(options.times)]
    folder = options.keep or Path(tempfile.mkdtemp(prefix="rdzv-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}, {len(plan)} faults on {options.lanes} lanes; kept in {folder}")
    histories = run(plan, options.lanes, options.workers, options.seed, folder)
    return verdict(histories)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("--faults", type=names_of_faults, help="which, separated by commas")
    parser.add_argument("--times", type=positive, help="how often each (default: 5; quick: 1)")
    parser.add_argument("--lanes", type=positive, default=4, help="how many run beside each other")
    parser.add_argument(
        "--workers", type=kinds_of_workers, default=WORKERS, help="of the lanes, in turn"
    )
    parser.add_argument("--quick", action="store_true", help="all but the longest, once")
    parser.add_argument(
        "--seed", type=int, default=None, help="determines the order and the victims"
    )
    parser.add_argument("--keep", type=Path, help="a folder for histories and logs")
    parser.add_argument("--check", type=Path, metavar="FILE", help="judge a kept history again")
    options = parser.parse_args(argv)
    options.times = options.times or (1 if options.quick else 5)
    options.seed = random.randrange(10**6) if options.seed is None else options.seed
    return options


def names_of_faults(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := sorted(set(names) - CATALOGUE.keys()):
        known = ", ".join(CATALOGUE)
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are: {known}")
    return names


def kinds_of_workers(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names or set(names) - set(WORKERS):
        raise argparse.ArgumentTypeError(f"{text!r} is not of gloo, kept, light")
    return names


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def is_quick(fault: Fault) -> bool:
    return fault.usual_s < QUICK_BELOW_S


def what_is_lacking() -> str:
    """Return why this machine cannot run faults; empty if it can."""
    if os.geteuid() != 0:
        return "faults need root, for network namespaces; run as root"
    for program in ("ip", "nsenter", "mount"):
        if shutil.which(program) is None:
            return f"faults need {program}; install iproute2 and util-linux"
    if etcd.binary("etcd") is None:
        return "faults need etcd's binaries; `make setup` installs them"
    if not Path("/dev/net/tun").exists():
        return "faults need /dev/net/tun; load the kernel module tun"
    return ""


# ------------------------------------------------------------------ running


@dataclass(frozen=True, slots=True)
class Share:
    """The faults and the kind of one lane."""

    worker: str
    store: str
    faults: list[Fault]


def share(
    plan: Sequence[Fault], lanes: int, workers: Sequence[str], rng: random.Random
) -> list[Share]:
    """Share the plan among lanes, so that all take about as long.

    Lanes take turns with the workers and, from either one on, with the stores. A lane for which
    nothing is left is not made.
    """
    turn = rng.randrange(len(STORES))
    shares = [
        Share(workers[lane % len(workers)], STORES[(lane + turn) % len(STORES)], [])
        for lane in range(max(lanes, 2))
    ]
    loads = [0.0] * len(shares)
    for fault in sorted(plan, key=lambda fault: (not fault.needs, -fault.usual_s)):
        fit = [lane for lane, each in enumerate(shares) if serves(each, fault)]
        lane = min(fit, key=lambda lane: loads[lane])
        shares[lane].faults.append(fault)
        # Restarts take longer where torch is imported.
        loads[lane] += fault.usual_s + (TORCH_S if shares[lane].worker in WITH_TORCH else 0.0)
    for each in shares:
        rng.shuffle(each.faults)
    return [each for each in shares if each.faults]


def serves(lane: Share, fault: Fault) -> bool:
    """Say whether a lane has what a fault needs."""
    return fault.needs in ("", lane.store) or (fault.needs == "torch" and lane.worker in WITH_TORCH)


def run(
    plan: Sequence[Fault], lanes: int, workers: Sequence[str], seed: int, folder: Path
) -> dict[Path, tuple[history.Record, ...]]:
    """Run a plan; return the history of each lane by its file."""
    mark = uuid.uuid4().hex[:8]
    shares = share(plan, lanes, workers, random.Random(seed))
    give_up = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: give_up.set())
    with concurrent.futures.ThreadPoolExecutor(len(shares)) as pool:
        running = [
            pool.submit(run_lane, number, mark, folder / f"lane-{number}", each, seed, give_up)
            for number, each in enumerate(shares)
        ]
        return dict(future.result() for future in running)


def run_lane(
    number: int, mark: str, folder: Path, job: Share, seed: int, give_up: threading.Event
) -> tuple[Path, tuple[history.Record, ...]]:
    """Run one lane's faults one after another; keep and return its history."""
    kept = folder / "history.jsonl"
    rng = random.Random(f"{seed} {number}")
    records: list[history.Record] = []
    try:
        with Lane(
            number, mark, folder, worker=job.worker, store=job.store, seed=seed + number
        ) as lane:
            try:
                lane.wait_group(LIVENESS_S)
                for place, fault in enumerate(job.faults):
                    if give_up.is_set():
                        break
                    episode(lane, number * 1000 + place, fault, rng)
                lane.finish(FINISH_S)
            finally:
                records += lane.collect()
    except (StuckError, RendezvousError) as error:
        print(f"[lane {number}] ENDS HERE: {error}", flush=True)
        # Violations that no fault explains: at the beginning, at the end, or between faults.
        if not any(isinstance(record, history.NotRecovered) for record in records):
            records.append(history.NotRecovered(time.monotonic(), -1, str(error)))
    history.write(kept, records)
    return kept, tuple(records)


def episode(lane: Lane, number: int, fault: Fault, rng: random.Random) -> None:
    """Run one fault, and wait until all hosts train again.

    Raises:
        StuckError: they did not.
    """
    before = lane.wait_group(LIVENESS_S)
    victim = fault.choose(lane, rng)
    began = history.FaultBegan(
        time.monotonic(), number, fault.name, fault.promise, victim.hosts, victim.unseen,
        tuple(before.pids.values()), before.round, before.restarts,
    )  # fmt: skip
    lane.note(began)
    try:
        harmed = fault.harm(lane, victim)
        healed = history.FaultHealed(time.monotonic(), number, harmed)
        lane.note(healed)
        after = lane.wait_group(LIVENESS_S, changed_from=before if must_change(fault) else None)
        healed_s = time.monotonic() - healed.at_s
        if harmed is not None:
            # Connections slowed by loss and backoff end late, and not always cleanly.
            time.sleep(LEASE_S + 1)
            after = lane.wait_group(LIVENESS_S)
        while lane.renew_lost():
            after = lane.wait_group(LIVENESS_S)
    except StuckError as error:
        lane.note(history.NotRecovered(time.monotonic(), number, str(error)))
        raise
    now = time.monotonic()
    lane.note(
        history.Recovered(now, number, after.round, after.restarts, tuple(after.pids.values()))
    )
    lasted_s = now - began.at_s
    text = f"{fault.name} on {', '.join(victim.hosts)}: {lasted_s:.1f} s, {healed_s:.1f} s to heal"
    say(lane, text)


def must_change(fault: Fault) -> bool:
    """Return whether the group after a fault must differ from the one before it."""
    return fault.promise is history.Promise.ONE_RESTART


def say(lane: Lane, text: str) -> None:
    print(f"[lane {lane.number} {lane.worker} {lane.store}] {text}", flush=True)


# ------------------------------------------------------------------ the verdict


def verdict(histories: dict[Path, tuple[history.Record, ...]]) -> int:
    """Print what was done, and every broken promise; return the exit code."""
    done: Counter[str] = Counter()
    broken = 0
    for path, records in histories.items():
        done.update(r.name for r in records if isinstance(r, history.FaultBegan))
        violations = checker.check(records)
        broken += len(violations)
        started = [record.pid for record in records if isinstance(record, history.Started)]
        workers = len(set(started))
        text = f"{workers} workers, kept {len(started) - workers} times"
        print(f"{path}: {len(records)} records, {text}, {len(violations)} violations")
        for violation in violations:
            print(f"  VIOLATION {violation}")
    print("faults: " + ", ".join(f"{name} {count}" for name, count in sorted(done.items())))
    print(f"verdict: {'BROKEN, ' + str(broken) + ' violations' if broken else 'OK'}")
    return BROKEN if broken else WHOLE


if __name__ == "__main__":
    sys.exit(main())
