"""Runs one case under a launcher, and records what its workers saw and what the user got."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import QUICK_TORCH
from cluster import fork as fork_ours
from cluster import ready as ready_to_fork_ours
from ports import free_port
from ready_torchrun import Forked, Start, ready_torchrun, streams_in
from waiting import pause_s

BIN = Path(sys.executable).parent
SCRIPTS = Path(__file__).with_name("scripts")
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PROGRAMS = ("torchrun", "rdzvrun", "python")
DEADLINE_S = 120.0

VARIABLE = re.compile(r"(?<!\S)([A-Z_]+)=")
"""A variable in a command line, and text that looks like one."""

READ_LATE = ("PET_", "CUDA_VISIBLE_DEVICES", "PYTHON_EXEC", "REAL_PYTHON")
READ_LATE += ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
"""How variables begin that torchrun reads only once it runs."""

Seen = dict[str, Any]
"""The results, by kind: `exit codes`, `argv` of each worker, `env RANK`, `files`, ..."""


@dataclass(frozen=True)
class Differ:
    """An intended difference: torchrun's behaviour, rdzvrun's, and the reason."""

    torchrun: Any
    rdzvrun: Any
    why: str


@dataclass(frozen=True)
class Send:
    """A signal to the launcher once this many workers have started; 0: while it waits."""

    signum: signal.Signals
    workers: int = 1


@dataclass(frozen=True)
class Case:
    """A command line, and its expected results.

    A line is as typed in a shell, after the launcher's name; words VAR=VALUE at its start are
    environment. @PORT is a free port, @NODE the node's number, @COUNT one more, @FIRST whether it
    is 0, @HOME its folder and working directory, @PYTHON this interpreter, @EXAMPLES their folder.
    """

    name: str
    line: str
    shows: Mapping[str, Any] = field(default_factory=dict)
    """Results that both must show."""
    differs: Mapping[str, Differ] = field(default_factory=dict)
    """Results in which they must differ."""
    launchers: tuple[str, str] = ("torchrun", "rdzvrun")
    rdzvrun_line: str = ""
    """rdzvrun's own line, if it needs another for the same."""
    nodes: int = 1
    stdin: str = ""
    send: Send | None = None
    says: tuple[str, str] | None = None
    """Text that torchrun and rdzvrun must have written to stderr."""
    says_stdout: str = ""
    """The required beginning of a line on stdout under both."""
    whole_stderr: bool = False
    """Compare all of stderr, not only the workers' output."""
    campaign: bool = False
    """It takes long, and shows the same as another case."""

    @property
    def may_be_forked(self) -> bool:
        """Whether launchers that have done their imports before are as good as others.

        Not if the case has variables that the imports may depend on, nor if torchrun runs its
        workers as its own modules, or reports where in its code it has failed; nor if events are
        shown, which name the interpreter, and that is not what the scripts begin with.
        """
        early = {name for name in VARIABLE.findall(self.line) if not name.startswith(READ_LATE)}
        own = "--run-path" in self.line or self.whole_stderr or early
        own = own or "--event-log-handler=console" in self.line
        return self.launchers == ("torchrun", "rdzvrun") and not own


class Launched:
    """A case under one launcher: a launcher process for each node."""

    def __init__(
        self, case: Case, launcher: str, line: str, folder: Path, fork: Start | None = None
    ) -> None:
        self._case = case
        self._launcher = launcher
        self._line = line
        self._folder = folder
        self._fork = fork
        self._port = free_port()
        self._mark = uuid.uuid4().hex
        self._seen = folder / "seen"
        self._seen.mkdir(parents=True)
        self._processes = [self._start(node) for node in range(case.nodes)]

    def _home(self, node: int) -> Path:
        return self._folder / f"n{node}"

    def _start(self, node: int) -> subprocess.Popen[bytes] | Forked:
        home = self._home(node)
        (home / "tmp").mkdir(parents=True)
        for script in SCRIPTS.iterdir():
            if script.is_file():
                shutil.copy(script, home)
            elif script.name == "plugin":
                shutil.copytree(script, home / script.name)
        (home / "stdin").write_text(self._case.stdin)
        words = shlex.split(self._replace(self._line, node))
        given = {}
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            given[name] = value
        environ = dict(clean_environ()) | {
            "TMPDIR": str(home / "tmp"),
            "CONFORMANCE_SEEN": str(self._seen),
            "CONFORMANCE_MARK": self._mark,
            **QUICK_TORCH,
            **given,
        }
        if self._fork is not None:
            return self._fork(words, home, environ)
        launcher = [
            str(BIN / word) if word in PROGRAMS else self._replace(word, node)
            for word in self._launcher.split()
        ]
        with (
            (home / "stdin").open() as stdin,
            (home / "stdout").open("a") as stdout,
            (home / "stderr").open("a") as stderr,
        ):
            return subprocess.Popen(
                [*launcher, *words],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=home,
                env=environ,
            )

    def _replace(self, text: str, node: int) -> str:
        values = {
            "@PORT": str(self._port),
            "@NODE": str(node),
            "@COUNT": str(node + 1),
            "@FIRST": str(node == 0).lower(),
            "@HOME": str(self._home(node)),
            "@PYTHON": sys.executable,
            "@CPU": str(min(os.sched_getaffinity(0))),
            "@EXAMPLES": str(EXAMPLES),
        }
        for name, value in values.items():
            text = text.replace(name, value)
        return text

    # ------------------------------------------------------------------ how it goes

    def poke(self) -> None:
        """Send the signal, if the case has one."""
        send = self._case.send
        if send is None:
            return
        if send.workers:
            self._wait_until(lambda: len([*self._seen.glob("*.json")]) >= send.workers)
        else:
            self._wait_until(lambda: is_listening(self._port))
        for process in self._processes:
            process.send_signal(send.signum)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        since_s = time.monotonic()
        while not condition():
            ended = [process.poll() for process in self._processes]
            assert None in ended, f"{self._launcher} has ended ({ended}):\n{self.stderr}"
            waited_s = time.monotonic() - since_s
            assert waited_s < DEADLINE_S, f"{self._launcher} hangs:\n{self.stderr}"
            time.sleep(pause_s(waited_s))

    def end(self) -> Seen:
        """Wait until it has ended, and return the results."""
        deadline = time.monotonic() + DEADLINE_S
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{self._launcher} does not end:\n{self.stderr}") from None
        return self._tell()

    def remain(self, expected: int) -> int:
        """Wait until this many processes of it are left; return how many are."""
        since_s = time.monotonic()
        while (count := len(self.remaining())) != expected:
            waited_s = time.monotonic() - since_s
            if waited_s > DEADLINE_S:
                break
            time.sleep(pause_s(waited_s))
        return count

    def remaining(self) -> list[int]:
        """Return the processes that are left of it."""
        mark = f"CONFORMANCE_MARK={self._mark}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def kill(self) -> None:
        for pid in self.remaining():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.kill()
            process.wait()

    @property
    def stderr(self) -> str:
        """The stderr of all nodes."""
        texts = [(self._home(node) / "stderr").read_text() for node in range(self._case.nodes)]
        return "\n".join(texts)

    # ------------------------------------------------------------------ what was seen

    def _tell(self) -> Seen:
        seen: Seen = {"exit codes": [as_in_a_shell(p.returncode) for p in self._processes]}
        signals = [json.loads(path.read_text()) for path in sorted(self._seen.glob("*.signal"))]
        seen["signals"] = signals
        seen["stdout"] = self._console("stdout")
        stderr = self._console("stderr")
        # Workers' output contains this word, the launchers' output does not.
        whole = self._case.whole_stderr
        seen["stderr"] = [line for line in stderr if whole or "hello" in line]
        seen["files"] = self._files()
        seen["events"] = [self._mask(event) for event in self._events()]
        workers = [json.loads(path.read_text()) for path in self._seen.glob("*.json")]
        workers.sort(key=lambda worker: (attempt_of(worker), int(worker["env"]["RANK"])))
        seen["workers"] = len(workers)
        for key in workers[0].keys() - {"env", "pid"} if workers else ():
            seen[f"worker's {key}"] = [self._mask(worker[key]) for worker in workers]
        # One that is dropped on the way to the workers is seen, too.
        names = set(clean_environ()).union(*(worker["env"] for worker in workers))
        for name in names - {"CONFORMANCE_MARK"} if workers else ():
            values = [worker["env"].get(name) for worker in workers]
            if set(values) != {clean_environ().get(name)}:  # Else it is as the user's shell has it.
                seen[f"env {name}"] = [self._mask_variable(name, value) for value in values]
        return seen

    def _console(self, stream: str) -> list[str]:
        texts = [(self._home(node) / stream).read_text() for node in range(self._case.nodes)]
        return sorted(self._mask(line) for text in texts for line in text.splitlines())

    def _events(self) -> list[str]:
        """Return torchelastic's events, without the parts that differ each time."""
        lines = [
            line
            for node in range(self._case.nodes)
            for line in (self._home(node) / "stderr").read_text().splitlines()
        ]
        return [event_in(line) for line in lines if EVENT in line]

    def _files(self) -> dict[str, str]:
        """Return the files of all attempts: `attempt_0/1/stdout.log`, `error.json` shortened."""
        found = {}
        for node in range(self._case.nodes):
            own = self._home(node) / "error.json"
            if own.exists():
                found[own.name] = self._mask(error_in(own.read_text()))
            for attempt in self._home(node).rglob("attempt_*"):
                for path in attempt.rglob("*"):
                    if path.is_file():
                        name = str(path.relative_to(attempt.parent))
                        text = path.read_text()
                        is_error = path.name == "error.json"
                        found[name] = self._mask(error_in(text) if is_error else text)
        return found

    def _mask(self, value: Any) -> Any:
        """Remove from a value the parts that differ each time: folders and ports."""
        if isinstance(value, list):
            return [self._mask(part) for part in value]
        if not isinstance(value, str):
            return value
        for node in range(self._case.nodes):
            value = value.replace(str(self._home(node)), "HOME")
        value = value.replace(str(self._folder), "FOLDER").replace(str(self._port), "PORT")
        value = value.replace(sys.prefix, "VENV").replace(str(ROOT), "ROOT")
        # Of a log folder: the launcher invents everything down to the attempt.
        value = re.sub(r"HOME/\S+/(?:round|attempt)_\d+/", "LOGS/", value)
        return re.sub(r"^logs/\S+/(?:round|attempt)_\d+/", "relative LOGS/", value)

    def _mask_variable(self, name: str, value: str | None) -> str | None:
        value = self._mask(value)
        if name == "MASTER_PORT" and value is not None and value.isdecimal():
            return "any"
        if name == "MASTER_ADDR" and value in names_of_this_machine():
            return "this machine"
        if name == "TORCHELASTIC_RUN_ID" and value is not None:
            made_up = r"standalone-[0-9a-f]{8}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
            return re.sub(made_up, "random", value)
        return value


@contextlib.contextmanager
def under_torchrun(case: Case, folder: Path, fork: Start) -> Iterator[Launched]:
    """Start a case under torchrun; leave nothing of it behind."""
    start = fork if case.may_be_forked else None
    theirs = Launched(case, case.launchers[0], case.line, folder / "torchrun", start)
    try:
        yield theirs
    finally:
        theirs.kill()


@contextlib.contextmanager
def under_rdzvrun(case: Case, folder: Path) -> Iterator[Launched]:
    """Start a case under rdzvrun; leave nothing of it behind."""
    start = ready_rdzvrun if case.may_be_forked else None
    line = case.rdzvrun_line or case.line
    ours = Launched(case, case.launchers[1], line, folder / "rdzvrun", start)
    try:
        yield ours
    finally:
        ours.kill()


@contextlib.contextmanager
def ready_launchers(folder: Path) -> Iterator[Start]:
    """Keep both launchers ready to be forked, torchrun from its first use; yield how it is."""
    ready_to_fork_ours()  # Once, before several threads ask for it.
    lock = threading.Lock()
    with contextlib.ExitStack() as stack:

        @functools.cache
        def ready() -> Start:
            return stack.enter_context(ready_torchrun(folder, clean_environ()))

        def start(words: Sequence[str], home: Path, environ: Mapping[str, str]) -> Forked:
            with lock:
                fork = ready()
            return fork(words, home, environ)

        yield start


def ready_rdzvrun(words: Sequence[str], home: Path, environ: Mapping[str, str]) -> Forked:
    """Start rdzvrun as a fork of a process that has done its imports."""
    with streams_in(home) as streams:
        return fork_ours("rdzvrun", words, environ, streams, home)


@functools.cache
def clean_environ() -> Mapping[str, str]:
    """Return this process's environment without the variables that control a launcher.

    Read once, before other threads need it: pytest writes to it at each test.
    """
    steers = ("TORCH", "PET_", "OMP_", "CUDA_", "KMP_", "LOGLEVEL", "PYTEST", "PYTHON", "RDZV_")
    # The path contains only what makes torch quick to import (conftest.py).
    left = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return left | {name: value for name, value in os.environ.items() if not name.startswith(steers)}


def is_listening(port: int) -> bool:
    wanted = f":{port:04X}"
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            if local.endswith(wanted) and state == "0A":
                return True
    return False


@functools.cache
def names_of_this_machine() -> Collection[str]:
    return {"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn()}


EVENT = '{"name": "torchelastic.'


def event_in(line: str) -> str:
    """Return everything about an event except unpredictable numbers and the agent's own errors."""
    handler, _, _ = line.partition(EVENT)
    event = json.loads(line.removeprefix(handler))
    metadata = event["metadata"]
    more = json.loads(metadata["metadata"])
    foreseen = {"run_id": "random", "worker_id": "pid", "duration_ms": 0, "total_run_time": 0}
    if event["source"] == "AGENT":
        foreseen["raw_error"] = "why"
    if more.get("worker_pid", [None]) != [None]:
        more["worker_pid"] = ["pid"]
    for name, value in foreseen.items():
        if metadata[name] is not None:
            metadata[name] = value
    metadata["metadata"] = more
    return handler + json.dumps(event)


def as_in_a_shell(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def attempt_of(worker: Mapping[str, Any]) -> int:
    return int(worker["env"]["TORCHELASTIC_RESTART_COUNT"])


def error_in(text: str) -> str:
    try:
        body = json.loads(text)["message"]
    except ValueError:
        return text
    if not isinstance(body, dict):
        return str(body)
    code = body.get("errorCode")
    return body["message"] if code is None else f"{body['message']} (errorCode {code})"
