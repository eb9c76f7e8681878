"""Writes the snapshots that a runner holds to disk.

    python -m rdzv.worker.write_snapshots DIR --run RUN --keep N --mark LINEAGE:STEP:SERIES FD...

Started by the runner with the job's interpreter, as the job's account, and given the slots as
descriptors. It works without the workers. Exits with 1 and a line on stderr if the step could not
be written; what is on disk already stays then. Prints what it has written.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .snapshot_files import NotWrittenError, StepWriter
from .snapshot_slot import Header, Slot


def main(argv: Sequence[str] | None = None) -> None:
    """Write the parts of one step."""
    parser = argparse.ArgumentParser(description="Write snapshots in memory to disk.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", required=True)
    parser.add_argument("--keep", type=int, required=True)
    parser.add_argument("--mark", required=True)
    parser.add_argument("fds", type=int, nargs="+")
    options = parser.parse_args(argv)
    lineage, step, series = options.mark.split(":", 2)
    # Training goes on beside it.
    os.nice(10)
    begun = time.monotonic()
    try:
        mark = (int(lineage), int(step), series)
        size, is_whole = write(options.folder, options.run, options.keep, mark, options.fds)
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        sys.exit(f"rdzv: step {step} is not written to {options.folder}: {reason}")
    what = "whole" if is_whole else "parts of other nodes are still missing"
    sys.stderr.write(
        f"rdzv: step {step} is written to {options.folder} ({what}): "
        f"{size / 1e6:.1f} MB in {time.monotonic() - begun:.2f} s\n"
    )


def write(
    folder: Path, run: str, keep: int, mark: tuple[int, int, str], fds: Sequence[int]
) -> tuple[int, bool]:
    """Write the parts of a mark from slots; return their size, and whether the step is whole."""
    found = [(slot, header) for slot, header in map(_opened, fds) if _mark_of(header) == mark]
    if not found:
        raise NotWrittenError("no slot holds it any more")
    written, first = 0, found[0][1]
    assert first is not None
    step = StepWriter(folder, run, first)
    for slot, header in found:
        assert header is not None
        if not slot.is_sound(header):
            raise NotWrittenError("it is damaged in memory")
        content = slot.read(header, in_place=True)
        temporary = step.write(header, content, slot.devices(header))
        if temporary is None:
            continue
        # A worker that does not know of this program may have begun to overwrite the slot.
        if slot.header() != header:
            temporary.unlink()
            raise NotWrittenError("it was overwritten meanwhile")
        step.give_name(temporary)
        written += header.bytes
    return written, step.finish(keep)


def _opened(fd: int) -> tuple[Slot, Header | None]:
    size = os.fstat(fd).st_size
    # Nothing that is written to it by mistake reaches the slot.
    slot = Slot(memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY)))
    return slot, slot.header()


def _mark_of(header: Header | None) -> tuple[int, int, str] | None:
    if header is None or not header.shards:
        return None
    return header.lineage, header.step, header.series


if __name__ == "__main__":
    main()
