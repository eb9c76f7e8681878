"""The cost of a launcher: the time until the script runs, and the resources beside training.

One job of one node with two workers, which import nothing, under each launcher in turn:

* torchrun: `torchrun --standalone`;
* rdzvrun: `rdzvrun --standalone`, which runs its own server in its process;
* rdzvrun-rdzvd: the same job with a server that already runs;
* rdzvrun-warm: `rdzvrun --standalone --warm`; its first workers start cold, beside the zygote.

start: seconds from the start of the command until the last of the two workers runs the first line
of the script. The files have been read before: the first run of each launcher is not counted.

idle: the resources of each process while the workers wait, once imports are over. Agent and runner
exist as long as the job, the store host and the zygote while they are needed; the workers are the
user's. torchrun is an agent alone. Memory is given twice: as PSS, in which each process counts its
share of a page (so it may be summed up, but is less if other programs of the machine have the same
libraries open), and as RSS, in which each process counts the whole page. CPU is in percent of one
core, as counted by the kernel's scheduler; wake-ups are how often per second a thread has waited
for something and continued.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
from processes import BIN, Rdzvd, guard

WORKER = Path(__file__).with_name("launch_worker.py")
WORKERS = 2
START_S = 60.0
"""How long a launcher may take until both workers run."""
SETTLE_S = 60.0
"""How long imports beside the workers may take."""
QUIET_S, QUIET_CPU = 1.0, 0.02
"""Imports are over once all processes together used less CPU than that for this long."""
END_S = 15.0
POLL_S = 0.01

ROLES = ("agent", "runner", "store host", "zygote", "worker", "other")
LAUNCHING = ("agent", "runner")
"""The roles that exist as long as the job and belong to the launcher."""
_SCRIPTS = {"__main__.py": "runner", "store_host.py": "store host"}


@dataclass(frozen=True, slots=True)
class Contender:
    """A launcher and its command line."""

    name: str
    program: str
    options: tuple[str, ...]
    server: bool = False
    """Whether it uses a server that already runs."""


CONTENDERS = (
    Contender("torchrun", "torchrun", ("--standalone",)),
    Contender("rdzvrun", "rdzvrun", ("--standalone",)),
    Contender("rdzvrun-rdzvd", "rdzvrun", ("--nnodes=1", "--rdzv-id=bench"), server=True),
    Contender("rdzvrun-warm", "rdzvrun", ("--standalone", "--warm")),
)


@dataclass(frozen=True, slots=True)
class Used:
    """The resources that one process has used so far."""

    cpu_s: float
    wakeups: int

    @classmethod
    def by(cls, pid: int) -> Used:
        """Read them, for all present threads."""
        cpu_ns = wakeups = 0
        for task in Path(f"/proc/{pid}/task").iterdir():
            cpu_ns += int((task / "schedstat").read_text().split()[0])
            wakeups += _field(task / "status", "voluntary_ctxt_switches")
        return cls(cpu_ns / 1e9, wakeups)


@dataclass(frozen=True, slots=True)
class Idle:
    """The resources of all processes of one role while nothing happens."""

    processes: int
    pss_bytes: int
    rss_bytes: int
    cpu_percent: float
    wakeups_per_s: float

    @classmethod
    def of(cls, parts: Sequence[Idle]) -> Idle:
        """Sum up.

        >>> Idle.of([Idle(1, 5, 7, 0.5, 1.0), Idle(1, 1, 2, 0.25, 0.5)])
        Idle(processes=2, pss_bytes=6, rss_bytes=9, cpu_percent=0.75, wakeups_per_s=1.5)
        """
        return cls(
            sum(part.processes for part in parts),
            sum(part.pss_bytes for part in parts),
            sum(part.rss_bytes for part in parts),
            sum(part.cpu_percent for part in parts),
            sum(part.wakeups_per_s for part in parts),
        )

    def as_json(self) -> dict[str, Json]:
        """Return it as values of a JSON line."""
        return {
            "processes": self.processes,
            "pss_bytes": self.pss_bytes,
            "rss_bytes": self.rss_bytes,
            "cpu_percent": float(f"{self.cpu_percent:.3g}"),
            "wakeups_per_s": float(f"{self.wakeups_per_s:.3g}"),
        }


def _field(path: Path, name: str) -> int:
    """Return a number of a file of /proc that has one on each line.

    Raises:
        RuntimeError: the file has no such line; the process may have ended.

    """
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"{path} says nothing of {name}")


def role_of(command: Sequence[str], *, leader: bool) -> str:
    """Return the role of a process by its command line; `leader` is started by the bench itself.

    A zygote is identified by its title.

    >>> role_of(["python", "-I", "-S", "/x/runner/__main__.py", "7"], leader=False)
    'runner'
    >>> role_of(["/x/torchrun", "/y/launch_worker.py"], leader=True)
    'agent'
    >>> role_of(["rdzv zygote: torch"], leader=False)
    'zygote'
    """
    if leader:
        return "agent"
    if command[0].startswith("rdzv zygote"):
        return "zygote"
    # The interpreter, its options, and then the program.
    script = next((Path(word).name for word in command if word.endswith(".py")), "")
    return "worker" if script == WORKER.name else _SCRIPTS.get(script, "other")


class Job:
    """One job of one launcher. Created by `running`."""

    def __init__(self, launcher: subprocess.Popen[bytes], started_s: float, log: Path) -> None:
        self._launcher = launcher
        self._started_s = started_s
        self._log = log
        self._starts = log.with_suffix(".starts")

    @classmethod
    @contextlib.contextmanager
    def running(
        cls, contender: Contender, endpoint: str, directory: Path, lifeline: Path
    ) -> Iterator[Job]:
        """Run a job until the body ends; no process is left then."""
        log = directory / f"{contender.name}.log"
        starts = log.with_suffix(".starts")
        starts.write_text("")
        command = [
            str(BIN / contender.program),
            *contender.options,
            # After --warm, whose value is optional.
            f"--nproc-per-node={WORKERS}",
            *([f"--rdzv-endpoint={endpoint}"] if contender.server else []),
            str(WORKER),
        ]
        environ = {
            **os.environ,
            "RDZV_BENCH_STARTS": str(starts),
            "RDZV_BENCH_LIFELINE": str(lifeline),
            # Both launchers would set it for more than one worker, and torchrun warns about it.
            "OMP_NUM_THREADS": "1",
        }
        with log.open("wb") as output:
            started_s = time.monotonic()
            launcher = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                preexec_fn=guard(),  # noqa: PLW1509
            )
        job = cls(launcher, started_s, log)
        try:
            yield job
        finally:
            job._end()

    def start_s(self) -> float:
        """Return how long it took until the last worker ran its first line.

        Raises:
            RuntimeError: not all of them run within the deadline, or the launcher has ended.

        """
        while len(starts := self._read()) < WORKERS:
            if self._launcher.poll() is not None or time.monotonic() > self._started_s + START_S:
                said = self._log.read_text(errors="replace").splitlines() or ["nothing"]
                raise RuntimeError(
                    f"{self._log.stem} has not started its workers; it wrote: {said[-1]}"
                )
            time.sleep(POLL_S)
        return max(starts) - self._started_s

    def idle(self, for_s: float) -> dict[str, Idle]:
        """Return the resources of each role's processes, after everything is imported.

        Raises:
            RuntimeError: processes started or ended meanwhile, or never became idle.
        """
        self._settle()
        pids = self._pids()
        before, before_s = {pid: Used.by(pid) for pid in pids}, time.monotonic()
        time.sleep(for_s)
        after, after_s = {pid: Used.by(pid) for pid in pids}, time.monotonic()
        if pids != self._pids():
            raise RuntimeError(f"{self._log.stem}: processes came or went while it was idle")
        found: dict[str, list[Idle]] = defaultdict(list)
        for pid in pids:
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            memory = Path(f"/proc/{pid}/smaps_rollup")
            spent_s = after_s - before_s
            found[role_of(command, leader=pid == self._launcher.pid)].append(
                Idle(
                    1,
                    _field(memory, "Pss") * 1024,
                    _field(memory, "Rss") * 1024,
                    100 * (after[pid].cpu_s - before[pid].cpu_s) / spent_s,
                    (after[pid].wakeups - before[pid].wakeups) / spent_s,
                )
            )
        return {role: Idle.of(found[role]) for role in ROLES if role in found}

    def _settle(self) -> None:
        """Wait until imports are over: they use CPU all the time."""
        end_s = time.monotonic() + SETTLE_S
        while True:
            before = {pid: Used.by(pid).cpu_s for pid in self._pids()}
            time.sleep(QUIET_S)
            after = {pid: Used.by(pid).cpu_s for pid in self._pids()}
            spent_s = sum(cpu_s - before.get(pid, 0.0) for pid, cpu_s in after.items())
            if before.keys() == after.keys() and spent_s < QUIET_CPU * QUIET_S:
                return
            if time.monotonic() > end_s:
                raise RuntimeError(f"{self._log.stem} does not come to rest within {SETTLE_S:g} s")

    def _pids(self) -> list[int]:
        """Return the launcher and all below it, parents first."""
        children: dict[int, list[int]] = defaultdict(list)
        for path in Path("/proc").iterdir():
            if path.name.isdecimal():
                with contextlib.suppress(OSError):
                    after_name = (path / "stat").read_text().rpartition(")")[2].split()
                    children[int(after_name[1])].append(int(path.name))
        found = [self._launcher.pid]
        for pid in found:
            found += sorted(children[pid])
        return found

    def _read(self) -> list[float]:
        whole, _, _ = self._starts.read_text().rpartition("\n")
        return [json.loads(line)["at_s"] for line in whole.splitlines()]

    def _end(self) -> None:
        """End it as a user does, which leaves nothing behind."""
        self._launcher.terminate()
        try:
            self._launcher.wait(END_S)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait(END_S)


# ------------------------------------------------------------------ what came of it


def measure_starts(
    chosen: Sequence[Contender], times: int, endpoint: str, directory: Path, lifeline: Path
) -> dict[str, list[float]]:
    """Start each launcher this often, in turn; the first start of each is not counted."""
    found: dict[str, list[float]] = {contender.name: [] for contender in chosen}
    for number in range(times + 1):
        for contender in chosen:
            with Job.running(contender, endpoint, directory, lifeline) as job:
                start_s = job.start_s()
            if number:
                found[contender.name].append(start_s)
        told = (f"{name} {figure(samples[-1])}" for name, samples in found.items() if samples)
        say_progress(f"start {number} of {times}: {', '.join(told)}")
    return found


def say_starts(found: Mapping[str, Sequence[float]]) -> None:
    """Print each launcher's time, and its ratio to torchrun: above 1, it is faster."""
    spreads = {name: Spread.of(samples) for name, samples in found.items()}
    peer = spreads.get("torchrun")
    for name, spread in spreads.items():
        faster = None if peer is None else peer.median / spread.median
        emit(
            f"start {name:14} median {spread.median:.3f} s, min {spread.low:.3f}, "
            f"p90 {spread.p90:.3f}, of {spread.count}; {figure(faster)} times as fast as torchrun",
            bench="launch",
            case="start",
            contender=name,
            workers=WORKERS,
            seconds=spread.as_json(),
            times_as_fast=None if faster is None else float(f"{faster:.3g}"),
            load=load(),
        )


def say_idle(name: str, roles: Mapping[str, Idle], idle_s: float) -> None:
    """Print the resources of each role, and the sum of agent and runner."""
    together = Idle.of([idle for role, idle in roles.items() if role in LAUNCHING])
    shown = {"agent + runner": together, **roles}
    for role, idle in shown.items():
        emit(
            f"idle  {name:14} {role:14} {idle.pss_bytes / 1e6:6.1f} MB PSS, "
            f"{idle.rss_bytes / 1e6:6.1f} MB RSS, {idle.cpu_percent:.3f} % CPU, "
            f"{idle.wakeups_per_s:.2f} wake-ups/s ({idle.processes})",
            bench="launch",
            case="idle",
            contender=name,
            role=role,
            seconds=idle_s,
            **idle.as_json(),
        )


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [contender.name for contender in CONTENDERS]
    add = parser.add_argument
    add("--starts", type=int, default=10, help="of each launcher (default 10)")
    add("--idle", type=float, default=25.0, help="seconds for each launcher; 0: not (default 25)")
    add("--launchers", default="", help=f"with commas (default all), of {', '.join(names)}")
    add("--out", type=Path, help="where the JSON lines are written as well")
    add("--directory", type=Path, help="where data is written, and removed again (default: /tmp)")
    chosen = parser.parse_args()
    wanted = names_of(parser, "--launchers", chosen.launchers, names)
    if chosen.starts < 0 or chosen.idle < 0:
        parser.error("--starts and --idle: give 0 or more")
    chosen.contenders = [c for c in CONTENDERS if not wanted or c.name in wanted]
    return chosen


@contextlib.contextmanager
def _server(contenders: Sequence[Contender], directory: Path) -> Iterator[str]:
    """Run the server that some of them need; yield its address."""
    if not any(contender.server for contender in contenders):
        yield ""
        return
    from ports import free_port

    address = f"127.0.0.1:{free_port()}"
    options = [f"--data-dir={directory / 'data'}"]
    rdzvd = Rdzvd(address, options, directory / "rdzvd.log")
    rdzvd.start()
    try:
        yield address
    finally:
        rdzvd.kill()


def main() -> None:
    """Measure, and leave nothing behind."""
    chosen = arguments()
    end_on_sigterm()
    # An installed package has its byte code; a source tree writes it at the first start, if it may.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with (
        tempfile.TemporaryDirectory(prefix="rdzv-bench-", dir=chosen.directory) as temporary,
        emitting_to(chosen.out),
        (Path(temporary) / "lifeline").open("w") as held,
        _server(chosen.contenders, Path(temporary)) as endpoint,
    ):
        fcntl.flock(held, fcntl.LOCK_EX)
        directory, lifeline = Path(temporary), Path(held.name)
        say_conditions("launch", directory)
        began_s = time.monotonic()
        if chosen.starts:
            say_starts(
                measure_starts(chosen.contenders, chosen.starts, endpoint, directory, lifeline)
            )
        if chosen.idle:
            for contender in chosen.contenders:
                with Job.running(contender, endpoint, directory, lifeline) as job:
                    job.start_s()
                    say_idle(contender.name, job.idle(chosen.idle), chosen.idle)
        print(f"# took {(time.monotonic() - began_s) / 60:.1f} minutes", file=sys.stderr)


if __name__ == "__main__":
    main()
