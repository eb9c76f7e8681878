"""One job whose recovery is timed: its launchers, what befalls it, and when it trains again.

Both launchers are looked at from outside, by the same means: old workers' ends by pidfd, new
workers' stages by what `recovery_worker.py` says. Only that something was noticed, and that a round
is complete, is told by nobody but the launchers' own logs; their wall clock is this machine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import measure  # noqa: F401  (its path to `cluster`)
import recovery_peers
from cluster import environ
from processes import BIN, guard

WORKER = Path(__file__).with_name("recovery_worker.py")
KEPT_WORKER = Path(__file__).with_name("recovery_kept_worker.py")
START_S = 240.0
"""How long a job may take to train at first, on top of its launcher's last call."""
LAST_CALL_S = 30.0
"""The default of both launchers."""
END_S = 15.0
POLL_S = 0.01

SETTLE_S = 2.0
"""How long a job trains before anything befalls it: what its launcher does just after a start is
over then, and few jobs fail in their first second."""

PHASES = (
    *("died", "noticed", "parked", "stopped", "round", "spawned"),
    *("started", "imported", "grouped", "reduced", "stepped"),
)
"""What a recovery passes through, each in seconds since what befell the job:

* died: the first worker of the old world is gone. Of a worker that got SIGKILL, that is what the
  kernel takes to free its memory, before anyone can hear of it;
* noticed: the first line that a launcher or server writes about it;
* parked: the last worker that stays has left its round (it says so itself);
* stopped: the last worker of the old world is gone, which again takes the kernel its time;
* round: the round of the new world is complete, by the last launcher that says so;
* spawned: the last process of the new world has executed its interpreter, or is forked and has its
  environment, by the last rdzvrun that says so (torchrun does not say it);
* started, imported, grouped, reduced, stepped: the last worker of the new world runs its first
  line, has imported torch, has its process group, has done its first all-reduce, and then its first
  DDP step.

Where a launcher needs several attempts, the last five are those of the world that trains.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Contender:
    """A launcher and its command line."""

    name: str
    program: str
    conf: Mapping[str, str] = field(default_factory=dict)
    """The value of --rdzv-conf."""
    options: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    script: Path = WORKER

    @property
    def torchrun(self) -> bool:
        """Whether it is the peer."""
        return self.program == "torchrun"

    @property
    def alone(self) -> bool:
        """Whether each of its workers is launched by itself."""
        return self.program in recovery_peers.NAMES

    @property
    def warm(self) -> bool:
        """Whether it has a zygote once it has trained for a while."""
        return self.program == "rdzvrun" and "--no-warm" not in self.options

    @property
    def patient(self) -> bool:
        """Whether its own timeouts, not this machine, take most of the time of a lost node."""
        return self.torchrun and "last_call_timeout" not in self.conf


UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
SHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
TUNED = {"last_call_timeout": "1", "keep_alive_interval": "1"}

CONTENDERS = (
    Contender("torchrun", "torchrun", environ=SHARED),
    Contender("torchrun-unshared", "torchrun", environ=UNSHARED),
    Contender("torchrun-tuned", "torchrun", TUNED, environ=SHARED),
    Contender("torchrun-best", "torchrun", TUNED, environ=UNSHARED),
    # Its last call holds at the first formation alone, which is not measured.
    Contender("rdzvrun-cold", "rdzvrun", {"last_call_timeout": "1"}, options=("--no-warm",)),
    Contender("rdzvrun", "rdzvrun", {"last_call_timeout": "1"}),
    Contender("rdzvrun-warm", "rdzvrun", {"last_call_timeout": "1"}, options=("--warm",)),
    Contender("rdzvrun-kept", "rdzvrun", {"last_call_timeout": "1"}, script=KEPT_WORKER),
    *(Contender(name, name) for name in recovery_peers.NAMES),
)
"""torchrun as it comes; with a store of its own for each attempt; tuned; both. rdzvrun. Peers."""

CASES = ("worker", "tree", "late", "term")
"""SIGKILL of a worker; of an agent and all below it; a node comes late; SIGTERM of an agent."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One line of a worker."""

    stage: str
    at_s: float
    pid: int
    seat: str
    """Its node and LOCAL_RANK: `n0/1`."""
    world_size: int
    round: int = 0
    """Of a script whose processes stay: the round. Otherwise a new world has new processes."""

    @property
    def worker(self) -> tuple[int, int]:
        """The value that differs in each world."""
        return self.pid, self.round


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run."""

    phases: Mapping[str, float]
    """Empty if the job did not recover."""
    failed: str = ""
    """The reason if it did not recover; otherwise empty."""


# ------------------------------------------------------------------ what was said, to phases


def new_world(
    stages: Iterable[Stage], old: frozenset[tuple[int, int]], seats: Sequence[str]
) -> dict[str, float] | None:
    """Return when the last worker of the new world reached each stage; None while none is steady.

    A seat's present worker is the last that has started there, and the world is that of all seats.
    A worker of the old world parks in it.

    >>> went = [Stage("steady", 9.0, 2, "n0", 1)]
    >>> new_world(went, frozenset({(1, 0)}), ["n0"]), new_world(went, frozenset({(2, 0)}), ["n0"])
    ({'steady': 9.0}, None)
    """
    present: dict[str, list[Stage]] = {}
    reached: dict[str, float] = {}
    for stage in stages:
        if stage.worker not in old and stage.seat in seats:
            of_seat = present.setdefault(stage.seat, [])
            if of_seat and of_seat[0].worker != stage.worker:
                of_seat.clear()
            of_seat.append(stage)
        elif stage.stage == "parked" and stage.worker in old:
            reached["parked"] = max(reached.get("parked", 0.0), stage.at_s)
    if set(present) != set(seats):
        return None
    for of_seat in present.values():
        if of_seat[-1].stage != "steady" or of_seat[-1].world_size != len(seats):
            return None
        for stage in of_seat:
            reached[stage.stage] = max(reached.get(stage.stage, 0.0), stage.at_s)
    return reached


_TORCH_LINE = re.compile(r"^[IWEC](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d+) \d+ \S+\] (.*)$")
_TORCH_NOTICES = re.compile(r"failed \(exitcode|Detected \d+ new nodes|death signal|Worker group")
_TORCH_ROUND = "Rendezvous complete"
_RDZV_NOTICES = frozenset(
    {
        "NodeJoined",
        "NodeLeaving",
        "NodeLeft",
        "NodeWentAway",
        "NodeLost",
        "RoundEnded",
        "WorkerFailed",
    }
)
_RDZV_ROUND = "RoundCompleted"


@dataclass(frozen=True, slots=True)
class Said:
    """A line of a launcher or server that shows a phase."""

    phase: str
    unix_s: float


def said_by_torchrun(log: str, year: int) -> Iterator[Said]:
    """Yield what a torchrun has written of notices and rounds.

    >>> line = "I1121 12:35:30.850000 9385 torch/x/api.py:553] [default] Rendezvous complete for"
    >>> [said.phase for said in said_by_torchrun(line, 2026)]
    ['round']
    """
    for line in log.splitlines():
        if found := _TORCH_LINE.match(line):
            month, day, hour, minute, second = map(int, found.groups()[:5])
            at = datetime(year, month, day, hour, minute, second)
            unix_s = at.timestamp() + float(f"0.{found[6]}")
            if _TORCH_ROUND in found[7]:
                yield Said("round", unix_s)
            elif _TORCH_NOTICES.search(found[7]):
                yield Said("noticed", unix_s)


def said_by_rdzvd(log: str) -> Iterator[Said]:
    """Yield what an rdzvd with --log-format=json has written of notices and rounds.

    >>> line = '{"time": "2026-11-21T12:00:00.250+00:00", "event": "NodeLost"}'
    >>> [said.phase for said in said_by_rdzvd(line)]
    ['noticed']
    """
    for line in log.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        name = said.get("event", "") if isinstance(said, dict) else ""
        if name == _RDZV_ROUND or name in _RDZV_NOTICES:
            unix_s = datetime.fromisoformat(said["time"]).timestamp()
            yield Said("round" if name == _RDZV_ROUND else "noticed", unix_s)


_RDZVRUN_LINE = re.compile(
    r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z) rdzvrun\S*: local_rank \d+ is pid "
)


def said_by_rdzvrun(log: str) -> Iterator[Said]:
    """Yield what an rdzvrun with LOGLEVEL=DEBUG has written of processes that it has started.

    >>> line = "2026-11-21T12:00:00.250Z rdzvrun[n0-7]: local_rank 0 is pid 4711"
    >>> [said.phase for said in said_by_rdzvrun(line)]
    ['spawned']
    """
    for line in log.splitlines():
        if found := _RDZVRUN_LINE.match(line):
            yield Said("spawned", datetime.fromisoformat(found[1]).timestamp())


def phases(
    befell_s: float,
    world: Mapping[str, float],
    exits_s: Mapping[int, float | None],
    said: Iterable[Said],
    unix_offset_s: float,
) -> dict[str, float]:
    """Return the phases of a recovery, in seconds; one of which nobody has told is left out.

    Logs are cut to milliseconds, so what they tell may seem to come just before its cause.
    """
    # A spare rank of a peer has started long before.
    reached = {name: at_s - befell_s for name, at_s in world.items() if name in PHASES}
    found = {name: after_s for name, after_s in reached.items() if after_s >= 0}
    ends = [end for end in exits_s.values() if end is not None]
    if ends:
        found["died"] = max(min(ends) - befell_s, 0.0)
        if len(ends) == len(exits_s):
            found["stopped"] = max(max(ends) - befell_s, 0.0)
    for one in said:
        at_s = one.unix_s - unix_offset_s - befell_s
        if at_s < -0.001 or at_s > world["reduced"] - befell_s:
            continue
        at_s = max(at_s, 0.0)
        earliest = one.phase == "noticed"
        known = found.get(one.phase)
        if known is None or (at_s < known if earliest else at_s > known):
            found[one.phase] = at_s
    return {name: found[name] for name in PHASES if name in found}


# ------------------------------------------------------------------ the job


class Job:
    """One job on some nodes. Created by `running`."""

    worker: Path | None = None
    """The script; None: the contender's."""
    max_restarts = 3
    nproc = 1
    """Workers of each node."""

    def __init__(
        self, contender: Contender, directory: Path, endpoint: str, lifeline: Path
    ) -> None:
        self._contender = contender
        self._directory = directory
        self._endpoint = endpoint
        self._lifeline = lifeline
        self._stages = directory / "stages"
        self._stages.touch()
        self._mark = uuid.uuid4().hex
        self._launchers: dict[str, subprocess.Popen[bytes]] = {}
        self._server: subprocess.Popen[str] | None = None
        self._unix_offset_s = time.time() - time.monotonic()

    @classmethod
    @asynccontextmanager
    async def running(
        cls, contender: Contender, directory: Path, endpoint: str, lifeline: Path
    ) -> AsyncIterator[Job]:
        """Run a job, and any server it needs, until the body ends; nothing is left then."""
        job = cls(contender, directory, endpoint, lifeline)
        try:
            if contender.program == "rdzvrun":
                job._start_server()
            elif contender.program == "torchft":
                job._launch("lighthouse", recovery_peers.lighthouse(endpoint), {})
            yield job
        finally:
            job._end()

    async def measure(self, case: str, nodes: int, nproc: int, deadline_s: float) -> Outcome:
        """Let the job train, cause the case's fault, and wait until it trains again."""
        alone = self._contender.alone
        self.nproc = 1 if alone else nproc
        names = [f"n{number}" for number in range(nodes * nproc if alone else nodes)]
        spares = recovery_peers.spares(self._contender.program, len(names)) if alone else ()
        at_first = names[:-1] if case == "late" else names
        self._nnodes = str(len(names)) if case == "worker" else f"{nodes - 1}:{nodes}"
        for name in (*at_first, *spares):
            self._start(name)
        waits_s = START_S + (LAST_CALL_S if case == "late" and self._contender.patient else 0.0)
        if (failed := await self._trains(at_first, frozenset(), waits_s)) is not None:
            return Outcome({}, f"did not start: {failed}")
        if self._contender.warm and (failed := await self._warmed(at_first)) is not None:
            return Outcome({}, failed)
        await asyncio.sleep(SETTLE_S)
        steady = {stage.seat: stage for stage in self._read() if stage.stage == "steady"}
        old = {seat: stage.pid for seat, stage in steady.items()}
        before = frozenset(stage.worker for stage in steady.values())
        with _watched(old.values()) as exits_s:
            befell_s = time.monotonic()
            self._befall(case, names[-1], old)
            leaves = case in ("tree", "term") or spares
            expected = [*names[:-1], *spares] if leaves else names
            failed = await self._trains(expected, before, deadline_s)
        if failed is not None:
            return Outcome({}, failed)
        world = new_world(self._read(), before, self._seats(expected))
        assert world is not None, "it trains"
        return Outcome(phases(befell_s, world, exits_s, self._said(), self._unix_offset_s))

    def _seats(self, nodes: Sequence[str]) -> list[str]:
        return [f"{node}/{number}" for node in nodes for number in range(self.nproc)]

    def _befall(self, case: str, node: str, workers: Mapping[str, int]) -> None:
        match case:
            case "worker":
                os.kill(workers[self._seats([node])[-1]], signal.SIGKILL)
            case "tree":
                for pid in [self._launchers[node].pid, *self._marked(node)]:
                    _kill(pid)
            case "late":
                self._start(node)
            case "term":
                self._launchers[node].send_signal(signal.SIGTERM)

    async def _trains(
        self, nodes: Sequence[str], old: frozenset[tuple[int, int]], deadline_s: float
    ) -> str | None:
        """Wait until all these nodes train together with new workers; return why they failed to."""
        end_s = time.monotonic() + deadline_s
        while new_world(self._read(), old, self._seats(nodes)) is None:
            for name in nodes:
                if (code := self._launchers[name].poll()) is not None:
                    return f"the launcher of {name} has ended with {code}"
            if time.monotonic() > end_s:
                return f"does not train within {deadline_s:g} s"
            await asyncio.sleep(POLL_S)
        return None

    async def _warmed(self, nodes: Sequence[str]) -> str | None:
        """Wait until each of these has a zygote; return why not."""
        end_s = time.monotonic() + START_S
        while not all("workers can be warm" in self._log(name).read_text() for name in nodes):
            if time.monotonic() > end_s:
                return f"there is no zygote within {START_S:g} s"
            await asyncio.sleep(POLL_S)
        return None

    def _read(self) -> list[Stage]:
        whole, _, _ = self._stages.read_text().rpartition("\n")
        return [Stage(**json.loads(line)) for line in whole.splitlines()]

    def _said(self) -> Iterator[Said]:
        if self._contender.torchrun or self._contender.alone:
            year = datetime.now().year
            for name in self._launchers:
                yield from said_by_torchrun(self._log(name).read_text(errors="replace"), year)
        else:
            yield from said_by_rdzvd(self._log("rdzvd").read_text())
            for name in self._launchers:
                yield from said_by_rdzvrun(self._log(name).read_text(errors="replace"))

    # -------------------------------------------------------------- processes

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def _start_server(self) -> None:
        command = [
            str(BIN / "rdzvd"),
            "--listen=127.0.0.1:0",
            f"--data-dir={self._directory / 'data'}",
            "--log-format=json",
        ]
        with self._log("rdzvd").open("w") as log:
            self._server = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environ("rdzvd"),
                preexec_fn=guard(),  # noqa: PLW1509
            )
        assert self._server.stdout is not None
        ready = self._server.stdout.readline()
        if not ready.startswith("rdzvd ready: listening on "):
            said = self._log("rdzvd").read_text().splitlines() or ["nothing was said"]
            raise RuntimeError(f"rdzvd did not start: {said[-1]}")
        self._endpoint = ready.split()[4].rstrip(",")

    def _start(self, name: str) -> None:
        contender = self._contender
        if contender.alone:
            told = recovery_peers.environ(
                contender.program, name, self._endpoint, int(self._nnodes)
            )
            self._launch(name, recovery_peers.command(contender.program), told)
            return
        conf = dict(contender.conf)
        backend = ["--rdzv-backend=rdzv", f"--node-id={name}"]
        if contender.torchrun:
            # The host of its store is spared, since its loss ends the job.
            conf["is_host"] = "1" if name == "n0" else "0"
            backend = ["--rdzv-backend=c10d"]
        command = [
            str(BIN / contender.program),
            *backend,
            # Not last: the value of --warm is optional, and the script is none.
            *contender.options,
            f"--rdzv-endpoint={self._endpoint}",
            "--rdzv-id=bench",
            f"--rdzv-conf={','.join(f'{key}={value}' for key, value in conf.items())}",
            f"--nnodes={self._nnodes}",
            f"--nproc-per-node={self.nproc}",
            f"--max-restarts={self.max_restarts}",
            f"--log-dir={self._directory / 'logs'}",
            str(self.worker or contender.script),
        ]
        self._launch(name, command, contender.environ)

    def _launch(self, name: str, command: Sequence[str], more: Mapping[str, str]) -> None:
        with self._log(name).open("wb") as log:
            self._launchers[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environ(name) | dict(more),
                preexec_fn=guard(),  # noqa: PLW1509
            )

    def _environ(self, node: str) -> dict[str, str]:
        return {
            **os.environ,
            "RDZV_BENCH_MARK": self._mark,
            "RDZV_BENCH_NODE": node,
            "RDZV_BENCH_STAGES": str(self._stages),
            "RDZV_BENCH_LIFELINE": str(self._lifeline),
            "LOGLEVEL": "INFO" if self._contender.torchrun else "DEBUG",
            # Both launchers would set it for more than one worker a node, and warn of it.
            "OMP_NUM_THREADS": "1",
        }

    def _marked(self, node: str = "") -> list[int]:
        """Return the processes of this job, or of one node of it, whatever their parents are."""
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        found = []
        for pid in pids:
            of = environ(pid)
            if of.get("RDZV_BENCH_MARK") == self._mark and node in ("", of["RDZV_BENCH_NODE"]):
                found.append(pid)
        return found

    def _end(self) -> None:
        """End all of it, including processes that have outlived their launcher."""
        end_s = time.monotonic() + END_S
        while marked := self._marked():
            if time.monotonic() > end_s:
                raise RuntimeError(f"processes survive SIGKILL for {END_S:g} s: {marked}")
            for pid in marked:
                _kill(pid)
            for launcher in self._launchers.values():
                launcher.poll()
            if self._server is not None:
                self._server.poll()
            time.sleep(POLL_S)
        for launcher in self._launchers.values():
            launcher.wait(END_S)
        if self._server is not None:
            self._server.wait(END_S)
            assert self._server.stdout is not None
            self._server.stdout.close()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _watched(pids: Iterable[int]) -> Iterator[dict[int, float | None]]:
    """Record in the mapping when each process ends, which need not be a child; None until then."""
    loop = asyncio.get_running_loop()
    exits_s: dict[int, float | None] = dict.fromkeys(pids)

    def note(pid: int, descriptor: int) -> None:
        exits_s[pid] = time.monotonic()
        loop.remove_reader(descriptor)

    with contextlib.ExitStack() as stack:
        for pid in exits_s:
            descriptor = os.pidfd_open(pid)
            stack.callback(os.close, descriptor)
            stack.callback(loop.remove_reader, descriptor)
            loop.add_reader(descriptor, note, pid, descriptor)
        yield exits_s
