"""Ports for programs that need a given one, and for servers that return to their own."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

FIRST = 20_000
BLOCKS, BLOCK = 90, 100
"""All are below the ports that the system assigns for port 0 and for connections: so no other
program gets one while its server is down between two starts.
"""


def _mine() -> Iterator[int]:
    """Yield the ports of a block that no other process has, endlessly.

    Concurrent runs of the tests, and the processes of one run, have separate blocks. The owner of a
    block holds a socket whose name the system forgets when the process ends.
    """
    for block in random.sample(range(BLOCKS), BLOCKS):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0rdzv-test-ports-{block}")
        except OSError:
            name.close()
            continue
        name.detach()  # It is never closed.
        first = FIRST + block * BLOCK
        yield from itertools.cycle(range(first, first + BLOCK))
    raise AssertionError(f"other processes have all {BLOCKS} blocks of ports")


_ports = _mine()
_lock = threading.Lock()


def free_port() -> int:
    """Return a port on which nothing listens, and that nothing else is given."""
    with _lock:  # Cases run in threads.
        for port in itertools.islice(_ports, BLOCK):
            with contextlib.suppress(OSError), socket.create_server(("", port)):
                return port
    raise AssertionError(f"none of this process's {BLOCK} ports is free")


def free_ports(count: int) -> list[int]:
    """Return several such ports."""
    return [free_port() for _ in range(count)]


def ports_of(pid: int) -> list[int]:
    """Return the TCP ports at which a process listens."""
    tables = [Path(f"/proc/{pid}/net/{table}") for table in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    ports = {
        f"socket:[{row[9]}]": int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"
    }
    own = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # It has just been closed.
            own.add(str(fd.readlink()))
    return [port for inode, port in ports.items() if inode in own]
