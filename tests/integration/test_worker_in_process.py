"""What a state saves and restores, and what it refuses and why.

These import torch into the process of the tests: that takes seconds, and its loggers slow down each
later test. Tests that do not need it are in `tests/unit/worker`.
"""

from __future__ import annotations

import doctest
import os
import random
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from kept_workers import FakeLink
from torch import nn
from torch.utils.data import DataLoader, Dataset

import rdzv.worker.state
from rdzv.worker import (
    CannotBroadcastError,
    ElasticBatchSampler,
    NoRoundError,
    Round,
    RoundOver,
    StaleGroupError,
    State,
    UnsupportedError,
    WorkerError,
    elastic,
    groups,
    session,
)
from rdzv.worker.contents import Contents
from rdzv.worker.cutting import NcclCut, recording_store
from rdzv.worker.groups import Options, RoundGroups
from rdzv.worker.rounds import follows_from_cut, is_suspect, round_of
from rdzv.worker.sealing import Sealing
from rdzv.worker.staging import digest


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
    """Do everything that changes the state; return the random numbers drawn."""
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

    def digests() -> list[str]:
        modules = sealing.contents.modules.values()
        return [digest(list(one.state_dict().items())) for one in modules]

    before = digests()
    drawn = step(entries)
    rate = entries["optimizer"].param_groups[0]["lr"]
    assert rate != 0.1
    sealing.roll_back()
    assert digests() == before
    assert entries["optimizer"].param_groups[0]["lr"] == 0.1
    assert sealing.contents.values["values"] == [1, {"a": 2}]
    # The same step draws the same numbers, and the scaler repeats the step.
    entries["values"] = sealing.contents.values["values"]
    assert step(entries) == drawn


def test_a_frozen_parameter_is_copied_again_only_if_it_has_changed() -> None:
    frozen, head = nn.Linear(4, 4), nn.Linear(4, 2)
    sealing = Sealing(
        {
            "model": nn.Sequential(frozen.requires_grad_(False), head),
            "optimizer": torch.optim.SGD(head.parameters(), lr=0.1),
        }
    )
    sealing.begin_round(0, 1, lambda: None)

    def committed() -> torch.Tensor:
        sealing.commit()
        return sealing.content(with_state=True).images["state"].parameters["model.0.weight"]

    first = committed()
    assert first.data_ptr() == committed().data_ptr() != frozen.weight.data_ptr()
    before = frozen.weight.clone()
    frozen.weight.data.mul_(0.5)  # Torch's version counter does not count this.
    second = committed()
    assert torch.equal(second, frozen.weight) and torch.equal(first, before)
    frozen.weight.data.zero_()
    sealing.roll_back()
    assert torch.equal(frozen.weight, before * 0.5)


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


def test_a_loss_with_its_graph_is_refused_with_a_remedy() -> None:
    @elastic
    def train(state: State, round_: Round) -> None:
        state.losses.append(torch.ones(1, requires_grad=True) * 2)
        state.commit()

    with pytest.raises(CannotBroadcastError, match=r"state\.losses .*graph.* \.detach\(\)"):
        train(State(losses=[]))


def test_another_state_than_the_functions_own_has_no_round() -> None:
    other = State(step=0)
    with pytest.raises(NoRoundError, match="on the State with which that function was called"):
        elastic(lambda state, round: other.commit())(State(step=0))


@pytest.mark.parametrize("lacks", ["is_available", "is_gloo_available"])
def test_a_torch_without_gloo_is_refused(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    monkeypatch.setattr(dist, lacks, lambda: False)
    with pytest.raises(UnsupportedError, match="this build of torch has no gloo"):
        elastic(lambda state, round: None)(State(step=0))


def test_commit_and_check_belong_to_a_round() -> None:
    state = State(step=0)
    for call in (state.commit, state.check):
        with pytest.raises(NoRoundError, match="outside of a round"):
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
    with pytest.raises(ValueError, match="the name 'commit' itself"):
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


# ------------------------------------------------------------------ bad input, in words


def test_a_group_from_outside_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(StaleGroupError, match="a process group was created before the function"):
        elastic(lambda state, round: None)(State(step=0))


def test_a_call_without_a_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"train was called with Linear in place of a State"):

        @elastic
        def train(state: State, round: Round) -> None:
            pass

        train(nn.Linear(1, 1))


# ------------------------------------------------------------------ NCCL, behind its seam


class FakeNccl:
    """The part of ProcessGroupNCCL with which torch brackets aborts; from 2.14 on, its group's."""

    supports_coalescing = True

    def __init__(self, log: list[str]) -> None:
        self._group_start = lambda: log.append("start")
        self._group_end = lambda: log.append("end")


class FakeGroup:
    """A process group in torch's lists."""

    def __init__(self, name: str, backend: FakeNccl, log: list[str]) -> None:
        self.group_name = name
        self.rank = lambda: 0
        self._get_backend = lambda device: backend
        self._start_coalescing = lambda device: log.append("start")
        self._end_coalescing = lambda device: log.append("end")
        self.abort = lambda: log.append(f"abort {name}")


@pytest.fixture(name="nccl_log")
def _nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Two groups of NCCL, as torch keeps them, that record what is done to them."""
    log: list[str] = []
    backend = FakeNccl(log)
    monkeypatch.setattr(c10d, "is_nccl_available", lambda: True)
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", FakeNccl, raising=False)
    for name in ("default", "second"):
        group: Any = FakeGroup(name, backend, log)
        c10d._world.pg_map[group] = ("cpu:gloo,cuda:nccl", dist.HashStore())
        c10d._world.pg_names[group] = name
        c10d._world.pg_backend_config[group] = "cpu:gloo,cuda:nccl"
        if name == "default":
            c10d.GroupMember.WORLD = c10d._world.default_pg = group
    del group
    yield log
    for lists in (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_backend_config):
        lists.clear()
    c10d._update_default_pg(None)


def test_a_cut_aborts_all_groups_of_nccl_in_one_bracket_and_once(nccl_log: list[str]) -> None:
    groups = list(c10d._world.pg_map)
    cut = NcclCut()
    cut.cut()
    cut.cut()
    assert nccl_log == ["start", "abort second", "abort default", "end"]
    assert not dist.is_initialized()
    # Torch has forgotten them, and they would be refused in the next round all the same.
    assert [one() for one in cut.aborted] == groups


def test_a_group_of_gloo_alone_is_not_aborted() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    NcclCut().cut()
    assert dist.is_initialized()


@pytest.mark.parametrize("link", [None, FakeLink()])
def test_nccl_is_kept_from_ending_processes_that_may_be_kept(
    monkeypatch: pytest.MonkeyPatch, link: Any
) -> None:
    """Before the group is created, since torch reads these then."""
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
    seen: list[str | None] = []
    made = dist.init_process_group

    def init(*args: Any, **kwargs: Any) -> None:
        seen.extend(os.environ.get(name) for name in names)
        made(*args, **kwargs)

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setenv(names[0], "1")  # As each launcher sets it.
    monkeypatch.setenv(names[1], "1")
    monkeypatch.delenv(names[1])
    groups = RoundGroups(round_of({}), Options(), link)
    groups.open()
    assert seen == (["0", "0"] if link else ["1", None])
    groups.close()


@pytest.mark.parametrize(
    ("backend", "handling", "is_unwatched"),
    [
        pytest.param("cpu:gloo,cuda:nccl", "1", True, id="turned off here"),
        pytest.param("nccl", "0", True, id="turned off by the user"),
        pytest.param("nccl", "3", False, id="on, by the user"),
        pytest.param("gloo", "1", False, id="no NCCL"),
    ],
)
def test_nccl_without_its_watchdog_is_unwatched(
    monkeypatch: pytest.MonkeyPatch, backend: str, handling: str, is_unwatched: bool
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", handling)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)
    link: Any = FakeLink()
    groups = RoundGroups(round_of({}), Options(backend), link)
    groups.open()
    assert groups.is_unwatched is is_unwatched
    groups.close()


def test_a_short_timeout_does_not_limit_how_long_new_workers_take_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[timedelta] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, timeout, **__: made.append(timeout))
    monkeypatch.setenv("RDZV_RECONFIGURE", "0")
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    timeout = timedelta(milliseconds=10)
    link: Any = FakeLink()
    kept = RoundGroups(round_of({"RANK": "0", "WORLD_SIZE": "2"}), Options(None, timeout), link)
    thread = threading.Thread(target=kept.open)
    thread.start()
    server.wait(["rdzv/0/started/0"], timedelta(seconds=60))
    thread.join(0.1)
    assert thread.is_alive() and not made
    server.set("rdzv/0/started/1", "true")  # The new worker.
    thread.join()
    assert made == [timeout]
    kept.close()


def test_two_rounds_on_one_store_share_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch numbers its groups from 0 in each round: without prefixes they would meet."""
    base = dist.HashStore()
    monkeypatch.setattr(RoundGroups, "make_store", lambda *_: base)
    for number in (0, 1):
        groups = RoundGroups(round_of({"RDZV_ROUND": str(number)}), Options(), None)
        groups.open()
        assert groups.store is not None
        assert not groups.store.check(["key"])
        groups.store.set("key", "")
        groups.close()


def test_a_worker_parks_in_order(monkeypatch: pytest.MonkeyPatch, nccl_log: list[str]) -> None:
    """Cut, release groups, wait for the devices, let writers finish, and only then report it."""

    class Word(FakeLink):
        def parked(self, number: int, connections: list[Any], **state: Any) -> None:
            nccl_log.append("parked")

        def wait_for_order(self) -> None:
            return None

    state = State(step=0)
    state.on_park(lambda round: nccl_log.append("on_park"))
    link: Any = Word()
    monkeypatch.setattr(session, "wait_for_devices", lambda: nccl_log.append("devices"))
    made = session.Session(state, Options(), link)
    groups = RoundGroups(round_of({}), Options(), link)
    groups.cut.add(groups.nccl)
    made.park(session.Over(groups.round, groups, RoundOver()))
    aborted = ["start", "abort second", "abort default", "end"]
    assert nccl_log == [*aborted, "devices", "on_park", "parked"]


def test_a_loader_that_outlives_a_round_yields_none_of_its_prefetched_batches() -> None:
    sampler = ElasticBatchSampler(64, 4, shuffle=False)
    loader: DataLoader[int] = DataLoader(
        list(range(64)),  # type: ignore[arg-type]
        batch_sampler=sampler,
        num_workers=1,
        persistent_workers=True,
        prefetch_factor=4,
    )
    sampler.begin_round(rank=1, world_size=2)
    batches = iter(loader)
    assert next(batches).tolist() == [4, 5, 6, 7]
    sampler.commit()
    sampler.begin_round(rank=0, world_size=1)
    with pytest.raises(WorkerError, match="earlier round"):
        next(batches)
    assert next(iter(loader)).tolist() == [8, 9, 10, 11]


class Draws(Dataset[tuple[float, ...]]):
    """Data that consist of random numbers."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[float, ...]:
        return index, random.random(), float(torch.rand(())), float(np.random.rand())


def draws(rank: int, world_size: int, processes: int) -> dict[Any, list[float]]:
    """Return what one rank of several draws in two epochs for each sample and micro-batch."""
    found: dict[Any, list[float]] = {}

    @elastic
    def train(state: State, round_: Round) -> None:
        model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        state.sampler.begin_round(rank, world_size)
        torch.manual_seed(rank + processes)
        while (epoch := state.sampler.epoch) < 2:
            loader = DataLoader(Draws(), batch_sampler=state.sampler, num_workers=processes)
            for samples in loader:
                with state.accumulate(model) as part:
                    drawn = [random.random(), float(torch.rand(())), float(np.random.rand())]
                found[epoch, tuple(samples[0].tolist())] = drawn
                for index, *drawn in zip(*(one.tolist() for one in samples), strict=True):
                    found[epoch, index] = drawn
                if part.is_last:
                    state.commit()

    train(State(sampler=ElasticBatchSampler(12, global_batch=8, micro_batch=3, seed=5)))
    return found


def test_random_numbers_belong_to_samples_and_micro_batches_not_to_ranks() -> None:
    alone = draws(0, 1, processes=0)
    shared = [draws(rank, 2, processes) for rank, processes in ((0, 2), (1, 0))]
    assert {**shared[0], **shared[1]} == alone
    # 12 samples, and 3 + 2 micro-batches, in each of 2 epochs.
    numbers = {number for drawn in alone.values() for number in drawn}
    assert len(numbers) == 2 * (12 + 5) * 3


@pytest.mark.parametrize("static_graph", [False, True])
def test_gradients_are_exchanged_in_the_last_part_of_a_step(static_graph: bool) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = ElasticBatchSampler(12, global_batch=12, micro_batch=4)
    synced = []

    @elastic
    def train(state: State, round_: Round) -> None:
        wrapped = nn.parallel.DistributedDataParallel(state.model, static_graph=static_graph)
        with pytest.raises(WorkerError, match="was called with Linear, which exchanges no grad"):
            state.accumulate(state.model).__enter__()
        for _ in state.sampler:
            with state.accumulate(wrapped) as part:
                synced.append(wrapped.require_backward_grad_sync)
                (part.weight * wrapped(torch.ones(1, 1))).sum().backward()
            if not part.is_last:
                with pytest.raises(WorkerError, match=r"has more micro-batches.*`if part\.is_last"):
                    state.optimizer.step()
                with pytest.raises(WorkerError, match="has more micro-batches"):
                    state.commit()
        assert model.weight.grad is not None and model.weight.grad.item() == pytest.approx(1)
        state.optimizer.step()
        state.commit()

    state = State(model=model, optimizer=optimizer, sampler=sampler)
    train(state)
    # Torch cannot leave out an exchange of a static graph.
    assert synced == [static_graph, static_graph, True]
    assert (state.committed, sampler.epoch) == (1, 1)


@pytest.mark.parametrize("samplers", [0, 2])
def test_parts_need_the_sampler_that_they_are_from(samplers: int) -> None:
    @elastic
    def train(state: State, round_: Round) -> None:
        with state.accumulate(nn.parallel.DistributedDataParallel(nn.Linear(1, 1))):
            pass

    entries = {f"sampler{i}": ElasticBatchSampler(8, 2) for i in range(samplers)}
    with pytest.raises(
        WorkerError, match=rf"needs one ElasticBatchSampler .* has {samplers}: give"
    ):
        train(State(**entries))


def test_what_is_published_several_at_a_time_is_noted_before_it_is_sent() -> None:
    done: list[object] = []
    gloo = SimpleNamespace(note=lambda value, own: done.append((value, own)))
    inner = SimpleNamespace(multi_set=lambda keys, values: done.append((keys, values)))
    store = recording_store(inner, gloo, lambda: done.append("asked"))  # type: ignore[arg-type]
    store.multi_set(["a", "b"], ["text", b"octets"])
    noted = [("text", True), (b"octets", True)]
    assert done == ["asked", *noted, (["a", "b"], ["text", b"octets"])]


def test_a_parameter_that_two_modules_share_is_sent_once() -> None:
    model, head = nn.Linear(4, 4), nn.Linear(4, 4)
    head.weight = model.weight
    optimizer = torch.optim.SGD([*model.parameters(), head.bias], lr=0.1)
    contents = Contents({"model": model, "head": head, "optimizer": optimizer})
    names = [name for name, _ in contents.parameters()]
    assert names == ["model.weight", "model.bias", "head.bias"]


@pytest.mark.parametrize(
    ("gpus", "nccl", "backend"),
    [(True, True, "cpu:gloo,cuda:nccl"), (False, True, "gloo"), (True, False, "gloo")],
)
def test_nccl_is_for_workers_with_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: bool, nccl: bool, backend: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    assert groups.default_backend() == backend
