"""Prints the CPU time that torch's record of collectives costs a process, in one line.

    python bench/hangs_cost.py [--server]

All-reduces in a group of one, so that nothing waits. With `--server` torch's worker server runs as
well, and is asked for the record of its 2,000 entries.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

BATCHES, REDUCES, ASKED = 30, 1_000, 20
REQUEST = (
    b"POST /handler/fr_trace_json HTTP/1.1\r\nHost: x\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)


def cpu_s(call: Callable[[], object], times: int) -> float:
    """Return the CPU time of this process for one call, all threads together."""
    begun = time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)
    for _ in range(times):
        call()
    return (time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID) - begun) / times


def ask(path: Path) -> int:
    """Return the size of the worker server's record."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        sock.sendall(REQUEST)
        size = 0
        while part := sock.recv(1 << 20):
            size += len(part)
        return size


def main() -> None:
    """Measure, and print."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "collectives"
        if "--server" in sys.argv:
            from torch._C._distributed_c10d import _WorkerServer

            # Never shut down: that waits for its threads.
            server = _WorkerServer(str(path))
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        tensor = torch.ones(256)
        cpu_s(lambda: dist.all_reduce(tensor), 3 * REDUCES)
        batches = [cpu_s(lambda: dist.all_reduce(tensor), REDUCES) * 1e6 for _ in range(BATCHES)]
        said = f"{statistics.median(batches):.1f} us an all-reduce, {min(batches):.1f} at best"
        if "--server" in sys.argv:
            each = cpu_s(lambda: ask(path), ASKED) * 1e3
            threads = len(list(Path("/proc/self/task").iterdir()))
            said += f"; {each:.0f} ms an answer of {ask(path):,} bytes; {threads} threads"
            assert server is not None
        print(said, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
