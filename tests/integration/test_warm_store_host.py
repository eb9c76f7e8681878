"""Store hosts forked from the zygote behave like cold ones, or cold ones are started instead."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from runners import PATIENCE_S, STORE_HOST, Node, marked, state_of, until

from rdzv.agent.core.events import (
    RunnerExited,
    RunnerRefused,
    StoreHostExited,
    StoreHostReady,
    WorkersGone,
    WorkerStarted,
    ZygoteLost,
    ZygoteReady,
)
from rdzv.agent.runner.processes import children_of
from rdzv.agent.runner.requests import StopStoreHost, ZygoteSpec
from rdzv.agent.runner.warm_forks import FORK_TIMEOUT_S
from rdzv.agent.runner_link.runner_link import RunnerLink

pytest.importorskip("torch", reason="torch is not installed")


LEAVE_A_TRACE = "trace = open(__file__)\n"
"""A preloaded module that only forks have open."""

CLIENT = """
import sys
from datetime import timedelta
from rdzv.agent.job_programs.store_host import import_store_type
TCPStore = import_store_type(whole_torch=False)
store = TCPStore("127.0.0.1", int(sys.argv[1]), timeout=timedelta(seconds=90))
store.set("key", "value")
print(store.get("key"), store.add("count", 1), flush=True)
sys.stdin.readline()
store.get("key")
"""


class StoreNode(Node):
    """A runner whose zygote leaves a trace in its forks."""

    patience_s = 100.0

    @property
    def said(self) -> Path:
        """Where the runner and all below it write their errors."""
        return self.folder / "said"

    def zygote(self, trace: str = LEAVE_A_TRACE, *modules: str) -> ZygoteSpec:
        """Return a zygote with torch, or with another module, and with that trace."""
        (self.folder / "trace.py").write_text(trace)
        script = self.folder / "script.py"
        script.write_text("import signal\nsignal.pause()\n")
        argv = (sys.executable, "-u", str(script))
        return ZygoteSpec(argv, self.env, None, (*(modules or ("torch",)), "trace"))

    async def keep(self, zygote: ZygoteSpec) -> int:
        self.link.ask(zygote)
        return (await self.heard(ZygoteReady)).pid

    def hosts(self) -> list[int]:
        return [
            pid
            for pid in marked(self.mark)
            if os.fsencode(STORE_HOST) in command_line(pid) and state_of(pid) not in ("", "Z")
        ]

    def is_warm(self, pid: int) -> bool:
        return str(self.folder / "trace.py") in open_on(pid)

    async def serving(self, number: int) -> int:
        """Start a store host; return its pid once it serves."""
        self.start_store_host(number)
        await self.heard(StoreHostReady, round=number)
        [pid] = self.hosts()
        return pid


def command_line(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return []


def open_on(pid: int) -> list[str]:
    """Return the files that the descriptors of a process refer to."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except OSError:
            continue
    return found


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Let programs started meanwhile write their errors there."""
    own = os.dup(2)
    with path.open("w") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)


def looks(pid: int) -> tuple[object, ...]:
    """Return what others see of a process, without the parts that differ each time."""
    process = Path("/proc", str(pid))
    status = (line.split(":\t") for line in (process / "status").read_text().splitlines())
    kept = ("SigBlk", "SigIgn", "SigCgt", "Cpus_allowed", "NoNewPrivs")
    return (
        [word for word in command_line(pid) if not word.isdigit()],
        sorted((process / "environ").read_bytes().split(b"\0")),
        os.getsid(pid) == os.getpgid(pid) == pid,
        [(name, value) for name, value in status if name in kept],
        [(process / "fd" / str(fd)).readlink() for fd in range(3)],
    )


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[StoreNode]:
    node = StoreNode(tmp_path)
    with writing_to(node.said):
        node.link = await RunnerLink.spawn(node.hear)
    yield node
    await node.link.close(PATIENCE_S)
    assert marked(node.mark) == []
    assert [event for event in node.events if isinstance(event, RunnerExited)] == node.events[-1:]


@pytest.mark.parametrize("use_libuv", ["0", "1"])
async def test_it_serves_who_was_there_before_it_and_holds_the_socket_alone(
    node: StoreNode, use_libuv: str
) -> None:
    node.env["USE_LIBUV"] = use_libuv
    await node.keep(node.zygote())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        inode = f"socket:[{os.fstat(listening.fileno()).st_ino}]"
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CLIENT, str(port)),
            env={**os.environ, "USE_LIBUV": use_libuv},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        node.link.start_store_host(0, listening, sys.executable, node.env)
    assert client.stdout is not None
    assert await client.stdout.readline() == b"b'value' 1\n"
    await node.heard(StoreHostReady, round=0)
    [host] = node.hosts()
    assert node.is_warm(host)
    assert [pid for pid in (node.link.pid, *marked(node.mark)) if inode in open_on(pid)] == [host]
    os.kill(host, signal.SIGKILL)
    assert await node.heard(StoreHostExited) == StoreHostExited(0, signal=signal.SIGKILL)
    await client.communicate(b"\n")
    assert client.returncode == 1
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


async def test_it_looks_like_a_cold_one(node: StoreNode) -> None:
    node.env["ODD"] = os.fsdecode(b"\xff\xc3\xa4")
    seen = []
    for number in range(2):
        host = await node.serving(number)
        assert node.is_warm(host) == (number > 0)
        assert host in children_of(node.link.pid)
        seen.append(looks(host))
        node.link.ask(StopStoreHost(number))
        await node.heard(StoreHostExited, round=number, signal=signal.SIGKILL)
        if number == 0:
            await node.keep(node.zygote())
    assert seen[0] == seen[1]


async def test_the_end_of_a_round_spares_it_and_the_runners_end_does_not(node: StoreNode) -> None:
    zygote = node.zygote()
    first = await node.keep(zygote)
    worker = replace(node.spec(*zygote.argv), warm=True)
    # At once, so that both are forked together.
    node.start_store_host(0)
    node.link.start_workers(0, [worker])
    await node.heard(WorkerStarted, round=0)
    await node.heard(StoreHostReady, round=0)
    [host] = node.hosts()
    await node.stop(0)
    assert sorted(marked(node.mark)) == sorted([first, host])
    os.kill(node.link.pid, signal.SIGKILL)
    await node.heard(RunnerExited)
    await until(lambda: marked(node.mark) == [])


async def test_a_round_has_one(node: StoreNode) -> None:
    await node.keep(node.zygote())
    node.start_store_host(3)
    node.start_store_host(3)
    assert (await node.heard(RunnerRefused)).reason == "round 3 has a store host"
    await node.heard(StoreHostReady, round=3)
    node.start_store_host(3)
    await until(lambda: [type(event) for event in node.events].count(RunnerRefused) == 2)
    assert len(node.hosts()) == 1


# ---------------------------------------------------------------------- never worse than cold


async def test_without_torch_in_the_zygote_it_starts_cold(node: StoreNode) -> None:
    await node.keep(node.zygote(LEAVE_A_TRACE, "json"))
    assert not node.is_warm(await node.serving(0))


async def test_with_another_interpreter_it_starts_cold(node: StoreNode) -> None:
    await node.keep(node.zygote())
    other = node.folder / "python"
    other.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    other.chmod(0o755)
    node.start_store_host(0, str(other))
    await node.heard(StoreHostReady)
    [host] = node.hosts()
    assert not node.is_warm(host)


async def test_a_zygote_that_imports_or_is_lost_is_not_waited_for(node: StoreNode) -> None:
    node.link.ask(node.zygote("import time\ntime.sleep(1000)\n", "json"))
    host = await node.serving(0)
    node.link.ask(StopStoreHost(0))
    await node.heard(StoreHostExited, round=0)
    [zygote] = [pid for pid in marked(node.mark) if pid != host]
    os.kill(zygote, signal.SIGKILL)
    await node.heard(ZygoteLost)
    assert not node.is_warm(await node.serving(1))


async def test_a_zygote_that_hangs_is_killed_and_a_cold_one_serves(node: StoreNode) -> None:
    zygote = await node.keep(node.zygote())
    os.kill(zygote, signal.SIGSTOP)
    assert not node.is_warm(await node.serving(7))
    why = f"it has not forked within {FORK_TIMEOUT_S:g} s"
    assert (await node.heard(ZygoteLost)).reason == why
    assert (
        f"rdzv: warning: round 7: its store host will start cold: {why}\n" in node.said.read_text()
    )


BROKEN = {
    "refuses": (
        "def refuse(*_, **__):\n    raise RuntimeError('not here')\n",
        "RuntimeError: not here",
    ),
    "dies": (
        "import os\ndef refuse(*_, **__):\n    os.kill(os.getpid(), 9)\n",
        "its fork died before it ran anything",
    ),
    "hangs": (
        "import time\ndef refuse(*_, **__):\n    time.sleep(1000)\n",
        f"its fork was not ready within {FORK_TIMEOUT_S:g} s",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_fork_that_does_not_serve_is_replaced_by_a_cold_one(
    node: StoreNode, how: str
) -> None:
    code, why = BROKEN[how]
    breaks = "import torch.distributed\ntorch.distributed.TCPStore = refuse\n"
    await node.keep(node.zygote(LEAVE_A_TRACE + code + breaks))
    assert not node.is_warm(await node.serving(0))
    assert [type(event) for event in node.events] == [ZygoteReady, StoreHostReady]
    assert (
        f"rdzv: warning: round 0: its store host will start cold: {why}\n" in node.said.read_text()
    )


async def test_one_that_is_stopped_before_it_is_forked_never_serves(node: StoreNode) -> None:
    zygote = await node.keep(node.zygote())
    os.kill(zygote, signal.SIGSTOP)
    port = node.start_store_host(0)
    node.link.ask(StopStoreHost(0))
    assert await node.heard(StoreHostExited) == StoreHostExited(0, signal=signal.SIGKILL)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    os.kill(zygote, signal.SIGCONT)
    host = await node.serving(1)
    assert node.is_warm(host)
    await until(lambda: sorted(marked(node.mark)) == sorted([zygote, host]))


async def test_a_stop_of_everything_does_not_wait_for_it(node: StoreNode) -> None:
    zygote = await node.keep(node.zygote())
    os.kill(zygote, signal.SIGSTOP)
    node.start_store_host(0)
    node.link.start_workers(0, [node.spec("sleep", "1000")])
    await node.stop(0)
    node.link.kill()
    assert (await node.heard(RunnerExited)).exit_code == 0
    told = [type(event) for event in node.events]
    assert StoreHostReady not in told
    assert WorkersGone in told
