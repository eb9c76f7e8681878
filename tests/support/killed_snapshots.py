"""Snapshots and copies of them that are killed: `killed_snapshots.py writers|copies COUNT [SEED]`.

writers: each is forked, saves step after step into two slots, and gets SIGKILL at a random moment.
The remaining data must be complete: at least the step before the one being written.

copies: a writer saves step after step, without regard for who copies them; a sender serves them. A
child fetches the newest into memory that holds an older copy, and gets SIGKILL. What is left must
be a copy that is whole, or none.

Prints how many kills came during a write, or during a copy.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NoReturn

import torch

from rdzv.worker import copy_snapshots
from rdzv.worker.contents import Image
from rdzv.worker.link import Announced
from rdzv.worker.slot_format import Header
from rdzv.worker.snapshot_slot import Content, Slot, bytes_needed
from rdzv.worker.snapshots import slot_to_write

SIZES = (1 << 14, 1 << 16, 3)
"""Small, so that a kill costs milliseconds: a writer spends most of its time between two seals."""
MOST_DELAY_S = 0.004
"""A kill comes at most this long after the first step: some steps later."""


def content_of(step: int) -> Content:
    tensors = {str(n): torch.full((size,), step + n) for n, size in enumerate(SIZES)}
    return Content(
        {"rng": step}, {"state": Image(step, tensors, [], {"objects": {}, "values": {}})}
    )


def write_for_ever(
    slots: list[Slot],
    step: int,
    told: mmap.mmap,
    begun: Callable[[], object] = lambda: None,
    pause_s: float = 0.0,
) -> NoReturn:
    """Save steps as a worker does, and put the number of the last one in shared memory.

    `begun` is called after the first.
    """
    first = step + 1
    while True:
        step += 1
        content = content_of(step)
        tensors, head = content.tensors(), content.head()
        number = slot_to_write([slot.header() for slot in slots], 0, None, Announced())
        assert number is not None
        for place, one in zip(slots[number].begin(tensors), tensors, strict=True):
            place.copy_(one)
        header = Header(step, 0, shard=0, shards=1, rank=0, world_size=1, state="s")
        slots[number].seal(header, tensors, head)
        told[:8] = step.to_bytes(8, "little")
        if step == first:
            begun()
        time.sleep(pause_s)


def kill_after_begin(run: Callable[[Callable[[], object]], NoReturn], dice: random.Random) -> None:
    """Fork a child that runs for ever, and kill it at a random moment after it has begun."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            run(lambda: os.write(writing, b"."))
        finally:
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    has_begun = os.read(reading, 1)
    os.close(reading)
    time.sleep(dice.random() * MOST_DELAY_S)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert has_begun and os.WIFSIGNALED(status), "the child ended by itself: see above"


def look(slots: list[Slot], told: int) -> tuple[int, bool]:
    """Return the newest step that is there, and whether a slot was being written to."""
    found = [(header, slot) for slot in slots if (header := slot.header()) is not None]
    assert found, "nothing is left"
    newest = max(look_at(header, slot) for header, slot in found)
    # It may have been killed between the seal and its report.
    assert newest in (told, told + 1), f"step {newest} is there, and {told} was saved"
    return newest, len(found) < len(slots)


def look_at(header: Header, slot: Slot) -> int:
    """Return the step in a slot, all of which is of that step."""
    assert slot.is_sound(header), f"step {header.step} is torn"
    read = slot.read(header)
    assert read.own["rng"] == header.step
    for one, other in zip(read.tensors(), content_of(header.step).tensors(), strict=True):
        assert torch.equal(one, other), f"step {header.step} is mixed"
    return header.step


MOST_WAIT_S = 30
PIECE_BYTES = 16 << 10
"""Small, so that many pieces make a copy."""


def serve(fds: list[int], size: int, listening: socket.socket) -> None:
    """Send for ever."""
    sender = copy_snapshots.Sender(copy_snapshots.TokenBucket(0))
    sender.token = "secret"
    sender.slots[0] = [copy_snapshots.mapped(os.dup(fd), size) for fd in fds]
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
        asked = {"shard": newest.shard, "bytes": newest.bytes, "digest": digest}
        asked["mark"] = {"step": newest.step}
        with (
            socket.create_connection(("127.0.0.1", port), 30) as sock,
            suppress(copy_snapshots.CopyError),
        ):
            key = copy_snapshots.greet_sender(sock, "secret")
            copy_snapshots.fetch(sock, asked, memoryview(memory), key, time.monotonic() + 30)
        attempts += 1
        if attempts == 1:
            begun()


def memory_for_slots() -> tuple[list[int], int]:
    """Return two files for a snapshot each, and their size."""
    first = content_of(0)
    size = bytes_needed(first.tensors(), first.head()) + 4096
    fds = [os.memfd_create(f"slot {number}") for number in range(2)]
    for fd in fds:
        os.ftruncate(fd, size)
    return fds, size


def kill_writers(slots: list[Slot], count: int, dice: random.Random) -> str:
    told, step, while_writing = mmap.mmap(-1, 4096), 0, 0
    for _ in range(count):
        kill_after_begin(partial(write_for_ever, slots, step, told), dice)
        step, writing = look(slots, int.from_bytes(told[:8], "little"))
        told[:8] = step.to_bytes(8, "little")
        while_writing += writing
    return f"{while_writing} while a slot was written to, {step} steps"


def kill_copies(
    slots: list[Slot], fds: list[int], size: int, count: int, dice: random.Random
) -> str:
    copy_snapshots.PIECE_BYTES = PIECE_BYTES
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
    return f"{while_copying} during a copy, {len(steps)} steps copied"


def main() -> None:
    count = int(sys.argv[2])
    dice = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    torch.set_num_threads(1)
    fds, size = memory_for_slots()
    slots = [Slot(memoryview(mmap.mmap(fd, size))) for fd in fds]
    if sys.argv[1] == "writers":
        found = kill_writers(slots, count, dice)
    else:
        found = kill_copies(slots, fds, size, count, dice)
    print(f"{count} kills, {found}: none torn")


if __name__ == "__main__":
    main()
