"""A torchrun that has done its imports: each start is a fork, where another imports torch anew.

Run by path, this is the process that is forked. It listens on a socket: each connection is one
start, asked for by a line of JSON, and answered with the pid and, when it has ended, its status. It
has one thread and nothing of a launcher has run in it, so a fork differs from a torchrun that was
executed in what reads the environment at the start of an interpreter or of torch, and in that
multiprocessing starts its children from another main module. Who depends on that does without.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

TORCHRUN = Path(sys.executable).with_name("torchrun")
DEADLINE_S = 60.0
_NUMBER = struct.Struct("!i")


class Forked:
    """One torchrun, with so much of `subprocess.Popen` as the tests need."""

    def __init__(self, connection: socket.socket, request: Mapping[str, object]) -> None:
        self._connection = connection
        connection.settimeout(DEADLINE_S)
        connection.sendall(json.dumps(request).encode() + b"\n")
        self.pid = self._read()
        self.returncode: int | None = None

    def _read(self) -> int:
        data = self._connection.recv(_NUMBER.size, socket.MSG_WAITALL)
        assert len(data) == _NUMBER.size, "the torchrun that is forked has ended"
        return int(_NUMBER.unpack(data)[0])

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("torchrun", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(self._read())
            self._connection.close()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Start = Callable[[Sequence[str], Path, Mapping[str, str]], Forked]
"""Starts torchrun with these words, in this folder, where the files stdin, stdout and stderr are
for it, and with this environment."""


@contextlib.contextmanager
def ready_torchrun(folder: Path, environ: Mapping[str, str]) -> Iterator[Start]:
    """Have a process ready to be forked, with the environment that matters at its start."""
    path = folder / "socket"
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [interpreter(), __file__, str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            # Without it numpy has as many threads as there are CPUs once it is imported.
            env={**environ, "OPENBLAS_NUM_THREADS": "1"},
        )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n", (folder / "log").read_text()

        def start(words: Sequence[str], home: Path, environ: Mapping[str, str]) -> Forked:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(path))
            return Forked(
                connection, {"words": [*words], "home": str(home), "environ": {**environ}}
            )

        yield start
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()


def interpreter() -> str:
    """Return the Python that torchrun is executed with, by the name that it gives to workers."""
    first_line = TORCHRUN.read_text().partition("\n")[0]
    named = first_line.removeprefix("#!")
    return named if Path(named).name.startswith("python") else sys.executable


# ---------------------------------------------------------------------- the process that is forked


def serve(path: str) -> None:
    """Fork for every connection; return, in the process that has become torchrun alone."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        import torch.distributed.run  # noqa: F401

        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
        assert threads == 1, f"it has {threads} threads, and cannot be forked"
        # Else each fork would copy all of it, only to look for what is not used any more.
        gc.freeze()
        os.write(1, b"ready\n")
        while True:
            connection, _ = listener.accept()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not os.fork():
                break
            connection.close()
    with connection:
        request = json.loads(connection.makefile().readline())
        pid = os.fork()
        if pid:
            connection.sendall(_NUMBER.pack(pid))
            status = os.waitpid(pid, 0)[1]
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(_NUMBER.pack(status))
            os._exit(0)
    become_torchrun(**request)


def become_torchrun(words: list[str], home: str, environ: dict[str, str]) -> None:
    """Make this process what it would be after its imports, had it been executed."""
    os.chdir(home)
    os.environ.clear()
    os.environ.update(environ)
    for fd, name, how in (
        (0, "stdin", os.O_RDONLY),
        (1, "stdout", os.O_WRONLY | os.O_APPEND),
        (2, "stderr", os.O_WRONLY | os.O_APPEND),
    ):
        opened = os.open(name, how | os.O_CREAT, 0o666)
        os.dup2(opened, fd)
        os.close(opened)
    random.seed()
    sys.argv[:] = [str(TORCHRUN), *words]
    sys.path[0] = str(TORCHRUN.parent)


def end(status: object) -> None:
    """End as an interpreter does, but for taking apart all that was imported, which is half of it.

    What is no number is left to the interpreter.
    """
    if status is None or isinstance(status, int):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)


if __name__ == "__main__":
    serve(sys.argv[1])
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        end(ended.code)
        raise
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        end(1)
    end(0)
