"""A worker writes to memory of the runner, and its children do not inherit that memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rdzv.worker.staging import mapped

SIZE = 1 << 20


def memory_of(pid: int | str) -> str:
    """Return the names of this memory that a process has mapped or open."""
    mapped_files = [
        line
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "rdzv test memory" in line
    ]
    return "\n".join(mapped_files)


@pytest.mark.slow
def test_what_is_written_is_in_the_file_and_no_forked_child_has_it() -> None:
    fd = os.memfd_create("rdzv test memory")
    os.ftruncate(fd, SIZE)
    memory = mapped(fd, SIZE)
    assert os.fstat(fd).st_blocks * 512 == SIZE  # All its pages are there.
    memory[SIZE - 1] = 7
    assert os.pread(fd, 1, SIZE - 1) == b"\7"
    os.close(fd)
    assert memory_of("self")
    pid = os.fork()
    if pid == 0:
        os._exit(1 if memory_of("self") else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    del memory
    assert not memory_of("self")


def test_a_file_that_has_no_such_size_is_refused() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        mapped(-1, SIZE)
