"""Which part of a sharded state a rank has, and who has the step that all can continue from."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.worker import NoSourceError
from rdzv.worker.healing import Offer, elect
from rdzv.worker.shards import Claim, Place, place_of, sources


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
    def offer(step: int, shard: int, *, torn: bool = False) -> Offer:
        return Offer(True, step, torn, "", "", shard, 2)

    assert elect([offer(7, 0), offer(6, 1)]) == 1
    assert elect([offer(7, 0), offer(6, 1), offer(6, 0), offer(7, 1)]) == 0
    assert elect([offer(7, 0, torn=True), offer(6, 1), offer(6, 0)]) == 1
    # A new rank has no part yet.
    new = Offer(False, 0, False, "", "")
    assert elect([new, offer(6, 1), offer(6, 0)]) == 1


@pytest.mark.parametrize(
    ("claims", "text"),
    [
        (
            [Claim(0, 2, [0], 2, ""), Claim(1, 2, [], 1, "")],
            "no rank holds part 1 of 2 of the sharded state, which rank 1 needs",
        ),
        ([Claim(0, 1, [0], 2, "")], "the state was sharded into 2 parts"),
    ],
)
def test_a_part_that_is_held_nowhere_is_named(claims: list[Claim], text: str) -> None:
    with pytest.raises(NoSourceError, match=text):
        sources(claims)
