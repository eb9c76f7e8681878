"""Programs with their imports already done: each start is a fork instead of a new interpreter.

Run by path, this is the process that is forked. It listens on a socket: each connection is one
start, requested by a line of JSON with the three standard streams, and answered with the pid and,
after its end, the status. It has one thread and has run nothing of a program, so a fork differs
from an executed program only in code that reads the environment at the start of an interpreter or
at an import, in its command line and environment as shown by /proc, and in the main module from
which multiprocessing starts children. Tests that depend on these do not use it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
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
from typing import TextIO

DEADLINE_S = 60.0
CONSTANTS = "RDZV_TEST_CONSTANTS"
"""In the environment of a start: the constants of our modules that differ, by name, as JSON."""
_NUMBER = struct.Struct("!i")


class Forked:
    """One program, with the part of `subprocess.Popen` that the tests need."""

    stdout: TextIO | None = None
    """Its output, if that is a pipe."""

    def __init__(self, connection: socket.socket, program: str) -> None:
        self._connection = connection
        self._program = program
        connection.settimeout(DEADLINE_S)
        self.pid = self._read()
        self.returncode: int | None = None

    def _read(self) -> int:
        data = self._connection.recv(_NUMBER.size, socket.MSG_WAITALL)
        assert len(data) == _NUMBER.size, f"the {self._program} that is forked has ended"
        return int(_NUMBER.unpack(data)[0])

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self._program, timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(self._read())
            self._connection.close()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Fork = Callable[[Sequence[str], Path, Mapping[str, str], Sequence[int]], Forked]
"""Starts a command in a folder, with an environment, and descriptors of its standard streams."""


@contextlib.contextmanager
def forked_programs(
    folder: Path,
    environ: Mapping[str, str],
    modules: Sequence[str],
    python: str = sys.executable,
) -> Iterator[Fork]:
    """Keep a process ready to be forked, given its imports and the environment for them."""
    path = folder / "socket"
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [python, __file__, str(path), *modules],
            # It ends with this process, whose end of the pipe is then closed.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**environ},
        )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == b"ready\n", (folder / "log").read_text()

        def fork(
            command: Sequence[str], cwd: Path, environ: Mapping[str, str], streams: Sequence[int]
        ) -> Forked:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(path))
            request = {"command": [*command], "cwd": str(cwd), "environ": {**environ}}
            socket.send_fds(connection, [b"\0"], [*streams])
            connection.sendall(json.dumps(request).encode() + b"\n")
            return Forked(connection, command[0])

        yield fork
    finally:
        server.kill()
        server.wait()
        server.stdin.close()
        server.stdout.close()


# ---------------------------------------------------------------------- the process that is forked


def serve(path: str, modules: Sequence[str]) -> str | None:
    """Fork for every connection; return the program, only in the process that is to become it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        for module in modules:
            importlib.import_module(module)
        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
        assert threads == 1, f"it has {threads} threads, and cannot be forked"
        # Otherwise each fork would copy all memory, only to search it for garbage.
        gc.freeze()
        os.write(1, b"ready\n")
        while True:
            if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
                return None
            connection, _ = listener.accept()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not os.fork():
                break
            connection.close()
    with connection:
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        request = json.loads(connection.makefile().readline())
        pid = os.fork()
        if pid:
            for stream in streams:
                os.close(stream)
            connection.sendall(_NUMBER.pack(pid))
            status = os.waitpid(pid, 0)[1]
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(_NUMBER.pack(status))
            os._exit(0)
    return become(**request, streams=streams)


def become(command: list[str], cwd: str, environ: dict[str, str], streams: list[int]) -> str:
    """Give this process the state that it would have after its imports, had it been executed."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    for fd, stream in enumerate(streams):
        os.dup2(stream, fd)
        os.close(stream)
    for path, value in json.loads(os.environ.pop(CONSTANTS, "{}")).items():
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path
        setattr(importlib.import_module(module), name, value)
    random.seed()
    sys.argv[:] = command
    sys.path[0] = str(Path(command[0]).parent)
    more = environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in more if folder and folder not in sys.path]
    return command[0]


def end(status: object) -> None:
    """End as an interpreter does, but without tearing down the imported modules, half of the time.

    A status that is no number is left to the interpreter.
    """
    if status is None or isinstance(status, int):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)


if __name__ == "__main__":
    if (program := serve(sys.argv[1], sys.argv[2:])) is None:
        sys.exit()
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        end(ended.code)
        raise
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        end(1)
    end(0)
