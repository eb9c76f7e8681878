"""Several rdzvd on one etcd: one leads, the others point to it, and any of them takes over."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import BIN, Cluster, alive
from etcd_cluster import EtcdCluster, free_ports

from rdzv.client import ControlClient, Server, parse_endpoint
from rdzv.errors import NotLeaderError, RendezvousConnectionError

pytestmark = pytest.mark.timeout(180)


class Replicas(Cluster):
    """Three rdzvd on one etcd, and nodes that know of all three."""

    def __init__(self, folder: Path, etcd: EtcdCluster) -> None:
        super().__init__(folder)
        ports = free_ports(6)
        self.addresses = [f"127.0.0.1:{port}" for port in ports[:3]]
        self.http = {
            a: f"http://127.0.0.1:{p}" for a, p in zip(self.addresses, ports[3:], strict=True)
        }
        self.endpoint = ",".join(self.addresses)
        self.etcd = ",".join(str(member.endpoint) for member in etcd.members)
        self.rdzvds: dict[str, subprocess.Popen[str]] = {}

    def start_replica(self, address: str, *options: str) -> None:
        command = [str(BIN / "rdzvd"), "--store=etcd", f"--etcd-endpoints={self.etcd}"]
        command += [f"--listen={address}", f"--http={self.http[address].removeprefix('http://')}"]
        with (self.folder / "rdzvd.log").open("a") as log:
            self.rdzvds[address] = subprocess.Popen(
                [*command, *options],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environ(),
            )
        stdout = self.rdzvds[address].stdout
        assert stdout is not None
        assert stdout.readline().startswith("rdzvd ready: listening on "), self.describe()

    def kill_replica(self, address: str) -> None:
        process = self.rdzvds.pop(address)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def servers(self) -> tuple[Server, ...]:
        try:
            with ControlClient([parse_endpoint(a) for a in self.rdzvds]) as client:
                return client.servers()
        except RendezvousConnectionError:
            return ()

    def wait_for_leader(self, above: int = 0) -> Server:
        """Wait until a server leads whose leadership is higher than another's."""

        def leader() -> Server | None:
            return next((s for s in self.servers() if (s.leadership or 0) > above), None)

        found = self.wait_until("a server leads", leader)
        assert isinstance(found, Server)
        return found

    def ready(self, address: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"{self.http[address]}/readyz", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.read().decode()

    def describe(self) -> str:
        return f"--- rdzvd\n{self.server_log}\n{super().describe()}"

    def stop(self) -> None:
        for address in list(self.rdzvds):
            self.kill_replica(address)
        super().stop()


@pytest.fixture(name="c")
def _replicas(tmp_path: Path) -> Iterator[Replicas]:
    (tmp_path / "etcd").mkdir()
    with EtcdCluster.running(tmp_path / "etcd", 1) as etcd:
        made = Replicas(tmp_path, etcd)
        try:
            for address in made.addresses:
                made.start_replica(address)
            yield made
        except BaseException:
            print(made.describe())
            raise
        finally:
            made.stop()


def test_one_leads_and_the_others_point_to_it(c: Replicas) -> None:
    leader = c.wait_for_leader()
    c.wait_until("all take part", lambda: len(c.servers()) == 3)
    servers = c.servers()
    assert sorted(server.address for server in servers) == sorted(c.addresses)
    assert [server.leads for server in servers].count(True) == 1
    for server in servers:
        status, text = c.ready(server.address)
        assert status == (200 if server.leads else 503)
        assert str(leader.leadership) in text if server.leads else leader.address in text
    standing_by = parse_endpoint(next(s.address for s in servers if not s.leads))
    with ControlClient(standing_by) as client:
        assert client.jobs() == ()
        assert str(client.server) == leader.address


def test_a_training_goes_on_when_the_leader_is_killed_and_when_it_comes_back(c: Replicas) -> None:
    nodes = [c.start_node(f"n{i}", "--max-restarts=3", nnodes="2") for i in (1, 2)]
    before = c.wait_for_round(0, workers=2)
    for _ in range(2):
        leader = c.wait_for_leader()
        assert leader.leadership is not None
        c.kill_replica(leader.address)
        c.start_replica(leader.address)
        c.wait_for_leader(above=leader.leadership)
        status = c.wait_for_state("running")
        c.wait_until("nobody is away", lambda: {n.state for n in c.status().nodes} == {"seated"})
        assert (status.round, status.restarts) == (0, 0)
        assert all(alive(int(report["pid"])) for report in before)
    os.kill(int(before[0]["pid"]), signal.SIGKILL)
    after = c.wait_for_round(1, workers=2)
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in after} == {"1"}
    c.finish()
    assert [node.wait() for node in nodes] == [0, 0]


def test_a_leader_that_was_held_up_stands_by_when_it_goes_on(c: Replicas) -> None:
    """A paused leader does not know that another leads; nothing that it says counts."""
    nodes = [c.start_node(f"n{i}", nnodes="2") for i in (1, 2)]
    c.wait_for_round(0, workers=2)
    leader = c.wait_for_leader()
    assert leader.leadership is not None
    paused = c.rdzvds.pop(leader.address)
    paused.send_signal(signal.SIGSTOP)
    try:
        c.wait_for_leader(above=leader.leadership)
        c.wait_until("all came over", lambda: {n.state for n in c.status().nodes} == {"seated"})
    finally:
        paused.send_signal(signal.SIGCONT)
        c.rdzvds[leader.address] = paused
    with ControlClient(parse_endpoint(leader.address)) as client:

        def redirected() -> bool:
            try:
                client.jobs()
            except NotLeaderError:
                return False
            return str(client.server) != leader.address

        c.wait_until("it points to the other", redirected)
    assert c.status().round == 0
    c.finish()
    assert [node.wait() for node in nodes] == [0, 0]


def test_jobs_wait_while_etcd_is_away_and_workers_run_on(c: Replicas, tmp_path: Path) -> None:
    """Nobody can lead without etcd; the workers do not notice."""
    nodes = [c.start_node(f"n{i}", nnodes="2") for i in (1, 2)]
    before = c.wait_for_round(0, workers=2)
    c.wait_for_leader()
    etcd = [
        int(p) for p in subprocess.check_output(["pgrep", "-f", str(tmp_path / "etcd")]).split()
    ]
    for pid in etcd:
        os.kill(pid, signal.SIGSTOP)
    try:
        c.wait_until("nobody serves", lambda: all(c.ready(a)[0] == 503 for a in c.addresses))
        assert all(alive(int(report["pid"])) for report in before)
    finally:
        for pid in etcd:
            os.kill(pid, signal.SIGCONT)
    c.wait_for_leader()
    c.wait_until("all are back", lambda: {n.state for n in c.status().nodes} == {"seated"})
    assert c.status().round == 0
    c.finish()
    assert [node.wait() for node in nodes] == [0, 0]


def test_nodes_without_a_server_elect_one_and_survive_its_loss(tmp_path: Path) -> None:
    """A line for torchrun's etcd back-end: there is no rdzvd, and any node may be lost."""
    (tmp_path / "etcd").mkdir()
    with EtcdCluster.running(tmp_path / "etcd", 1) as etcd:
        c = Cluster(tmp_path)
        c.endpoint = str(etcd.members[0].endpoint)
        try:
            nodes = {n: c.start_node(n, "--rdzv-backend=etcd") for n in ("n1", "n2", "n3")}
            c.wait_for_round(0, workers=3)
            served_by = next(n for n, node in nodes.items() if "this server leads" in node.text)
            nodes.pop(served_by).kill_tree()
            after = c.wait_for_round(1, workers=2)
            assert {report["TORCHELASTIC_RESTART_COUNT"] for report in after} == {"0"}
            c.finish()
            assert [node.wait() for node in nodes.values()] == [0, 0]
        except BaseException:
            print(c.describe())
            raise
        finally:
            c.stop()
