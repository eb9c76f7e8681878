"""Several rdzvd on one etcd: one leads, the others point to it, and any of them takes over."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import Cluster, alive
from etcd_cluster import PASSWORD, EtcdCluster
from replicas import Replicas

from rdzv.client import ControlClient, parse_endpoint
from rdzv.errors import NotLeaderError, RendezvousConnectionError


@pytest.fixture(name="c")
def _replicas(tmp_path: Path) -> Iterator[Replicas]:
    with Replicas.running(tmp_path, 1) as made:
        yield made


def states(c: Replicas) -> set[str]:
    """Return the states of the nodes; none while no server leads, which may last a moment."""
    with suppress(RendezvousConnectionError):
        return {node.state for node in c.status().nodes}
    return set()


def test_one_leads_and_the_others_point_to_it(c: Replicas) -> None:
    leader = c.wait_for_leader()
    c.wait_until("all take part", lambda: len(c.servers()) == 3)
    servers = c.servers()
    assert sorted(server.address for server in servers) == sorted(c.addresses)
    assert [server.leads for server in servers].count(True) == 1
    assert {server.address: server.page for server in servers} == c.http
    for server in servers:
        status, text = c.ready(server.address)
        assert status == (200 if server.leads else 503)
        assert str(leader.leadership) in text if server.leads else leader.address in text
    standing_by = parse_endpoint(next(s.address for s in servers if not s.leads))
    with ControlClient(standing_by) as client:
        assert client.jobs() == ()
        assert str(client.server) == leader.address


def test_who_asks_while_the_leader_is_killed_waits_for_the_next(c: Replicas) -> None:
    leader = c.wait_for_leader()
    c.wait_until("all take part", lambda: len(c.servers()) == 3)
    c.kill_replica(leader.address)
    found = c.run("rdzvctl", "--server", c.endpoint, "list")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("no jobs at ")


def test_three_servers_are_restarted_one_by_one_while_workers_fail(c: Replicas) -> None:
    """Each failure spends one restart and is in the history; rdzvctl hears the end of the job."""
    nodes = [c.start_node(f"n{i}", "--max-restarts=3", nnodes="2") for i in (1, 2)]
    workers = c.wait_for_round(0, workers=2)
    waits = c.start_program("waits", "rdzvctl", "--server", c.endpoint, "wait", "job")
    for number, address in enumerate(c.addresses, start=1):
        c.wait_for_leader()
        failing = int(workers[number % 2]["pid"])
        os.kill(failing, signal.SIGKILL)
        c.kill_replica(address, signal.SIGTERM)
        listed = c.run("rdzvctl", "--server", c.endpoint, "list")
        assert (listed.returncode, listed.stderr) == (0, "")
        c.start_replica(address)
        workers = c.wait_for_round(number, workers=2)
    status = c.wait_for_state("running")
    assert (status.round, status.restarts) == (3, 3)
    with c.client() as client:
        names = [event.name for event in client.events("job")]
    assert (names.count("WorkerFailed"), names.count("RoundCompleted")) == (3, 4)
    assert {"NodeLost", "RoundAdopted"}.isdisjoint(names)
    c.finish()
    assert [node.wait() for node in (*nodes, waits)] == [0, 0, 0]


def test_a_leader_that_was_held_up_stands_by_when_it_goes_on(c: Replicas) -> None:
    """A paused leader does not know that another leads; none of its writes counts."""
    nodes = [c.start_node(f"n{i}", nnodes="2") for i in (1, 2)]
    c.wait_for_round(0, workers=2)
    leader = c.wait_for_leader()
    assert leader.leadership is not None
    paused = c.rdzvds.pop(leader.address)
    paused.send_signal(signal.SIGSTOP)
    try:
        c.wait_for_leader(above=leader.leadership)
        c.wait_until("all came over", lambda: states(c) == {"seated"})
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
    assert c.wait_for_state("running").round == 0
    c.finish()
    assert [node.wait() for node in nodes] == [0, 0]


def test_jobs_wait_while_etcd_is_away_and_workers_run_on(c: Replicas, tmp_path: Path) -> None:
    """No server can lead without etcd; the workers do not notice."""
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
    c.wait_until("all are back", lambda: states(c) == {"seated"})
    assert c.wait_for_state("running").round == 0
    c.finish()
    assert [node.wait() for node in nodes] == [0, 0]


def test_a_server_speaks_to_an_etcd_with_tls_and_a_password(tmp_path: Path) -> None:
    (tmp_path / "etcd").mkdir()
    with EtcdCluster.running(tmp_path / "etcd", 1, tls=True) as etcd:
        assert etcd.tls is not None
        etcd.enable_authentication("/rdzv")
        password = tmp_path / "password"
        password.write_text(f"{PASSWORD}\n")
        c = Replicas(tmp_path, etcd)
        options = ("--etcd-user=rdzv", f"--etcd-ca={etcd.tls.ca}")
        certificate = (f"--etcd-cert={etcd.tls.cert}", f"--etcd-key={etcd.tls.key}")
        try:
            address = c.addresses[0]
            c.start_replica(address, *options, *certificate, f"--etcd-password-file={password}")
            assert c.wait_for_leader().address == address
            node = c.start_node("n1", nnodes="1")
            c.wait_for_round(0, workers=1)
            c.finish()
            assert node.wait() == 0
            password.write_text("wrong\n")
            refused = c.run(
                "rdzvd",
                *("--store=etcd", f"--etcd-endpoints={c.etcd}", "--listen=127.0.0.1:0"),
                *(*options, *certificate, f"--etcd-password-file={password}"),
            )
            assert refused.returncode != 0
            assert "password" in refused.stderr
            assert "Traceback" not in refused.stderr
        finally:
            c.stop()


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
