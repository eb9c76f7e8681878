"""What a user asked to be launched, and what this node can offer for it."""

from __future__ import annotations

import asyncio
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
from rdzv.meeting import address_towards, leads_beyond_loopback

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


async def local_address(endpoint: Endpoint) -> str:
    """Return the address that this node has on its way to the server."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)
    except (OSError, TimeoutError):
        return await _own_name() or "127.0.0.1"
    return address_towards(found) or await _own_name() or "127.0.0.1"


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
    return name if leads_beyond_loopback(found) else ""
