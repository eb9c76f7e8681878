"""Ports for programs that must be told theirs, and for servers that come back to their own."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
from collections.abc import Iterator

FIRST, LAST = 20_000, 29_000
"""Below those that the system gives out by itself, for port 0 and for each connection that is made:
so nobody else gets one while its server is not there, as between two lives of it."""
SHARES = 16


def _mine() -> Iterator[int]:
    """Yield the share of this process in a random order, so that no port is soon used again.

    Those who share the work of one run have shares of their own: what one has found to be free, and
    not yet taken, is not found by another.
    """
    worker = re.search(r"\d+", os.environ.get("PYTEST_XDIST_WORKER", ""))
    share = int(worker.group()) % SHARES if worker else 0
    while True:
        yield from random.sample(range(FIRST + share, LAST, SHARES), (LAST - FIRST) // SHARES)


_ports = _mine()


def free_port() -> int:
    """Return a port that nobody listens on, and that nobody else is given."""
    for port in _ports:
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise AssertionError("there is always another")


def free_ports(count: int) -> list[int]:
    """Return several such ports."""
    return [free_port() for _ in range(count)]
