"""How tensors are copied into the memory of snapshots, which no child inherits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from rdzv.worker import staging

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("threads", [1, 3])
def test_all_is_copied_by_however_many_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "CHUNK_BYTES", 64)
    tensors = [
        torch.randn(7, 33),
        torch.randn(6, 40).t(),
        torch.tensor(2.5, requires_grad=True),
        torch.arange(50, dtype=torch.int16),
        torch.empty(0, 3),
    ]
    places = [torch.zeros(one.shape, dtype=one.dtype) for one in tensors]
    staging.copy_all(tensors, places, [], threads)
    assert all(torch.equal(one, place) for one, place in zip(tensors, places, strict=True))


def test_an_error_in_any_thread_is_raised() -> None:
    tensors = [torch.zeros(3)] * 40
    places = [torch.zeros(3) for _ in range(39)] + [torch.zeros(4)]
    with pytest.raises(RuntimeError, match="size"):
        staging.copy_all(tensors, places, [], 4)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]), False),
        (torch.tensor([0.0]), torch.tensor([0]), False),
        (torch.zeros(2, 3), torch.zeros(3, 2), False),
        (torch.zeros(2, 3), torch.zeros(3, 2).t(), False),
        (torch.tensor(2), torch.tensor(2), True),
        (torch.empty(0), torch.empty(0), True),
        (torch.zeros(1).to_sparse(), torch.zeros(1).to_sparse(), False),
        (torch.zeros(1, device="meta"), torch.zeros(1, device="meta"), False),
    ],
)
def test_tensors_are_equal_if_their_bits_are_known_to_be(
    one: torch.Tensor, other: torch.Tensor, *, equal: bool
) -> None:
    assert staging.equal_bits(one, other) is equal


@pytest.mark.parametrize(
    ("cpus", "workers", "torchs", "threads"),
    [
        (1, "1", 1, 1),
        (8, "4", 1, 2),
        (8, "", 1, 4),
        (64, "8", 1, 4),
        (2, "4", 1, 1),
        (8, "1", 8, 1),
        (8, "1", 2, 1),
    ],
)
def test_the_number_of_threads(
    cpus: int, workers: str, torchs: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", workers)
    assert staging.copiers() == threads


def test_only_tiny_tensors_of_the_cpu_are_set_aside() -> None:
    tiny, large = torch.ones(3), torch.ones(1 << 20)
    (kept,), all_taken = staging.set_aside([tiny])
    tiny.zero_()
    assert all_taken
    assert kept.tolist() == [1, 1, 1]
    (_, same), all_taken = staging.set_aside([tiny, large])
    assert not all_taken
    assert same is large


SIZE = 1 << 20


def memory_of(pid: int | str) -> str:
    """Return the names of this memory that a process has mapped or open."""
    mapped_files = [
        line
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "rdzv test memory" in line
    ]
    return "\n".join(mapped_files)


def test_what_is_written_is_in_the_file_and_no_forked_child_has_it() -> None:
    fd = os.memfd_create("rdzv test memory")
    os.ftruncate(fd, SIZE)
    memory = staging.mapped(fd, SIZE)
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
        staging.mapped(-1, SIZE)
