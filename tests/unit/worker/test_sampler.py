"""Every sample once per epoch, over any history of failures and resizes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import SETTLED
from rdzv.worker import ElasticBatchSampler, NoRoundError, WorkerError


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
    assert [list(one)[-1] for one in group] == [[9], [10], [0]]  # type: ignore[call-overload]


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


def test_several_batches_may_lie_between_two_commits() -> None:
    sampler = ElasticBatchSampler(10, 1, shuffle=False, batches_per_commit=3)
    sampler.begin_round(0, 1)
    batches = iter(sampler)
    for _ in range(4):
        next(batches)
    sampler.commit()
    assert sampler.position == 3


def test_the_last_step_of_an_epoch_is_told_by_the_length() -> None:
    sampler = ElasticBatchSampler(10, 1, shuffle=False, batches_per_commit=3)
    sampler.begin_round(0, 1)
    steps: list[list[list[int]]] = [[]]
    while sampler.epoch < 1:
        for batch in sampler:
            steps[-1].append(batch)
            if len(steps[-1]) == min(3, len(sampler)):
                sampler.commit()
                steps.append([])
    assert steps == [[[0], [1], [2]], [[3], [4], [5]], [[6], [7], [8]], [[9]], []]


def test_an_epoch_whose_last_step_is_never_committed_is_refused() -> None:
    """Otherwise its last batches would be yielded for ever."""
    sampler = ElasticBatchSampler(10, 1, shuffle=False, batches_per_commit=3)
    sampler.begin_round(0, 1)

    def train_epoch() -> int:
        for batches, _ in enumerate(sampler, 1):
            if batches % 3 == 0:
                sampler.commit()
        return batches

    assert [train_epoch() for _ in range(3)] == [10, 1, 1]
    with pytest.raises(WorkerError, match=r"last 1 batches .* are never committed"):
        train_epoch()
    sampler.begin_round(0, 1)
    assert train_epoch() == 1


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
    with pytest.raises(WorkerError, match="for 10 samples, but the data set here has 11"):
        ElasticBatchSampler(11, 1).load_state_dict(state)


@pytest.mark.parametrize("how", [{"data": 0, "batch_size": 1}, {"data": 1, "batch_size": 0}])
def test_no_samples_are_no_data_set(how: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="is 0; it must be at least 1"):
        ElasticBatchSampler(**how)


@pytest.mark.slow
def test_a_later_version_goes_on_in_the_same_order() -> None:
    """A job may be upgraded in the middle of an epoch; another order would repeat samples."""
    one = ElasticBatchSampler(data=8, batch_size=8, seed=3)
    one.begin_round(0, 1)
    (batch,) = one
    assert batch == [3, 1, 0, 6, 2, 7, 4, 5]
