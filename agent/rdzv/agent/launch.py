"""What a user asked to be launched, and what this node can offer for it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rdzv.agent.core.environ import substitute_local_rank
from rdzv.agent.core.model import Job
from rdzv.agent.numa import NumaBinding
from rdzv.client import Endpoint
from rdzv.errors import InvalidRequestError
from rdzv.meeting import address_towards, leads_beyond_loopback

PROBE_TIMEOUT_S = 10.0
"""How long the job's interpreter, or the name service, may take to answer a question."""


NO_FILES = Path(os.devnull)
"""The log directory of who wants no files, as under torchrun."""

NO_HANDLER = "null"
"""The handler of who wants no events, as under torchrun."""

DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class Output:
    """Where the workers' output goes. Streams are bits: 1 stdout, 2 stderr, 3 both."""

    log_dir: Path | None = None
    redirects: Mapping[int, int] = field(default_factory=dict)
    """By LOCAL_RANK: the streams that go to files."""
    tee: Mapping[int, int] = field(default_factory=dict)
    """By LOCAL_RANK: the streams that go to files and, line by line, to the console."""
    shown_ranks: frozenset[int] | None = None
    """The LOCAL_RANKs whose output is shown on the console; None: all."""
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    prefix_template: str | None = None
    logs_specs: str = ""
    """Who decides all this instead: an entry point of the group `torchrun.logs_specs`."""


@dataclass(frozen=True, slots=True)
class EventSink:
    """Where torchelastic's events of this node go."""

    destination: str = NO_HANDLER
    """The name of a handler that torch knows."""
    backend: str = "rdzv"
    """The rendezvous back-end that the events name."""


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
    run_path: bool = False
    """`script` is run by `runpy.run_path`."""
    python: str = sys.executable
    role: str = "default"
    topology: str = ""
    local_addr: str = ""
    refuse_reuse: bool = False
    virtual_local_rank: bool = False
    """Every worker has LOCAL_RANK 0 and sees one GPU."""
    numa_binding: NumaBinding | None = None
    signals: tuple[signal.Signals, ...] = DEFAULT_SIGNALS
    """What makes this node leave."""
    output: Output = field(default_factory=Output)
    event_log: EventSink = EventSink()

    def argv(self, local_rank: int) -> tuple[str, ...]:
        """Return the command line of one worker."""
        args = substitute_local_rank(self.args, local_rank)
        if self.no_python:
            return (self.script, *args)
        if self.module:
            return (self.python, "-u", "-m", self.script, *args)
        if self.run_path:
            return (self.python, "-u", "-c", _RUN_PATH, self.script, *args)
        return (self.python, "-u", self.script, *args)


_RUN_PATH = (
    "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def check_startable(launch: Launch) -> None:
    """Refuse, before anything is started, a launch that can not work on this node.

    Raises:
        InvalidRequestError: script, program or interpreter are not there, or logs have no place.

    """
    _check_log_dir(launch.output.log_dir)
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
    if log_dir is None or log_dir == NO_FILES:
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
        "import importlib.util; print(importlib.util.find_spec('torch') is not None)"
    )
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            "-c",
            question,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return False
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            answer, _ = await process.communicate()
            return answer.strip() == b"True"
    except TimeoutError:
        process.kill()
        await process.wait()
        return False


_COUNT = """
import sys, torch
counts = {"gpu": torch.cuda.device_count(), "xpu": torch.xpu.device_count()}
kind = sys.argv[1]
print(counts[kind] if kind in counts else counts["gpu"] or counts["xpu"])
"""
COUNT_TIMEOUT_S = 120.0
"""Importing torch from a cold network disk takes its time."""


def count_cpus() -> int:
    """Count the CPUs that this process may use; a scheduler may have given it a few of many."""
    return len(os.sched_getaffinity(0))


def count_devices(kind: str, python: str) -> int:
    """Count the accelerators that the job's torch sees; `auto`: any, or else the CPUs.

    Source: `determine_local_world_size` in `torch/distributed/run.py`.

    Raises:
        InvalidRequestError: there are none, or the job's interpreter can not say.

    """
    given = f"--nproc-per-node={kind}"
    try:
        answer = subprocess.run(
            [python, "-c", _COUNT, kind],
            capture_output=True,
            text=True,
            timeout=COUNT_TIMEOUT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        last = str(getattr(error, "stderr", None) or error).strip().rpartition("\n")[2]
        raise InvalidRequestError(
            f"{given}: {python} can not count them ({last}); give a number of workers"
        ) from error
    count = int(answer)
    if count == 0 and kind == "auto":
        return count_cpus()
    if count == 0:
        raise InvalidRequestError(f"{given}: torch sees no {kind} on this node; give a number")
    return count


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
