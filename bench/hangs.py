"""Whether the right rank is named when a training hangs, and how soon.

    python bench/hangs.py [--hangs N] [--limit SECONDS] [--nodes N] [--ranks N] [--seed SEED]

One job of gloo ranks, on one or more nodes of this machine, hangs repeatedly, in eight ways by
turns: each round plants one hang in one rank, and `--hang-timeout` ends the round. Workers are
forked from a zygote, or started cold (`--cold`). The script reports no progress and imports nothing
of rdzv. For each way, the output shows how often the right rank was named, and a wrong one; and how
long beyond the limit it took, from the moment when the rank began to hang to the log line that
names it.

    python bench/hangs.py --cost

The cost of the record, in CPU time: without torch's record, with it (torch's default), and with its
worker server, which is asked for all entries; three times by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

import measure  # noqa: F401  (its path to `ports`)
from hangs_worker import KINDS
from ports import free_port
from processes import BIN, Rdzvd, guard

WORKER = Path(__file__).with_name("hangs_worker.py")
COST = Path(__file__).with_name("hangs_cost.py")
ROUND_S = 120.0
"""The most that one round may take; then the benchmark fails."""
ENDED = re.compile(r"^(\S+Z) .*: round (\d+) ended \(worker failure\): rank (\d+) .*?: (hung: .*)")


def plant(
    hangs: int, limit_s: float, seed: str, nodes: int, ranks: int, *, cold: bool
) -> list[tuple[str, bool, str, float]]:
    """Return, for each hang, its kind, whether the right rank was named, how, and how late."""
    folder = Path(tempfile.mkdtemp(prefix="rdzv-hangs-"))
    options = [f"--hang-timeout={limit_s:g}", f"--max-restarts={hangs - 1}", "--restart-backoff=0"]
    if not cold:
        options.append("--warm")
    address = f"127.0.0.1:{free_port()}"
    server = Rdzvd(address, ("--store=memory",), folder / "rdzvd.log")
    server.start()
    options += [f"--rdzv-endpoint={address}", "--rdzv-id=bench", f"--nnodes={nodes}"]
    options.append(f"--nproc-per-node={ranks // nodes}")
    processes = [
        subprocess.Popen(
            [BIN / "rdzvrun", *options, f"--node-id=n{number}", WORKER, folder, seed],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE if number == 0 else (folder / f"n{number}.log").open("w"),
            text=True,
            preexec_fn=guard(),  # noqa: PLW1509  # There is one thread.
        )
        for number in range(nodes)
    ]
    said = processes[0].stderr
    assert said is not None
    found = []
    with (folder / "log").open("w") as log:
        for line in said:
            log.write(line)
            if (match := ENDED.match(line)) is None:
                if "ended (worker failure)" in line:
                    print(f"a round ended otherwise: {line.strip()[:300]}", flush=True)
                continue
            at_s = datetime.fromisoformat(match[1]).timestamp()
            planted = json.loads((folder / f"{match[2]}.json").read_text())
            late_s = at_s - planted["unix_s"] - limit_s
            right = int(match[3]) == planted["rank"]
            found.append((planted["kind"], right, match[4], late_s))
            if not right:
                print(f"wrong: {planted} {match[3]}: {match[4][:400]}", flush=True)
    for process in processes:
        process.wait()
    server.kill()
    print(f"the log is {folder / 'log'}")
    return found


def table(found: list[tuple[str, bool, str, float]]) -> None:
    """Print the findings, kind by kind."""
    print("| way to hang | planted | right | wrong | late by, median | most |")
    print("|---|---|---|---|---|---|")
    for kind in (*KINDS, "all"):
        of = [one for one in found if kind in ("all", one[0])]
        if of:
            right, late = sum(one[1] for one in of), [one[3] for one in of]
            print(
                f"| {kind} | {len(of)} | {right} | {len(of) - right} | "
                f"{statistics.median(late):.1f} s | {max(late):.1f} s |"
            )


def cost() -> None:
    """Print what collectives cost with and without the record, and what an answer costs."""
    for name, options, env in 3 * (
        ("without a record", (), {"TORCH_FR_BUFFER_SIZE": "0"}),
        ("torch's record", (), {}),
        ("and its server", ("--server",), {}),
    ):
        command = [sys.executable, str(COST), *options]
        done = subprocess.run(
            command,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        print(f"{name}: {done.stdout.strip() or done.stderr[-500:]}", flush=True)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hangs", type=int, default=48)
    parser.add_argument("--limit", type=float, default=5.0)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--cost", action="store_true")
    args = parser.parse_args()
    if args.cost:
        cost()
        return
    since = time.monotonic()
    table(plant(args.hangs, args.limit, args.seed, args.nodes, args.ranks, cold=args.cold))
    print(f"in {time.monotonic() - since:.0f} s; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
