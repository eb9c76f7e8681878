"""A job's launch on this node: what to run, checks before the start, and device counts."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field
from importlib.machinery import PathFinder
from pathlib import Path

from rdzv.agent.core.environ import substitute_local_rank
from rdzv.agent.core.model import JobTerms
from rdzv.agent.launch.numa import NumaBinding
from rdzv.agent.runner_link.agent_children import ask_spared
from rdzv.agent.system.accounts import (
    Account,
    Identity,
    acting_as,
    open_untrusted,
    started_as,
)
from rdzv.core.evidence.hang_culprit import HangTimeout
from rdzv.errors import InvalidRequestError
from rdzv.structs import struct
from rdzv.transport import addresses
from rdzv.transport.endpoints import Endpoint

PROBE_TIMEOUT_S = 10.0
"""How long the job's interpreter or the name service may take to respond."""


MAX_SCRIPT_BYTES = 16 << 20
"""How much of a script is compared with other nodes' scripts."""

NO_FILES = Path(os.devnull)
"""The value of --log-dir that means no log files, as under torchrun."""

NO_HANDLER = "null"
"""The value of --event-log-handler that means no events, as under torchrun."""

DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@struct(frozen=True)
class Output:
    """Where the workers' output goes. Streams are bits: 1 is stdout, 2 is stderr, 3 is both."""

    log_dir: Path | None = None
    run_dir: Path | None = None
    """The folder for this run's files, or None to create one below `log_dir`."""
    redirects: Mapping[int, int] = field(default_factory=dict)
    """The streams that go to files, by LOCAL_RANK."""
    tee: Mapping[int, int] = field(default_factory=dict)
    """The streams that go both to files and, line by line, to the console, by LOCAL_RANK."""
    shown_ranks: frozenset[int] | None = None
    """The LOCAL_RANKs whose output is shown on the console, or None for all of them."""
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    prefix_template: str | None = None
    logs_specs: str = ""
    """An entry point in the group `torchrun.logs_specs` that overrides the settings above."""
    console: bool = True
    """Whether any output is copied to this process's own stdout and stderr."""

    @property
    def asks_for_files(self) -> bool:
        streams = (*self.redirects.values(), *self.tee.values())
        return any(streams) or bool(self.stdout_filters or self.stderr_filters)


@struct(frozen=True)
class EventSink:
    """Where this node's torchelastic events go."""

    destination: str = NO_HANDLER
    """The name of a handler known to torch."""
    backend: str = "rdzv"


@struct(frozen=True)
class SnapshotFiles:
    """Where snapshots are written on disk, how often, and how many are kept."""

    folder: Path
    every_s: float = 0.0
    """The period in seconds; 0 means that they are written only at the end."""
    keep: int = 2


@struct(frozen=True)
class Launch:
    """The launch of a job on this node: what to run and how to run it."""

    job: JobTerms
    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    python: str = sys.executable
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    account: Account | None = None
    chdir: Path | None = None
    progress_dir: Path | None = None
    """The parent folder of the workers' progress files, or None for the temporary folder."""
    snapshot: Path | None = None
    """A file or folder that shows, by changing, that a round has made progress."""
    snapshot_files: SnapshotFiles | None = None
    snapshot_memory: int | None = None
    """The maximum memory for snapshots on this node, in bytes; None means half of what is free at
    the first save.
    """
    snapshot_copy_rate: int = 0
    """The maximum number of snapshot bytes that this node sends to others per second; 0 means none.
    """
    preemption_file: Path | None = None
    """The file that announces a preemption of this machine, or None if this job has none."""
    role: str = "default"
    topology: str = ""
    local_addr: str = ""
    master: Endpoint | None = None
    refuse_reuse: bool = False
    secret: str = field(default="", repr=False)
    """The job secret, which every participant presents; empty if there is none. Only rdzvrun
    supports it: for a submitted job, the agent would have to read a file named by another user.
    """
    virtual_local_rank: bool = False
    numa_binding: NumaBinding | None = None
    warm: tuple[str, ...] = ()
    """The modules that a zygote preloads before the first round; empty if it does not."""
    warm_restarts: bool = False
    """Whether a zygote is started for restarts once the workers have imported torch."""
    collective_trace: bool = True
    """Whether the agent reads torch's record of the workers' collectives."""
    hang_timeout: HangTimeout | None = None
    signals: tuple[signal.Signals, ...] = DEFAULT_SIGNALS
    """The signals that make this node leave the job."""
    root_cause_exit: bool = False
    output: Output = field(default_factory=Output)
    event_log: EventSink = EventSink()

    @property
    def identity(self) -> Identity | None:
        return None if self.account is None else self.account.identity

    def argv(self, local_rank: int) -> tuple[str, ...]:
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
    """Refuse a launch that cannot work on this node, before anything is started.

    Raises `InvalidRequestError` if the folder, script, program or interpreter is missing, or logs
    cannot be written.
    """
    with acting_as(launch.identity):
        if launch.output.log_dir not in (None, NO_FILES):
            _check_folder("--log-dir", launch.output.log_dir)
        if launch.snapshot_files is not None:
            _check_folder("--snapshot-dir", launch.snapshot_files.folder)
        if launch.chdir is not None:
            check_chdir(launch.chdir, launch.identity)
        if launch.no_python:
            if not _is_program(launch, launch.script):
                raise InvalidRequestError(
                    f"{launch.script!r} is not a program on this node; give its path, or make "
                    "it executable"
                )
            return
        if not _is_program(launch, launch.python):
            raise InvalidRequestError(
                f"the interpreter {launch.python!r} is not on this node; set PYTHON_EXEC to one "
                "that is"
            )
        if not launch.module and not _is_there(_from(launch, launch.script)):
            where = launch.chdir or _working_directory()
            raise InvalidRequestError(
                f"the script {launch.script!r} is not on this node (looked in {where}); "
                "give a path that exists on every node"
            )


def check_chdir(chdir: Path, identity: Identity | None = None) -> None:
    """Refuse a working directory in which an account's workers cannot start.

    Raises `InvalidRequestError` if it does not exist, is not a directory, or cannot be entered.
    """
    folder = repr(str(chdir))
    with acting_as(identity):
        try:
            mode = chdir.stat().st_mode
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise InvalidRequestError(
                f"the folder {folder} cannot be used on this node ({why}); give one that "
                "exists on every node"
            ) from error
        if not stat.S_ISDIR(mode):
            raise InvalidRequestError(f"{folder} is not a directory on this node; give one that is")
        if not os.access(chdir, os.X_OK, effective_ids=True):
            raise InvalidRequestError(
                f"the account that jobs run as cannot enter the folder {folder} on this node; "
                "grant it the permission, or give another folder"
            )


def script_digest(launch: Launch) -> str:
    """Return a digest of the script, or of the name if that is a module's or a program's on PATH.

    Returns an empty string if the script cannot be read. May hang.
    """
    if launch.module or (launch.no_python and os.sep not in launch.script):
        content = launch.script.encode("utf-8", "surrogateescape")
    else:
        try:
            with acting_as(launch.identity):
                path = os.path.realpath(_from(launch, launch.script))
                with os.fdopen(open_untrusted(path, os.O_RDONLY), "rb") as file:
                    content = file.read(MAX_SCRIPT_BYTES)
        except OSError:
            return ""
    return hashlib.sha256(content).hexdigest()[:16]


def _is_program(launch: Launch, name: str) -> bool:
    if os.sep in name:
        return _is_executable(_from(launch, name))
    path = launch.environ.get("PATH", os.defpath)
    return any(_is_executable(Path(folder, name)) for folder in path.split(os.pathsep) if path)


def _is_executable(path: str | Path) -> bool:
    # This is checked with the effective rights, which `shutil.which` ignores.
    return os.access(path, os.X_OK, effective_ids=True) and not Path(path).is_dir()


def _from(launch: Launch, path: str) -> str:
    return path if launch.chdir is None or not path else str(launch.chdir / path)


def _check_folder(option: str, folder: Path) -> None:
    """Refuse a folder that cannot be created or written to, without creating anything."""
    there = next(path for path in (folder, *folder.parents) if _is_there(path))
    if not there.is_dir():
        reason = f"{there} is not a directory"
    elif not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        reason = f"cannot write to {there}"
    else:
        return
    raise InvalidRequestError(f"{option}={folder}: {reason}; give another")


def _is_there(path: str | Path) -> bool:
    try:
        return bool(str(path)) and Path(path).exists()
    except OSError:
        return False


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return "the working directory, which is gone"


async def has_torch(
    python: str, environ: Mapping[str, str] | None = None, account: Account | None = None
) -> bool:
    """Return whether the job's interpreter has torch, without importing it.

    No process is started if the job uses this process's interpreter and torch is found here.
    """
    if _is_this_python(python, environ, account) and _finds_torch():
        return True
    # The empty entry of sys.path is the working directory, which does not count.
    question = (
        "import sys; sys.path[:] = filter(None, sys.path); "
        "import importlib.util; print(importlib.util.find_spec('torch') is not None)"
    )
    try:
        answer, _ = await ask_interpreter(
            python, ("-c", question), environ, PROBE_TIMEOUT_S, account
        )
    except (OSError, TimeoutError):
        return False
    return answer.strip() == b"True"


def _is_this_python(
    python: str, environ: Mapping[str, str] | None, account: Account | None
) -> bool:
    """Return whether this process would import the same modules as the job's interpreter."""

    def its_own(variables: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in variables.items() if name.startswith("PYTHON")}

    alike = environ is None or its_own(environ) == its_own(os.environ)
    return python == sys.executable and account is None and alike


def _finds_torch() -> bool:
    # The first entry is the program's own folder or the working directory.
    path = sys.path if sys.flags.safe_path else sys.path[1:]
    return PathFinder.find_spec("torch", [part for part in path if part]) is not None


async def ask_interpreter(
    python: str,
    args: Sequence[str],
    environ: Mapping[str, str] | None,
    timeout_s: float,
    account: Account | None,
) -> tuple[bytes, bytes]:
    """Run the job's interpreter with these arguments. Returns its stdout and stderr."""
    with started_as(account) as how:
        _, answer, complaint = await ask_spared(
            python, *args, timeout_s=timeout_s, env=environ, **how
        )
    return answer, complaint


_COUNT = """
import sys, torch
counts = {"gpu": torch.cuda.device_count(), "xpu": torch.xpu.device_count()}
kind = sys.argv[1]
print(counts[kind] if kind in counts else counts["gpu"] or counts["xpu"])
"""
COUNT_TIMEOUT_S = 120.0
"""How long the count may take, as importing torch from a cold network disk is slow."""


def count_cpus() -> int:
    return len(os.sched_getaffinity(0))


async def ask_count_devices(
    kind: str,
    python: str,
    environ: Mapping[str, str] | None = None,
    account: Account | None = None,
) -> int:
    """Count the accelerators that the job's torch sees. `auto` falls back to counting CPUs.

    Source: `determine_local_world_size` in `torch/distributed/run.py`. Raises
    `InvalidRequestError` if there are none, or the job's interpreter does not respond.
    """
    try:
        question = ("-c", _COUNT, kind)
        answer, complaint = await ask_interpreter(
            python, question, environ, COUNT_TIMEOUT_S, account
        )
    except TimeoutError as error:
        raise _uncounted(kind, python, f"no answer within {COUNT_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise _uncounted(kind, python, str(error)) from error
    # Modules imported along with torch may have printed something first.
    last = answer.strip().rpartition(b"\n")[2]
    if not last.isdigit():
        raise _uncounted(kind, python, complaint.decode(errors="replace"))
    count = int(last)
    if count == 0 and kind == "auto":
        return count_cpus()
    if count == 0:
        raise InvalidRequestError(
            f"--nproc-per-node={kind}: torch sees no {kind} on this node; give a number"
        )
    return count


def _uncounted(kind: str, python: str, complaint: str) -> InvalidRequestError:
    last = complaint.strip().rpartition("\n")[2]
    return InvalidRequestError(
        f"--nproc-per-node={kind}: {python} cannot count them ({last}); give a number of workers"
    )


async def local_address(endpoint: Endpoint) -> str:
    """Return this node's own address towards a server; see `addresses.own_address`."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return await asyncio.to_thread(addresses.own_address, endpoint)
    except TimeoutError:
        raise addresses.unknown_address(endpoint, "the name service does not answer") from None


async def reachable_host_name(address: str) -> str:
    """Return this machine's name if others need it; see `addresses.reachable_host_name`."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return await asyncio.to_thread(addresses.reachable_host_name, address)
    except TimeoutError:
        return ""
