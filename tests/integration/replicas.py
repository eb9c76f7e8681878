"""Three rdzvd on one etcd, for tests of servers that share a store."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster import Cluster
from etcd_cluster import EtcdCluster
from forked_programs import Forked
from ports import free_ports

from rdzv.client import ControlClient, parse_endpoint
from rdzv.errors import RendezvousConnectionError
from rdzv.view.answers import Server


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
        self.rdzvds: dict[str, Forked] = {}

    @classmethod
    @contextmanager
    def running(cls, folder: Path, members: int, *options: str) -> Iterator[Replicas]:
        """Run all three on an etcd of so many members; their output is shown if the test fails."""
        (folder / "etcd").mkdir()
        with EtcdCluster.running(folder / "etcd", members) as etcd:
            made = cls(folder, etcd)
            try:
                for address in made.addresses:
                    made.start_replica(address, *options)
                yield made
            except BaseException:
                print(made.describe())
                raise
            finally:
                made.stop()

    def start_replica(self, address: str, *options: str) -> None:
        args = ["--store=etcd", f"--etcd-endpoints={self.etcd}", f"--listen={address}"]
        args += [f"--http={self.http[address].removeprefix('http://')}"]
        self.rdzvds[address] = self.start_rdzvd(*args, *options)
        stdout = self.rdzvds[address].stdout
        assert stdout is not None
        assert stdout.readline().startswith("rdzvd ready: listening on "), self.describe()

    def kill_replica(self, address: str, number: signal.Signals = signal.SIGKILL) -> None:
        process = self.rdzvds.pop(address)
        process.send_signal(number)
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
        """Wait until a server leads with a higher leadership than this."""

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
