"""A server and nodes on this machine, as real processes, for the integration tests."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forked_programs import Fork, Forked, forked_programs
from ports import free_port
from waiting import pause_s

from rdzv.client import ControlClient, parse_endpoints
from rdzv.demo.programs import descendants
from rdzv.errors import RendezvousError
from rdzv.transport.channels import PLAIN
from rdzv.view.answers import JobStatus

if TYPE_CHECKING:
    from ready_torchrun import Start

BIN = Path(sys.executable).parent
WORKERS = Path(__file__).with_name("workers")
QUICK_TORCH = {"RDZV_TEST_NO_COMPILER": str(WORKERS / "no_compiler.py")}
"""For workers with optimizers or DDP, which import torch's compiler though they compile nothing."""
FORK_ALL = {"RDZV_WARM_WAIT": "60"}
"""With `--warm`: the first workers are forked, too, so that torch is imported once for all."""
DEADLINE_S = 100.0
JOB = "job"
_MODULES = (
    *("rdzv.agent.run", "rdzv.agent.__main__", "rdzv.agent.job.job_driver", "rdzv.agent.node.node"),
    *("rdzv.server.__main__", "rdzv.server.driver", "rdzv.server.replication.replica"),
    *("rdzv.server.rpc.grpc_listener", "rdzv.server.http.listener", "rdzv.stores.sqlite"),
    *("rdzv.c10d.facade", "rdzv.ctl.__main__", "rdzv.client", "rdzv.ctl.as_text"),
    "rdzv.view.as_json",
)
"""The programs' imports at their start and soon after, which are most of a start's cost."""


@functools.cache
def ready() -> Fork:
    """Keep our programs ready to be forked until this process ends."""
    opened = contextlib.ExitStack()
    atexit.register(opened.close)
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
    # As the programs do at the start of an interpreter and when gRPC is imported.
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "GRPC_VERBOSITY": "NONE"}
    return opened.enter_context(forked_programs(folder, environ, _MODULES))


def fork(
    program: str,
    args: Sequence[str],
    environ: Mapping[str, str],
    streams: Sequence[int],
    cwd: Path | None = None,
) -> Forked:
    """Start one of our programs, with descriptors of its standard streams.

    It is forked, but otherwise as if it had been executed; see `forked_programs` for the
    difference.
    """
    return ready()([str(BIN / program), *args], cwd or Path.cwd(), environ, streams)


def fork_rdzvd(args: Sequence[str], environ: Mapping[str, str], log: Path) -> Forked:
    """Start a rdzvd that appends to a log, and whose output stays available."""
    reads, writes = os.pipe()
    with log.open("a") as stderr:
        server = fork("rdzvd", args, environ, (0, writes, stderr.fileno()))
    os.close(writes)
    server.stdout = os.fdopen(reads)
    return server


def run_forked(
    program: str,
    args: Sequence[str],
    environ: Mapping[str, str],
    cwd: Path | None = None,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run one of our programs to its end."""
    with contextlib.ExitStack() as stack:
        given, out, err = (
            stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", newline=""))
            for _ in range(3)
        )
        given.write(stdin)
        given.seek(0)
        streams = [file.fileno() for file in (given, out, err)]
        process = fork(program, args, environ, streams, cwd)
        try:
            code = process.wait(DEADLINE_S)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([program, *args], code, out.read(), err.read())


class Node:
    """One rdzvrun, and what its workers have reported."""

    def __init__(self, name: str, process: subprocess.Popen[str] | Forked, output: Path) -> None:
        self.name = name
        self.process = process
        self.output = output

    @property
    def text(self) -> str:
        """Its output so far."""
        return self.output.read_text()

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """Return its exit code; on a timeout, show its output."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end; it wrote:\n{self.text}") from None

    def descendants(self) -> list[int]:
        return descendants(self.process.pid)

    def workers(self) -> list[int]:
        """Return the pids of its workers: the processes with a RANK."""
        return [pid for pid in self.descendants() if "RANK" in environ(pid)]

    def kill_tree(self) -> None:
        """SIGKILL the agent and all below it, as when the machine dies."""
        for pid in [self.process.pid, *self.descendants()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Cluster:
    """A server, its nodes, and the folder that they use."""

    def __init__(self, folder: Path, *server_options: str) -> None:
        self.folder = folder
        self.server_options = server_options
        self.reports = folder / "reports"
        self.reports.mkdir()
        self.finish_file = folder / "finish"
        self.mark = uuid.uuid4().hex
        self.nodes: list[Node] = []
        self.server: subprocess.Popen[str] | Forked | None = None
        self.endpoint = ""
        self.credentials = PLAIN
        """The credentials that the test itself connects with."""

    # ------------------------------------------------------------------ processes

    def start_server(
        self, *options: str, listen: str = "", environ: Mapping[str, str] | None = None
    ) -> None:
        """Start rdzvd on a free port, or again on its previous port and data."""
        args = ["--data-dir", str(self.folder / "data")]
        args += ["--listen", listen or self.endpoint or f"127.0.0.1:{free_port()}"]
        args += [*self.server_options, *options]
        self.server = self.start_rdzvd(*args, environ=environ)
        self._wait_until_ready()

    def start_rdzvd(self, *args: str, environ: Mapping[str, str] | None = None) -> Forked:
        """Start a rdzvd whose output stays available."""
        environ = {**self.environ(), **(environ or {})}
        return fork_rdzvd(args, environ, self.folder / "rdzvd.log")

    def start_server_by(self, command: list[str]) -> None:
        """Start rdzvd with the caller's command, and wait until it is ready."""
        with (self.folder / "rdzvd.log").open("a") as log:
            self.server = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=self.environ()
            )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        assert self.server is not None
        assert self.server.stdout is not None
        ready = self.server.stdout.readline()
        assert ready.startswith("rdzvd ready: listening on "), self.server_log
        self.endpoint = ready.split()[4].rstrip(",")

    @property
    def server_log(self) -> str:
        return (self.folder / "rdzvd.log").read_text()

    def wait_for_log(self, text: str) -> None:
        """Wait until the server has logged something."""
        self.wait_until(f"rdzvd logs {text!r}", lambda: text in self.server_log)

    def kill_server(self) -> None:
        assert self.server is not None
        self.server.kill()
        self.server.wait()
        assert self.server.stdout is not None
        self.server.stdout.close()

    def start_node(
        self,
        name: str,
        *options: str,
        worker: str = "report.py",
        args: tuple[str, ...] = (),
        nnodes: str = "2:3",
        nproc: int = 1,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Node:
        """Start one rdzvrun of the job."""
        words = [
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={JOB}",
            f"--nnodes={nnodes}",
            f"--nproc-per-node={nproc}",
            f"--node-id={name}",
            f"--log-dir={self.folder / 'logs'}",
            *options,
            str(WORKERS / worker),
            *args,
        ]
        return self.start_program(name, "rdzvrun", *words, environ=environ, cwd=cwd)

    def start_program(
        self,
        name: str,
        program: str,
        *args: str,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Node:
        """Start one of our programs as a node."""
        output = self.folder / f"{name}-{len(self.nodes)}.log"
        with output.open("w") as log:
            streams = (0, log.fileno(), log.fileno())
            process = fork(program, args, {**self.environ(), **(environ or {})}, streams, cwd)
        self.nodes.append(Node(name, process, output))
        return self.nodes[-1]

    def start(
        self,
        name: str,
        command: list[str],
        *,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Node:
        """Execute a command as a node."""
        output = self.folder / f"{name}-{len(self.nodes)}.log"
        with output.open("w") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env={**self.environ(), **(environ or {})},
                cwd=cwd,
            )
        node = Node(name, process, output)
        self.nodes.append(node)
        return node

    def start_torchrun(
        self, ready: Start, name: str, *words: str, environ: Mapping[str, str] | None = None
    ) -> Node:
        """Start a torchrun that has done its imports as a node, in its own folder."""
        home = self.folder / f"{name}-{len(self.nodes)}"
        home.mkdir()
        (home / "stdout").symlink_to("stderr")
        process = ready(words, home, {**self.environ(), **(environ or {})})
        node = Node(name, process, home / "stderr")
        self.nodes.append(node)
        return node

    def run(
        self,
        program: str,
        *args: str,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run one of our programs to its end."""
        environ = {**self.environ(), **(environ or {})}
        return run_forked(program, args, environ, cwd or self.folder, stdin)

    def environ(self) -> dict[str, str]:
        """Return the environment of everything that is started here."""
        return {
            **os.environ,
            "RDZV_TEST_MARK": self.mark,
            "RDZV_TEST_REPORTS": str(self.reports),
            "RDZV_TEST_FINISH": str(self.finish_file),
            "PYTHONUNBUFFERED": "1",
        }

    def marked(self) -> list[int]:
        """Return every process that carries this cluster's mark, whoever its parent is."""
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        return [pid for pid in pids if environ(pid).get("RDZV_TEST_MARK") == self.mark]

    def kill_adopted(self) -> None:
        """Kill all but the server: adopted runners are no descendants of an agent."""
        for pid in self.marked():
            if self.server is None or pid != self.server.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # ------------------------------------------------------------------ looking and waiting

    def status(self) -> JobStatus:
        """Ask the server for the job's status."""
        with self.client() as client:
            return client.status(JOB)

    def client(self) -> ControlClient:
        return ControlClient(parse_endpoints(self.endpoint), credentials=self.credentials)

    def wait_until(self, what: str, holds: Callable[[], Any], timeout_s: float = DEADLINE_S) -> Any:
        """Wait until a condition holds, and return its result."""
        since_s = time.monotonic()
        while True:
            found = holds()
            if found:
                return found
            waited_s = time.monotonic() - since_s
            if waited_s > timeout_s:
                raise AssertionError(f"waited {timeout_s:g} s until {what}\n{self.describe()}")
            time.sleep(pause_s(waited_s))

    def describe(self) -> str:
        """Show all output, for a test that failed."""
        parts = [f"--- rdzvd\n{self.server_log}"] if self.server else []
        parts += [f"--- {node.name}\n{node.text}" for node in self.nodes]
        return "\n".join(parts)

    def wait_for_text(self, node: Node, text: str) -> None:
        """Wait until a node has written something.

        The server may know it earlier: the line is written beside the message.
        """
        self.wait_until(f"{node.name} writes {text!r}", lambda: text in node.text)

    def wait_for_event(self, name: str, text: str = "") -> None:
        """Wait until something has happened to the job, even if it is over by now."""

        def happened() -> bool:
            with ControlClient(parse_endpoints(self.endpoint)) as client:
                events = client.events(JOB)
            return any(event.name == name and text in event.text for event in events)

        self.wait_until(f"there is an event {name} {text!r}", happened)

    def wait_for_round(self, number: int, *, workers: int) -> list[dict[str, Any]]:
        """Wait until all workers of a round have reported; return their reports by RANK."""

        def complete() -> list[dict[str, Any]]:
            found = [r for r in self.all_reports() if r["RDZV_ROUND"] == str(number)]
            return found if len(found) >= workers else []

        found = self.wait_until(f"round {number} has {workers} workers", complete)
        assert len(found) == workers, found
        return sorted(found, key=lambda report: int(report["RANK"]))

    def all_reports(self) -> list[dict[str, Any]]:
        """Read the report that each worker writes at its start."""
        found = []
        for path in self.reports.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                found.append(json.loads(path.read_text()))
        return found

    def wait_for_state(self, state: str, timeout_s: float = DEADLINE_S) -> JobStatus:
        def reached() -> JobStatus | None:
            with contextlib.suppress(RendezvousError):
                status = self.status()
                return status if status.state == state else None
            return None

        status = self.wait_until(f"the job is {state}", reached, timeout_s)
        assert isinstance(status, JobStatus)
        return status

    def finish(self) -> None:
        """Let the workers end successfully."""
        self.finish_file.touch()

    # ------------------------------------------------------------------ the end

    def stop(self) -> None:
        """End everything, and check that nothing is left."""
        for node in self.nodes:
            if node.process.poll() is None:
                node.kill_tree()
        if self.server is not None and self.server.poll() is None:
            self.server.terminate()
            self.server.wait(DEADLINE_S)
        if self.server is not None and self.server.stdout is not None:
            self.server.stdout.close()
        self.wait_until("no process is left", lambda: not self.marked())


@contextlib.contextmanager
def cluster(folder: Path, *server_options: str) -> Iterator[Cluster]:
    """Run a cluster until the body ends; its output is shown if the test fails."""
    with cluster_without_server(folder, *server_options) as made:
        made.start_server()
        yield made


@contextlib.contextmanager
def cluster_without_server(folder: Path, *server_options: str) -> Iterator[Cluster]:
    """The same, but the caller starts the server."""
    made = Cluster(folder, *server_options)
    try:
        yield made
    except BaseException:
        print(made.describe())
        raise
    finally:
        made.stop()


def environ(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it is gone."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)
    return {}


def alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
