"""The parent's end of `c10d_peer.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Peer:
    """torch's TCPStore in a child process. Created by `running`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, case: str, **how: float) -> dict[str, Any]:
        """Have one case measured; this process does nothing meanwhile.

        Raises:
            RuntimeError: the child has ended; why, it wrote to stderr.

        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"case": case, **how}) + "\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"the peer has ended, with {self._process.wait()}, in case {case}")
        found: dict[str, Any] = json.loads(answer)
        return found

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Peer]:
        """Run the child until the body ends."""
        command = [sys.executable, str(Path(__file__).with_name("c10d_peer.py"))]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                yield cls(process)
            finally:
                process.kill()
