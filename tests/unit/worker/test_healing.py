"""Which rank has the state that all ranks of a round adopt, and the library's examples of it."""

from __future__ import annotations

import doctest
import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.worker.healing import (
    MismatchError,
    StateOffer,
    compare_manifests,
    elect,
    receivers,
    settle,
)
from rdzv.worker.rounds import Round
from rdzv.worker.shards import Place, place_of


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "link",
        "healing",
        "resharding",
        "resuming",
        "rounds",
        "shards",
        "snapshots",
        "cutting",
        "verifying",
    ],
)
def test_the_examples_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"rdzv.worker.{name}")).failed == 0


def offer(kept: bool, step: int, torn: bool = False, digest: str = "x") -> StateOffer:
    return StateOffer(kept, step, torn, digest, "")


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
    offers: list[StateOffer], source: int, to: list[int]
) -> None:
    assert elect(offers) == source
    assert receivers(offers, source) == to


def test_a_rank_that_has_gone_back_a_step_enters_as_a_new_one() -> None:
    """One that is merely behind has run that step's passes: it keeps its buffers and generators."""
    for has_gone_back in (True, False):
        offers = [offer(True, 6), offer(True, 5)]
        sealing: Any = SimpleNamespace(has_gone_back=has_gone_back, is_redo=True)
        settle(sealing, offers, 0, Round(1, 1, 2, 1, 0, ""))
        assert (offers[1].kept, sealing.is_redo) == (not has_gone_back, has_gone_back)


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
    store: Any = {"manifest": b'[["model.weight", "float32 4 2"]]'}
    with pytest.raises(MismatchError, match=says):
        compare_manifests(["a", "b"], here, round_, store, "manifest")
    compare_manifests(["a", "a"], here, round_, store, "manifest")


def sharded(sizes: tuple[int, ...], coordinate: tuple[int, ...], placements: str) -> Any:
    mesh = SimpleNamespace(
        size=lambda dim=None: math.prod(sizes) if dim is None else sizes[dim],
        get_coordinate=lambda: coordinate,
    )
    found = [SimpleNamespace(is_replicate=lambda one=one: one == "R") for one in placements]
    return "p", SimpleNamespace(device_mesh=mesh, placements=found)


def test_ranks_that_are_replicas_have_the_same_part() -> None:
    assert place_of([sharded((4,), (3,), "S")], 3, 4) == Place(3, 4)
    assert place_of([sharded((2, 4), (1, 3), "RS")], 7, 8) == Place(3, 4)
    assert place_of([sharded((2, 4), (1, 3), "SS")], 7, 8) == Place(7, 8)
    # Two meshes, or a mesh of only some ranks: it is unknown which ranks are replicas.
    two = [sharded((4,), (1,), "S"), sharded((2, 2), (0, 1), "RS")]
    assert place_of(two, 1, 4) == Place(1, 4)
    assert place_of([sharded((2,), (1,), "S")], 3, 4) == Place(3, 4)


def test_a_round_goes_on_from_the_newest_step_that_all_parts_have_sealed() -> None:
    def offer(step: int, shard: int, *, torn: bool = False) -> StateOffer:
        return StateOffer(True, step, torn, "", "", shard, 2)

    assert elect([offer(7, 0), offer(6, 1)]) == 1
    assert elect([offer(7, 0), offer(6, 1), offer(6, 0), offer(7, 1)]) == 0
    assert elect([offer(7, 0, torn=True), offer(6, 1), offer(6, 0)]) == 1
    # A new rank has no part yet.
    new = StateOffer(False, 0, False, "", "")
    assert elect([new, offer(6, 1), offer(6, 0)]) == 1
