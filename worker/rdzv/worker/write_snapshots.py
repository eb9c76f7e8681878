"""Program that writes snapshots held by a runner to disk.

    python -m rdzv.worker.write_snapshots DIR --run RUN --keep N --mark LINEAGE:STEP:SERIES FD...

The runner starts it with the job's interpreter, under the job's account, and passes the slots as
descriptors. It does not need the workers. On success, it prints a line about what it wrote. If the
step cannot be written, it prints one line on stderr and exits with 1; older steps stay on disk.

If the runner has found memory for it, the process first copies the snapshots, which takes no torch,
and closes a pipe: from then on, workers may overwrite their slots.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from .slot_format import Header, SealedMemory, SnapshotError

COPIED_VARIABLE = "RDZV_SNAPSHOT_COPIED"
"""The descriptor to close once the snapshots are copied; not set if there is no memory for that."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write snapshots in memory to disk.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", required=True)
    parser.add_argument("--keep", type=int, required=True)
    parser.add_argument("--mark", required=True)
    parser.add_argument("fds", type=int, nargs="+")
    options = parser.parse_args(argv)
    lineage, step, series = options.mark.split(":", 2)
    os.nice(10)  # Training takes priority.
    begun = time.monotonic()
    try:
        mark = (int(lineage), int(step), series)
        fd = os.environ.pop(COPIED_VARIABLE, "")
        copied = int(fd) if fd else None
        size, is_whole = write(options.folder, options.run, options.keep, mark, options.fds, copied)
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        sys.exit(f"rdzv: cannot write step {step} to {options.folder}: {reason}")
    what = "whole" if is_whole else "parts of other nodes are still missing"
    sys.stderr.write(
        f"rdzv: wrote step {step} to {options.folder} ({what}): "
        f"{size / 1e6:.1f} MB in {time.monotonic() - begun:.2f} s\n"
    )


def write(
    folder: Path,
    run: str,
    keep: int,
    mark: tuple[int, int, str],
    fds: Sequence[int],
    copied: int | None = None,
) -> tuple[int, bool]:
    """Write a mark's parts from slots; return their size, and whether the step is whole.

    The descriptor `copied` is closed once the slots are no longer needed.
    """
    opened = [_opened(fd) for fd in fds]
    found = [(slot, header) for slot, header in opened if header and header.mark[:3] == mark]
    if not found:
        is_damaged = any(slot.is_damaged for slot, _ in opened)
        lost = "a snapshot is damaged in memory, and" if is_damaged else ""
        raise SnapshotError(f"{lost} no slot holds it any more".strip())
    if copied is not None:
        copies = [(_copy(slot, header), header) for slot, header in found]
        _refuse_overwritten(found)
        found = copies
        os.close(copied)
    # These import torch, which takes seconds.
    from .snapshot_files import StepWriter
    from .snapshot_slot import Slot

    written = 0
    step = StepWriter(folder, run, found[0][1])
    for memory, header in found:
        slot = Slot(memory.memory)
        if not slot.is_sound(header, threads=1):
            raise SnapshotError("it is damaged in memory")
        content = slot.read(header, in_place=True)
        verify = partial(_refuse_overwritten, [(slot, header)])
        if step.write(header, content, slot.head_bytes(header), verify):
            written += header.bytes
    return written, step.finish(keep)


def _refuse_overwritten(found: Sequence[tuple[SealedMemory, Header]]) -> None:
    """Raise an error if a worker has overwritten a slot before it was notified of the pin."""
    if any(slot.header() != header for slot, header in found):
        raise SnapshotError("it was overwritten in the meantime")


def _copy(slot: SealedMemory, header: Header) -> SealedMemory:
    """Copy a snapshot. Raises `OSError` if there is no memory for it."""
    memory = mmap.mmap(-1, header.bytes)
    memory[:] = slot.memory[: header.bytes]
    return SealedMemory(memoryview(memory))


def _opened(fd: int) -> tuple[SealedMemory, Header | None]:
    size = os.fstat(fd).st_size
    # Copy on write, so that an accidental write does not reach the slot.
    slot = SealedMemory(memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY)))
    return slot, slot.header()


if __name__ == "__main__":
    main()
