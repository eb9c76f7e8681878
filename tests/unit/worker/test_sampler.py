"""Every sample once per epoch, over any history of failures and resizes."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import SETTLED
from rdzv.worker import ElasticBatchSampler, NoRoundError, WorkerError
from rdzv.worker.sampler import MicroBatch


def samplers(world_size: int, state: dict[str, object] | None, **how: object) -> list[object]:
    """Create the samplers of all ranks of a round, at the same position."""
    made = []
    for rank in range(world_size):
        one = ElasticBatchSampler(**how)  # type: ignore[arg-type]
        if state is not None:
            one.load_state_dict(state)
        one.begin_round(rank, world_size)
        made.append(one)
    return made


@pytest.mark.slow
@settings(SETTLED, max_examples=200)
@given(
    size=st.integers(1, 60),
    batch_size=st.integers(1, 7),
    seed=st.integers(0, 1000),
    history=st.lists(
        # Per round: the number of ranks, the steps it commits, the batches loaded ahead.
        st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(0, 3)),
        max_size=12,
    ),
)
def test_every_sample_is_done_once_an_epoch(
    size: int, batch_size: int, seed: int, history: list[tuple[int, int, int]]
) -> None:
    how = {"data": size, "batch_size": batch_size, "seed": seed}
    state: dict[str, object] | None = None
    done: dict[int, Counter[int]] = {}
    # Finally one round of one worker finishes the epoch.
    for world_size, steps, ahead in [*history, (1, 1000, 0)]:
        group: list[ElasticBatchSampler] = samplers(world_size, state, **how)  # type: ignore[assignment]
        epoch = group[0].epoch
        loaders = [iter(one) for one in group]
        loaded: list[list[list[int]]] = [[] for _ in group]
        for _ in range(steps):
            for loader, queue in zip(loaders, loaded, strict=True):
                while len(queue) <= ahead and (batch := next(loader, None)) is not None:
                    queue.append(batch)
            if not loaded[0]:
                break
            step = [queue.pop(0) for queue in loaded]
            assert all(step), "each rank has a sample in each step"
            before = group[0].position
            for one in group:
                one.commit()
            taken = [index for batch in step for index in batch]
            if before + len(taken) > size:  # Filled up with the first samples of the epoch.
                taken = taken[: size - before]
            done.setdefault(epoch, Counter()).update(taken)
            if group[0].epoch != epoch:
                assert all(next(loader, None) is None for loader in loaders)
                break
        assert len({str(one.state_dict()) for one in group}) == 1
        state = group[0].state_dict()
    ended = group[0].epoch
    for number in range(ended):
        assert done[number] == Counter(range(size)), f"epoch {number}"


def test_samples_loaded_ahead_are_handed_out_again() -> None:
    sampler = ElasticBatchSampler(10, 2, shuffle=False)
    sampler.begin_round(0, 1)
    batches = iter(sampler)
    assert [next(batches) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    sampler.commit()
    sampler.begin_round(0, 2)
    assert list(sampler) == [[2, 3], [6, 7]]


def test_the_tail_is_divided_among_all_ranks() -> None:
    group = samplers(3, None, data=11, batch_size=3, shuffle=False)
    # Two samples are left for three ranks.
    assert [list(one)[-1] for one in group] == [[9], [10], [9]]  # type: ignore[call-overload]


def test_without_its_tail_all_batches_have_one_size() -> None:
    sampler = ElasticBatchSampler(11, 2, shuffle=False, drop_tail=True)
    sampler.begin_round(1, 2)
    assert [len(batch) for batch in sampler] == [2, 2]
    assert len(sampler) == 2
    for _ in range(2):
        sampler.commit()
    assert (sampler.epoch, sampler.position) == (1, 0)


def test_a_tail_that_is_the_whole_epoch_is_refused() -> None:
    with pytest.raises(WorkerError, match="drop_tail leaves nothing of 5 samples in a world of 3"):
        ElasticBatchSampler(5, 2, drop_tail=True).begin_round(0, 3)


# ------------------------------------------------------------------ steps of several micro-batches


def step_of(sampler: ElasticBatchSampler, batches: Any) -> list[tuple[list[int], MicroBatch]]:
    """Take one rank's micro-batches of the next step, without computing anything."""
    taken: list[tuple[list[int], MicroBatch]] = []
    while not taken or not taken[-1][1].is_last:
        # Iterating over the batch itself would seed generators, and import torch.
        indices = next(batches)[:]
        taken.append((indices, sampler.begin_micro_batch()))
    return taken


@pytest.mark.slow
@settings(SETTLED, max_examples=300)
@given(
    size=st.integers(1, 60),
    global_batch=st.integers(5, 20),
    micro_batch=st.integers(1, 5),
    drop_tail=st.booleans(),
    rounds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), max_size=6),
)
def test_the_steps_of_a_global_batch_are_the_same_for_any_number_of_ranks(
    size: int,
    global_batch: int,
    micro_batch: int,
    drop_tail: bool,
    rounds: list[tuple[int, int]],
) -> None:
    if drop_tail and size < global_batch:
        size += global_batch
    how = {"data": size, "global_batch": global_batch, "micro_batch": micro_batch}
    how |= {"shuffle": False, "drop_tail": drop_tail}
    state: dict[str, object] | None = None
    steps: list[tuple[int, list[int]]] = []
    for world_size, count in [*rounds, (3, 9)]:
        group: list[ElasticBatchSampler] = samplers(world_size, state, **how)  # type: ignore[assignment]
        batches = [iter(one) for one in group]
        for _ in range(count):
            epoch, left, ends_epoch = group[0].epoch, len(group[0]), group[0].ends_epoch
            taken = [step_of(*both) for both in zip(group, batches, strict=True)]
            assert len({len(one) for one in taken}) == 1, "ranks differ in forward passes"
            turns = [part for turn in zip(*taken, strict=True) for part in turn]
            parts = [indices for indices, part in turns if part.weight]
            assert sum(part.weight for _, part in turns) == pytest.approx(world_size)
            samples = [index for indices in parts for index in indices]
            for indices, part in turns:
                assert indices in parts and len(indices) <= micro_batch
                share = len(indices) / len(samples) * world_size
                assert part.weight in (0, pytest.approx(share))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            steps.append((epoch, samples))
            for one in group:
                one.refuse_unfinished_step()
                one.commit()
            assert ends_epoch == (group[0].epoch > epoch)
            if ends_epoch:
                assert left == len(taken[0])
                assert [next(one, None) for one in batches] == [None] * world_size
                batches = [iter(one) for one in group]
            else:
                assert len(group[0]) == left - len(taken[0])
        state = group[0].state_dict()
    # Whatever the ranks were, these are the steps of one that takes the samples in order.
    per_epoch = size // global_batch if drop_tail else -(-size // global_batch)
    for number, (epoch, samples) in enumerate(steps):
        place = number % per_epoch * global_batch
        assert epoch == number // per_epoch
        assert samples == list(range(place, min(place + global_batch, size)))


def test_micro_batches_are_dealt_out_in_turn() -> None:
    """The gradients of 10 samples in 4 parts, of which 3 ranks compute 2 each."""
    how = {"data": 14, "global_batch": 10, "micro_batch": 3, "shuffle": False}
    group: Any = samplers(3, None, **how)
    batches = [iter(one) for one in group]
    found = [step_of(*both) for both in zip(group, batches, strict=True)]
    parts = [[(indices, round(part.weight, 9)) for indices, part in one] for one in found]
    assert parts == [
        [([0, 1], 0.6), ([7, 8, 9], 0.9)],
        [([2, 3, 4], 0.9), ([0, 1], 0.0)],
        [([5, 6], 0.6), ([2, 3, 4], 0.0)],
    ]
    for one in group:
        one.commit()
    found = [step_of(*both) for both in zip(group, batches, strict=True)]
    assert [one[0][0] for one in found] == [[10, 11], [12, 13], [10, 11]]
    assert [one[0][1].weight for one in found] == [1.5, 1.5, 0]


def test_ranks_accumulate_gradients_of_a_batch_of_their_own_size() -> None:
    group: Any = samplers(2, None, data=10, batch_size=4, micro_batch=2, shuffle=False)
    batches = [iter(one) for one in group]
    found = [step_of(*both) for both in zip(group, batches, strict=True)]
    assert [[indices for indices, _ in one] for one in found] == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
    ]
    assert {part.weight for one in found for _, part in one} == {0.5}


def test_the_last_step_of_an_epoch_is_told_before_it_is_committed() -> None:
    for how in ({"batch_size": 3}, {"global_batch": 3, "micro_batch": 2}):
        sampler = ElasticBatchSampler(8, shuffle=False, **how)
        sampler.begin_round(0, 1)
        told = []
        while sampler.epoch < 2:
            batches = iter(sampler)
            for _ in range(3):
                step_of(sampler, batches)
                told.append(sampler.ends_epoch)
                sampler.commit()
        assert told == [False, False, True] * 2, how


def begun(**how: int) -> tuple[ElasticBatchSampler, Any]:
    sampler = ElasticBatchSampler(12, shuffle=False, **how)
    sampler.begin_round(0, 1)
    return sampler, iter(sampler)


def test_a_step_is_refused_in_its_middle() -> None:
    sampler, batches = begun(batch_size=4, micro_batch=2)
    with pytest.raises(WorkerError, match=r"without a batch"):
        sampler.begin_micro_batch()
    list(islice(batches, 3))
    with pytest.raises(WorkerError, match=r"with state\.accumulate\(model\) as part"):
        sampler.refuse_unfinished_step()
    assert not sampler.begin_micro_batch().is_last
    with pytest.raises(WorkerError, match=r"has more micro-batches.*if part\.is_last"):
        sampler.refuse_unfinished_step()
    assert sampler.begin_micro_batch().is_last
    with pytest.raises(WorkerError, match=r"after the last one.*if part\.is_last"):
        sampler.begin_micro_batch()
    sampler.refuse_unfinished_step()
    sampler.commit()
    assert sampler.position == 4
    # A step may be given up, for a checkpoint or for another round.
    for give_up in (
        lambda: sampler.load_state_dict(sampler.state_dict()),
        lambda: sampler.begin_round(0, 1),
    ):
        batches = iter(sampler)
        next(batches)
        assert not sampler.begin_micro_batch().is_last
        give_up()
        sampler.refuse_unfinished_step()


def test_a_global_batch_with_fewer_samples_than_ranks_is_refused_at_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sampler = ElasticBatchSampler(99, global_batch=4, micro_batch=2)
    with pytest.raises(WorkerError, match=r"is 4, or 2 micro-batches, for 5 workers, so 3 are"):
        sampler.begin_round(4, 5)
    # Where there are enough samples, but not enough micro-batches, ranks are wasted.
    sampler.begin_round(0, 2)
    sampler.begin_round(1, 3)
    assert capsys.readouterr().err == ""
    sampler.begin_round(0, 3)
    assert "for 3 workers, so 1 are without work" in capsys.readouterr().err
    # A training that has begun goes on, though workers have come.
    sampler.load_state_dict({**sampler.state_dict(), "position": 4})
    sampler.begin_round(0, 5)
    assert "for 5 workers, so 3 are without work" in capsys.readouterr().err


def test_another_global_batch_is_refused() -> None:
    state = ElasticBatchSampler(99, global_batch=8, micro_batch=2).state_dict()
    ElasticBatchSampler(99, global_batch=8, micro_batch=4).load_state_dict(state)
    for how in ({"batch_size": 8}, {"global_batch": 16, "micro_batch": 2}):
        with pytest.raises(WorkerError, match=r"for global_batch=8, but here it is (None|16)"):
            ElasticBatchSampler(99, **how).load_state_dict(state)


# ------------------------------------------------------------------ refused


def test_an_iterator_of_a_former_round_is_refused() -> None:
    sampler = ElasticBatchSampler(10, 1, shuffle=False)
    sampler.begin_round(0, 1)
    batches = iter(sampler)
    next(batches)
    sampler.begin_round(0, 2)
    with pytest.raises(WorkerError, match="an earlier round"):
        next(batches)


def test_no_batches_before_a_round() -> None:
    with pytest.raises(NoRoundError, match=r"before a round began"):
        iter(ElasticBatchSampler(10, 1))


def test_another_data_set_is_refused() -> None:
    state = ElasticBatchSampler(10, 1).state_dict()
    with pytest.raises(WorkerError, match="for size=10, but here it is 11"):
        ElasticBatchSampler(11, 1).load_state_dict(state)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"data": 0, "batch_size": 1}, "number of samples is 0; it must be an integer of at least"),
        ({"batch_size": 0}, "batch_size is 0;"),
        ({"batch_size": 2.5}, "batch_size is 2.5;"),
        ({"global_batch": -1, "micro_batch": 1}, "global_batch is -1;"),
        ({}, "batch_size is None and global_batch is None: give one"),
        ({"batch_size": 2, "global_batch": 4, "micro_batch": 2}, "is 2 and global_batch is 4"),
        ({"global_batch": 4}, "micro_batch is None, but 4 samples need one of 1 to 4"),
        ({"global_batch": 4, "micro_batch": 5}, "micro_batch is 5, but 4 samples need"),
        ({"batch_size": 4, "micro_batch": 5}, "micro_batch is 5, but 4 samples need"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(how: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ElasticBatchSampler(**{"data": 9, **how})


@pytest.mark.slow
def test_a_later_version_goes_on_in_the_same_order() -> None:
    """A job may be upgraded in the middle of an epoch; another order would repeat samples."""
    one = ElasticBatchSampler(data=8, batch_size=8, seed=3)
    one.begin_round(0, 1)
    (batch,) = one
    assert batch == [3, 1, 0, 6, 2, 7, 4, 5]
