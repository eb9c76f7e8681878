"""The whole thing in under two minutes: a training that survives what happens to it.

Starts a rendezvous server and three nodes on this machine, with two workers each, which train a
small model with DistributedDataParallel. Then it kills a worker, kills a whole node, and brings
the node back, and watches the group re-form and the training go on from its snapshot each time.

    python examples/demo.py [--keep]

Exits with 0 only if all of it happened. With --keep the server, its page and its metrics stay up
afterwards, until Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BIN = Path(sys.executable).parent
TRAINING = Path(__file__).with_name("train_ddp.py")
JOB = "demo"
DEADLINE_S = 180.0
"""The demo fails if it has not ended by then."""

EPOCH = re.compile(r"epoch (\d+) \| step (\d+) \| loss ([\d.]+) \| world_size (\d+) \| round (\d+)")
RESUMED = re.compile(r"rank 0 of (\d+): (resuming from .*|starting afresh)")


class DemoError(Exception):
    """Something that was to happen did not."""


@dataclass
class Line:
    """One line that a process has written, and when."""

    at_s: float
    text: str


@dataclass
class Program:
    """One process of the demo and what it has written."""

    name: str
    process: subprocess.Popen[str]
    lines: list[Line] = field(default_factory=list)
    written: threading.Condition = field(default_factory=threading.Condition)

    @classmethod
    def start(cls, name: str, command: list[str], log_dir: Path) -> Program:
        """Start a program in a session of its own; what it writes is kept and logged."""
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        program = cls(name, process)
        threading.Thread(target=program._read, args=(log_dir / f"{name}.log",), daemon=True).start()
        return program

    def _read(self, log: Path) -> None:
        assert self.process.stdout is not None
        with log.open("a") as file:
            for text in self.process.stdout:
                file.write(text)
                file.flush()
                with self.written:
                    self.lines.append(Line(time.monotonic(), text.rstrip("\n")))
                    self.written.notify_all()
        with self.written:
            self.written.notify_all()

    def find(self, pattern: re.Pattern[str], after_s: float = 0.0) -> re.Match[str] | None:
        """Return the first match among the lines written after a time."""
        for line in self.lines:
            if line.at_s > after_s and (match := pattern.search(line.text)):
                return match
        return None


class Demo:
    """The story, step by step; each step checks that it happened."""

    deadline_s = DEADLINE_S

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.began_s = time.monotonic()
        self.nodes: dict[str, Program] = {}
        self.server: Program | None = None
        self.endpoint = ""
        self.http = ""

    # ------------------------------------------------------------------ the story

    def play(self) -> None:
        """Tell and check the whole story."""
        self.start_server()
        for name in ("n1", "n2", "n3"):
            self.start_node(name)
        self.say("started three nodes, n1, n2 and n3, with two workers each; min:max is 2:3")
        self.await_training(world_size=6, restarts=0, after_s=self.began_s, what="training began")
        self.await_epochs(2)

        victim = self.workers("n2")[0]
        self.say(f"SIGKILL to one worker on n2 (pid {victim})")
        killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        self.await_training(6, 1, killed_s, "the group restarted, one restart was spent")
        self.await_epochs(2)

        self.say("SIGKILL to everything on n3: its agent, its runner, its workers")
        killed_s = time.monotonic()
        self.kill_node("n3")
        self.await_training(4, 1, killed_s, "n1 and n2 went on without n3, no restart was spent")
        self.await_epochs(2)

        self.say("n3 comes back")
        came_s = time.monotonic()
        self.start_node("n3")
        self.await_training(6, 1, came_s, "n3 was taken in again, no restart was spent")

        self.await_end()

    def start_server(self) -> None:
        """Start rdzvd on a free port."""
        data_dir = self.directory / "rdzvd"
        command = [str(BIN / "rdzvd"), "--listen", "127.0.0.1:0", "--data-dir", str(data_dir)]
        command += ["--http", "127.0.0.1:0"]
        self.server = Program.start("rdzvd", command, self.directory)
        pattern = re.compile(r"ready: listening on ([^,\s]+),.* http on ([^,\s]+)")
        ready = self.wait_for(self.server, pattern, 0.0)
        self.endpoint, self.http = ready.group(1), f"http://{ready.group(2)}"
        self.say(f"started the rendezvous server, rdzvd, on {self.endpoint}")
        self.say(f"watch it live: {self.http}/#/job/{JOB}")

    def start_node(self, name: str) -> None:
        """Start one node: an agent in the foreground, as a user would."""
        command = [
            str(BIN / "rdzvrun"),
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={JOB}",
            "--nnodes=2:3",
            "--nproc-per-node=2",
            "--max-restarts=3",
            "--tee=3",
            f"--node-id={name}",
            f"--log-dir={self.directory / 'logs'}",
            str(TRAINING),
            f"--snapshot={self.directory / 'snapshot.pt'}",
            "--epochs=36",
            "--samples=1536",
            "--batch-size=16",
            "--step-seconds=0.05",
        ]
        self.nodes[name] = Program.start(name, command, self.directory)

    def kill_node(self, name: str) -> None:
        """Kill a node the hard way: no process of it gets to say anything."""
        agent = self.nodes.pop(name).process
        for pid in [agent.pid, *descendants(agent.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def workers(self, name: str) -> list[int]:
        """Return the pids of a node's workers: they have a RANK, and the runner has none."""
        found = descendants(self.nodes[name].process.pid)
        workers = [pid for pid in found if b"RANK" in environ(pid)]
        if not workers:
            raise DemoError(f"{name} has no workers")
        return workers

    def await_training(self, world_size: int, restarts: int, after_s: float, what: str) -> None:
        """Wait until RANK 0 trains in a group of this size, and check what the server says."""
        rank0 = self.nodes["n1"]
        pattern = re.compile(rf"rank 0 of {world_size}: (resuming from .*|starting afresh)")
        match = self.wait_for(rank0, pattern, after_s)
        took_s = next(x.at_s for x in rank0.lines if x.at_s > after_s and pattern.search(x.text))
        self.say(f"  {what}: {match.group(0)}, after {took_s - after_s:.1f} s")
        status = self.status()
        seen = (status["state"], status["world_size"], status["restarts"])
        if seen != ("running", world_size, restarts):
            raise DemoError(
                f"expected a running job of {world_size} workers with {restarts} restarts spent, "
                f"and rdzvctl says {seen}: {status['reason']}"
            )
        say_reason = f"  rdzvctl: {status['state']}, {status['reason']}"
        self.say(f"{say_reason}; restarts {status['restarts']} of {status['max_restarts']}")

    def await_epochs(self, count: int) -> None:
        """Let the training go on for a while."""
        for _ in range(count):
            match = self.wait_for(self.nodes["n1"], EPOCH, time.monotonic())
        self.say(f"  epoch {match.group(1)}, loss {match.group(3)}")

    def await_end(self) -> None:
        """Wait for the success of every node, and check that the model has learned."""
        for name, node in self.nodes.items():
            self.wait_until(lambda node=node: node.process.poll() is not None, f"{name} to end")
            if node.process.returncode != 0:
                raise DemoError(f"{name} exited with {node.process.returncode}, expected 0")
        done = re.compile(r"training finished: .*loss first ([\d.]+) -> last ([\d.]+)")
        match = self.wait_for(self.nodes["n1"], done, 0.0)
        epochs = [m for x in self.nodes["n1"].lines if (m := EPOCH.search(x.text))]
        first, last = float(epochs[0].group(3)), float(epochs[-1].group(3))
        if not last < first / 2:
            raise DemoError(f"the loss was to fall by half, and went from {first} to {last}")
        self.say(f"all nodes exited with 0; {match.group(0)}")
        self.say("rdzvctl status demo:")
        print(self.rdzvctl("status", JOB), flush=True)
        status = self.status()
        if (status["state"], status["restarts"]) != ("succeeded", 1):
            raise DemoError(f"expected success with 1 restart, and rdzvctl says {status}")

    # ------------------------------------------------------------------ looking and waiting

    def status(self) -> dict[str, object]:
        """Ask the server, as an operator would."""
        answer = json.loads(self.rdzvctl("status", JOB, "-o", "json"))
        assert isinstance(answer, dict)
        return answer

    def rdzvctl(self, *args: str) -> str:
        """Run rdzvctl and return what it says."""
        command = [str(BIN / "rdzvctl"), "--server", self.endpoint, *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def wait_for(self, program: Program, pattern: re.Pattern[str], after_s: float) -> re.Match[str]:
        """Wait until a program writes a line that matches."""
        what = f"{program.name} to write {pattern.pattern!r}"
        with program.written:
            while (match := program.find(pattern, after_s)) is None:
                if program.process.poll() is not None:
                    raise DemoError(
                        f"{program.name} exited with {program.process.returncode}, and was {what}"
                    )
                self.check_deadline(what)
                program.written.wait(timeout=1.0)
        return match

    def wait_until(self, condition: object, what: str) -> None:
        """Wait until something holds."""
        assert callable(condition)
        while not condition():
            self.check_deadline(what)
            time.sleep(0.1)

    def check_deadline(self, what: str) -> None:
        """Fail the demo if it takes too long."""
        if time.monotonic() > self.began_s + self.deadline_s:
            raise DemoError(f"waited for {what} until the demo's {self.deadline_s:g} s were over")

    def say(self, text: str) -> None:
        """Tell what happens."""
        print(f"[{time.monotonic() - self.began_s:5.1f} s] {text}", flush=True)

    # ------------------------------------------------------------------ the end

    def stay(self) -> None:
        """Leave the server up, to be looked at, until Ctrl-C or SIGTERM."""
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        print(
            f"\nthe server stays up until Ctrl-C:\n"
            f"  page     {self.http}/#/job/{JOB}\n"
            f"  API      {self.http}/api/v1/jobs/{JOB}\n"
            f"  metrics  {self.http}/metrics\n"
            f"  rdzvctl  {BIN / 'rdzvctl'} --server {self.endpoint} status {JOB}",
            flush=True,
        )
        stop.wait()

    def stop(self) -> None:
        """End everything that was started, and nothing else."""
        for node in self.nodes.values():
            if node.process.poll() is None:
                node.process.terminate()
        for node in self.nodes.values():
            node.process.wait(timeout=60)
        if self.server is not None and self.server.process.poll() is None:
            self.server.process.terminate()
            self.server.process.wait(timeout=10)


def descendants(pid: int) -> list[int]:
    """Return the pids of all processes below one."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def environ(pid: int) -> dict[bytes, bytes]:
    """Return the environment that a process was started with."""
    with contextlib.suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)
    return {}


@contextlib.contextmanager
def directory(keep: bool) -> Iterator[Path]:
    """Make a folder for the demo's files; it stays if the demo fails, or is asked to keep it."""
    path = Path(tempfile.mkdtemp(prefix="rdzv_demo_"))
    try:
        yield path
    except BaseException:
        print(f"what the programs wrote is in {path}", file=sys.stderr)
        raise
    if keep:
        print(f"what the programs wrote is in {path}")
    else:
        shutil.rmtree(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="A training that survives what happens to it.")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep logs and snapshot, and leave server, page and metrics up until Ctrl-C",
    )
    args = parser.parse_args()
    try:
        with directory(args.keep) as path:
            demo = Demo(path)
            try:
                demo.play()
                took_s = time.monotonic() - demo.began_s
                print(f"demo passed in {took_s:.0f} s", flush=True)
                if args.keep:
                    demo.stay()
            finally:
                demo.stop()
    except DemoError as error:
        sys.exit(f"demo failed: {error}")


if __name__ == "__main__":
    main()
