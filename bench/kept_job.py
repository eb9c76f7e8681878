"""The job of kept.py: nodes with kept workers, the faults in them, and the workers' diary."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measure  # noqa: F401  (its path to `cluster`)
from cluster import JOB, Cluster, Node

HERE = Path(__file__).parent
WORKER = HERE / "kept_worker.py"
SUPPORT = HERE.parent / "tests" / "support"
LOOK_S = 0.005
START_S = 300.0
"""How long a round of only new processes may take: each imports torch."""
BACK_S = 60.0
"""How long any other round may take; much longer than promised."""
PAUSE_S = 0.02
"""The pause between two steps: six workers share two cores."""


class BrokenPromiseError(Exception):
    """Something happened that must not."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker at the start of a round."""

    pid: int
    rank: int
    node: str
    kept: bool
    step: int
    weights: str
    seed: int
    world: int


@dataclass
class Diary:
    """The workers' output."""

    path: Path
    begun: dict[int, dict[int, Seat]] = field(default_factory=dict)
    """By round and rank."""
    stepped_s: dict[int, dict[int, float]] = field(default_factory=dict)
    """When each rank did its first step of a round."""
    parked_s: dict[int, dict[int, float]] = field(default_factory=dict)
    """When each pid left a round."""
    losses: dict[tuple[int, int], str] = field(default_factory=dict)
    """By step and rank; for a repeated step, the last."""
    blocked: dict[int, float] = field(default_factory=dict)
    """Since when a pid has been blocked."""
    died: list[int] = field(default_factory=list)
    """The pids that died while healing others."""
    _read: int = 0

    def read(self) -> Diary:
        """Read new lines."""
        with self.path.open("rb") as file:
            file.seek(self._read)
            whole, _, _ = file.read().rpartition(b"\n")
        if whole:
            self._read += len(whole) + 1
            for line in whole.splitlines():
                self._take(json.loads(line))
        return self

    def _take(self, said: Mapping[str, Any]) -> None:
        pid, at_s, number = said["pid"], said["at_s"], said.get("round", -1)
        match said["what"]:
            case "begin":
                fields = ("rank", "node", "kept", "step", "weights", "seed", "world")
                seat = Seat(pid, *(said[name] for name in fields))
                self.begun.setdefault(number, {})[seat.rank] = seat
            case "step":
                self.losses[said["step"], said["rank"]] = said["loss"]
                if said["first"]:
                    self.stepped_s.setdefault(number, {})[said["rank"]] = at_s
            case "parked":
                self.parked_s.setdefault(number, {})[pid] = at_s
            case "blocks":
                self.blocked[pid] = at_s
            case "dies":
                self.died.append(pid)


class KeptJob:
    """A job on some nodes of two workers each; created in a cluster that ends it."""

    def __init__(
        self,
        made: Cluster,
        lifeline: Path,
        *options: str,
        environ: Mapping[str, str] | None = None,
        nproc: int = 2,
        pause_s: float = PAUSE_S,
    ) -> None:
        self.made = made
        self.nproc = nproc
        self.round = -1
        """The last round that trains."""
        folder = made.folder
        self.orders = folder / "orders"
        self.orders.mkdir()
        diary = folder / "diary"
        diary.touch()
        self.diary = Diary(diary)
        self.may_end: set[str] = set()
        """The nodes whose agents may end."""
        self._options = options
        self._environ = {
            "KEPT_ORDERS": str(self.orders),
            "KEPT_DIARY": str(diary),
            "KEPT_PAUSE_S": str(pause_s),
            "RDZV_BENCH_LIFELINE": str(lifeline),
            "OMP_NUM_THREADS": "1",
            "RDZV_WARM_WAIT": str(START_S),
            "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
            **(environ or {}),
        }

    def start(self, names: Iterable[str], nnodes: str) -> list[Node]:
        """Start nodes."""
        return [
            self.made.start_node(
                name,
                # One import per node, before the first round.
                "--warm",
                "--max-restarts=1000000",
                "--restart-backoff=0",
                "--rdzv-conf=last_call_timeout=1",
                "--redirects=3",
                *self._options,
                worker=str(WORKER),
                nnodes=nnodes,
                nproc=self.nproc,
                environ={**self._environ, "KEPT_NODE": name},
            )
            for name in names
        ]

    @property
    def workers(self) -> dict[int, Seat]:
        """The workers of the last training round, by rank."""
        return self.diary.begun[self.round]

    def trains(self, workers: int, after: int | None = None, within_s: float = BACK_S) -> float:
        """Wait until all workers of a later round have made a step; return when the last did."""
        after = self.round if after is None else after

        def found() -> int | None:
            self.diary.read()
            for number, seats in self.diary.begun.items():
                whole = len(seats) == workers == next(iter(seats.values())).world
                stepped = self.diary.stepped_s.get(number, {})
                if number > after and whole and len(stepped) == workers:
                    return number
            return None

        self.round = self.until(f"{workers} train after round {after}", found, within_s)
        self.check_bits()
        return max(self.diary.stepped_s[self.round].values())

    def warmed(self, nodes: Iterable[Node]) -> None:
        """Wait until restarts are warm."""
        for node in nodes:
            self.until("there is a zygote", lambda: "workers can be warm" in node.text, START_S)  # noqa: B023

    def until(self, what: str, holds: Callable[[], Any], within_s: float = BACK_S) -> Any:
        """Wait until `holds` returns a true value, and return it."""
        end_s = time.monotonic() + within_s
        while (found := holds()) is None or found is False:
            if time.monotonic() > end_s:
                raise BrokenPromiseError(f"not within {within_s:g} s: {what}")
            for node in self.made.nodes:
                code = node.process.poll()
                if code not in (None, -signal.SIGKILL) and node.name not in self.may_end:
                    raise BrokenPromiseError(
                        f"{node.name} has ended with {code}: {node.text[-500:]}"
                    )
            time.sleep(LOOK_S)
        return found

    def order(self, pid: int, text: str) -> None:
        """Make a worker block before its next step, and wait until it does."""
        path = self.orders / str(pid)
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)
        self.until(f"{pid} blocks", lambda: pid in self.diary.read().blocked)
        path.unlink()

    def check_bits(self) -> None:
        """Raise if the ranks of the round did not start with the same weights."""
        found = {(seat.step, seat.weights) for seat in self.workers.values()}
        if len(found) != 1:
            raise BrokenPromiseError(f"round {self.round} began with a mixture: {self.workers}")

    def replaced(self, before: Mapping[int, Seat]) -> set[int]:
        """Return the pids of the workers that did not keep their process."""
        now = {seat.pid for seat in self.workers.values()}
        return {seat.pid for seat in before.values()} - now

    def check_kept(self, before: Mapping[int, Seat], but: Iterable[int] = ()) -> None:
        """Raise unless all workers except these pids, which must be gone, kept their process."""
        expected, gone = set(but), self.replaced(before)
        if gone != expected:
            raise BrokenPromiseError(
                f"round {self.round}: pids {sorted(gone)} are gone, not {sorted(expected)}; "
                f"{self.why_new()}"
            )

    def why_new(self) -> str:
        """Return what the nodes' logs say about new workers in the last round."""
        text = f"round {self.round}: "
        found = [
            line for node in self.made.nodes for line in node.text.splitlines() if text in line
        ]
        return " | ".join(found)

    def decided_s(self) -> float | None:
        """Return when the server decided on the last round."""
        with self.made.client() as client:
            events = client.events(JOB, 50)
        found = [event.unix_ms for event in events if event.name == "RoundCompleted"]
        return found[-1] / 1000 - (time.time() - time.monotonic()) if found else None

    def node_state(self, name: str) -> str:
        """Return how the server sees a node; empty if it does not know it."""
        return next((n.state for n in self.made.status().nodes if n.node_id == name), "")

    def has_standby(self, name: str) -> bool:
        """Return whether the workers of a waiting node are parked before their first round."""
        found = next((n.standby for n in self.made.status().nodes if n.node_id == name), None)
        return found is not None and found.state == "ready"

    def scale(self, nodes: int) -> float:
        """Change the number of nodes as an operator; return when."""
        run = self.made.status().run
        assert run is not None
        with self.made.client() as client:
            at_s = time.monotonic()
            client.scale(JOB, run, nodes, nodes, "")
        return at_s

    def end(self) -> None:
        """End the workers, to leave the machine to others."""
        for node in self.made.nodes:
            if node.process.poll() is None:
                node.kill_tree()


def resources(pid: int) -> tuple[int, int, int]:
    """Return how many descriptors and threads a process has, and its resident memory in bytes.

    It trains meanwhile, and opens its diary now and then, so the minimum of several readings
    counts.
    """
    looks = []
    for _ in range(20):
        status = Path(f"/proc/{pid}/status").read_text()
        found = dict(line.split(":", 1) for line in status.splitlines())
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        looks.append((descriptors, int(found["Threads"]), int(found["VmRSS"].split()[0]) << 10))
        time.sleep(LOOK_S)
    fewest, threads, memory = (min(of) for of in zip(*looks, strict=True))
    return fewest, threads, memory


def victim(job: KeptJob, name: str) -> Seat:
    """Return the last worker of a node."""
    return max((s for s in job.workers.values() if s.node == name), key=lambda seat: seat.rank)


def of_nodes(seats: Mapping[int, Seat], names: Sequence[str]) -> dict[int, Seat]:
    """Return the workers on these nodes."""
    return {rank: seat for rank, seat in seats.items() if seat.node in names}
