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
from typing import NoReturn

import torch

from rdzv.worker.images import Image
from rdzv.worker.snapshot_slot import Content, Header, Slot, bytes_needed
from rdzv.worker.snapshots import slot_to_write

SIZES = (1 << 18, 1 << 20, 3)


def content_of(step: int) -> Content:
    tensors = {str(n): torch.full((size,), step + n) for n, size in enumerate(SIZES)}
    return Content({"rng": step}, {"state": Image(step, tensors, [], {"values": {"step": step}})})


def write_for_ever(slots: list[Slot], step: int, told: mmap.mmap, pause_s: float = 0.0) -> NoReturn:
    """Save steps as a worker does, and put the number of the last one in shared memory."""
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
        time.sleep(pause_s)


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
        before = int.from_bytes(told[:8], "little")
        pid = os.fork()
        if pid == 0:
            write_for_ever(slots, step, told)
        while int.from_bytes(told[:8], "little") <= before:
            time.sleep(0)
        time.sleep(dice.random() * 0.02)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        step, writing = look(slots, int.from_bytes(told[:8], "little"))
        told[:8] = step.to_bytes(8, "little")
        while_writing += writing
    print(f"{count} kills, {while_writing} while a slot was written to, {step} steps: none torn")


if __name__ == "__main__":
    main()
