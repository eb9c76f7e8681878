"""Hosts with their own network: rdzvd on one, rdzv-agent on three others. Needs root.

Each host is a network namespace; they share files and processes. Operators are on the machine that
made the namespaces, and reach all of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster import BIN, WORKERS, Cluster, Node, alive, cluster_without_server
from forked_programs import NETWORK

from rdzv.client import ControlClient, parse_endpoints
from rdzv.view.answers import JobStatus
from tests.faults.network import Network
from tests.support.whole_lines import lines_of

HEAD = "head"
HOSTS = ("n1", "n2", "n3")
PORT = 29_400
DEADLINE_S = 100.0

need_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="making network namespaces needs root and iproute2",
)


@dataclass
class Hosts:
    """The hosts, and the programs that run on them."""

    cluster: Cluster
    network: Network
    folder: Path
    server_config: str = ""

    @property
    def endpoint(self) -> str:
        return f"{self.network.address(HEAD)}:{PORT}"

    def start_server(self) -> None:
        config = self.folder / "rdzvd.toml"
        config.write_text(self.server_config)
        self.cluster.start_server(
            *("--insecure", f"--config={config}"), listen=self.endpoint, environ=self._on(HEAD)
        )

    def restart_server(self) -> None:
        """Kill -9 it, and start it again: nobody may notice."""
        self.cluster.kill_server()
        self.start_server()

    def start_agent(self, host: str) -> Node:
        """Start the agent of a host, or restart it with the jobs that it finds there."""
        config = self.folder / f"{host}.toml"
        config.write_text(
            f'server = "{self.endpoint}"\nnode_id = "{host}"\naccount = "root"\n'
            f'gpus = "none"\nstate_dir = "{self.folder / host}"\n'
            f'runtime_dir = "{self.folder / host}-run"\n[labels]\nhost = "{host}"\n'
        )
        return self.cluster.start_program(
            host, "rdzv-agent", f"--config={config}", environ=self._on(host)
        )

    def _on(self, host: str) -> dict[str, str]:
        return {NETWORK: str(self.network.path(host))}

    def agent(self, host: str) -> Node:
        """Return the agent of a host that was started last."""
        return [node for node in self.cluster.nodes if node.name == host][-1]

    def ctl(self, *words: str, expect: int = 0) -> str:
        """Run rdzvctl to its end, and return what it printed."""
        done = self.cluster.run("rdzvctl", f"--server={self.endpoint}", *words)
        assert done.returncode == expect, (words, done.stdout, done.stderr, self.describe())
        return done.stdout + done.stderr

    def start_ctl(self, name: str, *words: str) -> Node:
        """Start rdzvctl, which runs until it is done."""
        command = [str(BIN / "rdzvctl"), f"--server={self.endpoint}", *words]
        return self.cluster.start(name, command)

    def submit(
        self,
        name: str,
        nodes: str,
        *more: str,
        worker: str = "talk_until.py",
        script_args: tuple[str, ...] = (),
    ) -> None:
        self.ctl(
            *("submit", f"--rdzv-id={name}", f"--nnodes={nodes}", "--nproc-per-node=1"),
            *(f"--env=RDZV_TEST_DIARY={self.folder / name}.diary", *more, "--"),
            *(str(WORKERS / worker), str(self.end_of(name)), *script_args),
        )

    def end_of(self, name: str) -> Path:
        return self.folder / f"{name}.end"

    def connected(self) -> int:
        """Count the agents that are connected to the server."""
        with ControlClient(parse_endpoints(self.endpoint)) as client:
            return sum(node.state == "connected" for node in client.nodes())

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
        parts = [line.split() for line in lines_of(self.folder / f"{name}.diary")]
        return [(int(p[0]), int(p[1]), int(p[3])) for p in parts]

    def wait(self, what: str, holds: Callable[[], Any]) -> Any:
        return self.cluster.wait_until(what, holds, DEADLINE_S)

    def wait_running(self, name: str, nodes: int) -> list[int]:
        """Wait until a job runs on this many nodes, and return the pids of its workers."""
        self.wait(f"{name} runs on {nodes} nodes", lambda: len(self.seated(name)) == nodes)

        def pids() -> list[int]:
            round_ = self.status(name).round
            found = [pid for number, _, pid in self.started(name) if number == round_]
            return found if len(found) == nodes and all(map(alive, found)) else []

        found: list[int] = self.wait(f"the workers of {name} have started", pids)
        return found

    def describe(self) -> str:
        return self.cluster.describe()


@contextlib.contextmanager
def three_hosts(folder: Path, server_config: str = "") -> Iterator[Hosts]:
    """Run rdzvd and three connected agents; in the end nothing of them or their jobs is left."""
    with (
        Network(uuid.uuid4().hex[:6], 1, (HEAD, *HOSTS), seed=1) as network,
        cluster_without_server(folder) as made,
    ):
        found = Hosts(made, network, folder, server_config)
        try:
            found.start_server()
            for host in HOSTS:
                found.start_agent(host)
            found.wait("all agents are connected", lambda: found.connected() == len(HOSTS))
            yield found
        finally:
            made.kill_adopted()
