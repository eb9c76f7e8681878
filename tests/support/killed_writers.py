"""Writers of snapshots that are killed at random moments: `killed_writers.py COUNT [SEED]`.

Each is forked, saves step after step into two slots, and gets SIGKILL. The remaining data must be
complete: at least the step before the one being written, with the tensors of that step.

Prints how many kills came during a write.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch

from rdzv.worker.contents import Image
from rdzv.worker.snapshot_slot import Content, Header, Slot, bytes_needed
from rdzv.worker.snapshots import slot_to_write

SIZES = (1 << 14, 1 << 16, 3)
"""Small, so that a kill costs milliseconds: a writer spends most of its time between two seals."""
MOST_DELAY_S = 0.004
"""A kill comes at most this long after the first step: some steps later."""


def content_of(step: int) -> Content:
    tensors = {str(n): torch.full((size,), step + n) for n, size in enumerate(SIZES)}
    return Content({"rng": step}, {"state": Image(step, tensors, [], {"values": {"step": step}})})


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
        number = slot_to_write([slot.header() for slot in slots], 0, None, None)
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


def main() -> None:
    count = int(sys.argv[1])
    dice = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    torch.set_num_threads(1)
    first = content_of(0)
    size = bytes_needed(first.tensors(), first.head()) + 4096
    memory = [mmap.mmap(-1, size) for _ in range(3)]
    slots, told = [Slot(memoryview(one)) for one in memory[:2]], memory[2]
    step, while_writing = 0, 0
    for _ in range(count):
        kill_after_begin(partial(write_for_ever, slots, step, told), dice)
        step, writing = look(slots, int.from_bytes(told[:8], "little"))
        told[:8] = step.to_bytes(8, "little")
        while_writing += writing
    print(f"{count} kills, {while_writing} while a slot was written to, {step} steps: none torn")


if __name__ == "__main__":
    main()
