"""A stand-in for the runner, which uses the link's protocol with real workers.

Each round has its own store. Workers are forked from a server that has torch imported. A worker
runs a function of `kept_training`, or of a module that is named before it, with arguments.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tests.support.whole_lines import whole_lines

if TYPE_CHECKING:
    from rdzv.worker.cutting import RoundCut

T = TypeVar("T")

DEADLINE_S = 100.0
_forks = multiprocessing.get_context("forkserver")
# DDP's constructor imports torch's compiler; only some of the functions shard.
_forks.set_forkserver_preload(["kept_training", "torch._dynamo", "torch.distributed.fsdp"])


def _start_fork_server() -> None:
    """Start the server once; its preload reads PYTHONPATH and nothing else of the path here."""
    before = os.environ.get("PYTHONPATH")
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "worker")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def run_worker(
    link: socket.socket | None, env: dict[str, str], out: str, function: str, args: dict[str, Any]
) -> None:
    """Run a function of a module in a forked process, as if the runner had started it."""
    fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.update(env)
    # Otherwise it may have no loader processes.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    if link is not None:
        os.environ["RDZV_WORKER_LINK"] = str(link.detach())
    module, _, name = function.rpartition(".")
    getattr(importlib.import_module(module or "kept_training"), name)(**args)


class FakeLink:
    """A link whose runner says nothing but that rounds are over, and holds no connections."""

    holds_connections = False

    def begin(self, number: int, cut: RoundCut) -> None:
        pass

    def is_over(self) -> bool:
        return True

    def end(self) -> None:
        pass


@dataclass
class Worker:
    """One worker process, the runner's end of its link, and its output."""

    process: BaseProcess
    link: socket.socket
    out: Path
    connections: socket.socket | None = None
    """Where its connections are held, also if it dies."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    _received: bytearray = field(default_factory=bytearray)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, message: dict[str, Any], *fds: int) -> None:
        payload = json.dumps({**message, "fds": len(fds)}).encode()
        socket.send_fds(self.link, [struct.pack(">I", len(payload)) + payload], fds)

    def give_queue(self) -> None:
        """Give the worker a socket for its connections, which are held until `connections` ends."""
        self.connections, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.send({"type": "queue"}, theirs.fileno())

    def expect(self, kind: str, deadline_s: float = DEADLINE_S, **fields: Any) -> dict[str, Any]:
        """Return the next message of a kind with these fields; earlier ones are skipped."""
        end = time.monotonic() + deadline_s
        while True:
            while self.messages:
                message = self.messages.pop(0)
                if message["type"] == kind and fields.items() <= message.items():
                    return message
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.link], [], [], left)[0]:
                raise AssertionError(f"no {kind} {fields} within {deadline_s} s: {self.text()}")
            data = self.link.recv(65536)
            if not data:
                raise AssertionError(f"the worker is gone, without {kind} {fields}: {self.text()}")
            self._received += data
            while len(self._received) >= 4:
                (length,) = struct.unpack_from(">I", self._received)
                if len(self._received) < 4 + length:
                    break
                self.messages.append(json.loads(self._received[4 : 4 + length]))
                del self._received[: 4 + length]

    def text(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    def lines(self, what: str | None = None) -> list[dict[str, Any]]:
        """Return the JSON lines that the worker has printed, optionally of one kind."""
        found = []
        for line in whole_lines(self.text()):
            if line.startswith("{") and line.endswith("}"):
                row = json.loads(line)
                if what is None or row.get("what") == what:
                    found.append(row)
        return found

    def wait_line(self, what: str, deadline_s: float = DEADLINE_S, **fields: Any) -> dict[str, Any]:
        """Wait for a printed line."""

        def printed() -> dict[str, Any] | None:
            rows = (row for row in self.lines(what) if fields.items() <= row.items())
            return next(rows, None)

        return self._wait(printed, f"line {what} {fields}", deadline_s)

    def wait_text(self, text: str) -> None:
        """Wait for any output, which may be of the library."""
        self._wait(lambda: text in self.text() or None, repr(text), DEADLINE_S)

    def _wait(self, look: Callable[[], T | None], what: str, deadline_s: float) -> T:
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if (found := look()) is not None:
                return found
            time.sleep(0.01)
        raise AssertionError(f"no {what} within {deadline_s} s: {self.text()}")

    def exit_code(self, deadline_s: float = DEADLINE_S) -> int | None:
        """Wait for the end of the process."""
        self.process.join(deadline_s)
        assert not self.process.is_alive(), f"runs on after {deadline_s} s: {self.text()}"
        return self.process.exitcode

    def resources(self, before: tuple[int, int, int] | None = None) -> tuple[int, int, int]:
        """Return how many descriptors and threads the process has, and its resident memory.

        If they differ from `before`, look again until the deadline: on a busy machine a descriptor
        of the last round may not be closed yet.
        """
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            status = Path(f"/proc/{self.pid}/status").read_text()
            found = dict(line.split(":", 1) for line in status.splitlines())
            fds = len(list(Path(f"/proc/{self.pid}/fd").iterdir()))
            threads = int(found["Threads"])
            as_before = before is None or (fds, threads) == before[:2]
            if as_before or time.monotonic() > deadline_s:
                return fds, threads, int(found["VmRSS"].split()[0]) << 10
            time.sleep(0.01)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.process.join(DEADLINE_S)


class World:
    """Rounds of workers: which ones take part, with which rank, and on which store."""

    def __init__(self, folder: Path, function: str, **args: Any) -> None:
        self.folder = folder
        self.function = function
        self.args = args
        self.number = -1
        self.holds_connections = False
        self.workers: list[Worker] = []
        """Those of the present round, by rank."""
        self.all: list[Worker] = []
        self._stores: list[Any] = []

    def begin(
        self,
        size: int,
        kept: Sequence[Worker] = (),
        *,
        step: int | None = None,
        source: int | None = None,
        out: Path | None = None,
        **args: Any,
    ) -> list[Worker]:
        """Begin a round: kept workers get the first ranks, new ones are started for the others."""
        import torch.distributed as dist

        self.number += 1
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        self._stores.append(
            dist.TCPStore(
                "127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False
            )
        )
        workers = []
        for rank in range(size):
            env = self._env(rank, size, port)
            if rank < len(kept):
                worker = kept[rank]
                if worker.connections is not None:
                    worker.connections.close()
                    worker.give_queue()
                worker.send(
                    {
                        "type": "go",
                        "round": self.number,
                        "env": env,
                        "source": source,
                        "step": step,
                        "stdout": None if out is None else str(out),
                        "stderr": None if out is None else str(out),
                    },
                )
            else:
                worker = self._start(env, {**self.args, **args})
            workers.append(worker)
        self.workers = workers
        return workers

    def end(self, workers: Sequence[Worker] | None = None) -> list[dict[str, Any]]:
        """Announce that the round is over, and wait until these workers have parked."""
        told = self.workers if workers is None else workers
        for worker in told:
            worker.send({"type": "round_over", "round": self.number})
        return [worker.expect("parked", round=self.number) for worker in told]

    def resumed(self) -> list[dict[str, Any]]:
        """Wait until the function is about to be called on all ranks."""
        return [worker.expect("resumed", round=self.number) for worker in self.workers]

    def notice_file(self, rank: int) -> Path:
        """Return the file whose existence tells a rank to leave."""
        return self.folder / f"notice{rank}"

    def _env(self, rank: int, size: int, port: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "test",
            "RDZV_ROUND": str(self.number),
            "RDZV_NOTICE_FILE": str(self.notice_file(rank)),
        }

    def _start(self, env: dict[str, str], args: dict[str, Any]) -> Worker:
        ours, theirs = socket.socketpair()
        out = self.folder / f"worker{len(self.all)}.log"
        _start_fork_server()
        process = _forks.Process(
            target=run_worker, args=(theirs, env, str(out), self.function, args), daemon=True
        )
        process.start()
        theirs.close()
        worker = Worker(process, ours, out)
        if self.holds_connections:
            worker.give_queue()
        self.all.append(worker)
        return worker

    def close(self) -> None:
        for worker in self.all:
            if worker.process.is_alive():
                os.kill(worker.pid, signal.SIGKILL)
            worker.process.join(DEADLINE_S)
            worker.link.close()
            if worker.connections is not None:
                worker.connections.close()
        self._stores.clear()


@contextmanager
def world(folder: Path, function: str = "train", **args: Any) -> Iterator[World]:
    """Create a world whose workers end with the block."""
    made = World(folder, function, **args)
    try:
        yield made
    finally:
        made.close()
