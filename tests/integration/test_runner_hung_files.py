"""A file server hangs: the start of a worker that needs it delays neither a stop nor the fence."""

from __future__ import annotations

import select
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
from file_server import FileServer, serving
from runners import PATIENCE_S, RUNNER, Node, marked, state_of, until

from rdzv.agent.core.events import Fenced, WorkerExited, WorkersGone, WorkerStarted, ZygoteReady
from rdzv.agent.runner.channel import Channel
from rdzv.agent.runner.requests import RenewFence, WorkerSpec, ZygoteSpec
from rdzv.agent.runner.system import boottime_ms
from rdzv.agent.runner_link.runner_link import RunnerLink


@pytest.fixture(name="server")
def _server(tmp_path: Path) -> Iterator[FileServer]:
    """A server that has what `NEEDING` needs."""
    with serving(tmp_path / "served") as server:
        shutil.copy("/bin/true", server.path / "program")
        (server.path / "folder").mkdir()
        yield server


@pytest.fixture
async def node(tmp_path: Path, server: FileServer) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    node.link = await RunnerLink.spawn(node.hear)
    yield node
    await node.link.close(PATIENCE_S)
    server.go_on()
    await until(lambda: marked(node.mark) == [])


Needing = Callable[[Node, FileServer], WorkerSpec]


def needing_a_log(node: Node, server: FileServer) -> WorkerSpec:
    log = server.path / "logs" / "0" / "stdout.log"
    return replace(node.spec("echo", "hello", local_rank=1), stdout=str(log))


def needing_a_program(node: Node, server: FileServer) -> WorkerSpec:
    return node.spec(server.path / "program", local_rank=1)


def needing_a_folder(node: Node, server: FileServer) -> WorkerSpec:
    return replace(node.spec("true", local_rank=1), cwd=str(server.path / "folder"))


NEEDING = (needing_a_log, needing_a_program, needing_a_folder)


async def start_beside(node: Node, waiting: WorkerSpec) -> int:
    """Start a worker that waits for the server, and one that runs; return the pid of the second."""
    node.link.start_workers(0, [waiting, node.spec("sleep", "1000")])
    return (await node.heard(WorkerStarted, local_rank=0)).pid


async def fence(node: Node) -> None:
    """Let the fence kill the workers, and not before its time."""
    at_ms = boottime_ms() + 200
    node.link.ask(RenewFence(at_ms))
    assert (await node.heard(Fenced, round=0)).at_ms >= at_ms
    await node.heard(WorkersGone, round=0)


@pytest.mark.parametrize("needing", NEEDING)
async def test_the_fence_kills_workers_that_run_while_another_is_not_started(
    node: Node, server: FileServer, needing: Needing
) -> None:
    server.hang()
    # Its interpreter is not available either; the fence does not depend on it.
    node.start_store_host(0, str(server.path / "program"))
    running = await start_beside(node, needing(node, server))
    await fence(node)
    assert state_of(running) == ""


@pytest.mark.parametrize("needing", NEEDING)
async def test_a_stop_ends_a_worker_that_is_not_started_by_its_signal(
    node: Node, server: FileServer, needing: Needing
) -> None:
    """No grace is waited for: none of the user's code has run."""
    server.hang()
    await start_beside(node, needing(node, server))
    await node.stop(0)


@pytest.mark.parametrize("needing", NEEDING)
async def test_a_worker_is_started_once_its_files_are_there_again(
    node: Node, server: FileServer, needing: Needing
) -> None:
    server.hang()
    node.link.start_workers(0, [needing(node, server), node.spec("true")])
    await node.heard(WorkerExited, local_rank=0, exit_code=0)
    server.go_on()
    await node.heard(WorkerExited, local_rank=1, exit_code=0)
    if needing is needing_a_log:
        assert (server.path / "logs" / "0" / "stdout.log").read_text() == "hello\n"


async def test_a_fork_of_the_zygote_opens_its_log_itself(node: Node, server: FileServer) -> None:
    script = node.folder / "script.py"
    script.write_text("print('hello')")
    argv = (sys.executable, "-u", str(script))
    zygote = ZygoteSpec(argv, node.env, None, ("json",))
    node.link.ask(zygote)
    await node.heard(ZygoteReady)
    server.hang()
    log = str(server.path / "stdout.log")
    warm = replace(node.spec(*argv, local_rank=1), stdout=log, warm=True)
    await start_beside(node, warm)
    await fence(node)


def test_a_start_that_takes_long_is_told_with_what_it_waits_for(
    tmp_path: Path, server: FileServer
) -> None:
    server.hang()
    log = str(server.path / "stdout.log")
    worker = {"local_rank": 3, "argv": ["true"], "env": {}, "stdout": log}
    with impatient_runner() as (agent, stderr):
        agent.send({"type": "start_workers", "round": 7, "workers": [worker]})
        said = stderr.readline()
        again, _, _ = select.select([stderr], [], [], 0.3)
    assert not again, "it is told once"
    assert said.startswith("rdzv: warning: round 7: the worker of local_rank 3 (pid ")
    assert said.endswith(f" has not started after 0.1 s; it is still at: stdout {log!r}\n")


@contextmanager
def impatient_runner() -> Iterator[tuple[Channel, IO[str]]]:
    """A runner that soon finds a start slow, the agent's end of its socket, and its stderr."""
    folder = str(RUNNER.parents[1])
    code = (
        f"import sys; sys.path.append({folder!r}); from runner import child_exits, runner; "
        "child_exits.START_SLOW_S = 0.1; runner.main(int(sys.argv[1]))"
    )
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stderr=subprocess.PIPE,
            text=True,
        )
    with process:
        assert process.stderr is not None
        with closing(Channel(ours)) as agent:
            yield agent, process.stderr
