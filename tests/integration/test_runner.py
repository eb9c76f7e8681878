"""The runner with real processes: what it starts and reports, and that it leaves nothing behind.

Every process of a test carries a mark in its environment, as do all its descendants; a test ends
with a search for the mark in /proc.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from runners import FOR_EVER_MS, PATIENCE_S, RUNNER, STORE_HOST, Node, marked, state_of, until

from rdzv.agent.core.events import (
    Fenced,
    RunnerExited,
    RunnerRefused,
    StartFailed,
    StoreHostExited,
    StoreHostReady,
    WorkerExited,
    WorkersGone,
    WorkersStuck,
    WorkerStarted,
)
from rdzv.agent.runner.channel import MAX_FRAME_BYTES
from rdzv.agent.runner.processes import (
    SWEEP_INTERVAL_S,
    children_of,
    is_of_family,
    mark_of,
)
from rdzv.agent.runner.requests import (
    NotifyWorkers,
    RenewFence,
    StopStoreHost,
    StopWorkers,
    WorkerSpec,
)
from rdzv.agent.runner.system import boottime_ms
from rdzv.agent.runner_link.runner_link import RunnerLink, StartedRunner

SCRIPTS = Path(__file__).with_name("runner_scripts")
# ---------------------------------------------------------------------- tools


@contextmanager
def playing(script: str, *arguments: str | Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Run one of the scripts, with access to its input and output, and kill it in the end."""
    with subprocess.Popen(
        [sys.executable, SCRIPTS / script, *arguments],
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> list[str]:
    """Return the words of the next line that a script prints."""
    assert process.stdout is not None
    return process.stdout.readline().split()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(tmp_path).running() as node:
        yield node
    assert [event for event in node.events if isinstance(event, RunnerExited)] == node.events[-1:]


async def test_a_runner_that_was_started_ahead_is_taken_hold_of(tmp_path: Path) -> None:
    node, started = Node(tmp_path), StartedRunner()
    node.link = started.link(node.hear)
    started.close()
    assert node.link.pid == started.pid
    await node.start(0, node.python("pass"))
    await node.heard(WorkerExited, round=0, exit_code=0)
    await node.link.close(PATIENCE_S)
    assert state_of(started.pid) == ""


async def test_a_runner_that_nobody_takes_hold_of_is_ended() -> None:
    started = StartedRunner()
    started.close()
    started.close()
    assert state_of(started.pid) == ""


# Creates a file when it is ready, then waits for a signal.
READY_AND_WAIT = """
import pathlib, signal, sys
def ready():
    pathlib.Path({path!r}).touch()
    while True:
        signal.pause()
"""


def waiting(path: Path, before: str = "") -> str:
    return READY_AND_WAIT.format(path=str(path)) + before + "\nready()\n"


# ---------------------------------------------------------------------- workers


async def test_exit_codes_and_signals_are_reported(node: Node) -> None:
    pids = await node.start(
        0,
        node.python("pass", 0),
        node.python("raise SystemExit(7)", 1),
        node.python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 2),
    )
    assert await node.heard(WorkerExited, local_rank=0) == WorkerExited(0, 0, pids[0], 0, None, 0)
    assert await node.heard(WorkerExited, local_rank=1) == WorkerExited(0, 1, pids[1], 7, None, 0)
    assert await node.heard(WorkerExited, local_rank=2) == WorkerExited(0, 2, pids[2], None, 11, 0)
    assert not any(isinstance(event, WorkersGone) for event in node.events)
    await node.stop(0)


async def test_an_agent_that_reads_nothing_for_a_while_hears_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that the socket does not accept waits in the runner until it does."""
    pair = socket.socketpair

    def narrow() -> tuple[socket.socket, socket.socket]:
        ours, theirs = pair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # The minimum.
        return ours, theirs

    monkeypatch.setattr(socket, "socketpair", narrow)
    node, started = Node(tmp_path), StartedRunner()
    monkeypatch.undo()
    node.link = started.link(node.hear)
    started.close()
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    ranks = range(30)
    # Each waits until the other end is opened.
    waits = (node.spec("/bin/sh", "-c", f"exec <{gate}", local_rank=rank) for rank in ranks)
    pids = await node.start(0, *waits)
    opened = os.open(gate, os.O_RDWR)
    deadline = time.monotonic() + PATIENCE_S
    # The runner waits for each that has exited; the event loop stands still meanwhile.
    while any(map(state_of, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)  # noqa: ASYNC251
    os.close(opened)
    assert not any(isinstance(event, WorkerExited) for event in node.events)
    for rank in ranks:
        await node.heard(WorkerExited, local_rank=rank, exit_code=0)
    await node.link.close(PATIENCE_S)


async def test_a_handler_has_time_to_save(node: Node) -> None:
    ready, saved = node.folder / "ready", node.folder / "saved"
    handler = f"""
def save(*_):
    with open({str(saved)!r}, "a") as file:
        file.write("saved\\n")
    sys.exit(3)
signal.signal(signal.SIGTERM, save)
"""
    await node.start(0, node.python(waiting(ready, handler)))
    await until(ready.exists)
    await node.stop(0)
    assert saved.read_text() == "saved\n"
    assert (await node.heard(WorkerExited)).exit_code == 3


async def test_workers_that_are_notified_go_on_and_hear_it_once(node: Node) -> None:
    ready, told = node.folder / "ready", node.folder / "told"
    handler = f"""
def tell(*_):
    with open({str(told)!r}, "a") as file:
        file.write("told\\n")
signal.signal(signal.SIGTERM, tell)
"""
    await node.start(0, node.python(waiting(ready, handler)))
    await until(ready.exists)
    node.link.ask(NotifyWorkers(0, signal.SIGTERM))
    await until(told.exists)
    node.link.ask(NotifyWorkers(0, signal.SIGTERM))
    # Nor by a stop: a worker that saves its state is left alone until the grace is over.
    node.link.ask(StopWorkers(0, 100, signal.SIGTERM))
    await node.heard(WorkersGone)
    assert told.read_text() == "told\n"
    assert (await node.heard(WorkerExited)).signal == signal.SIGKILL


ASKS_ITS_CHILD = """
import os, signal, sys
asks, asked = os.pipe()
answers, answered = os.pipe()
if os.fork() == 0:
    os.write(answered, os.read(asks, 1))
    os._exit(0)
os.close(answered)
def save(*_):
    os.write(asked, b"x")
    if os.read(answers, 1):
        open({saved!r}, "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
"""


@pytest.mark.parametrize("how", ["notified", "stopped"])
async def test_a_signal_reaches_the_worker_and_nothing_that_it_has_started(
    node: Node, how: str
) -> None:
    """A worker that saves still needs them, such as the processes of a DataLoader."""
    ready, saved = node.folder / "ready", node.folder / "saved"
    code = ASKS_ITS_CHILD.format(saved=str(saved))
    await node.start(0, node.python(waiting(ready, code)))
    await until(ready.exists)
    if how == "notified":
        node.link.ask(NotifyWorkers(0, signal.SIGTERM))
        await node.heard(WorkerExited)
    await node.stop(0)
    assert saved.exists()


IGNORE_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


async def test_a_worker_that_ignores_the_signal_is_killed_after_the_grace(node: Node) -> None:
    ready = node.folder / "ready"
    await node.start(0, node.python(waiting(ready, IGNORE_SIGTERM)))
    await until(ready.exists)
    asked = time.monotonic()
    await node.stop(0, grace_ms=300)
    assert time.monotonic() - asked >= 0.3
    assert (await node.heard(WorkerExited)).signal == signal.SIGKILL


@pytest.mark.parametrize("graces_ms", [(FOR_EVER_MS, 1_500), (1_500, FOR_EVER_MS)])
async def test_a_second_stop_shortens_the_grace_and_never_lengthens_it(
    node: Node, graces_ms: tuple[int, int]
) -> None:
    """Nor does it send the same signal again: a handler that saves is not entered twice."""
    ready, count = node.folder / "ready", node.folder / "count"
    handler = f"signal.signal(signal.SIGTERM, lambda *_: open({str(count)!r}, 'a').write('x'))"
    await node.start(0, node.python(waiting(ready, handler)))
    await until(ready.exists)
    for grace_ms in graces_ms:
        node.link.ask(StopWorkers(0, grace_ms, signal.SIGTERM))
    await node.heard(WorkersGone, round=0)
    assert count.read_text() == "x"


async def test_descendants_are_left_alone_until_the_stop_and_gone_after_it(node: Node) -> None:
    await node.start(0, node.spec(sys.executable, "-S", SCRIPTS / "tree.py", node.folder, "leave"))
    assert (await node.heard(WorkerExited)).exit_code == 0
    pids = {int((node.folder / name).read_text()) for name in ("child", "session", "daemon")}
    assert set(marked(node.mark)) == pids
    await node.stop(0)
    assert marked(node.mark) == []
    assert not any(map(state_of, pids))


HELPER = """
import os, signal, time
reads, writes = os.pipe()
if os.fork() == 0:
    os.close(writes)
    os.read(reads, 1)  # Until the worker has ended.
    time.sleep(0.1)
    open({flushed!r}, "w").close()
    os._exit(0)
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory({name!r}, create=True, size=1 << 16)
"""


@pytest.mark.parametrize("end", ["os._exit(0)", "os._exit(3)", "os.kill(os.getpid(), 9)"])
async def test_what_a_worker_has_started_may_end_by_itself(node: Node, end: str) -> None:
    """A logger writes what it has, and Python's resource tracker removes files in /dev/shm."""
    flushed, memory = node.folder / "flushed", Path("/dev/shm") / node.mark.partition("=")[2]
    code = HELPER.format(flushed=str(flushed), name=memory.name)
    try:
        await node.start(0, node.python(code + end))
        await node.heard(WorkerExited)
        await node.stop(0)
        assert flushed.exists() and not memory.exists()
    finally:
        memory.unlink(missing_ok=True)


async def test_torch_shm_manager_holds_up_no_round_and_the_runner_waits_for_it(node: Node) -> None:
    """It removes a worker's files in /dev/shm two seconds after the worker has ended."""
    program, gate, done = (node.folder / name for name in ("torch_shm_manager", "gate", "done"))
    shutil.copy("/bin/sh", program)
    os.mkfifo(gate)
    argv = [str(program), "-c", f"read line <{gate}; : >{done}"]
    start = f"import subprocess\nsubprocess.Popen({argv!r}, start_new_session=True).returncode = 0"
    for number, code in enumerate((start, "pass")):
        await node.start(number, node.python(code))
        await node.heard(WorkerExited, round=number)
        await node.stop(number)
    assert len(marked(node.mark)) == 1
    closing = asyncio.create_task(node.link.close(PATIENCE_S))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(closing), 0.3)
    opened = os.open(gate, os.O_RDWR)
    os.write(opened, b"\n")
    await closing
    os.close(opened)
    assert done.exists()


@pytest.mark.parametrize("environ", [{"RDZV_RUNNER": "r7"}, {"RDZV_WORKER_MARK": "4711"}, {}])
async def test_what_a_worker_starts_has_its_mark(node: Node, environ: dict[str, str]) -> None:
    """By the mark it is found in whatever session it is, and nobody reads its memory for that."""
    pid, ready = node.folder / "pid", node.folder / "ready"
    script = f"echo $$ >{pid}; mv {pid} {ready}; exec sleep 1000"
    code = f"import subprocess\nsubprocess.Popen(['sh', '-c', {script!r}], start_new_session=True)"
    worker = node.python(f"{code}.wait()")
    await node.start(0, replace(worker, env={**worker.env, **environ}))
    await until(ready.exists)
    mark = mark_of(int(ready.read_text()))
    assert is_of_family(mark, "r7") is ("RDZV_RUNNER" in environ)
    assert (mark == 4711) is ("RDZV_WORKER_MARK" in environ)
    await node.stop(0, 0)


async def test_orphans_that_exit_are_reaped(node: Node) -> None:
    orphan = node.folder / "orphan"
    write = f"open({str(orphan)!r}, 'w').write(str(os.getpid()))"
    code = f"import os, time\nif os.fork() == 0:\n    {write}\n    os._exit(0)\ntime.sleep(0.05)"
    await node.start(0, node.python(code))
    await node.heard(WorkerExited)
    await until(lambda: children_of(node.link.pid) == [])
    assert state_of(int(orphan.read_text())) == ""
    await node.stop(0)


async def test_two_rounds_one_after_another(node: Node) -> None:
    await node.start(0, node.spec("sleep", "1000"))
    node.link.start_workers(1, [node.spec("sleep", "1000")])
    refused = await node.heard(RunnerRefused)
    assert refused.reason == "round 1 cannot start: 0 is not gone"
    await node.stop(0)
    await node.start(1, node.spec("sleep", "1000"))
    node.events.clear()
    await node.stop(0)
    assert node.events == [WorkersGone(0)]
    await node.stop(1)


async def test_what_can_not_be_reaped_is_reported_once_and_gone_when_it_can(node: Node) -> None:
    """A tracer stands in for a kernel that does not let go of a process."""
    (pid,) = await node.start(0, node.spec("sleep", "1000"))
    with playing("tracer.py", str(pid)) as tracer:
        if line_of(tracer) != ["0"]:
            pytest.skip("ptrace is not permitted here")
        node.link.ask(StopWorkers(0, 0, signal.SIGTERM))
        assert await node.heard(WorkersStuck) == WorkersStuck(0, (pid,))
        await asyncio.sleep(2 * SWEEP_INTERVAL_S)  # Time to repeat itself, or to give up.
        assert [type(event) for event in node.events] == [WorkerStarted, WorkersStuck]
    await node.heard(WorkersGone)
    assert (await node.heard(WorkerExited)).pid == pid


# ---------------------------------------------------------------------- starting


@contextmanager
def hostile_signals() -> Iterator[None]:
    """Ignore one signal and block another, for a process that is started meanwhile."""
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2, signal.SIGCHLD])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2, signal.SIGCHLD])
        signal.signal(signal.SIGUSR1, handler)


async def test_workers_have_default_signals_and_no_other_descriptors(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with hostile_signals():
        node.link = await RunnerLink.spawn(node.hear)
    try:
        await _look_at_a_fresh_process(node, tmp_path)
    finally:
        await node.link.close(PATIENCE_S)
    assert marked(node.mark) == []


async def _look_at_a_fresh_process(node: Node, tmp_path: Path) -> None:
    node.start_store_host(0)
    status, fds = tmp_path / "status", tmp_path / "fds"
    await node.start(
        0,
        replace(node.spec("cat", "/proc/self/status"), stdout=str(status)),
        replace(node.spec("ls", "/proc/self/fd", local_rank=1), stdout=str(fds)),
    )
    await node.heard(WorkerExited, local_rank=0, exit_code=0)
    await node.heard(WorkerExited, local_rank=1, exit_code=0)
    lines = dict(line.split(":\t") for line in status.read_text().splitlines())
    assert int(lines["SigBlk"], 16) == 0
    # The C library keeps two signals for itself, which may be inherited as ignored.
    ours = sum(1 << (signum - 1) for signum in signal.valid_signals())
    assert int(lines["SigIgn"], 16) & ours == 0
    assert fds.read_text().split() == ["0", "1", "2", "3"]  # 3 is that of ls, at its folder.


async def test_a_worker_leads_a_session_and_starts_where_it_was_told(node: Node) -> None:
    out, err = node.folder / "logs" / "0" / "out", node.folder / "logs" / "0" / "err"
    code = """
import os, sys
print(os.getcwd(), os.getsid(0) == os.getpid() == os.getpgid(0), flush=True)
said = os.environb[b"ODD"], os.fsencode(sys.argv[1]), len(os.environb)
print(*map(ascii, said), file=sys.stderr)
"""
    odd = os.fsdecode(b"\xff\xc3\xa4")
    spec = WorkerSpec(
        local_rank=0,
        argv=(sys.executable, "-S", "-c", code, odd),
        env={**node.env, "ODD": odd, "LC_ALL": "C.UTF-8"},
        cwd=str(node.folder),
        stdout=str(out),
        stderr=str(err),
    )
    for number in range(2):
        await node.start(number, spec)
        await node.heard(WorkerExited, round=number, exit_code=0)
        await node.stop(number)
    assert out.read_text() == f"{node.folder} True\n" * 2  # Appended to.
    assert err.read_text() == "b'\\xff\\xc3\\xa4' b'\\xff\\xc3\\xa4' 4\n" * 2


def no_interpreter(node: Node) -> WorkerSpec:
    script = node.folder / "script"
    script.write_text("#!/nonexistent/python\n")
    script.chmod(0o755)
    return node.spec(script)


def windows_lines(node: Node) -> WorkerSpec:
    script = no_interpreter(node).argv[0]
    Path(script).write_bytes(b"#!/bin/sh\r\necho\r\n")
    return node.spec(script)


def log_under_a_file(node: Node) -> WorkerSpec:
    (node.folder / "file").touch()
    return replace(node.spec("true"), stdout=str(node.folder / "file" / "log"))


def log_is_a_pipe_that_nobody_reads(node: Node) -> WorkerSpec:
    os.mkfifo(node.folder / "fifo")
    return replace(node.spec("true"), stderr=str(node.folder / "fifo"))


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda node: node.spec("/nonexistent"), "argv[0] '/nonexistent': No such file"),
        (lambda node: node.spec("/"), "argv[0] '/': Permission denied"),
        (no_interpreter, "the interpreter named in its first line is missing"),
        (windows_lines, "is missing: its name there ends in a carriage return"),
        (
            lambda node: replace(node.spec("true"), cwd="/nonexistent"),
            "cwd '/nonexistent': No such",
        ),
        (log_under_a_file, "stdout '{folder}/file/log': its folder '{folder}/file': File exists"),
        (log_is_a_pipe_that_nobody_reads, "stderr '{folder}/fifo': No such device"),
        (lambda node: node.spec("true", "\0"), "embedded null byte"),
        (lambda node: node.spec("true", *["x" * 100_000] * 180), "is too large"),
    ],
)
async def test_when_one_worker_can_not_start_none_does(
    node: Node, broken: Callable[[Node], WorkerSpec], reason: str
) -> None:
    bad = replace(broken(node), local_rank=1)
    node.link.start_workers(0, [node.spec("sleep", "1000"), bad])
    failed = await node.heard(StartFailed, round=0)
    assert reason.format(folder=node.folder) in failed.reason
    await node.heard(WorkersGone, round=0)
    assert marked(node.mark) == []
    await node.start(1, node.spec("sleep", "1000"))


# ---------------------------------------------------------------------- ends


async def test_nothing_outlives_the_agents_sigkill(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with playing(
        "agent.py", tmp_path, SCRIPTS / "tree.py", tmp_path, "stay", **node.env
    ) as process:
        assert line_of(process)[0] == "up"
        await until((tmp_path / "ready").exists)
        await until((tmp_path / "hosting").exists)
        # The agent, its runner, the worker and three descendants, the store host.
        await until(lambda: len(marked(node.mark)) == 7)
        process.kill()
        await until(lambda: marked(node.mark) == [])


async def test_nothing_outlives_the_runners_sigkill(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with playing(
        "agent.py", tmp_path, SCRIPTS / "tree.py", tmp_path, "stay", **node.env
    ) as process:
        assert line_of(process)[0] == "up"
        await until((tmp_path / "ready").exists)
        await until((tmp_path / "hosting").exists)
        assert process.stdin is not None
        print(file=process.stdin, flush=True)
        assert line_of(process) == ["swept", "-9", "[]"]
        assert set(marked(node.mark)) <= {process.pid}
        assert process.wait(PATIENCE_S) == 0


async def test_the_runner_ignores_signals_that_are_meant_for_workers(node: Node) -> None:
    await node.start(0, node.python("pass"))
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        os.kill(node.link.pid, signum)
    await node.heard(WorkerExited, exit_code=0)
    await node.stop(0)


async def test_a_runner_that_hangs_is_killed_with_its_workers(node: Node) -> None:
    await node.start(0, node.spec("sleep", "1000"))
    os.kill(node.link.pid, signal.SIGSTOP)
    await node.link.close(0.2)
    assert (await node.heard(RunnerExited)).exit_code == -signal.SIGKILL
    await until(lambda: marked(node.mark) == [])
    node.link.ask(StopWorkers(0, 0, signal.SIGTERM))  # Does nothing.


# ---------------------------------------------------------------------- the fence


def fence_in(ms: int) -> int:
    return boottime_ms() + ms


async def test_a_round_that_reaches_the_fence_is_killed_with_all_its_descendants(
    node: Node,
) -> None:
    """Notified before any exit, so that none is taken for a failure; no handler is waited for."""
    await node.start(
        0,
        node.spec(sys.executable, "-S", SCRIPTS / "tree.py", node.folder, "stay"),
        node.python(waiting(node.folder / "deaf", IGNORE_SIGTERM), local_rank=1),
    )
    await until(lambda: (node.folder / "ready").exists() and (node.folder / "deaf").exists())
    at_ms = fence_in(300)
    node.link.ask(RenewFence(at_ms))
    assert (await node.heard(Fenced, round=0)).at_ms >= at_ms
    await node.heard(WorkersGone, round=0)
    assert marked(node.mark) == []
    told = [type(event) for event in node.events if not isinstance(event, WorkerStarted)]
    assert told == [Fenced, WorkerExited, WorkerExited, WorkersGone]
    assert (await node.heard(WorkerExited, local_rank=0)).signal == signal.SIGKILL


async def test_a_fence_that_is_renewed_in_time_kills_nobody(node: Node) -> None:
    node.link.ask(RenewFence(fence_in(3_000)))
    [pid] = await node.start(0, node.spec("sleep", "1000"))
    end_ms = fence_in(4_000)
    while boottime_ms() < end_ms:
        node.link.ask(RenewFence(fence_in(3_000)))
        await asyncio.sleep(0.1)
    assert [type(event) for event in node.events] == [WorkerStarted]
    node.link.ask(RenewFence(fence_in(3_600_000)))
    node.link.ask(RenewFence(fence_in(10)))  # It never moves back.
    await asyncio.sleep(0.1)
    assert state_of(pid) == "S"
    await node.stop(0)


async def test_a_round_that_starts_behind_the_fence_starts_no_worker(node: Node) -> None:
    """A stopped agent receives its round long after the server has given it up."""
    node.link.ask(RenewFence(fence_in(-1)))
    node.link.start_workers(0, [node.spec("sleep", "1000")])
    await node.heard(WorkersGone, round=0)
    assert [type(event) for event in node.events] == [Fenced, WorkersGone]
    node.link.ask(RenewFence(fence_in(3_600_000)))
    await node.start(1, node.spec("sleep", "1000"))


async def test_without_workers_a_fence_has_no_meaning_and_spares_the_store_host(
    node: Node,
) -> None:
    node.start_store_host(0)
    await node.heard(StoreHostReady)
    node.link.ask(RenewFence(fence_in(50)))
    await asyncio.sleep(0.3)
    assert [type(event) for event in node.events] == [StoreHostReady]
    node.link.start_workers(0, [node.spec("sleep", "1000")])
    await node.heard(WorkersGone, round=0)
    assert not any(isinstance(event, StoreHostExited) for event in node.events)


async def test_the_fence_holds_though_the_agent_is_stopped(tmp_path: Path) -> None:
    """The runner enforces it by itself: this is its purpose."""
    node = Node(tmp_path)
    with playing(
        "agent.py", tmp_path, SCRIPTS / "tree.py", tmp_path, "stay", FENCE_MS="3000", **node.env
    ) as process:
        assert line_of(process)[0] == "up"
        process.send_signal(signal.SIGSTOP)
        workers = [pid for pid in marked(node.mark) if is_worker(pid)]
        assert len(workers) == 4
        await until(lambda: state_of(process.pid) == "T")
        await until(lambda: not any(map(state_of, workers)))
        assert state_of(process.pid) == "T"
        process.kill()
        await until(lambda: marked(node.mark) == [])


def is_worker(pid: int) -> bool:
    """Return whether a process is the test's tree, not its agent, runner or store host."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"tree.py" in command and b"agent.py" not in command


# ---------------------------------------------------------------------- the wire


@contextmanager
def bare_runner(stderr: int | None = None, program: Path = RUNNER) -> Iterator[socket.socket]:
    """A runner without a link, and the agent's end of its socket."""
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S)
    with theirs:
        command = [sys.executable, "-I", "-S", program, str(theirs.fileno())]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], start_new_session=True, stderr=stderr
        )
    with ours:
        yield ours
    assert process.wait(PATIENCE_S) == 0


def frame(message: object) -> bytes:
    payload = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">I", len(payload)) + payload


def read_event(sock: socket.socket) -> dict[str, object]:
    (length,) = struct.unpack(">I", sock.recv(4, socket.MSG_WAITALL))
    event: dict[str, object] = json.loads(sock.recv(length, socket.MSG_WAITALL))
    return event


def test_a_runner_whose_files_are_gone_does_not_run_the_script_for_a_zygote(tmp_path: Path) -> None:
    """An upgrade may have moved them: without the hook an interpreter would run the script."""
    shutil.copytree(RUNNER.parent, tmp_path / "runner")
    ran = tmp_path / "ran"
    argv = [sys.executable, "-c", f"open({str(ran)!r}, 'w')"]
    request = {"type": "keep_zygote", "argv": argv, "env": {}, "cwd": None, "modules": ["json"]}
    with bare_runner(program=tmp_path / "runner" / "__main__.py") as agent:
        agent.sendall(frame(request))
        lost = read_event(agent)
    assert lost["type"] == "zygote_lost"
    hook = tmp_path / "job_programs" / "zygote_hook" / "sitecustomize.py"
    assert str(lost["reason"]).endswith(f"file {str(hook)!r}: No such file or directory")
    assert not ran.exists()


STOP = {"type": "stop_workers", "round": 0}


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({}, "type: expected str, got None"),
        ({"type": "dance"}, "there is no request 'dance'"),
        ({**STOP, "grace_ms": "1"}, "grace_ms: expected int, got '1'"),
        ({"type": "start_store_host", "round": 0, "argv": ["x"], "env": {}}, "listening socket"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(request_: object, reason: str) -> None:
    with bare_runner() as sock:
        sock.sendall(frame(request_) + frame({**STOP, "grace_ms": 0}))
        refused = read_event(sock)
        assert refused["type"] == "error"
        assert reason in str(refused["reason"])
        assert read_event(sock) == {"type": "gone", "round": 0}


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (frame(b"{"), "a frame is not JSON"),
        (frame([]), "a frame is not a JSON object"),
        (struct.pack(">I", MAX_FRAME_BYTES + 1), "a frame of 16777217 bytes is too large"),
    ],
)
def test_after_a_malformed_frame_the_agent_is_lost(sent: bytes, reason: str) -> None:
    with bare_runner() as sock:
        sock.sendall(sent)
        assert str(read_event(sock)["reason"]).startswith(reason)
        assert sock.recv(1) == b""


def test_what_crosses_a_shutdown_is_no_error() -> None:
    """An agent confirms what it has heard, and asks again if the end takes long."""
    shutdown, heard = frame({"type": "shutdown"}), frame({"type": "forget_events", "number": 0})
    with bare_runner() as sock:
        sock.sendall(shutdown + heard + shutdown + frame({**STOP, "grace_ms": 0}))
        assert read_event(sock)["reason"] == "the runner is shutting down"
        assert sock.recv(1) == b""


def test_a_descriptor_that_belongs_to_no_request_is_closed() -> None:
    read_end, write_end = os.pipe()
    with bare_runner() as sock, os.fdopen(read_end, "rb") as pipe:
        socket.send_fds(sock, [frame({**STOP, "grace_ms": 0})], [write_end])
        os.close(write_end)
        assert read_event(sock) == {"type": "gone", "round": 0}
        assert pipe.read() == b""


@contextmanager
def nobody_reads() -> Iterator[int]:
    """A stderr whose reader is gone."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    yield write_end
    os.close(write_end)


@contextmanager
def full() -> Iterator[int]:
    """A stderr whose reader has stopped reading."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with suppress(BlockingIOError):
        while os.write(write_end, bytes(4096)):
            pass
    os.set_blocking(write_end, True)
    yield write_end
    os.close(read_end)
    os.close(write_end)


@contextmanager
def dead_console() -> Iterator[int]:
    """A stderr that is a closed terminal."""
    terminal, console = os.openpty()
    os.close(terminal)
    yield console
    os.close(console)


@pytest.mark.parametrize("stderr", [nobody_reads, full, dead_console])
def test_a_stderr_that_takes_nothing_neither_ends_nor_holds_up_the_runner(
    stderr: Callable[[], AbstractContextManager[int]],
) -> None:
    host = {"type": "start_store_host", "argv": ["/nonexistent"], "env": {}}
    with (
        stderr() as fd,
        bare_runner(stderr=fd) as sock,
        socket.create_server(("127.0.0.1", 0)) as listening,
    ):
        for number in range(3):
            socket.send_fds(sock, [frame({**host, "round": number})], [listening.fileno()])
            exited = {"type": "store_host_exited", "round": number, "exit_code": 127}
            assert read_event(sock) == {**exited, "signal": None}


# ---------------------------------------------------------------------- the store host


async def test_a_store_serves_clients_that_were_there_before_it(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            SCRIPTS / "store_client.py",
            str(port),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        listening.setblocking(False)
        async with asyncio.timeout(PATIENCE_S):
            await readable(listening)  # The client is in the backlog.
        node.link.start_store_host(0, listening, sys.executable, node.env)
    assert client.stdin is not None
    assert client.stdout is not None
    await node.heard(StoreHostReady, round=0)
    assert await client.stdout.readline() == b"b'value' [b'1', b'2']\n"

    # It outlives the workers of its round.
    await node.start(0, node.spec("sleep", "1000"))
    await node.stop(0)
    assert len(marked(node.mark)) == 1

    node.link.ask(StopStoreHost(0))
    assert await node.heard(StoreHostExited) == StoreHostExited(0, signal=signal.SIGKILL)
    client.stdin.write(b"\n")
    async with asyncio.timeout(PATIENCE_S):
        said, _ = await client.communicate()
    assert said == b"DistNetworkError\n"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


async def readable(sock: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


async def test_each_round_has_its_own_store_host(node: Node) -> None:
    for number in range(2):
        node.start_store_host(number)
        await node.heard(StoreHostReady, round=number)
    node.start_store_host(1)
    assert (await node.heard(RunnerRefused)).reason == "round 1 has a store host"
    node.link.ask(StopStoreHost(0))
    assert (await node.heard(StoreHostExited)).round == 0
    node.link.ask(StopStoreHost(0))  # Does nothing.


@pytest.mark.parametrize(("python", "exit_code"), [("/bin/false", 1), ("/nonexistent", 127)])
async def test_a_store_host_that_fails_is_reported(node: Node, python: str, exit_code: int) -> None:
    node.start_store_host(0, python)
    assert await node.heard(StoreHostExited) == StoreHostExited(0, exit_code=exit_code)
    assert not any(isinstance(event, StoreHostReady) for event in node.events)


def run_store_host(
    listening: socket.socket, ready_fd: int, *options: str, python: Sequence[str] = (), **env: str
) -> subprocess.Popen[str]:
    fd = listening.fileno()
    command = [sys.executable, *python, str(STORE_HOST), "--fd", str(fd)]
    return subprocess.Popen(
        [*command, "--ready-fd", str(ready_fd), *options],
        pass_fds=[fd, ready_fd],
        env={**os.environ, "RDZV_TEST_PROMPT_STORES": "1", **env},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("option", ["", "--whole-torch"])
@pytest.mark.parametrize("use_libuv", ["0", "1"])
def test_a_store_host_by_itself_on_a_dual_stack_socket(option: str, use_libuv: str) -> None:
    read_end, write_end = os.pipe()
    with (
        os.fdopen(read_end, "rb") as ready,
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listening,
    ):
        options = [option] if option else []
        with run_store_host(listening, write_end, *options, USE_LIBUV=use_libuv) as host:
            os.close(write_end)
            try:
                assert ready.read() == b"ready\n"
                port = listening.getsockname()[1]
                socket.create_connection(("127.0.0.1", port)).close()
            finally:
                host.kill()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("not listening", "ValueError: the socket is not listening"),
        ("other port", "ValueError: the socket has port"),
        ("no torch", "ModuleNotFoundError: No module named 'torch'"),
    ],
)
def test_a_store_host_fails_with_one_clear_line(case: str, reason: str) -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as ready, closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        if case != "not listening":
            sock.listen()
        options = ["--port", "1"] if case == "other port" else []
        python = ["-I", "-S"] if case == "no torch" else []
        with run_store_host(sock, write_end, *options, python=python) as host:
            os.close(write_end)
            _, said = host.communicate(timeout=PATIENCE_S)
        assert ready.read() == b""
    assert host.returncode == 1
    assert said.startswith(f"rdzv store host: {reason}")
    assert said.count("\n") == 1
