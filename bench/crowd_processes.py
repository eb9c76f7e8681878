"""All simulated nodes of a job, in several processes with open files of their own (crowd.py)."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from processes import Asked

CROWDS = 4
"""The most processes that the nodes are in."""
ANSWER_S = 20.0
"""How much longer than for its act to wait for the answer of a part of the crowd."""
TRAFFIC = ("up", "down", "up_bytes", "down_bytes", "tries")
FILES_OF_A_PROCESS = 200
"""Its open files beside those of nodes."""
NICENESS = "10"
"""Nodes have machines of their own: here, they leave the CPUs to the servers and to etcd."""

HERE = Path(__file__).parent


class Crowd:
    """All nodes of one job. Created by `running`."""

    def __init__(self, parts: Sequence[Asked], nodes: int, timeout_s: float) -> None:
        self._parts = parts
        self._nodes = nodes
        self._timeout_s = timeout_s

    @classmethod
    @contextlib.contextmanager
    def running(cls, nodes: int, timeout_s: float) -> Iterator[Crowd]:
        """Start the processes, and end them with the body; each act may take `timeout_s`."""
        # Otherwise gRPC logs the end of each connection to a server that is killed.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        arguments = HERE / "crowd.py", str(timeout_s), NICENESS
        with contextlib.ExitStack() as stack:
            # Each has two nodes at least, so one is left where one is lost.
            count = min(CROWDS, max(nodes // 2, 1))
            parts = [stack.enter_context(Asked.running(*arguments)) for _ in range(count)]
            yield cls(parts, nodes, timeout_s)

    def gather(self, servers: Sequence[str], tls: str) -> dict[str, Any]:
        """Let all nodes but the last one join."""
        count = len(self._parts)
        ends = [self._nodes * (part + 1) // count for part in range(count)]
        shares = zip([0, *ends], ends, strict=False)
        for part, numbers in zip(self._parts, shares, strict=False):
            part.tell(act="gather", nodes=self._nodes, numbers=numbers, endpoints=servers, tls=tls)
        return self.answer()

    def ask(self, act: str, **how: object) -> dict[str, Any]:
        """Let all parts do something at once; return their answers as one."""
        self.tell(act, **how)
        return self.answer()

    def tell(self, act: str, **how: object) -> None:
        """Let all parts begin something; `answer` returns what came of it."""
        for part in self._parts:
            part.tell(act=act, **how)

    def answer(self) -> dict[str, Any]:
        """Wait until all parts have done what they were told; return their answers as one.

        Raises:
            TimeoutError: one of them did not in time.
            RuntimeError: one of them has ended.

        """
        answers = [part.answer(self._timeout_s + ANSWER_S) for part in self._parts]
        together: dict[str, Any] = {
            "cpu_s": sum(answer["cpu_s"] for answer in answers),
            "traffic": {k: sum(answer["traffic"][k] for answer in answers) for k in TRAFFIC},
            "disturbed": sum(answer.get("disturbed", 0) for answer in answers),
            "answer_s": max(answer.get("answer_s", 0) for answer in answers),
        }
        if "last_s" in answers[0]:
            began_s = min(answer["began_s"] for answer in answers)
            together["last_s"] = max(answer["last_s"] for answer in answers)
            together["took_s"] = together["last_s"] - began_s
        return together


def most_files() -> int:
    """Let each process open as many files as allowed; return how many of them nodes may use."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard - FILES_OF_A_PROCESS
