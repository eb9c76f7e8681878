"""Copies of snapshots that are killed at random moments: `killed_copies.py COUNT [SEED]`.

A writer saves step after step into two slots, without regard for who copies them; a sender serves
them. A child fetches the newest into memory that holds an older copy, and gets SIGKILL. What is
left must be a copy that is whole, or none.

Prints how many kills came during a copy.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NoReturn

import torch
from killed_writers import content_of, kill_after_begin, look_at, write_for_ever

from rdzv.agent.job_programs import snapshot_carrier as carrier
from rdzv.worker.snapshot_slot import Slot, bytes_needed

MOST_WAIT_S = 30
PIECE_BYTES = 16 << 10
"""Small, so that many pieces make a copy."""


def serve(fds: list[int], size: int, listening: socket.socket) -> None:
    """Send for ever."""
    sender = carrier.Sender(carrier.TokenBucket(0))
    sender.token = "secret"
    sender.slots[0] = [carrier.Memory(os.dup(fd), size) for fd in fds]
    sender.accept(listening)


def fetch_for_ever(
    fds: list[int], port: int, memory: mmap.mmap, begun: Callable[[], object]
) -> NoReturn:
    """Fetch the newest step again and again; what was overwritten meanwhile is not there.

    `begun` is called after the first attempt.
    """
    attempts, until = 0, time.monotonic() + MOST_WAIT_S
    slots = [Slot(memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))) for fd in fds]
    while True:
        held = [(one.seal_digest, one.header(), one.seal_digest) for one in slots]
        whole = [(one, digest) for digest, one, again in held if one and digest == again]
        if not whole:
            assert attempts or time.monotonic() < until, "no header can be read in either slot"
            continue
        newest, digest = max(whole, key=lambda one: one[0].step)
        asked = {"step": newest.step, "shard": newest.shard, "bytes": newest.bytes}
        asked |= {"digest": digest}
        with socket.create_connection(("127.0.0.1", port), 30) as sock, suppress(carrier.CopyError):
            key = carrier.greet_sender(sock, "secret")
            carrier.fetch(sock, asked, memoryview(memory), key, time.monotonic() + 30)
        attempts += 1
        if attempts == 1:
            begun()


def main() -> None:
    count = int(sys.argv[1])
    dice = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    torch.set_num_threads(1)
    carrier.PIECE_BYTES = PIECE_BYTES
    first = content_of(0)
    size = bytes_needed(first.tensors(), first.head()) + 4096
    fds = [os.memfd_create(f"slot {number}") for number in range(2)]
    for fd in fds:
        os.ftruncate(fd, size)
    slots = [Slot(memoryview(mmap.mmap(fd, size))) for fd in fds]
    told, memory = mmap.mmap(-1, 4096), mmap.mmap(-1, size)
    listening = socket.create_server(("127.0.0.1", 0))
    children = []
    for run in (
        lambda: write_for_ever(slots, 0, told, pause_s=0.01),
        lambda: serve(fds, size, listening),
    ):
        children.append(os.fork())
        if children[-1] == 0:
            run()
    port, while_copying, steps = listening.getsockname()[1], 0, set[int]()
    try:
        for _ in range(count):
            kill_after_begin(partial(fetch_for_ever, fds, port, memory), dice)
            copy = Slot(memoryview(memory))
            header = copy.header()
            if header is None:
                while_copying += 1
            else:
                steps.add(look_at(header, copy))
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    print(f"{count} kills, {while_copying} during a copy, {len(steps)} steps copied: none torn")


if __name__ == "__main__":
    main()
