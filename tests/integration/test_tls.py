"""A cluster with TLS, as docs/security.md sets it up; its certificates change while it trains."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import BIN, DEADLINE_S, JOB, WORKERS, Cluster, cluster_without_server
from test_invisible_server import Training
from tls_files import Files, put

from rdzv.client import ControlClient, Endpoint, parse_endpoints
from rdzv.errors import RendezvousConnectionError, UnauthenticatedError
from rdzv.transport.channels import Credentials
from tests.faults.network import Network

DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"


@pytest.fixture
def c(tmp_path: Path) -> Iterator[Cluster]:
    with cluster_without_server(tmp_path) as made:
        yield made


def start_server(c: Cluster, files: Files, *more: str) -> None:
    tls = files.server()
    options = [f"--tls-cert={tls.cert}", f"--tls-key={tls.key}", f"--tls-client-ca={tls.client_ca}"]
    c.start_server(*options, *more)


def options_of(credentials: Credentials) -> tuple[str, ...]:
    return (
        f"--tls-ca={credentials.ca}",
        f"--tls-cert={credentials.cert}",
        f"--tls-key={credentials.key}",
    )


def replace_pair(of: Credentials, by: Credentials) -> None:
    for source, target in ((by.key, of.key), (by.cert, of.cert)):
        assert source is not None
        assert target is not None
        put(source, target)


def connections(pid: int, port: int) -> set[str]:
    """Return the sockets of a process that are connected to a port: their inodes."""
    # gRPC's sockets are for IPv6, even if the address is not.
    tables = [Path(f"/proc/{pid}/net/{table}") for table in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    connected = {row[9] for row in rows if row[2].endswith(f":{port:04X}") and row[3] == "01"}
    own = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(fd))  # noqa: PTH115
        except FileNotFoundError:
            continue
    return {inode for inode in connected if f"socket:[{inode}]" in own}


def test_certificates_are_renewed_under_a_live_training(c: Cluster, tmp_path: Path) -> None:
    """All of them, with their CA: no stream ends, and the old ones are useless afterwards."""
    first, second = Files(tmp_path / "first"), Files(tmp_path / "second")
    nodes = {name: first.node(name) for name in ("n1", "n2")}
    c.credentials = operator = first.client("ops", "admin")
    start_server(c, first)
    training = Training(c, lambda name: options_of(nodes[name]))
    training.wait_for_steps(10)
    port = int(c.endpoint.rpartition(":")[2])
    pids = [node.process.pid for node in training.nodes]
    streams = [connections(pid, port) for pid in pids]
    assert all(streams)
    workers = [node.workers() for node in training.nodes]

    # Old credentials that an attacker has kept.
    (tmp_path / "old").mkdir()
    kept = {name: tmp_path / "old" / name for name in ("cert", "key")}
    assert operator.cert is not None
    assert operator.key is not None
    shutil.copy(operator.cert, kept["cert"])
    shutil.copy(operator.key, kept["key"])

    both = tmp_path / "both.crt"
    both.write_bytes(first.ca.read_bytes() + second.ca.read_bytes())
    put(both, first.ca)
    assert c.status().state == "running"
    for file in ("server.key", "server.crt"):
        put(second.folder / file, first.folder / file)
    replace_pair(operator, second.client("ops", "admin"))
    for name, credentials in nodes.items():
        replace_pair(credentials, second.node(name))
    assert c.status().state == "running"
    put(second.ca, first.ca)
    assert c.status().state == "running"
    old = Credentials(first.ca, kept["cert"], kept["key"])
    with (
        ControlClient(parse_endpoints(c.endpoint), credentials=old) as client,
        pytest.raises(RendezvousConnectionError, match="refuses the client certificate"),
    ):
        client.status(JOB)

    training.wait_for_steps(10)
    assert [connections(pid, port) for pid in pids] == streams
    # The next streams are opened with the files of that time.
    c.kill_server()
    start_server(c, first)
    training.wait_until_seated()
    training.wait_for_steps(10)
    assert [node.workers() for node in training.nodes] == workers
    status = c.status()
    assert (status.round, status.restarts) == (0, 0)
    c.finish()
    assert [node.wait() for node in training.nodes] == [0, 0]


def handshake(port: int, version: str, shown: Credentials) -> str:
    """Return the output of openssl about a handshake; it waits for nothing more."""
    done = subprocess.run(
        [
            *("openssl", "s_client", "-connect", f"127.0.0.1:{port}", version, "-brief"),
            *("-CAfile", str(shown.ca), "-cert", str(shown.cert), "-key", str(shown.key)),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return (done.stdout + done.stderr).decode(errors="replace")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="speaking TLS 1.2 needs openssl")
def test_nothing_below_tls_1_3_is_spoken(c: Cluster, tmp_path: Path) -> None:
    files = Files(tmp_path / "certs")
    admin = files.client("admin", "admin")
    tls = files.server()
    options = [f"--tls-cert={tls.cert}", f"--tls-key={tls.key}", f"--tls-client-ca={tls.client_ca}"]
    process = subprocess.Popen(
        [BIN / "rdzvd", "--store=memory", "--listen=127.0.0.1:0", "--http=127.0.0.1:0", *options],
        stdout=subprocess.PIPE,
        text=True,
        env=c.environ(),
    )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        ports = [int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", ready)]
        assert len(ports) == 2
        for port in ports:
            assert "Protocol version: TLSv1.3" in handshake(port, "-tls1_3", admin)
            assert "Protocol version" not in handshake(port, "-tls1_2", admin)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
        if process.stdout is not None:
            process.stdout.close()


def test_a_token_stands_in_for_a_certificate_where_that_is_allowed(
    c: Cluster, tmp_path: Path
) -> None:
    files, token = Files(tmp_path / "certs"), tmp_path / "token"
    start_server(
        *(c, files, "--store=memory", "--http=127.0.0.1:0", "--tls-http-client-auth=accept"),
        *("--tls-token-listen=127.0.0.1:0", f"--init-admin-token={token}", "--log-level=info"),
    )
    found = re.search(
        r"callers without a certificate can connect to 127\.0\.0\.1:(\d+)", c.server_log
    )
    assert found is not None, c.server_log
    at = Endpoint("127.0.0.1", int(found[1]))
    with ControlClient(at, 60, Credentials(files.ca, token_file=token)) as client:
        assert client.servers()[0].insecure is None
    with (
        ControlClient(at, 60, Credentials(files.ca)) as client,
        pytest.raises(UnauthenticatedError),
    ):
        client.servers()
    # The port for callers with certificates accepts no one without.
    main = parse_endpoints(c.endpoint)
    with (
        ControlClient(main, 60, Credentials(files.ca, token_file=token)) as client,
        pytest.raises(RendezvousConnectionError, match="requires a client certificate"),
    ):
        client.servers()


def test_files_that_can_not_be_used_are_said_before_anything_is_bound(
    c: Cluster, tmp_path: Path
) -> None:
    files = Files(tmp_path / "certs")
    tls = files.server()
    done = c.run(
        *("rdzvd", "--store=memory", "--listen=127.0.0.1:0"),
        *(f"--tls-cert={tls.cert}", f"--tls-key={files.folder / 'ca.key'}"),
    )
    assert done.returncode == 2, done.stderr
    assert "the key does not belong to the certificate" in done.stderr
    assert "ready" not in done.stdout


# ------------------------------------------------------------------------------------ five commands


def five_commands() -> list[list[str]]:
    """Read the commands of the document, as a shell would."""
    text = DOCUMENT.read_text().partition("## A TLS cluster in five commands")[2]
    block = re.search(r"\n\n((?:    .*\n)+)", text)
    assert block is not None
    lines = block[1].replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    assert len(commands) == 5
    return commands


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="making network namespaces needs root and iproute2",
)
def test_five_commands_set_up_a_cluster_of_three_hosts(c: Cluster, tmp_path: Path) -> None:
    certs_init, certs_node, certs_client, rdzvd, rdzvrun = five_commands()
    head, *hosts = ("head", "n1", "n2")
    with Network(uuid.uuid4().hex[:6], 1, (head, *hosts), seed=1) as network:
        address = network.address(head)

        def on(host: str, command: list[str]) -> list[str]:
            """Return the document's command with the names of this network."""
            words = [BIN / command[0], *command[1:]]
            real = [str(word).replace("10.0.0.5", address) for word in words]
            # There is no name service here.
            real = [re.sub(r"\bhead\b", address, word) for word in real]
            return network.on(host, [word.replace("n1", host) for word in real])

        for command in (certs_init, certs_client):
            subprocess.run(on(head, command), cwd=tmp_path, check=True, capture_output=True)
        for host in hosts:
            done = on(host, certs_node)
            subprocess.run(done, cwd=tmp_path, check=True, capture_output=True)
            (tmp_path / host).mkdir()
            for file in ("ca.crt", f"node-{host}.crt", f"node-{host}.key"):
                shutil.copy(tmp_path / "tls" / file, tmp_path / host / file)
        # The document's command does not say where the data is.
        absolute = [word.replace("=tls/", f"={tmp_path}/tls/") for word in on(head, rdzvd)]
        c.start_server_by([*absolute, f"--data-dir={tmp_path / 'data'}"])
        for host in hosts:
            script = [str(WORKERS / "report.py") if w == "train.py" else w for w in rdzvrun]
            c.start(host, on(host, script), cwd=tmp_path / host)
        c.wait_for_round(0, workers=2)
        shown = tmp_path / "tls"
        listing = on(head, ["rdzvctl", "--server=head", "list"])
        alice = {
            "RDZV_TLS_CA": str(shown / "ca.crt"),
            "RDZV_TLS_CERT": str(shown / "client-alice.crt"),
            "RDZV_TLS_KEY": str(shown / "client-alice.key"),
        }

        def ctl(environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                listing,
                capture_output=True,
                text=True,
                env={**c.environ(), **environ},
                timeout=DEADLINE_S,
                check=False,
            )

        assert "train" in ctl(alice).stdout
        without = ctl({"RDZV_TLS_CA": alice["RDZV_TLS_CA"]})
        assert without.returncode == 75
        assert "requires a client certificate" in without.stderr
        assert "it may want TLS: give --tls-ca" in ctl({}).stderr
        c.finish()
        assert [node.wait() for node in c.nodes] == [0, 0]
