"""How tensors are copied into the memory of snapshots."""

from __future__ import annotations

import os

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
