"""Which rank has the state that all ranks of a round adopt, and the library's examples of it."""

from __future__ import annotations

import doctest
import importlib

import pytest

from rdzv.worker.healing import Offer, elect, receivers


@pytest.mark.parametrize(
    "name", ["frames", "healing", "resuming", "rounds", "shard_healing", "snapshots", "tcp"]
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
