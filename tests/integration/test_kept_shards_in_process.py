"""A rank's part of a sharded state in one process: what is held, and what is refused and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from rdzv.worker import NoRoundError, Round, State, UnsupportedError, WorkerError
from rdzv.worker import elastic as as_elastic


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def built() -> dict[str, Any]:
    model = fully_shard(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def one_step(state: State) -> None:
    state.model(torch.randn(4, 4)).sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()


def in_a_round(what: Callable[[State], None]) -> None:
    def call(state: State, round: Round) -> None:
        what(state)

    as_elastic(call)(State(step=0))


@pytest.mark.parametrize(
    ("holds_last", "ends_in_step", "steps"),
    [(True, False, (1, 2)), (True, True, (2,)), (False, False, (2,)), (False, True, ())],
)
def test_the_last_two_sealed_steps_are_held(
    holds_last: bool, ends_in_step: bool, steps: tuple[int, ...]
) -> None:
    def train(state: State) -> None:
        shards, seen = state._sealing.shards, {}
        state.add(**built())
        assert shards.parts is not None
        # Without a runner `state.add` holds nothing.
        shards.begin(shards.parts, holds_last=holds_last)
        for step in (1, 2):
            one_step(state)
            state.commit()
            seen[step] = state.model[0].weight.to_local().clone()
        if ends_in_step:
            one_step(state)
        shards.take_out(2)
        held = {step: shards.held(step) for step in range(4)}
        found = tuple(step for step, image in held.items() if image is not None)
        assert found == steps
        for step in steps:
            image = held[step]
            assert image is not None
            assert torch.equal(image.parameters["model.0.weight"], seen[step])
        assert shards.is_missing == (steps == ())
        assert shards.oldest_step(2) == (1 if 1 in steps else 2)

    in_a_round(train)


def test_nothing_is_held_before_a_step_was_sealed() -> None:
    def train(state: State) -> None:
        state.add(**built())
        one_step(state)
        shards = state._sealing.shards
        shards.take_out(None)
        assert shards.held(None) is None and not shards.is_missing

    in_a_round(train)


def test_a_model_that_is_the_same_on_all_ranks_belongs_to_the_state() -> None:
    def train(state: State) -> None:
        with pytest.raises(UnsupportedError, match=r"no sharded parameters .*to State\(\.\.\.\)"):
            state.add(model=nn.Linear(1, 1))
        with pytest.raises(WorkerError, match="given 'epoch', which is a plain value"):
            state.add(epoch=1, **built())
        scheduler = {"step": torch.optim.lr_scheduler.StepLR(built()["optimizer"], 1)}
        with pytest.raises(WorkerError, match=r"state\.step was given to State\(\.\.\.\) and to"):
            state.add(**built(), **scheduler)

    in_a_round(train)


def test_a_sharded_model_belongs_to_a_round() -> None:
    with pytest.raises(NoRoundError, match=r"state\.add\(\) was called outside of a round"):
        State(step=0).add(model=nn.Linear(1, 1))

    def train(state: State) -> None:
        outside = State(**built())
        with pytest.raises(
            UnsupportedError, match=r"model\.0\.weight is distributed over a device"
        ):
            outside._sealing.contents.refuse_shards()

    in_a_round(train)
