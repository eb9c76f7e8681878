"""What a user asked to be launched, and what this node can offer for it."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rdzv.agent.core.environ import substitute_local_rank
from rdzv.agent.core.model import Job
from rdzv.client import Endpoint
from rdzv.errors import InvalidRequestError

PROBE_TIMEOUT_S = 10.0
"""How long the job's interpreter, or the name service, may take to answer a question."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One job on this node: what to run, and how."""

    job: Job
    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    """`script` is a module, as in `python -m`."""
    no_python: bool = False
    """`script` is a program, to be executed directly."""
    python: str = sys.executable
    role: str = "default"
    topology: str = ""
    local_addr: str = ""
    log_dir: Path | None = None
    redirects: Mapping[int, int] = field(default_factory=dict)
    """By LOCAL_RANK: 1 sends stdout to a file, 2 stderr, 3 both; others go to the console."""
    refuse_reuse: bool = False

    def argv(self, local_rank: int) -> tuple[str, ...]:
        """Return the command line of one worker."""
        args = substitute_local_rank(self.args, local_rank)
        if self.no_python:
            return (self.script, *args)
        if self.module:
            return (self.python, "-u", "-m", self.script, *args)
        return (self.python, "-u", self.script, *args)


def check_startable(launch: Launch) -> None:
    """Refuse, before anything is started, a launch that can not work on this node.

    Raises:
        InvalidRequestError: script, program or interpreter are not there, or logs have no place.

    """
    _check_log_dir(launch.log_dir)
    if launch.no_python:
        if shutil.which(launch.script) is None:
            raise InvalidRequestError(
                f"{launch.script!r} is no program on this node; give its path, or make it "
                "executable"
            )
        return
    if shutil.which(launch.python) is None:
        raise InvalidRequestError(
            f"the interpreter {launch.python!r} is not on this node; set PYTHON_EXEC to one that is"
        )
    if not launch.module and not _is_there(launch.script):
        raise InvalidRequestError(
            f"the script {launch.script!r} is not on this node (looked in {_working_directory()}); "
            "give a path that exists on every node"
        )


def _check_log_dir(log_dir: Path | None) -> None:
    """Refuse a log directory that can not be made or written; make nothing yet."""
    if log_dir is None:
        return
    there = next(path for path in (log_dir, *log_dir.parents) if _is_there(path))
    if not there.is_dir():
        reason = f"{there} is no directory"
    elif not os.access(there, os.W_OK | os.X_OK):
        reason = f"{there} can not be written"
    else:
        return
    raise InvalidRequestError(f"--log-dir={log_dir}: {reason}; give another")


def _is_there(path: str | Path) -> bool:
    """Say whether there is such a file; also where its folders can not be searched."""
    try:
        return bool(str(path)) and Path(path).exists()
    except OSError:
        return False


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return "the working directory, which is gone"


async def has_torch(python: str) -> bool:
    """Ask the job's interpreter whether it has torch, without importing it."""
    question = (
        "import sys; sys.path[:] = filter(None, sys.path); "  # The working directory has no say.
        "import importlib.util; sys.exit(importlib.util.find_spec('torch') is None)"
    )
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            "-c",
            question,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return False
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return await process.wait() == 0
    except TimeoutError:
        process.kill()
        await process.wait()
        return False


def machine_id() -> str:
    """Name this machine and network namespace: nodes with the same name share a loopback."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = socket.gethostname()
    try:
        namespace = str(Path("/proc/self/ns/net").readlink())
    except OSError:
        namespace = ""
    return f"{boot_id}/{namespace}"


async def local_address(endpoint: Endpoint) -> str:
    """Return the address that this node has on its way to the server.

    It is the local end of a connected datagram socket: nothing is sent.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)
    except (OSError, TimeoutError):
        return await _own_name() or "127.0.0.1"
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return await _own_name() or "127.0.0.1"


async def reachable_host_name() -> str:
    """Return this machine's name if it leads to more than loopback, else nothing."""
    return await _own_name()


async def _own_name() -> str:
    name = socket.gethostname()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        return ""
    addresses = {str(address[0]) for *_, address in found}
    return name if any(not is_loopback(address) for address in addresses) else ""


def is_loopback(address: str) -> bool:
    """Say whether only this machine can reach an address.

    >>> [is_loopback(a) for a in ("127.0.0.1", "::1", "localhost", "10.0.0.5", "n1")]
    [True, True, True, False, False]
    """
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


class StoreSocket:
    """The listening socket that a node holds ready for the c10d store of its next round.

    Clients may connect as soon as the port was announced; the store host serves them when it is
    up. A port is never offered twice, so that no client of an old round reaches a newer store.
    """

    def __init__(self, *, loopback_only: bool) -> None:
        self._loopback_only = loopback_only
        self._socket: socket.socket | None = None
        self._offered: set[int] = set()

    @property
    def port(self) -> int:
        """The port that is held, bound anew if none is.

        Raises:
            OSError: no port can be bound.

        """
        if self._socket is None:
            self._socket = self._bind_new()
            self._offered.add(_port_of(self._socket))
        return _port_of(self._socket)

    def take(self) -> socket.socket | None:
        """Hand the socket over to the caller, who closes it."""
        taken, self._socket = self._socket, None
        return taken

    def release(self) -> None:
        """Free the port."""
        taken = self.take()
        if taken is not None:
            taken.close()

    def _bind_new(self) -> socket.socket:
        rejected: list[socket.socket] = []
        try:
            while True:
                candidate = self._bind()
                if _port_of(candidate) not in self._offered:
                    return candidate
                rejected.append(candidate)
        finally:
            for held in rejected:
                held.close()

    def _bind(self) -> socket.socket:
        if self._loopback_only:
            return socket.create_server(("127.0.0.1", 0), backlog=4096)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096
            )
        return socket.create_server(("0.0.0.0", 0), backlog=4096)


def _port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])
