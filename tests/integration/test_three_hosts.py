"""An operator's day: three hosts with rdzv-agent, one with rdzvd, and jobs that are submitted.

Each host is a network namespace of its own. `rdzvctl` is typed on the host of the server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster import BIN, WORKERS, Cluster, Node, alive, cluster_without_server

from rdzv.client import ControlClient, JobStatus, parse_endpoints
from tests.faults.network import Network

HEAD = "head"
HOSTS = ("n1", "n2", "n3")
PORT = 29_400
DEADLINE_S = 60.0

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="making network namespaces needs root and iproute2",
)


@dataclass
class Hosts:
    """The hosts, and what runs on them."""

    cluster: Cluster
    network: Network
    folder: Path

    @property
    def endpoint(self) -> str:
        return f"{self.network.address(HEAD)}:{PORT}"

    def start_server(self) -> None:
        command = [str(BIN / "rdzvd"), "--insecure", f"--listen={self.endpoint}"]
        command += [f"--data-dir={self.folder / 'data'}"]
        self.cluster.start_server_by(self.network.on(HEAD, command))

    def restart_server(self) -> None:
        """Kill -9, and start it again: nobody is to notice."""
        self.cluster.kill_server()
        self.start_server()

    def start_agent(self, host: str) -> None:
        config = self.folder / f"{host}.toml"
        config.write_text(
            f'server = "{self.endpoint}"\nnode_id = "{host}"\naccount = "root"\n'
            f'gpus = "none"\nstate_dir = "{self.folder / host}"\n'
            f'runtime_dir = "{self.folder / host}-run"\n[labels]\nhost = "{host}"\n'
        )
        command = [str(BIN / "rdzv-agent"), f"--config={config}"]
        self.cluster.start(host, self.network.on(host, command))

    def ctl(self, *words: str, expect: int = 0) -> str:
        """Run rdzvctl to its end, and return what it printed."""
        done = subprocess.run(
            self.network.on(HEAD, [str(BIN / "rdzvctl"), f"--server={self.endpoint}", *words]),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            cwd=self.folder,
            env=self.cluster.environ(),
        )
        assert done.returncode == expect, (words, done.stdout, done.stderr, self.describe())
        return done.stdout + done.stderr

    def start_ctl(self, name: str, *words: str) -> Node:
        """Start rdzvctl, which goes on until it is done."""
        command = [str(BIN / "rdzvctl"), f"--server={self.endpoint}", *words]
        return self.cluster.start(name, self.network.on(HEAD, command))

    def submit(self, name: str, nodes: str, *more: str, script_args: tuple[str, ...] = ()) -> None:
        self.ctl(
            *("submit", f"--rdzv-id={name}", f"--nnodes={nodes}", "--nproc-per-node=1"),
            *(f"--env=RDZV_TEST_DIARY={self.folder / name}.diary", *more, "--"),
            *(str(WORKERS / "talk_until.py"), str(self.end_of(name)), *script_args),
        )

    def end_of(self, name: str) -> Path:
        return self.folder / f"{name}.end"

    def status(self, name: str) -> JobStatus:
        with ControlClient(parse_endpoints(self.endpoint)) as client:
            return client.status(name)

    def seated(self, name: str) -> list[str]:
        """Name the nodes of a running job by GROUP_RANK."""
        shown = self.status(name)
        if shown.state != "running":
            return []
        return [node.node_id for node in shown.nodes if node.state == "seated"]

    def started(self, name: str) -> list[tuple[int, int, int]]:
        """Return round, RANK and pid of every worker that the job has ever started."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / f"{name}.diary").read_text().splitlines()
            parts = [line.split() for line in lines]
            return [(int(p[0]), int(p[1]), int(p[3])) for p in parts]
        return []

    def wait(self, what: str, holds: Callable[[], Any]) -> Any:
        return self.cluster.wait_until(what, holds, DEADLINE_S)

    def wait_running(self, name: str, nodes: int) -> list[int]:
        """Wait until a job runs on so many nodes, and return the pids of its workers."""
        self.wait(f"{name} runs on {nodes} nodes", lambda: len(self.seated(name)) == nodes)

        def pids() -> list[int]:
            round_ = self.status(name).round
            found = [pid for number, _, pid in self.started(name) if number == round_]
            return found if len(found) == nodes and all(map(alive, found)) else []

        found: list[int] = self.wait(f"the workers of {name} have started", pids)
        return found

    def describe(self) -> str:
        return self.cluster.describe()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with (
        Network(uuid.uuid4().hex[:6], 1, (HEAD, *HOSTS), seed=1) as network,
        cluster_without_server(tmp_path) as made,
    ):
        found = Hosts(made, network, tmp_path)
        found.start_server()
        for host in HOSTS:
            found.start_agent(host)
        found.wait(
            "all agents are connected",
            lambda: found.ctl("nodes", "-o", "json").count('"connected"') == len(HOSTS),
        )
        yield found


def test_jobs_of_two_users_run_in_the_promised_order(hosts: Hosts) -> None:
    hosts.submit("ada-1", "2")
    first = hosts.wait_running("ada-1", 2)
    hosts.submit("bob-1", "2")
    hosts.submit("ada-2", "1")
    hosts.submit("bob-2", "1", "--priority=1", "--labels=host=n1")
    free = next(host for host in HOSTS if host not in hosts.seated("ada-1"))
    assert f"1 is free ({free})" in hosts.status("bob-1").reason
    # One node is free, and ada-2 needs only one: but bob-1 was there before, and could use it.
    assert f"{free}: kept for bob-1" in hosts.status("ada-2").reason
    hosts.restart_server()
    assert hosts.wait_running("ada-1", 2) == first
    hosts.end_of("ada-1").touch()
    # n1 goes to who is more urgent; of the others bob-1 is first, and takes the two that are left.
    hosts.wait_running("bob-2", 1)
    hosts.wait_running("bob-1", 2)
    assert hosts.seated("bob-2") == ["n1"]
    assert hosts.seated("bob-1") == ["n2", "n3"]
    assert hosts.started("ada-2") == []
    for name in ("bob-2", "bob-1", "ada-2"):
        hosts.end_of(name).touch()
    for name in ("ada-1", "bob-2", "bob-1", "ada-2"):
        hosts.ctl("wait", name)
    assert hosts.status("bob-1").state == hosts.status("ada-2").state == "succeeded"


def test_a_day_with_rdzvctl(hosts: Hosts) -> None:
    hosts.submit("night", "2")
    before = hosts.wait_running("night", 2)
    follow = hosts.start_ctl("follow", "logs", "night", "-f", "--rank=1")
    hosts.wait("the first line", lambda: "rank 1 round 0 step 0\n" in follow.text)

    hosts.restart_server()
    assert hosts.wait_running("night", 2) == before

    hosts.ctl("cordon", "n3", "--reason=fan")
    hosts.ctl("scale", "night", "2:3")
    shown = hosts.status("night")
    assert (shown.min_nodes, shown.max_nodes) == (2, 3)
    assert hosts.wait_running("night", 2) == before
    hosts.restart_server()
    assert "fan" in hosts.ctl("nodes")
    hosts.ctl("uncordon", "n3")
    grown = hosts.wait_running("night", 3)

    hosts.ctl("scale", "night", "2")
    hosts.wait_running("night", 2)
    assert not any(alive(pid) for pid in grown)
    free = next(host for host in HOSTS if host not in hosts.seated("night"))
    hosts.submit("beside", "1")
    hosts.wait_running("beside", 1)
    assert hosts.seated("beside") == [free]

    rounds = hosts.status("night").round
    assert rounds is not None
    hosts.ctl("restart", "night")
    hosts.wait("the next round runs", lambda: hosts.status("night").round == rounds + 1)
    hosts.wait_running("night", 2)
    assert hosts.status("night").restarts == 0

    hosts.restart_server()
    hosts.ctl("stop", "night")
    hosts.ctl("wait", "night", expect=3)
    follow.wait()
    # From the beginning of the round on, over rounds and servers, and to the last line.
    assert f"rank 1 round {rounds + 1} step 0\n" in follow.text
    assert f"rank 1 round {rounds + 1}: saved\n" in follow.text
    # Also after the job's end, from the nodes that ran it.
    assert "saved" in hosts.ctl("logs", "night", "--rank=0")

    hosts.end_of("beside").touch()
    hosts.ctl("wait", "beside")
    hosts.submit("broken", "1", script_args=("exit=7",))
    hosts.end_of("broken").touch()
    hosts.ctl("wait", "broken", expect=1)
    assert "exit code 7" in hosts.ctl("status", "broken")


def test_a_node_that_dies_is_replaced_and_the_queue_goes_on(hosts: Hosts) -> None:
    hosts.submit("night", "2")
    hosts.wait_running("night", 2)
    lost = hosts.seated("night")[1]
    agent = next(node for node in hosts.cluster.nodes if node.name == lost)
    os.kill(agent.process.pid, signal.SIGKILL)
    hosts.wait("it is replaced", lambda: lost not in hosts.seated("night"))
    hosts.wait_running("night", 2)
    assert hosts.status("night").restarts == 0
    hosts.end_of("night").touch()
    hosts.ctl("wait", "night")
