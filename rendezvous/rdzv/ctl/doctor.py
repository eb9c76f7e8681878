"""`rdzvctl doctor`: checks this machine, the connection to the server, and its nodes.

Each check examines one thing, changes nothing, and returns a finding, with a remedy if possible.
"""

from __future__ import annotations

import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from pathlib import Path

from rdzv.client import ControlClient
from rdzv.core.words import counted, duration, listed, size_text
from rdzv.ctl.layout import Cell, Page
from rdzv.errors import InvalidRequestError, RendezvousError
from rdzv.structs import struct
from rdzv.transport.addresses import leads_beyond_loopback
from rdzv.transport.certificates import read_certificate
from rdzv.transport.channels import Credentials
from rdzv.version import VERSION
from rdzv.view.answers import Node, Server

FEW_FILES = 4_096
"""With a lower limit, workers with several data loaders and sockets run out of open files."""
SMALL_SHM_BYTES = 1 << 30
CLOCK_MS = 2_000
"""How much this machine's clock may differ from the server's."""
EXPIRES_SOON_S = 14 * 86_400
IMPORT_WITHIN_S = 120
CONNECT_WITHIN_S = 3.0


class Verdict(StrEnum):
    """A check's result."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@struct(frozen=True)
class Finding:
    """One check's result, with the reason for it."""

    verdict: Verdict
    check: str
    text: str


_ok, _warning, _problem = (partial(Finding, verdict) for verdict in Verdict)


# ---------------------------------------------------------------------- this machine


def check_machine(python: str) -> Iterator[Finding]:
    yield check_torch(python)
    yield check_shm(Path("/dev/shm"))
    yield check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_name(socket.gethostname())


def check_torch(python: str) -> Finding:
    if shutil.which(python) is None:
        return _problem(
            "torch", f"{python} is not a program; name the job's interpreter with --python"
        )
    code = "import torch; print(torch.__version__, torch.cuda.device_count())"
    try:
        done = subprocess.run(
            [python, "-c", code],
            capture_output=True,
            text=True,
            timeout=IMPORT_WITHIN_S,
            check=False,
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _problem("torch", f"{python} cannot import it: {error}")
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return _problem("torch", f"{python} cannot import it ({reason}); install it there")
    version, gpus = done.stdout.split()[-2:]
    return _ok("torch", f"{version} in {python}, {counted(int(gpus), 'GPU')}")


def check_shm(shm: Path) -> Finding:
    try:
        usage = shutil.disk_usage(shm)
    except OSError as error:
        return _problem("/dev/shm", f"it cannot be used: {error.strerror}")
    text = f"{size_text(usage.free)} free of {size_text(usage.total)}"
    if usage.total < SMALL_SHM_BYTES or usage.free < usage.total // 10:
        remedy = "enlarge it (docker: --shm-size), or SIGBUS may kill DataLoader workers"
        return _warning("/dev/shm", f"{text}; {remedy}")
    return _ok("/dev/shm", text)


def check_open_files(soft: int, hard: int) -> Finding:
    if soft == resource.RLIM_INFINITY or soft >= FEW_FILES:
        return _ok("open files", "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft}")
    upto = "" if hard == resource.RLIM_INFINITY else f" (up to {hard} is allowed)"
    return _warning("open files", f"only {soft}; raise it: ulimit -n, LimitNOFILE={upto}")


def check_name(name: str) -> Finding:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return _warning(
            "host name",
            f"{name} is unknown to the name service ({error.strerror}); nodes get an "
            "address instead, unless --local-addr names one",
        )
    if not leads_beyond_loopback(found):
        return _warning(
            "host name",
            f"{name} resolves only to loopback ({found[0][4][0]}; see /etc/hosts), so "
            "other machines cannot use it; nodes get an address instead",
        )
    return _ok("host name", f"{name} is {found[0][4][0]}")


# ---------------------------------------------------------------------- the server


def check_certificate(credentials: Credentials, now: datetime) -> Iterator[Finding]:
    if credentials.cert is None:
        return
    what = f"certificate {credentials.cert}"
    try:
        found = read_certificate(credentials.cert.read_bytes(), what)
    except (OSError, InvalidRequestError) as error:
        yield _problem("certificate", str(error))
        return
    if trouble := found.trouble(now):
        yield _problem("certificate", f"{what} {trouble}; renew it")
        return
    left_s = (found.not_after - now).total_seconds()
    text = f"{credentials.cert} is valid for {duration(round(left_s * 1000))} more"
    soon = left_s < EXPIRES_SOON_S
    yield _warning("certificate", f"{text}; renew it") if soon else _ok("certificate", text)


def check_server(client: ControlClient) -> Iterator[Finding]:
    began_s = time.monotonic()
    try:
        servers = client.servers()
    except RendezvousError as error:
        yield _problem("server", str(error))
        return
    took_ms = (time.monotonic() - began_s) * 1000
    yield from judge_servers(str(client.server), servers, took_ms, round(time.time() * 1000))


def judge_servers(
    asked: str, servers: Sequence[Server], took_ms: float, now_unix_ms: int
) -> Iterator[Finding]:
    leaders = [server.address for server in servers if server.leads]
    if leaders:
        yield _ok("server", f"{asked} answers after {took_ms:.0f} ms; {leaders[0]} leads")
    else:
        yield _problem("server", f"{asked} answers, but no server leads: {len(servers)} stand by")
    for server in servers:
        if server.version and server.version != VERSION:
            text = f"{server.address} has {server.version}, this rdzvctl {VERSION}"
            yield _warning("version", f"{text}; both should be the same once an upgrade is over")
        if server.insecure:
            yield _warning("access", f"{server.address}: {server.insecure}")
        if server.store_away:
            yield _problem("store", f"{server.address}: {server.store_away}")
        if server.unix_ms is not None:
            yield _judge_clock(server.address, now_unix_ms - server.unix_ms, took_ms)


def _judge_clock(address: str, ahead_ms: float, took_ms: float) -> Finding:
    # The server read its clock at some point between the request and the response.
    ahead_ms, error_ms = ahead_ms - took_ms / 2, took_ms / 2
    if abs(ahead_ms) - error_ms <= CLOCK_MS:
        return _ok("clock", f"it agrees with that of {address}, within {CLOCK_MS / 1000:g} s")
    side = "ahead of" if ahead_ms > 0 else "behind"
    text = f"this machine's is {duration(round(abs(ahead_ms)))} {side} that of {address}"
    return _warning("clock", f"{text}; run NTP on both, or times in logs are misleading")


# ---------------------------------------------------------------------- the nodes


def check_nodes(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check the nodes that the server knows."""
    if not nodes:
        yield _warning(
            "nodes", "the server knows none; start rdzvrun or rdzv-agent with its address"
        )
        return
    away = [node.node_id for node in nodes if node.state != "connected"]
    wrong = [node for node in nodes if node.unhealthy or node.quarantine]
    old = [n for n in nodes if n.agent_version not in (None, VERSION)]
    yield _ok("nodes", f"{counted(len(nodes) - len(away), 'node')} of {len(nodes)} connected")
    if away:
        yield _warning("nodes", f"not connected: {listed(away)}")
    for node in wrong:
        yield _warning(f"node {node.node_id}", node.unhealthy or node.quarantine or "")
    if old:
        versions = listed(dict.fromkeys(f"{n.node_id} ({n.agent_version})" for n in old))
        yield _warning("version", f"different from this rdzvctl's {VERSION}: {versions}")


def try_port(host: str, port: int) -> str:
    """Try to connect to a port; return why that failed, or an empty string."""
    try:
        with socket.create_connection((host, port), CONNECT_WITHIN_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


# ---------------------------------------------------------------------- between two machines


def wait_for_visit(port: int, within_s: float, say: Callable[[int], None]) -> Finding:
    """Listen on a port, pass its number to `say`, and wait for `visit` from another machine."""
    try:
        with socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True) as open_:
            say(open_.getsockname()[1])
            return meet(open_, within_s)
    except OSError as error:
        return _problem("ports", f"cannot listen on port {port}: {error.strerror}")


def meet(listening: socket.socket, within_s: float) -> Finding:
    """Wait for a connection from another machine, and connect back to the port that it names."""
    listening.settimeout(within_s)
    try:
        with listening.accept()[0] as peer:
            peer.settimeout(CONNECT_WITHIN_S)
            host = str(peer.getpeername()[0]).removeprefix("::ffff:")
            error = try_port(host, int(peer.recv(16).decode("ascii")))
            peer.sendall((error or "ok").encode()[:200])
    except (OSError, ValueError) as error_:
        return _problem("ports", f"no other machine connected within {within_s:g} s: {error_}")
    if error:
        return _problem("ports", f"{host} reaches this machine, but not vice versa: {error}")
    return _ok("ports", f"{host} and this machine reach each other's ports")


def visit(host: str, port: int) -> Finding:
    """Connect to a machine that is running `wait_for_visit`, which then connects back."""
    try:
        with (
            socket.create_connection((host, port), CONNECT_WITHIN_S) as peer,
            socket.create_server((peer.getsockname()[0], 0), family=peer.family) as back,
        ):
            peer.sendall(f"{back.getsockname()[1]}\n".encode("ascii"))
            peer.settimeout(2 * CONNECT_WITHIN_S)
            answer = peer.recv(200).decode(errors="replace")
    except OSError as error:
        return _problem("ports", f"{host}:{port} cannot be reached: {error.strerror or error}")
    if answer != "ok":
        return _problem("ports", f"{host} cannot reach this machine: {answer or 'no answer'}")
    return _ok("ports", f"{host} and this machine reach each other's ports")


# ---------------------------------------------------------------------- all of them


def examine(
    client: ControlClient, credentials: Credentials, python: str, *, with_nodes: bool
) -> Iterator[Finding]:
    yield from check_machine(python)
    yield from check_certificate(credentials, datetime.now(UTC))
    answers = True
    for finding in check_server(client):
        answers = answers and not (finding.check == "server" and finding.verdict != Verdict.OK)
        yield finding
    if with_nodes and answers:
        try:
            yield from check_nodes(client.nodes())
        except RendezvousError as error:
            yield _problem("nodes", str(error))


def line(finding: Finding, page: Page) -> str:
    styles = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.PROBLEM: "red"}
    verdict = Cell(finding.verdict.value.ljust(7), styles[finding.verdict])
    return page.line(verdict, Cell(finding.check.ljust(12), "bold"), Cell(finding.text))
