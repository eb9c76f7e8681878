"""Which rank has the state that all ranks of a round adopt, and the library's examples of it."""

from __future__ import annotations

import doctest
import importlib

import pytest

from rdzv.worker.healing import MismatchError, Offer, compare_manifests, elect, receivers
from rdzv.worker.rounds import Round


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["link", "healing", "resuming", "rounds", "shards", "snapshots", "tcp"]
)
def test_the_examples_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"rdzv.worker.{name}")).failed == 0


def offer(kept: bool, step: int, torn: bool = False, digest: str = "x") -> Offer:
    return Offer(kept, step, torn, digest, "")


@pytest.mark.parametrize(
    ("offers", "source", "to"),
    [
        # All are new and equal.
        ([offer(False, 0), offer(False, 0)], 0, []),
        # One is new.
        ([offer(True, 5), offer(False, 0), offer(True, 5)], 0, [1]),
        # One is a step ahead, and one of the others is torn.
        ([offer(True, 5, torn=True), offer(True, 5), offer(True, 6)], 2, [0, 1]),
        # No step was sealed: a kept rank wins over a new one.
        ([offer(False, 0), offer(True, 0)], 1, [0]),
        # Bits differ at the same step.
        ([offer(True, 5), offer(True, 5, digest="y")], 0, [1]),
    ],
)
def test_the_source_and_who_receives_from_it(
    offers: list[Offer], source: int, to: list[int]
) -> None:
    assert elect(offers) == source
    assert receivers(offers, source) == to


@pytest.mark.parametrize(
    ("rank", "says"),
    [
        (0, "the state of rank 1 differs from that of rank 0"),
        (1, "model.weight is float32 4 3 on rank 1, and float32 4 2 on rank 0"),
    ],
)
def test_every_rank_refuses_a_state_that_differs_on_one(rank: int, says: str) -> None:
    here = [["model.weight", f"float32 4 {2 + rank}"]]
    round_ = Round(0, rank, 2, local_rank=rank, restarts=0, token="")
    first = b'[["model.weight", "float32 4 2"]]'
    with pytest.raises(MismatchError, match=says):
        compare_manifests(["a", "b"], here, round_, lambda: first)
    compare_manifests(["a", "a"], here, round_, lambda: first)
