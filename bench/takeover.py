"""How long a job has no server when the one that serves it dies, and until all is as before.

Each repetition has two outages of the same kind. In the first nothing else happens:

* leads: from the signal to the next server that leads: for sqlite and memory the same rdzvd,
  started again at once on its port, says that it is ready; for etcd one of the other two says that
  it leads;
* seated: from the signal until `rdzvctl status` shows every node seated again;
* decided: then a worker is killed: from its death until every node has started the next round.

In the second a worker is killed at the same moment as the server:

* recovered: from the signal until every node has started the next round; the job stands still from
  the one to the other. `cpu` is what the servers and the nodes' processes used of the CPUs
  meanwhile: where others use them too, it says how much of the time is ours.

Nobody may have been given up over either of them: workers that stopped for it fail the repetition.

Before each outage all streams have stood for long enough that nodes take it for the first of its
kind: they look for a server at once, and then less and less often.

Nodes are simulated, in processes of their own: real streams and decisions, no worker processes.
Training itself goes on meanwhile and is not measured; tests/integration does that with real
workers.

The peer, in the same run: torchrun with its c10d back-end, two real nodes, and SIGKILL of the one
torchrun that hosts the store. Its job does not come back, so there is no time to compare with: the
line says with which exit codes it is over.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from crowd import JOB
from crowd_processes import Crowd, most_files
from measure import Spread, emit, end_on_sigterm, load, say_conditions, say_progress, span
from processes import BIN, Rdzvd, cpu_s

from rdzv.client import ControlClient, Endpoint
from rdzv.errors import RendezvousError
from rdzv.transport.node_stream import BACKOFF
from rdzv.view.answers import Server

CASES = ("sqlite", "memory", "etcd-killed", "etcd-stopped")
NODES = (2, 50)
TIMEOUT_S = 90.0
POLL_S = 0.03
"""How often servers are asked, which costs them time that nodes wait for."""
STATUS_S = 30.0
"""How long the status of a job may take: that of ten thousand nodes is long."""


class Servers:
    """The servers of one case, and what `rdzvctl` would see of them."""

    def __init__(self, rdzvds: Sequence[Rdzvd], number: signal.Signals) -> None:
        self.rdzvds = rdzvds
        self._number = number

    @property
    def endpoints(self) -> list[Endpoint]:
        """The addresses that nodes and operators use."""
        return [each.endpoint for each in self.rdzvds]

    def leader(self, above: int = 0) -> Server | None:
        """Return the server that leads, if its leadership is above another's."""
        for endpoint in self.endpoints:
            # A new channel each time: one that was refused waits before it tries again.
            with contextlib.suppress(RendezvousError), ControlClient(endpoint) as client:
                for server in client.servers():
                    if (server.leadership or 0) > above:
                        return server
        return None

    def seated(self) -> int:
        """Return how many nodes the leader sees seated."""
        asked_once = ControlClient(self.endpoints, timeout_s=STATUS_S, takeover_s=0)
        with contextlib.suppress(RendezvousError), asked_once as client:
            return [node.state for node in client.status(JOB).nodes].count("seated")
        return 0

    def others(self, ended: Rdzvd) -> list[Rdzvd]:
        """Return the servers beside one."""
        return [each for each in self.rdzvds if each is not ended]

    def end_leader(self, leader: Server) -> Rdzvd:
        """Send the signal of this case to the server that leads; return it."""
        ended = next(r for r in self.rdzvds if str(r.endpoint) == leader.address)
        ended.signal(self._number)
        return ended


@dataclass
class Times:
    """Seconds of each repetition; see the module."""

    leads: list[float] = field(default_factory=list)
    seated: list[float] = field(default_factory=list)
    decided: list[float] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)
    servers_cpu: list[float] = field(default_factory=list)
    nodes_cpu: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class Outages:
    """Ends the leader of one case repeatedly."""

    def __init__(self, servers: Servers, crowd: Crowd, nodes: int, timeout_s: float) -> None:
        """Each wait may take `timeout_s`."""
        self._servers = servers
        self._crowd = crowd
        self._nodes = nodes
        self._timeout_s = timeout_s
        self.times = Times()

    def repeat(self, times: int) -> None:
        """Measure this many repetitions; a failed one is reported and is the last."""
        try:
            self._crowd.gather([str(one) for one in self._servers.endpoints], tls="")
            self._crowd.ask("form")
            self._all_seated()
            for _ in range(times):
                self._quiet_outage()
                self._outage_with_failure()
        except (TimeoutError, RuntimeError) as error:
            self.times.failed.append(str(error))

    def _calm(self) -> Server:
        """Wait until streams are old enough; return the leader."""
        time.sleep(BACKOFF.steady_s + 0.5)
        return self._leader(0)

    def _quiet_outage(self) -> None:
        before = self._calm()
        began_s = time.monotonic()
        ended = self._servers.end_leader(before)
        self._next_leads(ended, before)
        self.times.leads.append(time.monotonic() - began_s)
        # Asking for the status of a thousand nodes would delay their return.
        self._all_back(began_s)
        self._all_seated()
        self.times.seated.append(time.monotonic() - began_s)
        self.times.decided.append(self._crowd.ask("fail", each=False)["took_s"])
        self._whole(ended)
        say_progress(
            f"{self._nodes} nodes: leads {self.times.leads[-1]:.2f} s, "
            f"seated {self.times.seated[-1]:.2f} s, decided {self.times.decided[-1]:.2f} s"
        )

    def _outage_with_failure(self) -> None:
        before = self._calm()
        began_s = time.monotonic()
        ended = self._servers.end_leader(before)
        self._crowd.tell("fail", each=False)
        others = self._servers.others(ended)
        others_cpu_s = sum(cpu_s(each.pid) for each in others)
        self._next_leads(ended, before)
        answer = self._crowd.answer()
        self.times.recovered.append(answer["last_s"] - began_s)
        self.times.nodes_cpu.append(answer["cpu_s"])
        # The one server of sqlite and memory has a new process.
        served_cpu_s = sum(cpu_s(each.pid) for each in others or [ended])
        self.times.servers_cpu.append(served_cpu_s - others_cpu_s)
        self._whole(ended)
        self._all_back(began_s)
        say_progress(f"{self._nodes} nodes: recovered {self.times.recovered[-1]:.2f} s")

    def _next_leads(self, ended: Rdzvd, before: Server) -> None:
        if len(self._servers.rdzvds) == 1:
            ended.gone()
            ended.start()
        else:
            self._leader(before.leadership or 0)

    def _leader(self, above: int) -> Server:
        end_s = time.monotonic() + self._timeout_s
        while (found := self._servers.leader(above)) is None:
            if time.monotonic() > end_s:
                raise TimeoutError(f"waited {self._timeout_s:g} s until a server leads")
            time.sleep(POLL_S)
        return found

    def _all_back(self, since_s: float) -> None:
        """Wait until all nodes are back since then, with the workers that are to run."""
        answer = self._crowd.ask("await", since_s=since_s)
        if disturbed := answer["disturbed"]:
            raise RuntimeError(f"workers of {disturbed} nodes have stopped for a server's end")

    def _all_seated(self) -> None:
        end_s = time.monotonic() + self._timeout_s
        while (seated := self._servers.seated()) < self._nodes:
            if time.monotonic() > end_s:
                raise TimeoutError(f"waited {self._timeout_s:g} s; {seated} nodes are seated")
            time.sleep(POLL_S)

    def _whole(self, ended: Rdzvd) -> None:
        """Start the server that was ended again, beside those that took over; await all nodes."""
        if len(self._servers.rdzvds) > 1:
            ended.gone()
            ended.start()
        self._all_seated()


@contextmanager
def servers_of(case: str, directory: Path) -> Iterator[Servers]:
    """Run the servers of one case, and the etcd that they need."""
    from etcd_cluster import EtcdCluster
    from ports import free_ports

    log = directory / "rdzvd.log"
    with contextlib.ExitStack() as stack:
        if case.startswith("etcd"):
            below = directory / "etcd"
            below.mkdir()
            etcd = stack.enter_context(EtcdCluster.running(below, 1, fsync=True))
            at = ",".join(str(member.endpoint) for member in etcd.members)
            options, count = ["--store=etcd", f"--etcd-endpoints={at}"], 3
        else:
            options, count = [f"--store={case}", f"--data-dir={directory / 'data'}"], 1
        rdzvds = [Rdzvd(f"127.0.0.1:{port}", options, log) for port in free_ports(count)]
        number = signal.SIGTERM if case.endswith("stopped") else signal.SIGKILL
        for each in rdzvds:
            stack.callback(each.kill)
            each.start()
        yield Servers(rdzvds, number)


def measure_case(
    case: str, nodes: int, repetitions: int, timeout_s: float, directory: Path
) -> None:
    """Print one case."""
    with servers_of(case, directory) as servers, Crowd.running(nodes, timeout_s) as crowd:
        outages = Outages(servers, crowd, nodes, timeout_s)
        outages.repeat(repetitions)
        say_case(case, nodes, outages.times)


def say_case(case: str, nodes: int, times: Times) -> None:
    """Print the times of one case."""
    kinds = {
        "leads": times.leads,
        "seated": times.seated,
        "decided": times.decided,
        "recovered": times.recovered,
    }
    cpus = {"servers_cpu": times.servers_cpu, "nodes_cpu": times.nodes_cpu}
    emit(
        f"takeover {case:<12} nodes={nodes:<4} "
        + "  ".join(f"{name} {span(samples)}" for name, samples in kinds.items())
        + f"  cpu: servers {span(times.servers_cpu)}, nodes {span(times.nodes_cpu)}"
        + f"  n={len(times.leads)} load {load():.0f}"
        + "".join(f"  FAILED: {why}" for why in times.failed),
        bench="takeover",
        case=case,
        nodes=nodes,
        failed=list(times.failed),
        load=load(),
        **{f"{k}_s": Spread.of(s).as_json() if s else None for k, s in (kinds | cpus).items()},
    )


# ------------------------------------------------------------------------------------ the peer


def torchrun_without_its_store(directory: Path) -> tuple[list[int | None], float]:
    """Kill the torchrun that hosts the c10d store; return both exit codes, and after how long.

    None for a torchrun that still runs when the wait for it is over.
    """
    from cluster import WORKERS, Cluster, alive
    from ports import free_port

    c = Cluster(directory)
    port = free_port()
    try:
        nodes = [
            c.start(
                f"torchrun-{index}",
                [
                    str(BIN / "torchrun"),
                    "--rdzv-backend=c10d",
                    f"--rdzv-endpoint=127.0.0.1:{port}",
                    f"--rdzv-id={JOB}",
                    f"--rdzv-conf=is_host={1 - index}",
                    "--nnodes=2",
                    "--max-restarts=3",
                    str(WORKERS / "all_reduce_c10d.py"),
                ],
                # Otherwise the workers of all attempts share one store, which is flaky by itself.
                environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            )
            for index in range(2)
        ]
        c.wait_until("both train", lambda: len(c.all_reports()) == 2, TIMEOUT_S)
        assert all(alive(report["pid"]) for report in c.all_reports())
        began = time.monotonic()
        nodes[0].process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            nodes[1].process.wait(TIMEOUT_S)
        return [
            node.process.wait(TIMEOUT_S) if node is nodes[0] else node.process.poll()
            for node in nodes
        ], time.monotonic() - began
    finally:
        # The workers of a killed torchrun continue to train without it.
        for pid in c.marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        c.stop()


def say_peer(repetitions: int, directory: Path) -> None:
    """Print the fate of torchrun's job."""
    ends: list[tuple[list[int | None], float]] = []
    for number in range(repetitions):
        below = directory / f"torchrun-{number}"
        below.mkdir()
        ends.append(torchrun_without_its_store(below))
    over = sum(1 for codes, _ in ends if None not in codes and codes != [0, 0])
    codes = sorted({f"{host} and {other}" for (host, other), _ in ends})
    emit(
        f"takeover torchrun c10d nodes=2    job over, {over} of {len(ends)}: exit codes "
        f"{', '.join(codes)} (host of the store and other node), "
        f"the last {span([seconds for _, seconds in ends])} after SIGKILL  load {load():.0f}",
        bench="takeover",
        case="torchrun c10d",
        nodes=2,
        over=over,
        of=len(ends),
        exit_codes=[list(codes) for codes, _ in ends],
        load=load(),
    )


# ------------------------------------------------------------------------------------ all of it


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="two repetitions with two nodes")
    add("--cases", default=",".join(CASES), help=f"with commas, of {', '.join(CASES)}")
    add("--nodes", default="", help=f"sizes of the job, with commas (default: {NODES})")
    add("--repetitions", type=int, default=0, help="for each case (default 5; --quick 2)")
    add("--timeout", type=float, default=TIMEOUT_S, help="seconds for a wait (default: 90)")
    add("--no-peer", action="store_true", help="without torchrun")
    add("--directory", type=Path, help="where data is written, and removed again (default: /tmp)")
    chosen = parser.parse_args()
    if unknown := set(chosen.cases.split(",")) - set(CASES):
        parser.error(f"--cases: no {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    try:
        sizes = tuple(int(part) for part in chosen.nodes.split(",") if part)
    except ValueError:
        parser.error(f"--nodes {chosen.nodes} are no numbers; give, for example, 2,50")
    if any(size < 2 for size in sizes) or chosen.repetitions < 0:
        parser.error("--nodes are at least 2, and --repetitions at least 1")
    if max(sizes, default=0) > (most := most_files()):
        parser.error(
            f"--nodes {chosen.nodes}: a server needs a file for each, and {most} are allowed; "
            "raise the hard limit (ulimit -Hn), or give fewer"
        )
    if chosen.timeout <= 0:
        parser.error(f"--timeout {chosen.timeout:g}: give more than 0 seconds")
    chosen.nodes = sizes or (NODES[:1] if chosen.quick else NODES)
    chosen.repetitions = chosen.repetitions or (2 if chosen.quick else 5)
    return chosen


def main() -> None:
    """Measure, and leave nothing behind."""
    chosen = arguments()
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="rdzv-bench-", dir=chosen.directory) as temporary:
        directory = Path(temporary)
        say_conditions("takeover", directory)
        for nodes in chosen.nodes:
            for case in chosen.cases.split(","):
                below = directory / f"{case}-{nodes}"
                below.mkdir()
                measure_case(case, nodes, chosen.repetitions, chosen.timeout, below)
        if not chosen.no_peer:
            say_peer(min(chosen.repetitions, 3), directory)


if __name__ == "__main__":
    main()
