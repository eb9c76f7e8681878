"""One lane of a run: a network, servers, three nodes and one job; faults follow one another.

Everything is a real process. Lanes run side by side and share only the machine.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from rdzv.client import ControlClient, parse_endpoints
from rdzv.demo.programs import descendants
from rdzv.errors import RendezvousError
from rdzv.view.answers import Event, JobStatus
from tests.faults import history, sources
from tests.faults.errors import StuckError
from tests.faults.etcd import MEMBERS, Etcd
from tests.faults.network import Harm, Network

T = TypeVar("T")

BIN = Path(sys.executable).parent
WORKERS = Path(__file__).with_name("workers")
ROOT = Path(__file__).parents[2]
NODES = ("n1", "n2", "n3")
ALONE = ("s1",)
"""The server that keeps its data on its own disk."""
REPLICAS = ("s1", "s2", "s3")
"""The servers that share etcd."""
PORT = 29_400
JOB = "job"
STEPS = 3
"""This many steps in a row count as training."""
READY_S = 60.0
POLL_S = 0.05
HELD = "lost more than once"
"""Part of the server's reason for a node that may not end a running round for now."""
DISK_MIB = {"sqlite": 24, "etcd": 256}
"""The size of the data disk; etcd allocates 64 MiB for each segment of its log."""


@dataclass(frozen=True, slots=True)
class Group:
    """A training group: its round, its workers by host, and the restarts spent."""

    round: int
    pids: dict[str, int]
    restarts: int


@dataclass(slots=True)
class Agent:
    """One rdzvrun."""

    host: str
    node_id: str
    process: subprocess.Popen[bytes]
    log: Path


class Lane:
    """The processes of one lane, and what was observed of them."""

    def __init__(
        self, number: int, mark: str, folder: Path, *, worker: str, store: str, seed: int
    ) -> None:
        self.number = number
        self.worker = worker
        self.store = store
        self.folder = folder
        self.hosts = REPLICAS if store == "etcd" else ALONE
        """The hosts of the servers."""
        members = MEMBERS if store == "etcd" else ()
        self.network = Network(mark, number, (*NODES, *self.hosts, *members), seed)
        self.agents: dict[str, Agent] = {}
        self.past_agents: list[Agent] = []
        self.servers: dict[str, subprocess.Popen[bytes]] = {}
        self._etcd: Etcd | None = None
        self.records: list[history.Record] = []
        self._starts = 0
        self._disks: dict[str, Path] = {}
        self._stack = contextlib.ExitStack()
        self._diaries_folder = folder / "diaries"
        self._diaries_folder.mkdir(parents=True)
        self.diaries = sources.Diaries(self._diaries_folder)
        self._finish = folder / "finish"
        self.store_hosts_killed = 0

    # ------------------------------------------------------------------ beginning and end

    def __enter__(self) -> Lane:
        try:
            self._stack.enter_context(self.network)
            for host in MEMBERS if self.store == "etcd" else ALONE:
                self._disks[host] = self._make_disk(host)
            if self.store == "etcd":
                self._start_etcd()
            for host in self.hosts:
                self.start_server(host)
            for host in NODES:
                self.start_agent(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process and remove the network and the disk."""
        for agent in self.agents.values():
            kill_tree(agent.process.pid)
            agent.process.wait()
        self.agents.clear()
        for server in self.servers.values():
            server.kill()
            server.wait()
        self.servers.clear()
        self._stack.close()

    def _make_disk(self, host: str) -> Path:
        """Mount a small disk for a host's data, which can be filled."""
        disk = self.folder / f"disk-{host}"
        disk.mkdir()
        size = f"size={DISK_MIB[self.store]}m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "rdzv-faults", str(disk)], check=True)
        self._stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=True)
        return disk

    def _start_etcd(self) -> None:
        self._etcd = Etcd(self.network, self.folder, self._disks)
        self._stack.callback(self._etcd.close)
        for host in MEMBERS:
            self._etcd.start(host)
        self._etcd.wait_healthy()

    # ------------------------------------------------------------------ processes

    def start_server(self, host: str) -> None:
        """Start rdzvd on its earlier data, and wait until it is ready."""
        address = f"{self.network.address(host)}:{PORT}"
        command = [str(BIN / "rdzvd"), f"--listen={address}", "--insecure"]
        if self._etcd is not None:
            command += [
                "--store=etcd", f"--etcd-endpoints={self._etcd.endpoints}",
                f"--advertise={address}",
            ]  # fmt: skip
        else:
            command.append(f"--data-dir={self._disks[host]}")
        log = self.folder / f"rdzvd-{host}.log"
        with log.open("ab") as output:
            self.servers[host] = subprocess.Popen(
                self.network.on(host, command), stdout=subprocess.PIPE, stderr=output
            )
        wait_ready(self.servers[host], f"rdzvd on {host}", log)

    @property
    def endpoints(self) -> str:
        return ",".join(f"{self.network.address(host)}:{PORT}" for host in self.hosts)

    def start_agent(self, host: str) -> None:
        """Start rdzvrun on a host, as a node with a new id, as one without `--node-id` has."""
        self._starts += 1
        node_id = f"{host}-{self._starts}"
        if host in self.agents:
            self.past_agents.append(self.agents[host])
        log = self.folder / f"rdzvrun-{node_id}.log"
        command = [
            str(BIN / "rdzvrun"),
            f"--rdzv-endpoint={self.endpoints}",
            f"--rdzv-id={JOB}",
            "--nnodes=2:3",
            "--nproc-per-node=1",
            "--max-restarts=100000",
            "--restart-backoff=0",
            f"--node-id={node_id}",
            "--rdzv-conf=last_call_timeout=2",
            "--shutdown-timeout=5",
            f"--log-dir={self.folder / 'logs' / node_id}",
            str(WORKERS / f"{self.worker}.py"),
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.network.on(host, command),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environ(host, node_id),
            )
        self.agents[host] = Agent(host, node_id, process, log)

    @contextlib.contextmanager
    def another_job(self) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
        """Start a job of three seconds on all hosts, for which losing a node must cost nothing."""
        self._starts += 1
        job = f"{JOB}-{self._starts}"
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for host in NODES:
                node_id = f"{host}-{job}"
                command = [
                    str(BIN / "rdzvrun"),
                    f"--rdzv-endpoint={self.endpoints}",
                    f"--rdzv-id={job}",
                    f"--nnodes={len(NODES)}",
                    "--nproc-per-node=1",
                    "--max-preemptions=0",
                    f"--node-id={node_id}",
                    f"--log-dir={self.folder / 'logs' / node_id}",
                    *("--no-python", "sleep", "3"),
                ]
                with (self.folder / f"rdzvrun-{node_id}.log").open("wb") as output:
                    process = subprocess.Popen(
                        self.network.on(host, command),
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=self._environ(host, node_id),
                    )
                processes.append(process)
            yield job, processes
        finally:
            for process in processes:
                kill_tree(process.pid)
                wait_exit(process, READY_S)

    def wait_logged(self, host: str, line: str, timeout_s: float) -> None:
        """Wait for a line in the log of a server, and return within a millisecond of it.

        Raises:
            StuckError: there was no such line before the deadline.
        """
        deadline = time.monotonic() + timeout_s
        with (self.folder / f"rdzvd-{host}.log").open("rb") as log:
            seen = b""
            while line.encode() not in seen:
                if time.monotonic() > deadline:
                    raise StuckError(f"waited {timeout_s:g} s for {line!r} in the log of {host}")
                time.sleep(0.001)
                seen = seen[-len(line) :] + log.read()

    def _environ(self, host: str, node_id: str) -> dict[str, str]:
        environ = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "eth0",
            "PYTHONUNBUFFERED": "1",
            "RDZV_FAULTS_HISTORY": str(self._diaries_folder),
            "RDZV_FAULTS_SNAPSHOT": str(self.folder / "snapshot"),
            "RDZV_FAULTS_FINISH": str(self._finish),
            "RDZV_FAULTS_HOST": host,
            "RDZV_FAULTS_NODE": node_id,
        }
        if self.worker == "light":
            environ["PYTHON_EXEC"] = str(self._python_without_torch())
        return environ

    def _python_without_torch(self) -> Path:
        """Create an interpreter without torch, so that RANK 0's worker serves the store."""
        python = self.folder / "python"
        if not python.exists():
            python.write_text(
                '#!/bin/sh\ncase "$*" in *find_spec*) exit 1;; esac\n'
                f'exec {sys.executable} -S -E "$@"\n'
            )
            python.chmod(0o755)
        return python

    @property
    def etcd(self) -> Etcd:
        assert self._etcd is not None, "the fault needs a lane with etcd"
        return self._etcd

    # ------------------------------------------------------------------ queries

    def status(self) -> JobStatus:
        with self._client() as client:
            return client.status(JOB)

    def events(self) -> tuple[Event, ...]:
        with self._client() as client:
            return client.events(JOB, 10_000)

    def leader(self) -> str:
        """Return the host of the server that leads.

        Raises:
            StuckError: none did before the deadline.

        """

        def look() -> str | None:
            with contextlib.suppress(RendezvousError), self._client() as client:
                leading = {server.address for server in client.servers() if server.leads}
                for host in self.hosts:
                    if f"{self.network.address(host)}:{PORT}" in leading:
                        return host
            return None

        return self.wait_until("a server leads", look, READY_S)

    def leader_or_alone(self) -> str:
        return self.hosts[0] if len(self.hosts) == 1 else self.leader()

    def _client(self) -> ControlClient:
        return ControlClient(parse_endpoints(self.endpoints), timeout_s=3.0)

    def worker_pid(self, host: str) -> int:
        """Return a host's worker of the newest round."""
        self.diaries.poll()
        (pid,) = self.diaries.in_round(self.diaries.newest_round)[host]
        return pid

    def host_of_rank_0(self) -> str:
        """Return the host of RANK 0's worker of the newest round."""
        self.diaries.poll()
        number = self.diaries.newest_round
        (host,) = (
            started.host
            for started in self.diaries.started.values()
            if started.round == number and started.rank == 0
        )
        return host

    def below(self, host: str, mark: str) -> int:
        """Return the process below a host's agent whose command line contains this mark."""
        for pid in descendants(self.agents[host].process.pid):
            if mark in command_line(pid):
                return pid
        raise StuckError(f"there is no {mark} on {host}")

    # ------------------------------------------------------------------ waiting

    def wait_until(self, what: str, look: Callable[[], T | None], timeout_s: float) -> T:
        """Wait until `look` returns something, and return it.

        Raises:
            StuckError: there was nothing before the deadline.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            found = look()
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise StuckError(f"waited {timeout_s:g} s until {what}")
            time.sleep(POLL_S)

    def wait_training(self, hosts: Iterable[str], timeout_s: float) -> int:
        """Wait until exactly these hosts make steps in one round; return the round."""
        wanted = set(hosts)
        base: dict[int, int] = {}

        def look() -> int | None:
            self.diaries.poll()
            number = self.diaries.newest_round
            workers = self.diaries.in_round(number)
            if workers.keys() != wanted:
                return None
            pids = [pid for host in workers for pid in workers[host]]
            steps = {pid: self.diaries.latest[pid].step for pid in pids if self._knows(pid)}
            for pid, step in steps.items():
                base.setdefault(pid, step)
            moved = [steps[pid] >= base[pid] + STEPS for pid in steps]
            return number if len(moved) == len(pids) and all(moved) else None

        text = f"{', '.join(sorted(wanted))} train in one round"
        try:
            return self.wait_until(text, look, timeout_s)
        except StuckError as error:
            raise StuckError(f"{error}; {self.describe()}") from None

    def _knows(self, pid: int) -> bool:
        return pid in self.diaries.latest

    def wait_group(self, timeout_s: float, changed_from: Group | None = None) -> Group:
        """Wait until all hosts train in one round, and the server reports the same.

        With `changed_from`, wait for a later round than that of this group.

        Raises:
            StuckError: they did not before the deadline.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._renew_held()
            with contextlib.suppress(RendezvousError, StuckError):
                number = self.wait_training(NODES, 3.0)
                status = self.status()
                seated = {node.node_id for node in status.nodes if node.state == "seated"}
                wanted = {agent.node_id for agent in self.agents.values()}
                old = changed_from is not None and number <= changed_from.round
                found = (status.state, status.round, seated)
                if found == ("running", number, wanted) and not old:
                    workers = self.diaries.in_round(number)
                    pids = {host: pid for host, (pid,) in workers.items()}
                    return Group(number, pids, status.restarts or 0)
            if time.monotonic() > deadline:
                raise StuckError(
                    f"waited {timeout_s:g} s until all train, as the server says as well; "
                    f"{self.describe()}"
                )

    def _renew_held(self) -> None:
        """Replace nodes that were lost twice, which are not admitted for a minute."""
        with contextlib.suppress(RendezvousError):
            held = {who for who, why in self.status().reason.by_node.items() if HELD in why}
            for agent in self.agents.values():
                if agent.node_id in held:
                    self.renew(agent.host)
                    return

    def renew(self, host: str) -> None:
        """Let a host's agent leave, and start another under a new node id."""
        process = self.agents[host].process
        process.send_signal(signal.SIGTERM)
        wait_exit(process, READY_S)
        self.start_agent(host)

    def renew_lost(self) -> bool:
        """Renew one node that was lost, so that it is not held when it is lost again.

        Nodes are renewed one at a time: if all left before another came, the job would be over.
        """
        lost = sources.lost_nodes(self.events())
        for agent in self.agents.values():
            if agent.node_id in lost:
                self.renew(agent.host)
                return True
        return False

    def describe(self) -> str:
        """Describe in one line the server's view of the job."""
        try:
            status = self.status()
        except RendezvousError as error:
            return f"the server: {error}"
        nodes = ", ".join(f"{n.node_id} {n.state}" for n in status.nodes)
        self.diaries.poll()
        workers = self.diaries.in_round(self.diaries.newest_round)
        return (
            f"the server: {status.state} in round {status.round}: {status.reason}; {nodes}; "
            f"workers of round {self.diaries.newest_round}: {workers}"
        )

    # ------------------------------------------------------------------ actions

    def note(self, record: history.Record) -> None:
        self.records.append(record)

    def harm_network(self, harms: Sequence[Harm], for_s: float) -> int:
        """Harm the network for a while, then heal it; return how many frames were harmed."""
        self.network.harm(harms)
        try:
            time.sleep(for_s)
        finally:
            harmed = self.network.harm(())
        return harmed

    @contextlib.contextmanager
    def full_disk(self, host: str) -> Iterator[None]:
        """Fill the disk of a host to its last byte, and make room at the end."""
        ballast = self._disks[host] / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            if os.statvfs(self._disks[host]).f_bavail > 0:
                raise StuckError(f"the disk on {host} does not get full")
            yield
        finally:
            ballast.unlink(missing_ok=True)

    def finish(self, timeout_s: float) -> None:
        """Let the workers end with success, and record how the job ended."""
        self._finish.touch()
        codes = []
        deadline = time.monotonic() + timeout_s
        for agent in self.agents.values():
            try:
                codes.append(agent.process.wait(max(deadline - time.monotonic(), 0.1)))
            except subprocess.TimeoutExpired:
                raise StuckError(f"{agent.node_id} does not end; {self.describe()}") from None
        status = self.status()
        ended = history.JobEnded(time.monotonic(), status.state, status.restarts or 0, tuple(codes))
        self.note(ended)

    def collect(self) -> tuple[history.Record, ...]:
        """Return all observations, from every source."""
        self.diaries.poll()
        agents = [*self.past_agents, *self.agents.values()]
        told = [
            line
            for agent in agents
            for line in sources.told(agent.host, agent.node_id, agent.log.read_text())
        ]
        announced = list(sources.announced(self.events()))
        return (*announced, *told, *self.diaries.records, *self.records)


# ------------------------------------------------------------------ processes


def wait_ready(process: subprocess.Popen[bytes], name: str, log: Path) -> None:
    """Wait for a server's line that it is ready.

    Raises:
        StuckError: it ended, or did not print the line in time.
    """
    assert process.stdout is not None
    with process.stdout as output:
        ready, _, _ = select.select([output], [], [], READY_S)
        if not ready or b"ready" not in output.readline():
            raise StuckError(f"{name} is not ready; it wrote:\n{log.read_text()[-2000:]}")


def wait_exit(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Wait for the end of a process, and return its exit code.

    Raises:
        StuckError: it did not end in time.
    """
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise StuckError(f"pid {process.pid} does not end within {timeout_s:g} s") from None


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants, as when its machine dies."""
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP a process, and let it continue at the end."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
