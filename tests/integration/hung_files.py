"""A file server that hangs at will, for tests: a FUSE daemon that is stopped."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SERVER = Path(__file__).with_name("runner_scripts") / "fuse_server.py"
_MNT_DETACH = 2


class FileServer:
    """Serves the files below `path`, until it hangs."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        self.path = path
        self._process = process

    def hang(self) -> None:
        """Let everybody wait who asks for a file from now on."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        """Answer all that was asked meanwhile, and what follows."""
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def file_server(path: Path) -> Iterator[FileServer]:
    """Mount such a file system at a folder that is not there yet."""
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("mounting a file system needs root and /dev/fuse")
    path.mkdir()
    command = [sys.executable, "-I", SERVER, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                pytest.skip("no file system can be mounted here")
            yield FileServer(path, process)
        finally:
            process.kill()  # The kernel refuses then what still waits.
            ctypes.CDLL(None).umount2(os.fsencode(path), _MNT_DETACH)
