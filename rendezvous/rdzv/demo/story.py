"""The demo, step by step. Each step checks that it has succeeded."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rdzv.demo.programs import DemoProgram, command_of, environment
from rdzv.errors import RendezvousError
from rdzv.version import VERSION

JOB = "demo"
TRAINING = Path(__file__).with_name("training.py")
DEADLINE_S = 300.0
SILENT_S = 1.0
"""The demo prints what it is waiting for after this long without a line."""
REMINDS_S = 5.0
LOOKS_S = 0.05
_EPOCH = re.compile(r"epoch (\d+) \| loss ([\d.]+) \| world_size (\d+)")
_HAS_TORCH = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('torch') else 3)"


class DemoError(RendezvousError):
    """A step of the demo has failed."""


def play(python: str, *, keep: bool) -> None:
    """Run the demo, which trains with the interpreter `python`; raise an error if a step fails.

    With `keep`, its files are kept, and the server and its page stay up until Ctrl-C.
    """
    say = (
        f"rdzv {VERSION}: a training on this machine loses a worker, then a whole node, "
        "and continues"
    )
    print(f"{say}; this takes about half a minute", flush=True)
    check_torch(python)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with _folder(keep) as folder:
        demo = Demo(folder, python)
        try:
            demo.play()
            rows = ("From each event until all workers were training", *demo.costs)
            print("", *rows, "", sep="\n", flush=True)
            demo.say("the demo has passed")
            if keep:
                demo.stay()
        finally:
            demo.stop()


def check_torch(python: str) -> None:
    try:
        done = subprocess.run([python, "-c", _HAS_TORCH], timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or "it has not answered within 30 s"
        raise DemoError(
            f"cannot run the interpreter {python!r}: {why}; name another: --python PATH"
        ) from None
    if done.returncode != 0:
        raise DemoError(
            f"the interpreter {python!r} has no torch, which the demo's training needs; "
            f"install it (`{python} -m pip install torch`), or name an interpreter that "
            "has it: --python PATH"
        )


class Demo:
    """The demo's server and nodes, and the steps that they go through."""

    deadline_s = DEADLINE_S

    def __init__(self, folder: Path, python: str) -> None:
        self.folder = folder
        self.enough = folder / "enough"
        """The file that ends the training: no machine is too slow for the steps before."""
        self.environ = environment(python)
        self.began_s = time.monotonic()
        self.speaks_s = self.began_s
        self.costs: list[str] = []
        """How long it took from each of the demo's deeds until all workers were training."""
        self.deed = ""
        self.nodes: dict[str, DemoProgram] = {}
        self.server: DemoProgram | None = None
        self.endpoint = ""
        self.http = ""

    def play(self) -> None:
        self.start_server()
        for name in ("n1", "n2"):
            self.start_node(name)
        self.say("started two nodes, n1 and n2, with two workers each; the job can run on one")
        self.await_training(4, 0, self.began_s, "the training began")
        self.await_epochs(2)

        victim = next(iter(self.nodes["n2"].workers()), None)
        if victim is None:
            raise DemoError("n2 has no workers")
        killed_s = self.do("a worker is killed", f"SIGKILL to one worker on n2 (pid {victim})")
        os.kill(victim, signal.SIGKILL)
        self.await_training(4, 1, killed_s, "all workers restarted", "one restart is spent")
        self.await_epochs(2)

        text = "SIGKILL to everything on n2: its agent, its runner, its workers"
        killed_s = self.do("a node is killed", text)
        self.nodes.pop("n2").kill_all()
        self.await_training(2, 1, killed_s, "n1 continued without n2", "no restart is spent")
        self.await_epochs(2)

        came_s = self.do("the node is back", "n2 comes back")
        self.start_node("n2")
        self.await_training(4, 1, came_s, "n2 was taken in again", "n1 trained until then")
        self.await_epochs(2)
        self.await_end()

    def start_server(self) -> None:
        command = command_of("rdzv.server", "--listen=127.0.0.1:0", "--http=127.0.0.1:0")
        self.server = self._start("rdzvd", [*command, f"--data-dir={self.folder / 'rdzvd'}"])
        pattern = re.compile(r"ready: listening on ([^,\s]+),.* http on ([^,\s]+)")
        ready = self.await_line(self.server, pattern, "the server to start")
        self.endpoint, self.http = ready[1], f"http://{ready[2]}"
        self.say(f"started the server, rdzvd, on {self.endpoint}")
        self.say(f"watch it live: {self.http}/#/job/{JOB}")

    def start_node(self, name: str) -> None:
        launch = (f"--rdzv-endpoint={self.endpoint}", f"--rdzv-id={JOB}", f"--node-id={name}")
        group = ("--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--tee=3", "--warm")
        logs = f"--log-dir={self.folder / 'logs'}"
        script = (str(TRAINING), f"--snapshot={self.folder / 'snapshot.pt'}")
        length = (f"--until={self.enough}", "--epochs=100000", "--step-seconds=0.05")
        command = command_of("rdzv.agent.run", *launch, *group, logs, *script, *length)
        self.nodes[name] = self._start(name, command)

    def _start(self, name: str, command: Sequence[str]) -> DemoProgram:
        return DemoProgram(name, command, self.environ, self.folder / f"{name}.log")

    def do(self, deed: str, text: str) -> float:
        """Print the next action, which `deed` names, and return the time."""
        self.deed = deed
        self.say(text)
        return time.monotonic()

    def await_training(
        self, world_size: int, restarts: int, since_s: float, what: str, cost: str = ""
    ) -> None:
        pattern = re.compile(rf"rank 0 of {world_size}: (resuming from .*|starting afresh)")
        awaited = f"{world_size} workers to import torch and connect"
        start = self.await_line(self.nodes["n1"], pattern, awaited)[1]
        took_s = time.monotonic() - since_s
        if self.deed:
            self.costs.append(f"  {self.deed:20}{took_s:6.1f} s   {cost}")
        took = f"{what} after {took_s:.1f} s, {start}"
        self.say(f"  {took}; {cost}" if cost else f"  {took}")
        status = self.status()
        why = status["reason"]["headline"]
        seen = (status["state"], status["world_size"], status["restarts"])
        if seen != ("running", world_size, restarts):
            raise DemoError(
                f"expected a running job of {world_size} workers with {restarts} restarts "
                f"spent, but rdzvctl says {seen}: {why}"
            )
        spent = f"restarts {status['restarts']} of {status['max_restarts']}"
        self.say(f"  rdzvctl: {status['state']}, {why}; {spent}")

    def await_epochs(self, count: int) -> None:
        for _ in range(count):
            epoch = self.await_line(self.nodes["n1"], _EPOCH, "the next epoch")
        self.say(f"  epoch {epoch[1]}, loss {epoch[2]}")

    def await_end(self) -> None:
        self.enough.touch()
        for name, node in self.nodes.items():
            self.await_until(node.ended, f"{name} to end with this epoch")
            if node.process.returncode != 0:
                raise DemoError(f"{name} exited with {node.process.returncode}, expected 0")
        n1 = self.nodes["n1"]
        self.await_line(n1, re.compile("training finished"), "the last line of the training")
        losses = [float(epoch[2]) for epoch in _EPOCH.finditer(n1.log.read_text())]
        if not losses[-1] < losses[0] / 2:
            raise DemoError(f"the loss should fall by half, but was {losses[0]}, then {losses[-1]}")
        self.say(f"both nodes exited with 0; the loss fell from {losses[0]} to {losses[-1]}")
        print(f"\n$ rdzvctl explain {JOB}", flush=True)
        self.rdzvctl("explain", JOB, shown=True)
        status = self.status()
        if (status["state"], status["restarts"]) != ("succeeded", 1):
            raise DemoError(f"expected success with 1 restart, but rdzvctl says {status}")

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.rdzvctl("status", JOB, "-o", "json"))
        return answer

    def rdzvctl(self, *args: str, shown: bool = False) -> str:
        """Run rdzvctl; return what it prints, or show it as it would be on this terminal."""
        command = command_of("rdzv.ctl", "--server", self.endpoint, *args)
        to = None if shown else subprocess.PIPE
        done = subprocess.run(
            command, env=self.environ, stdout=to, stderr=to, text=True, timeout=60, check=False
        )
        if done.returncode != 0:
            raise DemoError(f"rdzvctl {args[0]} exited with {done.returncode}: {done.stderr}")
        return done.stdout

    def await_line(
        self, program: DemoProgram, pattern: re.Pattern[str], what: str
    ) -> re.Match[str]:
        while True:
            ended = program.ended()
            if (found := program.next(pattern)) is not None:
                return found
            if ended:
                code = program.process.returncode
                raise DemoError(f"{program.name} exited with {code}; awaited: {what}")
            self.note_wait(what)
            time.sleep(LOOKS_S)

    def await_until(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            self.note_wait(what)
            time.sleep(LOOKS_S)

    def note_wait(self, what: str) -> None:
        """Print what is awaited after a while without output; raise an error after the deadline."""
        now_s = time.monotonic()
        if now_s > self.began_s + self.deadline_s:
            raise DemoError(
                f"still waiting for {what} when the demo's {self.deadline_s:g} s were over"
            )
        if now_s >= self.speaks_s:
            self.say(f"  waiting for {what} ...")
            self.speaks_s = now_s + REMINDS_S

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began_s:5.1f} s] {text}", flush=True)
        self.speaks_s = time.monotonic() + SILENT_S

    def stay(self) -> None:
        over = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: over.set())
        lines = (
            "\nthe server stays up until Ctrl-C:",
            f"  page     {self.http}/#/job/{JOB}",
            f"  API      {self.http}/api/v1/jobs/{JOB}",
            f"  metrics  {self.http}/metrics",
            f"  rdzvctl --server {self.endpoint} status {JOB}",
        )
        print("\n".join(lines), flush=True)
        over.wait()

    def stop(self) -> None:
        for node in self.nodes.values():
            node.process.terminate()
        for node in self.nodes.values():
            node.stop(60)
        if self.server is not None:
            self.server.stop(10)


@contextmanager
def _folder(keep: bool) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rdzv_demo_"))
    try:
        yield path
    except DemoError as error:
        raise DemoError(f"the demo has failed: {error}; all output is in {path}") from None
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    if keep:
        print(f"all output is in {path}")
    else:
        shutil.rmtree(path)
