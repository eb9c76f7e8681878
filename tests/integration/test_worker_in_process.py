"""What a state takes, what it puts back, and what it refuses in words.

These import torch into the process of the tests: that takes seconds, and its loggers slow down each
test that follows. What needs none of it is in `tests/unit/worker`.
"""

from __future__ import annotations

import doctest
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import rdzv.worker.state
from rdzv.worker import CannotBroadcastError, NoRoundError, State, UnsupportedError, elastic
from rdzv.worker.contents import packed, unpacked
from rdzv.worker.digest import digest
from rdzv.worker.sealing import Sealing
from rdzv.worker.suspicion import follows_from_cut, is_suspect


def test_the_example_holds() -> None:
    assert doctest.testmod(rdzv.worker.state).failed == 0


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    """Destroy the group that an exception within a round leaves behind, as in any script."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def parts() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    average = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {
        "model": model,
        "average": average,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        "scaler": torch.amp.GradScaler("cpu", init_scale=8.0),
        "values": [1, {"a": 2}],
        "step": 0,
    }


def step(entries: dict[str, Any]) -> list[float]:
    """Do what moves everything; return what was drawn."""
    loss = entries["model"](torch.randn(8, 4)).sum()
    entries["scaler"].scale(loss).backward()
    entries["scaler"].unscale_(entries["optimizer"])
    with torch.no_grad():
        for parameter in entries["average"].parameters():
            parameter.data.mul_(0.5)
    entries["scheduler"].step()
    entries["values"][1]["a"] += 1
    return [loss.item(), random.random(), float(np.random.rand())]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_all_that_moves_outside_of_the_parameters_is_put_back() -> None:
    entries = parts()
    sealing = Sealing(entries)
    sealing.begin_round(0, 1, lambda: None)
    sealing.commit()
    before = {
        name: digest(list(module.state_dict().items()))
        for name, module in sealing.contents.modules.items()
    }
    drawn = step(entries)
    rate = entries["optimizer"].param_groups[0]["lr"]
    assert rate != 0.1
    sealing.roll_back()
    after = {
        name: digest(list(module.state_dict().items()))
        for name, module in sealing.contents.modules.items()
    }
    assert after == before
    assert entries["optimizer"].param_groups[0]["lr"] == 0.1
    assert sealing.contents.values["values"] == [1, {"a": 2}]
    # The same step draws the same numbers, and the scaler takes the step anew.
    entries["values"] = sealing.contents.values["values"]
    assert step(entries) == drawn


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_step_that_is_not_committed_tears_the_state() -> None:
    entries = parts()
    sealing = Sealing(entries)
    sealing.begin_round(0, 1, lambda: None)
    assert (sealing.torn, sealing.step) == (False, None)
    step(entries)
    entries["scaler"].step(entries["optimizer"])
    entries["scaler"].update()
    assert sealing.torn
    sealing.commit()
    assert (sealing.torn, sealing.step) == (False, 1)


def test_a_step_in_a_round_that_was_cut_is_refused_before_it_touches_anything() -> None:
    class CutError(Exception):
        pass

    def refuse() -> None:
        raise CutError

    entries = parts()
    sealing = Sealing(entries)
    sealing.begin_round(0, 1, refuse)
    entries["model"](torch.randn(8, 4)).sum().backward()
    before = digest(list(entries["model"].named_parameters()))
    with pytest.raises(CutError):
        entries["optimizer"].step()
    assert digest(list(entries["model"].named_parameters())) == before
    assert not sealing.torn


def test_a_value_that_cannot_be_copied_is_named() -> None:
    state = State(lock=threading.Lock())
    with pytest.raises(CannotBroadcastError, match=r"state\.lock cannot be sent to another rank"):
        elastic(lambda state, round: None)(state)


def test_a_value_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(CannotBroadcastError, match=r"state\.value\.f .*Keep it out"):
        packed({"value.f": lambda: None})


def test_packed_parts_come_out_as_they_went_in() -> None:
    assert unpacked(packed({"a": [1, "x"], "b": None})) == {"a": [1, "x"], "b": None}


def test_a_torch_without_gloo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    with pytest.raises(UnsupportedError, match="this build of torch has no gloo"):
        elastic(lambda state, round: None)(State(step=0))


def test_commit_and_check_belong_to_a_round() -> None:
    state = State(step=0)
    for call in (state.commit, state.check):
        with pytest.raises(NoRoundError, match="no round is under way"):
            call()


def test_entries_are_attributes() -> None:
    state = State(model=nn.Linear(1, 1), step=0)
    state.step += 1
    assert state.step == 1
    assert isinstance(state.model, nn.Linear)
    with pytest.raises(AttributeError, match="no entry 'epoch'"):
        _ = state.epoch
    with pytest.raises(AttributeError, match="no plain value 'epoch'"):
        state.epoch = 1
    with pytest.raises(ValueError, match="'commit' for itself"):
        State(commit=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_a_digest_tells_bits_and_order_apart(dtype: torch.dtype) -> None:
    one = torch.arange(1001).remainder(2).to(dtype)
    other = one.clone()
    assert digest([("a", one)]) == digest([("a", other)])
    other[[0, 1]] = other[[1, 0]]
    assert digest([("a", one)]) != digest([("a", other)])
    assert digest([("a", one)]) != digest([("b", one)])
    assert digest([("a", one[1:])]) == digest([("a", one[1:].clone())])


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError("NCCL error in: ..."),
        dist.DistNetworkError("Failed to recv, got 0 bytes."),
    ],
)
def test_an_error_of_a_collective_is_suspect(error: BaseException) -> None:
    assert is_suspect(error)
    assert follows_from_cut(error)
