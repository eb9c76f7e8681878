"""Ports for programs that must be told theirs, and for servers that come back to their own."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import threading
from collections.abc import Iterator

FIRST = 20_000
BLOCKS, BLOCK = 90, 100
"""All are below those that the system gives out by itself, for port 0 and for each connection: so
nobody else gets one while its server is not there, as between two lives of it."""


def _mine() -> Iterator[int]:
    """Yield the ports of a block that no other process has, over and over.

    Several runs of the tests, and those who share the work of one, have blocks of their own. Who
    has a block is known by the name of a socket, which the system forgets when its process ends.
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
    """Return a port that nobody listens on, and that nobody else is given."""
    with _lock:  # Cases run in threads.
        for port in itertools.islice(_ports, BLOCK):
            with contextlib.suppress(OSError), socket.create_server(("", port)):
                return port
    raise AssertionError(f"none of this process's {BLOCK} ports is free")


def free_ports(count: int) -> list[int]:
    """Return several such ports."""
    return [free_port() for _ in range(count)]
